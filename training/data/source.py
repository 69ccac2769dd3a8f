"""Row groups of a split, decoded one by one, in any thread."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from sparkring.conf.manifest import ROW_NUMBER, Column, DataFile
from sparkring.conf.plain_text import count_of
from sparkring.training.data.decoding.columns import DataError, check_type
from sparkring.training.data.files import FileOpener, missing
from sparkring.training.data.select import Selection

KEPT_FOOTERS = 256


class FileSource:
    """Row groups of the selected files by their index in stored order; thread-safe."""

    def __init__(
        self,
        opener: FileOpener,
        selection: Selection,
        columns: Sequence[Column],
        check_pages: bool = True,
    ) -> None:
        """Open the row groups of the selected files.

        Args:
            opener: opens files, from their storage or from a cache.
            selection: files, and the filter that their rows must pass.
            columns: the stored columns to decode.
            check_pages: verify the checksum of every page, a quarter of the time; needless where hashes were checked.
        """
        self.opener = opener
        self._files, self._filter = selection.files, selection.row_filter
        self._columns, self._check_pages = tuple(columns), check_pages
        self._names = [c.name for c in columns]
        self._texts = [c.name for c in columns if c.dtype == "string" and c.layout == "scalar"]
        counts = np.fromiter((len(f.row_groups) for f in self._files), np.int64, len(self._files))
        self._first_group = np.concatenate(([0], np.cumsum(counts)))  # (files + 1,)
        self._footers: OrderedDict[str, pq.FileMetaData] = OrderedDict()
        self._types: dict[str, tuple[pa.DataType, str]] = {}  # of each column, and the file where it was seen first
        self._lock = threading.Lock()

    def locate(self, group: int) -> tuple[DataFile, int]:
        """Return the file of a row group of the split, and its number inside."""
        number = int(np.searchsorted(self._first_group, group, side="right")) - 1
        return self._files[number], int(group - self._first_group[number])

    def read(self, group: int) -> tuple[pa.Table, float, float]:
        """Decode a row group: (table, seconds opening, seconds reading and decoding)."""
        file, inside = self.locate(group)
        began = time.perf_counter()
        table, opened = self._decode(file, inside)
        if table.num_rows != file.row_groups[inside]:
            raise DataError(
                f"{file.path}, row group {inside}: {count_of(table.num_rows, 'row')}, the manifest says "
                f"{file.row_groups[inside]}"
            )
        if self._filter is not None:
            table = table.filter(self._filter.expression).select(self._names)
        return with_offset(table, file), opened - began, time.perf_counter() - opened

    def describe(self, group: int) -> str:
        file, inside = self.locate(group)
        return f"{file.path}, row group {inside}"

    def _decode(self, file: DataFile, inside: int) -> tuple[pa.Table, float]:
        """Decode the wanted columns and those of the filter; also return when the file was open."""
        names = self._names
        if self._filter is not None:
            names = [*names, *sorted(self._filter.columns - set(names))]
        try:
            with self.opener.open(file) as handle:
                parquet = self._parquet(file, handle)
                opened = time.perf_counter()
                return parquet.read_row_group(inside, columns=names, use_threads=False), opened
        except FileNotFoundError as error:
            raise DataError(missing(file, self.opener.storage)) from error
        except (OSError, pa.ArrowException) as error:
            raise DataError(
                f"{file.path}, row group {inside}: cannot be read ({error}); file damaged or storage failing: "
                "rebuild the dataset, or set on_corrupt to quarantine to continue without it"
            ) from error

    def _parquet(self, file: DataFile, handle: pa.NativeFile) -> pq.ParquetFile:
        with self._lock:
            footer = self._footers.get(file.path)
        parquet = pq.ParquetFile(
            handle,
            metadata=footer,
            pre_buffer=not self.opener.storage.is_local,
            coerce_int96_timestamp_unit="us",
            page_checksum_verification=self._check_pages,
            read_dictionary=self._texts,  # a text is one row's index of a dictionary, never a Python string per row
        )
        if footer is None:
            self._check_footer(file, parquet)
            with self._lock:
                self._footers[file.path] = parquet.metadata
                if len(self._footers) > KEPT_FOOTERS:
                    self._footers.popitem(last=False)
        return parquet

    def _check_footer(self, file: DataFile, parquet: pq.ParquetFile) -> None:
        meta = parquet.metadata
        rows = tuple(meta.row_group(i).num_rows for i in range(meta.num_row_groups))
        if rows != file.row_groups:
            raise DataError(
                f"{file.path}: row groups hold {_brief(rows)} rows, the manifest says {_brief(file.row_groups)}"
            )
        schema = parquet.schema_arrow
        for column in self._columns:
            index = schema.get_field_index(column.name)
            if index < 0 and column.name == ROW_NUMBER:
                raise DataError(
                    f"{file.path}: its rows carry no numbers (column {ROW_NUMBER!r}), which evaluation and data.audit "
                    "read; the dataset is of an older sparkring: rebuild it"
                )
            if index < 0:
                raise DataError(
                    f"{file.path}: no column {column.name!r}; the manifest declares it, the file has {schema.names}"
                )
            self._check_column(file, column, schema.field(index).type)

    def _check_column(self, file: DataFile, column: Column, stored: pa.DataType) -> None:
        try:
            check_type(column, stored)
        except DataError as error:
            raise DataError(f"{file.path}: {error}; the files of one dataset must agree: rebuild it") from None
        with self._lock:
            first, where = self._types.setdefault(column.name, (stored, file.path))
        if first != stored:
            raise DataError(
                f"{file.path}: column {column.name!r} is stored as {stored}, "
                f"in {where} as {first} (schema drift); rebuild the dataset"
            )


def with_offset(table: pa.Table, file: DataFile) -> pa.Table:
    """Convert a file's row numbers within its day partition to numbers within the split.

    Files keep their own numbers because several datasets share them.
    """
    index = table.schema.get_field_index(ROW_NUMBER)
    if not file.row_offset or index < 0:
        return table
    return table.set_column(index, table.schema.field(index), pc.add(table[ROW_NUMBER], file.row_offset))


def _brief(values: Sequence[Any]) -> str:
    return str(list(values)) if len(values) <= 8 else f"{list(values[:8])}... ({len(values)} of them)"
