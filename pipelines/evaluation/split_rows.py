"""The rows of a split that the ranks read, seen from the driver: baselines and groups are made of the same rows."""

from __future__ import annotations

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
        """ROW_NUMBER of every row, (rows,) int64, ascending. The files are read only where there is a filter."""
        if self.keep is not None:
            return self.column(ROW_NUMBER).to_numpy()
        ranges = [np.arange(a, a + file.rows) for a, file in zip(self.first_rows, self.files, strict=True)]
        return np.concatenate([np.zeros(0, np.int64), *ranges])

    def column(self, name: str, text: bool = False) -> pa.ChunkedArray:
        """The column's stored values; a `text` column's as indices of dictionaries."""
        tables = self.tables([name], [name] if text else [])
        return pa.chunked_array([chunk for table in tables for chunk in table[name].chunks])

    def tables(self, names: Iterable[str], texts: Sequence[str] = ()) -> Iterator[pa.Table]:
        """The named columns' stored values, file by file; those of `texts` as indices of dictionaries."""
        read = self._with(names)
        for file in self.files:
            path = self.folder.path(file.path)
            table = pq.read_table(path, columns=read, filesystem=self.folder.fs, read_dictionary=[*texts])
            table = with_offset(table, file)
            yield table if self.keep is None else table.filter(self.keep.expression)

    @property
    def most_rows(self) -> int:
        """How many rows there are, without the filter."""
        return sum(file.rows for file in self.files)

    def doubles(self, names: Iterable[str]) -> Iterator[pa.RecordBatch]:
        """The named tensors and masks as `frame` has them, in the driver, file by file; read once for each call."""
        tensors = TensorSource(self.manifest, list(names))
        texts = [column.name for column in tensors.stored if column.dtype == "string"]
        return map(tensors.doubles, self.tables([column.name for column in tensors.stored], texts))

    def frame(self, spark: SparkSession, names: Iterable[str]) -> DataFrame:
        """The named scalar tensors in Spark, and the masks of those that have one: doubles, by the reader's code."""
        tensors = TensorSource(self.manifest, list(names))

        def made(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            return (tensors.doubles(pa.Table.from_batches([batch])) for batch in batches)

        stored = self.stored(spark, [column.name for column in tensors.stored])
        return stored.mapInArrow(made, ", ".join(f"`{name}` double" for name in tensors.scalar_names))

    def stored(self, spark: SparkSession, names: Iterable[str]) -> DataFrame:
        """The named columns' stored values in Spark, and those that the filter looks at.

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
        """The names, and those the filter looks at."""
        return list(dict.fromkeys([*names, *sorted(self.keep.columns if self.keep else ())]))


def split_rows(dataset: Dataset, split: str, data: DataConfig, left_out: Collection[str]) -> SplitRows:
    """The rows that readers of the split serve; `left_out`: the files that the ranks found damaged."""
    files = dataset.manifest.files_of(split)
    firsts = accumulate((file.rows for file in files), initial=0)
    read = [(file, first) for file, first in zip(files, firsts, strict=False) if file.path not in left_out]
    keep = make_row_filter(dataset.manifest, data.filters) if data.filters else None
    files, first_rows = tuple(f for f, _ in read), tuple(first for _, first in read)
    return SplitRows(dataset.manifest.files_folder(dataset.folder), dataset.manifest, files, first_rows, keep)


def spark_path(folder: Storage) -> str:
    """The folder's URI for Spark: local paths are absolute with a scheme, others as the user wrote them."""
    return f"file://{folder.root}" if folder.is_local else folder.uri.partition("?")[0]
