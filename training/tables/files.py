"""Tables as named tensors: in checkpoints, whose buckets any world can take, and in a finished model.

It knows no file format: a tensor of a file is anything with a shape whose rows can be read (`RowFile`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from sparkring.training.tables.hashing import BUCKETS, bucket_of
from sparkring.training.tables.table import TableDump

Array = NDArray[Any]


class RowFile(Protocol):
    """A tensor in a file."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def read_rows(self, start: int, stop: int) -> torch.Tensor: ...


def to_tensors(dump: TableDump) -> dict[str, torch.Tensor]:
    """The dump's arrays by name."""
    return {name: torch.from_numpy(np.ascontiguousarray(part)) for name, part in vars(dump).items()}


def stored_dumps(table: str, files: Sequence[Mapping[str, RowFile]], wanted: NDArray[np.int64]) -> Iterator[TableDump]:
    """Read the `wanted` buckets, sorted, from files of some ranks' dumps; only their rows are read.

    ValueError where the files do not hold each bucket once.
    """
    owned = [_whole(file["buckets"]) for file in files]
    times = np.bincount(np.concatenate([np.zeros(0, np.int64), *owned]), minlength=BUCKETS)
    odd = np.flatnonzero(times != 1)
    if len(odd):
        how = "missing" if not times[odd[0]] else "stored twice"
        raise ValueError(
            f"table {table!r}: {len(odd)} of {BUCKETS} buckets are missing or stored twice, the first is bucket "
            f"{odd[0]}, {how}; the checkpoint is damaged, delete its step"
        )
    for file, buckets in zip(files, owned, strict=True):
        picked = np.flatnonzero(np.isin(buckets, wanted))
        if len(picked):
            yield _picked(file, buckets, picked)


def _picked(file: Mapping[str, RowFile], buckets: Array, picked: Array) -> TableDump:
    """The buckets at places `picked` of a file."""
    starts, seen = _whole(file["starts"]), _whole(file["seen"])
    runs = np.split(picked, np.flatnonzero(np.diff(picked) > 1) + 1)  # buckets that are neighbors are read at once
    spans = [(int(starts[run[0]]), int(starts[run[-1] + 1])) for run in runs]

    def rows(name: str) -> Array:
        parts = [file[name].read_rows(start, stop).numpy() for start, stop in spans]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    sizes = np.diff(starts)[picked]
    return TableDump(
        buckets=buckets[picked],
        starts=np.concatenate([[0], np.cumsum(sizes)]),
        ids=rows("ids"),
        rows=rows("rows"),
        use=rows("use") if file["use"].shape[0] else np.zeros((0, 2), np.int64),
        seen=seen[np.isin(bucket_of(np.ascontiguousarray(seen[:, 0])), buckets[picked])],
        counts=_whole(file["counts"])[picked],
        clock=_whole(file["clock"]),
    )


def _whole(file: RowFile) -> Array:
    found: Array = file.read_rows(0, file.shape[0]).numpy()
    return found
