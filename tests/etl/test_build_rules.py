"""What makes a dataset another dataset, and what is deleted of builds that died. No Spark."""

import os
import time

import pytest

from conf.manifest import Accounting, DataFile, DatasetManifest, Lineage, SplitInfo
from conf.schema_etl import EtlConfig
from conf.storage import open_storage
from etl.build import _check_unchanged, _sweep, dataset_fingerprint
from etl.errors import EtlError
from etl.source import find_source

FEATURES = {"a": {"kind": "numeric"}, "b": {"kind": "numeric"}}


def config(path="t.csv", features=FEATURES, **changes) -> EtlConfig:
    source = {"path": path, "columns": {"a": "int", "b": "int"}}
    return EtlConfig.model_validate({"sources": {"t": source}, "rows": "t", "features": features} | changes)


def test_the_fingerprint_is_of_content_not_of_place():
    first = dataset_fingerprint(config(), {"t": "x"}, "4.3.0")
    assert dataset_fingerprint(config("elsewhere/t.csv"), {"t": "x"}, "4.3.0") == first
    others = [
        dataset_fingerprint(config(), {"t": "y"}, "4.3.0"),
        dataset_fingerprint(config(), {"t": "x"}, "4.4.0"),
        dataset_fingerprint(config(features=dict(reversed(FEATURES.items()))), {"t": "x"}, "4.3.0"),
        dataset_fingerprint(config(split={"seed": 1}), {"t": "x"}, "4.3.0"),
        dataset_fingerprint(config(shard={"row_group": 7}), {"t": "x"}, "4.3.0"),
        dataset_fingerprint(config(rows="json:loads"), {"t": "x"}, "4.3.0"),
    ]
    assert len({first, *others}) == 7


def test_only_old_folders_no_manifest_lists_are_deleted(tmp_path):
    for name in ("data-used", "data-dead", "data-young", "notes"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "train-00000.parquet").write_bytes(b"x")
        if name != "data-young":
            for path in (tmp_path / name / "train-00000.parquet", tmp_path / name):
                os.utime(path, (time.time() - 90_000,) * 2)
    path, sha = "data-used/train-00000.parquet", "0" * 64
    file = DataFile(path=path, split="train", rows=1, bytes=1, sha256=sha, row_groups=(1,))
    manifest = DatasetManifest(
        name="t",
        fingerprint="0" * 64,
        created_at="",
        columns=(),
        files=(file,),
        splits={"train": SplitInfo(rows=1, files=1)},
        accounting=Accounting(rows_in=1, rows_out=1),
        lineage=Lineage(sources={}),
    )
    _sweep(open_storage(str(tmp_path)), manifest)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["data-used", "data-young", "notes"]


def test_a_source_that_changes_while_it_is_read_is_refused(tmp_path):
    (tmp_path / "t.csv").write_text("a,b\n1,2\n")
    found = {"t": find_source("t", config(str(tmp_path / "t.csv")).sources["t"])}
    _check_unchanged(found)
    (tmp_path / "t.csv").write_text("a,b\n1,2\n3,4\n")
    with pytest.raises(EtlError, match=r"etl\.sources\.t: its files changed"):
        _check_unchanged(found)
