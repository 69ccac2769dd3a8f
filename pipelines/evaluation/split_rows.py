"""The rows of a split that the ranks read, seen from the driver: baselines and groups are made of the same rows."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from sparkring.conf.blocks.data import DataConfig
from sparkring.conf.manifest import ROW_NUMBER, DataFile, DatasetManifest
from sparkring.conf.storage import Storage
from sparkring.etl.sources.spark_path import as_glob
from sparkring.pipelines.context.etl_step import Dataset
from sparkring.training.data.features.tensors import TensorSource
from sparkring.training.data.select import RowFilter, make_row_filter
from sparkring.training.data.source import with_offset

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


@dataclass(frozen=True)
class SplitRows:
    """Rows of some files, filtered as the ranks' readers filter, in stored order."""

    folder: Storage  # that the files' paths are relative to
    manifest: DatasetManifest
    files: tuple[DataFile, ...]
    first_rows: tuple[int, ...]  # ROW_NUMBER of each file's first row
    keep: RowFilter | None  # the readers' filter; None: all rows

    def row_numbers(self) -> np.ndarray:
        """Return ROW_NUMBER of every row, (rows,) int64, ascending. Reads files only with a filter."""
        if self.keep is not None:
            return self.column(ROW_NUMBER).to_numpy()
        ranges = [np.arange(a, a + file.rows) for a, file in zip(self.first_rows, self.files, strict=True)]
        return np.concatenate([np.zeros(0, np.int64), *ranges])

    def column(self, name: str, text: bool = False) -> pa.ChunkedArray:
        """Return the column's stored values; a `text` column's as indices of dictionaries."""
        tables = self.tables([name], [name] if text else [])
        return pa.chunked_array([chunk for table in tables for chunk in table[name].chunks])

    def tables(self, names: Iterable[str], texts: Sequence[str] = (), share: float = 1.0) -> Iterator[pa.Table]:
        """Read the named columns' stored values, file by file; those of `texts` as indices of dictionaries.

        `share`: of the rows of each file, from its beginning.
        """
        read = self._with(names)
        for file in self.files:
            path = self.folder.path(file.path)
            with pq.ParquetFile(path, filesystem=self.folder.fs, read_dictionary=[*texts], pre_buffer=True) as stored:
                wanted = math.ceil(share * file.rows)
                ends = accumulate(stored.metadata.row_group(g).num_rows for g in range(stored.num_row_groups))
                groups = sum(end < wanted for end in ends) + 1
                table = stored.read_row_groups([*range(min(groups, stored.num_row_groups))], columns=read)
            table = with_offset(table.slice(0, wanted), file)
            yield table if self.keep is None else table.filter(self.keep.expression)

    @property
    def most_rows(self) -> int:
        """How many rows there are, without the filter."""
        return sum(file.rows for file in self.files)

    def doubles(self, names: Iterable[str], share: float = 1.0) -> Iterator[pa.RecordBatch]:
        """Read the named tensors and masks as doubles, by the reader's code, file by file; `share`: see `tables`."""
        tensors = TensorSource(self.manifest, list(names))
        texts = [column.name for column in tensors.stored if column.dtype == "string"]
        return map(tensors.doubles, self.tables([column.name for column in tensors.stored], texts, share))

    def stored(self, spark: SparkSession, names: Iterable[str]) -> DataFrame:
        """Read the named columns' stored values in Spark, and those that the filter looks at.

        Unlisted files of the folder are never read.
        """
        frame = spark.read.parquet(*[as_glob(f"{spark_path(self.folder)}/{file.path}") for file in self.files])
        frame, keep = frame.select(*self._with(names)), self.keep
        if keep is None:
            return frame

        def kept(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            for batch in batches:  # pyarrow's filter, for Spark's own comparisons treat NaN and null otherwise
                yield from pa.Table.from_batches([batch]).filter(keep.expression).to_batches()

        return frame.mapInArrow(kept, frame.schema)

    def _with(self, names: Iterable[str]) -> list[str]:
        """List the names, and those the filter looks at."""
        return list(dict.fromkeys([*names, *sorted(self.keep.columns if self.keep else ())]))


def split_rows(dataset: Dataset, split: str, data: DataConfig, left_out: Collection[str]) -> SplitRows:
    """Return the rows that readers of the split serve; `left_out`: files that the ranks found damaged."""
    files = dataset.manifest.files_of(split)
    firsts = accumulate((file.rows for file in files), initial=0)
    read = [(file, first) for file, first in zip(files, firsts, strict=False) if file.path not in left_out]
    keep = make_row_filter(dataset.manifest, data.filters) if data.filters else None
    files, first_rows = tuple(f for f, _ in read), tuple(first for _, first in read)
    return SplitRows(dataset.manifest.files_folder(dataset.folder), dataset.manifest, files, first_rows, keep)


def spark_path(folder: Storage) -> str:
    """Return the folder's URI for Spark: local paths are absolute with a scheme, others as given."""
    return f"file://{folder.root}" if folder.is_local else folder.uri.partition("?")[0]
