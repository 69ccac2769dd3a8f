"""The data files of one version of an Iceberg table, and the rows deleted in them: from manifests, no row is read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from sparkring.conf.errors import first_line
from sparkring.conf.plain_text import count_of
from sparkring.etl.errors import EtlError
from sparkring.etl.sources.iceberg.table import SHOWN, TableVersion, readable

if TYPE_CHECKING:
    from pyiceberg.expressions import BooleanExpression
    from pyiceberg.manifest import DataFile

THREADS = 16
ID = b"PARQUET:field_id"  # in the metadata of Arrow's fields
GONE = "was it expired, or the table dropped? Run again, which reads the table as it is then"


@dataclass(frozen=True)
class IcebergFile:
    """A data file, or one that says which rows of data files are deleted."""

    path: str  # as the table's metadata writes it
    bytes: int
    rows: int
    identity: tuple[tuple[int, Any], ...] = ()  # field id, the value all rows have in that column, by their partition
    deletes: tuple[IcebergFile, ...] = ()  # sorted


def plan(key: str, version: TableVersion, row_filter: BooleanExpression | None) -> tuple[IcebergFile, ...]:
    """List the files that may hold rows for which the filter is true, sorted. Raises EtlError for what is not read.

    The filter is about columns as the version's schema names them; None: all files.
    """
    with readable(key):
        return _plan(key, version, row_filter)


def _plan(key: str, version: TableVersion, row_filter: BooleanExpression | None) -> tuple[IcebergFile, ...]:
    from pyiceberg.expressions import AlwaysTrue
    from pyiceberg.manifest import INITIAL_SEQUENCE_NUMBER, DataFileContent, read_manifest_list
    from pyiceberg.table import ManifestGroupPlanner
    from pyiceberg.table.delete_file_index import DeleteFileIndex

    if version.snapshot is None:
        return ()
    # Not `DataScan.plan_files`: of pyiceberg 0.12 it fails where a condition meets a partition of nulls.
    planner = ManifestGroupPlanner(version.metadata, version.metadata_io, row_filter or AlwaysTrue())
    version.check_place(key, version.snapshot.manifest_list)
    # Not `snapshot.manifests`: its cache is by path and lasts as long as the process, so another table could fill it.
    manifests = list(read_manifest_list(version.metadata_io.new_input(version.snapshot.manifest_list)))
    if len({manifest.manifest_path for manifest in manifests}) < len(manifests):
        raise ValueError(f"{version.snapshot.manifest_list} names a manifest twice")  # each is as large as it may be
    for manifest in manifests:
        version.check_place(key, manifest.manifest_path)
    entries = list(chain.from_iterable(planner.plan_manifest_entries(manifests)))
    deletes = DeleteFileIndex()
    for entry in entries:
        if entry.data_file.content == DataFileContent.EQUALITY_DELETES:
            raise EtlError(
                f"{key}: the table has equality deletes ({entry.data_file.file_path}), which are not read; rewrite "
                "its files once without them (CALL system.rewrite_data_files with 'delete-file-threshold', '1'), or "
                "have its writer delete by position"
            )
        if entry.data_file.content == DataFileContent.POSITION_DELETES:
            deletes.add_delete_file(entry, entry.data_file.partition)
    found = [
        _file(
            key,
            version,
            e.data_file,
            deletes.for_data_file(e.sequence_number or INITIAL_SEQUENCE_NUMBER, e.data_file, e.data_file.partition),
        )
        for e in entries
        if e.data_file.content == DataFileContent.DATA
    ]
    return tuple(sorted(found, key=lambda file: file.path))


def _file(key: str, version: TableVersion, data: DataFile, deletes: Iterable[DataFile]) -> IcebergFile:
    file = _checked(key, version, data)
    deleted = sorted((_checked(key, version, delete) for delete in deletes), key=lambda d: d.path)
    return IcebergFile(file.path, file.bytes, file.rows, tuple(sorted(_identity(version, data))), tuple(deleted))


def _checked(key: str, version: TableVersion, file: DataFile) -> IcebergFile:
    from pyiceberg.manifest import FileFormat

    version.check_place(key, file.file_path)
    if file.file_format != FileFormat.PARQUET:
        raise EtlError(
            f"{key}: {file.file_path} is a file of {file.file_format.value}, and only Parquet is read; set "
            "write.format.default = parquet in the table and rewrite it (CALL system.rewrite_data_files)"
        )
    if file.key_metadata is not None:
        raise EtlError(
            f"{key}: {file.file_path} is encrypted, which is not read; copy the rows into a table that is not"
        )
    return IcebergFile(file.file_path, file.file_size_in_bytes, file.record_count)


def _identity(version: TableVersion, file: DataFile) -> Iterator[tuple[int, Any]]:
    """Yield columns by which the file's partition is made as they are: such a column need not be in the file."""
    from pyiceberg.transforms import IdentityTransform

    spec = version.metadata.specs()[file.spec_id]
    for position, field in enumerate(spec.fields):
        if isinstance(field.transform, IdentityTransform):
            yield field.source_id, file.partition[position]


