"""Files of parts, each numbered by itself, are numbered through by every dataset that they belong to."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from sparkring.conf.blocks.data import CacheConfig, DataConfig
from sparkring.conf.manifest import DatasetManifest, SplitInfo, WindowPart
from sparkring.conf.storage import open_storage
from sparkring.training.data.build import make_reader
from sparkring.training.data.request import ReadRequest

MakeDataset = Callable[..., DatasetManifest]


def window(manifests: dict[str, DatasetManifest]) -> DatasetManifest:
    """The manifest over datasets in the folders `root/<name>`, as if they were parts."""
    files, parts, offset = [], [], 0
    for name, manifest in manifests.items():
        rows = sum(file.rows for file in manifest.files)
        files += [f.model_copy(update={"path": f"{name}/{f.path}", "row_offset": offset}) for f in manifest.files]
        parts.append(WindowPart(interval=name, fingerprint="0" * 64, folder=name, rows=rows))
        offset += rows
    splits = {"train": SplitInfo(rows=offset, files=len(files))}
    first = next(iter(manifests.values()))
    accounting = first.accounting.model_copy(update={"rows_in": offset, "rows_out": offset, "quarantined": {}})
    update = {"files": tuple(files), "parts": tuple(parts), "splits": splits, "accounting": accounting}
    return DatasetManifest.model_validate(dict(first) | update)


@pytest.mark.parametrize("cached", ["no", "files"])
def test_rows_are_numbered_in_the_window_whatever_a_cache_holds(
    make_dataset: MakeDataset, tmp_path: Path, cached: str
) -> None:
    days = {name: make_dataset(tmp_path / name, groups) for name, groups in (("a", [[30, 7]]), ("b", [[20], [13]]))}
    cache = CacheConfig() if cached == "no" else CacheConfig.model_validate({cached: str(tmp_path / "cache")})
    for chosen in (["a", "b"], ["b"], ["b", "a"]):  # the same files, behind other numbers of rows
        manifest = window({name: days[name] for name in chosen})
        rows = manifest.splits["train"].rows
        request = ReadRequest(open_storage(str(tmp_path / "window")), manifest, "train", ["id"], 10)
        config = DataConfig(audit=True, tail="pad", lanes=4, cache=cache)
        with closing(make_reader(config, request)) as reader:
            for epoch in (0, 1):
                batches = list(reader.batches(epoch * rows, reader.steps_per_epoch))
                ids = np.concatenate([b.ids[b.weight > 0 if b.weight is not None else ...] for b in batches])
                values = np.concatenate(
                    [b.columns["id"][b.weight > 0 if b.weight is not None else ...] for b in batches]
                )
                assert sorted(ids.tolist()) == list(range(rows))
                # Parts number their rows from 0, as their values do here.
                first = days[chosen[0]].splits["train"].rows
                assert (np.where(ids < first, ids, ids - first) == values).all()
