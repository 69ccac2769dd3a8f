"""Datasets as petastorm sees them: row groups, shards, and writing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sparkring.conf.manifest import DatasetManifest
from sparkring.conf.plain_text import count_of
from sparkring.conf.storage import Storage
from sparkring.training.data.petastorm_adapter import legacy_pyarrow


def rank_rows(global_batch: int, rank: int, size: int) -> int:
    """Return a rank's rows of every global batch; ranks differ by at most one."""
    return global_batch * (rank + 1) // size - global_batch * rank // size


def rows_per_shard(group_rows: Sequence[int], size: int) -> list[int]:
    """Count the rows of each shard: petastorm gives row group i to shard i % size."""
    if len(group_rows) < size:
        raise ValueError(
            f"the dataset has {count_of(len(group_rows), 'row group')} for {count_of(size, 'rank')}, and petastorm "
            "shards whole row groups; write smaller row groups, use fewer ranks, or reader: native, which has no such "
            "limit"
        )
    return [sum(group_rows[rank::size]) for rank in range(size)]


def equal_steps(shard_rows: Sequence[int], global_batch: int) -> int:
    """Return the number of steps of every rank: as many as the smallest shard fills."""
    size = len(shard_rows)
    shares = [rank_rows(global_batch, rank, size) for rank in range(size)]
    if min(shares) < 1:
        raise ValueError(
            f"global batch {global_batch} is smaller than the {count_of(size, 'rank')} it is divided among"
        )
    steps = min(rows // share for rows, share in zip(shard_rows, shares, strict=True))
    if steps < 1:
        raise ValueError(
            f"ranks own {list(shard_rows)} rows, one of them not a single batch of {global_batch}; lower the batch"
        )
    return steps


def _dataset(urls: str | Sequence[str]) -> legacy_pyarrow.ParquetDataset:
    from petastorm.fs_utils import get_filesystem_and_path_or_paths

    fs, paths = get_filesystem_and_path_or_paths(urls)
    return legacy_pyarrow.ParquetDataset(paths, filesystem=fs)


def row_group_rows(urls: str | Sequence[str]) -> list[int]:
    """List the rows of every row group, in petastorm's numbering."""
    from petastorm.etl.dataset_metadata import load_row_groups

    footers: dict[str, Any] = {}
    rows = []
    for piece in load_row_groups(_dataset(urls)):
        if piece.path not in footers:
            footers[piece.path] = piece.get_metadata()
        rows.append(footers[piece.path].row_group(piece.row_group).num_rows)
    return rows


def is_unischema(urls: str | Sequence[str]) -> bool:
    """Return whether petastorm wrote the dataset, so that codecs must decode its rows."""
    from petastorm.etl.dataset_metadata import PetastormMetadataError, get_schema

    try:
        get_schema(_dataset(urls))
    except PetastormMetadataError:
        return False
    return True


def urls_of(storage: Storage, manifest: DatasetManifest, split: str) -> list[str]:
    """List the URLs of a split's files, for petastorm. ValueError for remote storage."""
    if not storage.is_local:
        raise ValueError(
            f"{storage.uri}: reader petastorm reads a job's own dataset from local storage; give data.petastorm.url"
        )
    if mark := next((each for each in "?#%" if each in storage.root), None):
        raise ValueError(f"{storage.root}: reader petastorm opens URLs, where {mark!r} ends a path; rename the folder")
    return [f"file://{storage.path(file.path)}" for file in manifest.files_of(split)]


def materialize(spark: Any, url: str, schema: Any, row_group_mb: int | None = None) -> Any:
    """Open a context around a Spark job that writes a Petastorm dataset to `url`."""
    from petastorm.etl.dataset_metadata import materialize_dataset

    return materialize_dataset(spark, url, schema, row_group_mb)


def encode_row(schema: Any, row: dict[str, Any]) -> Any:
    """Encode a dict of numpy values as a Spark row, by the codecs of a Unischema."""
    from petastorm.unischema import dict_to_spark_row

    return dict_to_spark_row(schema, row)
