"""How many rows of its sparse tables a rank pulls in a step: the distinct ids in as many rows of the dataset."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from sparkring.conf.manifest import DatasetManifest
from sparkring.conf.storage import Storage

MOST_ROWS = 1 << 18  # that are read; of more, the distinct ids of these are scaled


def distinct_ids(dataset: Storage, manifest: DatasetManifest, split: str, columns: Sequence[str], rows: int) -> int:
    """Count the distinct values of columns, which share a table, in the first rows of a split.

    Args:
        dataset: its folder.
        manifest: its manifest.
        split: whose rows.
        columns: of the dataset's files; a list counts by its values.
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
    """All values, those of lists one after another."""
    whole = column.combine_chunks()
    flat = whole.flatten() if pa.types.is_nested(whole.type) else whole
    return flat.cast(pa.int64())