# --- what is in files: of data files the footers, of files of deletes all of them


def footers(key: str, version: TableVersion, files: Iterable[IcebergFile]) -> list[pa.Schema]:
    """Read each file's schema. Raises EtlError naming files that are gone, or are not what the table says."""
    return _of_each(key, version, files, lambda opened: pq.read_schema(opened))


def field_ids(fields: Iterable[pa.Field]) -> Iterator[int]:
    """Yield the ids of a file's columns, those within structs, lists and maps too."""
    for field in fields:
        if field.metadata and ID in field.metadata:
            yield int(field.metadata[ID])
        if pa.types.is_map(field.type):
            yield from field_ids([field.type.key_field, field.type.item_field])
        elif pa.types.is_nested(field.type):
            yield from field_ids(field.type.field(n) for n in range(field.type.num_fields))


def deleted_rows(key: str, version: TableVersion, files: Iterable[IcebergFile]) -> dict[str, np.ndarray]:
    """Return, by data file with deletes, the deleted rows' positions, int64 (deleted rows,)."""
    deletes = sorted({delete for file in files for delete in file.deletes}, key=lambda file: file.path)
    tables = dict(zip(deletes, _of_each(key, version, deletes, _positions), strict=True))
    found = {}
    for file in files:
        parts = [tables[delete].get(file.path, np.empty(0, np.int64)) for delete in file.deletes]
        if parts:
            found[file.path] = np.unique(np.concatenate(parts))
    return found


def gone(version: TableVersion, files: Iterable[IcebergFile]) -> list[str]:
    """List data files that are no longer there, or have another size."""
    with ThreadPoolExecutor(THREADS) as pool:
        problems = pool.map(lambda file: _size_problem(version, file), files)
        return [problem for problem in problems if problem]


def _of_each(key: str, version: TableVersion, files: Iterable[IcebergFile], read: Callable[[Any], Any]) -> list[Any]:
    """Call `read(opened file)` for each file. Files that cannot be read, or hold something else, are one EtlError."""

    def one(file: IcebergFile) -> tuple[str, Any]:
        if problem := _size_problem(version, file):
            return problem, None
        try:
            with version.io.new_input(file.path).open() as opened:
                return "", read(opened)
        except Exception as error:  # of damaged bytes Arrow raises many types
            return f"{file.path}: {first_line(error)}", None

    with ThreadPoolExecutor(THREADS) as pool:
        results = list(pool.map(one, files))
    if problems := [problem for problem, _ in results if problem]:
        shown = "".join(f"\n  - {problem}" for problem in problems[:SHOWN])
        raise EtlError(f"{key}: {len(problems)} of the table's files cannot be read:{shown}")
    return [result for _, result in results]


def _size_problem(version: TableVersion, file: IcebergFile) -> str:
    try:
        found = len(version.io.new_input(file.path))
    except FileNotFoundError:
        return f"{file.path}: is gone; {GONE}"
    except OSError as error:
        return f"{file.path}: {first_line(error)}"
    return "" if found == file.bytes else f"{file.path}: has {count_of(found, 'byte')}, and the table says {file.bytes}"


def _positions(opened: Any) -> dict[str, np.ndarray]:
    """Read a file of position deletes: data file -> positions."""
    table = pq.read_table(opened, columns=["file_path", "pos"])
    grouped = table.group_by("file_path").aggregate([("pos", "list")])
    positions = [np.asarray(found.values, np.int64) for found in grouped["pos_list"].combine_chunks()]
    return dict(zip(grouped["file_path"].to_pylist(), positions, strict=True))
