"""What a step does with a model's sparse tables: the rows that a rank pulls are the distinct ids of its batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from torch import nn

from sparkring.conf.config import RunConfig
from sparkring.conf.manifest import DatasetManifest
from sparkring.conf.plain_text import count_of
from sparkring.conf.storage import Storage
from sparkring.pipelines.context.etl_step import Dataset
from sparkring.training.models.sparse_embedding import SparseEmbedding, sparse_embeddings
from sparkring.training.planner.workload import SparseTable, Workload
from sparkring.training.tables.hashing import BUCKETS
from sparkring.training.tables.sharded import sent_bytes
from sparkring.training.tables.update_rules import UpdateRule

MOST_ROWS = 1 << 18  # that are read; of more, the distinct ids of these are scaled


def planned_tables(config: RunConfig, dataset: Dataset | None, model: nn.Module) -> tuple[SparseTable, ...]:
    """Return the model's sparse tables. Without a dataset each row is assumed to have its own id."""

    def distinct(module: SparseEmbedding) -> Callable[[int], int]:
        def of_rows(rows: int) -> int:
            try:
                if dataset is not None:
                    return distinct_ids(dataset.folder, dataset.manifest, "train", module.columns, rows)
            except (OSError, ValueError, KeyError):  # a column that a feature makes, or a file that is gone
                pass
            return rows * len(module.columns)

        return cache(of_rows)

    def planned(name: str, module: SparseEmbedding) -> SparseTable:
        distinct_of = distinct(module)
        rows = 0 if dataset is None else distinct_of(dataset.manifest.splits["train"].rows)
        return SparseTable(
            name,
            distinct_of,
            module.dim * (2 if config.tables.wire == "bf16" else _element(config)),
            (module.dim + UpdateRule(config.tables.optimizer).state_width(module.dim)) * _element(config),
            most_rows=min(rows, config.tables.max_rows or rows),
            bucket_rows=config.tables.max_rows and config.tables.max_rows // BUCKETS,
            replicated=config.tables.place == "replicate",
            lagged=config.tables.lag > 0,
        )

    return tuple(planned(name, module) for name, module in sparse_embeddings(model).items())


def _element(config: RunConfig) -> int:
    return 8 if config.train.dtype == "float64" else 4


def table_notes(config: RunConfig, workload: Workload) -> list[str]:
    """List, per sparse table, the bytes of a row, and what a step sends if sharded and if replicated."""
    ranks, lines = workload.mesh.dp, []
    for table in workload.tables:
        ids = table.distinct(workload.rows_per_rank)
        shard, replicate = (sent_bytes(replicated, ids, table.sent_bytes, ranks) for replicated in (False, True))
        lines.append(
            f"sparse table {table.name}: {table.row_bytes} bytes a row and 20 to 60 in its map, on one rank (place: "
            f"shard) or on all {ranks} (replicate). A rank's {count_of(workload.rows_per_rank, 'row', ',')} of a "
            f"step have {count_of(ids, 'id', ',')}: it sends {shard:,.0f} bytes sharded, {replicate:,.0f} replicated; "
            f"tables.place = {config.tables.place}{_lag_note(config)}"
        )
    return lines


def _lag_note(config: RunConfig) -> str:
    """Describe what is sent while ranks compute."""
    if not config.tables.lag:
        return ""
    hidden = "rows" if config.optim.clip_norm is not None else "rows and gradients"
    return f"; {hidden} are sent while ranks compute (tables.lag = {config.tables.lag})"


def distinct_ids(dataset: Storage, manifest: DatasetManifest, split: str, columns: Sequence[str], rows: int) -> int:
    """Count the distinct values of columns, which share a table, in the first rows of a split.

    Args:
        dataset: folder of the dataset.
        manifest: manifest of the dataset.
        split: name of the split.
        columns: columns of the dataset's files; a list counts by its values.
        rows: to look at; of more than MOST_ROWS the distinct values of these are scaled.

    Raises:
        OSError, ArrowException: a file cannot be read, or has no such column.
    """
    wanted, read, values = min(rows, MOST_ROWS), 0, []
    for table in _row_groups(dataset, manifest, split, columns):
        taken = table.slice(0, wanted - read)
        read += taken.num_rows
        values += [_flat(taken.column(name)) for name in columns]
        if read == wanted:
            break
    found = len(pc.unique(pa.chunked_array(values, pa.int64())))
    return round(found * rows / wanted) if read == wanted else found


def _row_groups(dataset: Storage, manifest: DatasetManifest, split: str, columns: Sequence[str]) -> Iterator[pa.Table]:
    folder = manifest.files_folder(dataset)
    for file in manifest.files_of(split):
        with folder.fs.open_input_file(folder.path(file.path)) as stream:
            parquet = pq.ParquetFile(stream)
            for group in range(parquet.num_row_groups):
                yield parquet.read_row_group(group, columns=list(columns))


def _flat(column: pa.ChunkedArray) -> pa.Array:
    """Flatten all values, including those of lists."""
    whole = column.combine_chunks()
    flat = whole.flatten() if pa.types.is_nested(whole.type) else whole
    return flat.cast(pa.int64())
