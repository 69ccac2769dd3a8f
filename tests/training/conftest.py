"""Datasets for the data path's tests, written with pyarrow alone; and agents that run the ranks of whole jobs."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sparkring.conf.manifest import (
    ROW_NUMBER,
    Column,
    DatasetManifest,
)
from sparkring.training.launch.group import WorkerGroup
from sparkring.training.launch.local import local_group
from tests.helpers.datasets import listed, manifest_of, write_manifest
from tests.helpers.groups import warm

MakeDataset = Callable[..., DatasetManifest]
# What a rank would import by itself, for seconds: torch's first optimizer imports dynamo, pyarrow's first array pandas.
PRELOAD = (
    *("torch", "horovod.torch", "torch._dynamo", "pandas", "sparkring.training.models.tabular"),
    *("sparkring.training.worker.train", "sparkring.training.worker.train_trees", "sparkring.training.worker.server"),
)


def write_dataset(
    folder: Path,
    groups: Sequence[Sequence[int]],
    columns: Sequence[Column] = (Column(name="id", dtype="int64"), Column(name="x", dtype="float32")),
    make: Callable[[np.ndarray], dict[str, Any]] | None = None,
    split: str = "train",
    **write: Any,
) -> DatasetManifest:
    """Files of row groups of these sizes; `make`: global row numbers (n,) -> columns (default: id, x)."""
    values = make or (lambda ids: {"id": ids, "x": ids.astype(np.float32)})
    files, at = [], 0

    def stored(first: int, rows: int, schema: pa.Schema | None = None) -> pa.Table:
        ids = np.arange(first, first + rows)
        return pa.table(values(ids) | {ROW_NUMBER: ids}, schema=schema)

    for number, sizes in enumerate(groups):
        path = folder / "data-test" / f"{split}-{number:05d}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        schema = stored(at, 1).schema
        with pq.ParquetWriter(path, schema, write_page_checksum=True, **write) as writer:
            for size in sizes:
                writer.write_table(stored(at, size, schema), row_group_size=max(1, size))
                at += size
        files.append(listed(folder, path, split))
    manifest = manifest_of(
        columns=columns, files=files, name="test", fingerprint=hashlib.sha256(repr(groups).encode()).hexdigest()
    )
    return write_manifest(folder, manifest)


def described(columns: Sequence[Column], features: dict[str, Any] | None = None) -> DatasetManifest:
    """The manifest of a dataset without files."""
    return manifest_of(columns=columns, name="test", features=features or {})


@pytest.fixture
def make_dataset() -> MakeDataset:
    return write_dataset


@pytest.fixture
def no_torch(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let new fork servers find no torch: a rank imports it for a second, for a store that not every test uses.

    Returns the folder that hides it, for the PYTHONPATH of a program.
    """
    folder = tmp_path_factory.mktemp("no_torch")
    (folder / "torch.py").write_text("raise ImportError('hidden by a test')\n")
    monkeypatch.syspath_prepend(folder)
    return folder


@pytest.fixture(scope="session")
def group() -> Iterator[WorkerGroup]:
    """Three agents with warm fork servers, for the jobs of every file."""
    with local_group(3, PRELOAD) as group:
        yield warm(group, 3)
