"""The files of a split: checked against the manifest, opened, decoded row group by row group, in any thread."""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from conf.manifest import ROW_NUMBER, Column, DataFile
from conf.storage import Storage
from training.data.columns import DataError, Unreachable, check_type

log = logging.getLogger(__name__)
KEPT_FOOTERS = 256


@dataclass(frozen=True)
class Keep:
    """A filter on rows: the expression, and the columns it looks at."""

    expression: pc.Expression
    columns: frozenset[str]


class Opener(Protocol):
    """How a listed file's bytes are reached: straight from storage, or through a cache."""

    def open(self, file: DataFile) -> pa.NativeFile: ...

    def check(self, file: DataFile, content: bool) -> None:
        """DataError where the file is not what the manifest says, by its hash (content) or its length."""
        ...

    def take_counts(self) -> dict[str, int]:
        """What happened since the last call, for the meter."""
        ...


class Direct:
    """Opens files where they lie."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage

    def open(self, file: DataFile) -> pa.NativeFile:
        return self._storage.fs.open_input_file(self._storage.path(file.path))

    def check(self, file: DataFile, content: bool) -> None:
        (check_hash if content else check_size)(self._storage, file)

    def take_counts(self) -> dict[str, int]:
        return {}


class Decoded(Protocol):
    """Where decoded row groups are kept for later epochs."""

    def get(self, file: DataFile, group: int) -> pa.Table | None: ...

    def put(self, file: DataFile, group: int, table: pa.Table) -> None: ...

    def take_counts(self) -> dict[str, int]: ...


class FileSource:
    """Row groups of the listed files by their index in stored order. Thread-safe; keeps the last footers it parsed.

    `keep`: rows for which it is not true are left out of every row group. `decoded`: kept row groups of earlier epochs.
    `check_pages`: verify the checksum of every page, a quarter of the time; needless where hashes were checked.
    """

    def __init__(
        self, storage: Storage, files: Sequence[DataFile], columns: Sequence[Column], opener: Opener | None = None,
        keep: Keep | None = None, decoded: Decoded | None = None, check_pages: bool = True,
    ) -> None:  # fmt: skip
        self.storage, self.files, self._columns = storage, tuple(files), tuple(columns)
        self.opener = opener or Direct(storage)
        self._keep, self.decoded, self._check_pages = keep, decoded, check_pages
        self._names = [c.name for c in columns]
        counts = np.fromiter((len(f.row_groups) for f in self.files), np.int64, len(self.files))
        self._first_group = np.concatenate(([0], np.cumsum(counts)))
        self._footers: OrderedDict[str, pq.FileMetaData] = OrderedDict()
        self._types: dict[str, tuple[pa.DataType, str]] = {}
        self._lock = threading.Lock()

    def place(self, group: int) -> tuple[int, int]:
        """(index of the file, row group inside it) of a row group of the split."""
        file = int(np.searchsorted(self._first_group, group, side="right")) - 1
        return file, int(group - self._first_group[file])

    def read(self, group: int) -> tuple[pa.Table, float, float]:
        """Decode one row group; (table of the wanted columns, seconds opening, seconds reading and decoding)."""
        index, inside = self.place(group)
        file = self.files[index]
        began = time.perf_counter()
        if self.decoded is not None and (kept := self.decoded.get(file, inside)) is not None:
            return kept, time.perf_counter() - began, 0.0
        table, opened = self._decode(file, inside)
        if table.num_rows != file.row_groups[inside]:
            raise DataError(
                f"{file.path}, row group {inside}: {table.num_rows} rows, the manifest says {file.row_groups[inside]}"
            )
        if self._keep is not None:
            table = table.filter(self._keep.expression).select(self._names)
        if self.decoded is not None:
            self.decoded.put(file, inside, table)
        return table, opened - began, time.perf_counter() - opened

    def _decode(self, file: DataFile, inside: int) -> tuple[pa.Table, float]:
        names = self._names if self._keep is None else [*self._names, *sorted(self._keep.columns - set(self._names))]
        try:
            with self.opener.open(file) as handle:
                parquet = self._parquet(file, handle)
                opened = time.perf_counter()
                return parquet.read_row_group(inside, columns=names, use_threads=False), opened
        except FileNotFoundError as error:
            raise DataError(
                f"{file.path}: listed in the manifest, missing in {self.storage.uri}; rebuild the dataset"
            ) from error
        except (OSError, pa.ArrowException) as error:
            raise DataError(
                f"{file.path}, row group {inside}: cannot be read ({error}); file damaged or storage failing: "
                "rebuild the dataset, or set on_corrupt to quarantine to go on without it"
            ) from error

    def describe(self, group: int) -> str:
        index, inside = self.place(group)
        return f"{self.files[index].path}, row group {inside}"

    def _parquet(self, file: DataFile, handle: pa.NativeFile) -> pq.ParquetFile:
        with self._lock:
            footer = self._footers.get(file.path)
        parquet = pq.ParquetFile(
            handle,
            metadata=footer,
            pre_buffer=not self.storage.is_local,
            coerce_int96_timestamp_unit="us",
            page_checksum_verification=self._check_pages,
        )
        if footer is None:
            self._check(file, parquet)
            with self._lock:
                self._footers[file.path] = parquet.metadata
                if len(self._footers) > KEPT_FOOTERS:
                    self._footers.popitem(last=False)
        return parquet

    def _check(self, file: DataFile, parquet: pq.ParquetFile) -> None:
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


def check_size(storage: Storage, file: DataFile) -> None:
    """DataError where a listed file is missing or has another length: one request, before its hash is worth reading."""
    try:
        size = storage.size_bytes(file.path)
    except OSError as error:
        raise Unreachable(f"{file.path}: cannot be looked up in {storage.uri} ({error})") from error
    if size is None:
        raise DataError(
            f"{file.path}: listed in the manifest, missing in {storage.uri}; rebuild the dataset or restore the file"
        )
    if size != file.bytes:
        raise DataError(
            f"{file.path}: {size} bytes, the manifest says {file.bytes}; "
            "the file was truncated or replaced: rebuild the dataset"
        )


def check_hash(storage: Storage, file: DataFile) -> None:
    """DataError where a listed file's content is not what was written, naming the row group that no longer decodes."""
    check_size(storage, file)
    try:
        found = storage.sha256(file.path)
    except OSError as error:
        raise Unreachable(f"{file.path}: cannot be read from {storage.uri} ({error})") from error
    if found != file.sha256:
        group = first_damaged_group(storage, file)
        where = "" if group is None else f", row group {group} does not decode"
        raise DataError(
            f"{file.path}{where}: sha256 is {found[:12]}..., the manifest says {file.sha256[:12]}...; "
            "rebuild the dataset, or set on_corrupt to quarantine to train without this file"
        )


def first_damaged_group(storage: Storage, file: DataFile) -> int | None:
    """Index of the first row group of a damaged file that fails to decode; None where all still do."""
    for group in range(len(file.row_groups)):
        try:
            with storage.fs.open_input_file(storage.path(file.path)) as handle:
                pq.ParquetFile(handle, page_checksum_verification=True).read_row_group(group)
        except (OSError, pa.ArrowException):
            return group
    return None


def unlisted_files(storage: Storage, files: Sequence[DataFile]) -> list[str]:
    """Parquet files of the folder that the manifest does not list: not part of the dataset, and worth a word.

    Rows the build has quarantined lie beside the shards on purpose.
    """
    listed = {f.path for f in files}
    own = {p.split("/")[0] + "/quarantine" for p in listed}
    found = [p for p in storage.list_files() if p.endswith(".parquet") and p not in listed]
    return [p for p in found if "/".join(p.split("/")[:2]) not in own]


def _brief(values: Sequence[Any]) -> str:
    return str(list(values)) if len(values) <= 8 else f"{list(values[:8])}... ({len(values)} of them)"
