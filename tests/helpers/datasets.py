"""Manifests and files of small datasets: what a test does not care about has a value here."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from sparkring.conf.manifest import MANIFEST_NAME, Accounting, Column, DataFile, DatasetManifest, Lineage, SplitInfo


def manifest_of(columns: Iterable[Column] = (), files: Iterable[DataFile] = (), **changes: Any) -> DatasetManifest:
    """A manifest of these columns and files, whose splits and rows are those of the files."""
    files = tuple(files)
    rows = {file.split: sum(each.rows for each in files if each.split == file.split) for file in files}
    usual: dict[str, Any] = {
        "name": "d",
        "fingerprint": "a" * 64,
        "created_at": "",
        "splits": {
            split: SplitInfo(rows=count, files=sum(file.split == split for file in files))
            for split, count in rows.items()
        },
        "accounting": Accounting(rows_in=sum(rows.values()), rows_out=sum(rows.values())),
        "lineage": Lineage(sources={}),
    }
    return DatasetManifest(columns=tuple(columns), files=files, **(usual | changes))


def write_manifest(folder: Path, manifest: DatasetManifest) -> DatasetManifest:
    """Make a dataset of the files in the folder."""
    (folder / MANIFEST_NAME).write_text(manifest.to_json())
    return manifest


def unread_file(split: str, rows: int, path: str = "") -> DataFile:
    """A file that a manifest lists, and that is never opened."""
    return DataFile(
        path=path or f"{split}.parquet", split=split, rows=rows, bytes=1, sha256="a" * 64, row_groups=(rows,)
    )


def listed(folder: Path, path: Path, split: str) -> DataFile:
    """What a manifest says of a Parquet file that lies there."""
    data, stored = path.read_bytes(), pq.ParquetFile(path).metadata
    groups = tuple(stored.row_group(number).num_rows for number in range(stored.num_row_groups))
    return DataFile(
        path=str(path.relative_to(folder)),
        split=split,
        rows=sum(groups),
        bytes=len(data),
        sha256=hashlib.sha256(data).hexdigest(),
        row_groups=groups,
    )
