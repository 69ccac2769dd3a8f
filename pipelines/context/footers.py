"""Read the footers of a dataset's Parquet files, for what can be known of the rows without reading them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pyarrow as pa
import pyarrow.parquet as pq

from sparkring.conf.manifest import DatasetManifest
from sparkring.conf.storage import Storage
from sparkring.etl.sources.files.listing import LOOKED_AT, spread


def read_footers(folder: Storage, files: Sequence[str], most: int = LOOKED_AT) -> Iterator[pq.FileMetaData]:
    """Yield the footers of files; of more than `most`, of some that are spread over them.

    A file that cannot be read says nothing here: the readers name it, and what is wrong with it.
    """
    for path in spread(tuple(files), most):
        try:
            with folder.fs.open_input_file(folder.path(path)) as file:
                footer = pq.ParquetFile(file).metadata
        except (OSError, ValueError, pa.ArrowException):
            continue
        yield footer


def mean_lengths(dataset: Storage, manifest: DatasetManifest) -> dict[str, float]:
    """Return the mean length of each ragged column over training rows; over all rows without any."""
    wanted = {column.name for column in manifest.columns if column.layout == "ragged"}
    values, rows = dict.fromkeys(wanted, 0), 0
    files = [file.path for file in manifest.files if file.split == "train"] or [file.path for file in manifest.files]
    for footer in read_footers(manifest.files_folder(dataset), files):
        rows += footer.num_rows
        for group in (footer.row_group(number) for number in range(footer.num_row_groups)):
            for column in (group.column(place) for place in range(group.num_columns)):
                if (name := column.path_in_schema.split(".")[0]) in wanted:
                    empty = column.statistics.null_count if column.is_stats_set else 0  # lists without values, or null
                    values[name] += column.num_values - (empty or 0)
    return {name: count / rows for name, count in values.items()} if rows else {}
