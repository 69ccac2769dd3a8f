"""List the files of a source: a file, a folder or a glob on any storage."""

from __future__ import annotations

import contextlib
import fnmatch
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, TypeVar

import pyarrow.fs as pafs

from sparkring.conf.plain_text import count_of
from sparkring.conf.sources import FilesSource
from sparkring.conf.sources.files import WHOLE_FILES
from sparkring.conf.storage import Storage, open_storage
from sparkring.conf.uris import local_path, without_options
from sparkring.etl.errors import EtlError, NoFiles
from sparkring.etl.sources.files.partitions import Keep, PartitionLister, check_types

# Folder in which a table format keeps what belongs to the table -> the format, and the files there that show it.
LAKE_MARKS = {
    "_delta_log": ("Delta", r"[^/]+"),
    "metadata": ("Iceberg", r"(?:[^/]*\.metadata\.json|version-hint\.text)$"),
    ".hoodie": ("Hudi", r"[^/]+"),
}
WILDCARDS = "*?["
ANY_FOLDERS = "**"
COMPRESSED = r"\.gz|\.bz2|\.zst|\.lz4"
DECOMPRESSED = {"csv": ("gz", "bz2", "zst", "lz4"), "json": ("gz", "bz2", "zst", "lz4"), "text": ("gz", "bz2", "zst")}
# Of a text in the form that other programs write, Spark's own lz4 takes the first bytes for a length: gigabytes.
PACKED = re.compile(r"\.(gz|bz2|zst|lz4|xz|lzma|lzo|br|Z|snappy|deflate|zip|7z|rar|tar|tgz|tbz2?|txz)$", re.IGNORECASE)
LOOKED_AT = 16  # files of a table that are examined
T = TypeVar("T")


@dataclass(frozen=True)
class SourceFile:
    """`path` is relative to the source's root and part of the fingerprint; `full` is what opens it.

    `partition` holds a value for each of the declared partition columns, in their order.
    """

    path: str
    full: str
    bytes: int
    mtime_ns: int
    partition: tuple[Any, ...] = ()


@dataclass(frozen=True)
class FileList:
    """The files of one table, in the order of their paths."""

    storage: Storage
    files: tuple[SourceFile, ...]

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files)

    def partition_folders(self, levels: int) -> list[str]:
        """List the partition folders below the root, sorted, `levels` partition columns deep."""
        return sorted({"/".join(file.path.split("/")[:levels]) for file in self.files})

    def spark_paths(self) -> list[str]:
        return spark_paths(self.storage, [file.full for file in self.files])


def spark_paths(storage: Storage, paths: Iterable[str]) -> list[str]:
    """Return full paths for Spark: `file:///...` locally, else with the recipe's scheme and host."""
    if storage.is_local:
        return [f"file://{path}" for path in paths]
    root = without_options(storage.uri).rstrip("/")
    return [root + path[len(storage.root.rstrip("/")) :] for path in paths]


def list_files(name: str, config: FilesSource, keep: Keep = lambda values: True) -> FileList:
    """List the files of a source below its root. Raises EtlError if it has no files.

    Of a table with declared partitions only folders are opened whose values `keep` accepts.
    """
    root, pattern = _split_glob(config.path)
    storage = open_storage(root)
    if config.partitions:
        return _list_partitions(name, config, storage, keep)
    info = storage.fs.get_file_info(storage.root)
    if info.type == pafs.FileType.File:
        infos, prefix = [info], len(info.path) - len(info.base_name)
    else:
        deep = pattern is None or len(pattern) > 1 or pattern[0] == ANY_FOLDERS
        selector = pafs.FileSelector(storage.root, allow_not_found=True, recursive=deep)
        infos, prefix = storage.fs.get_file_info(selector), len(storage.root.rstrip("/")) + 1
    there = [i for i in sorted(infos, key=lambda i: i.path) if i.type == pafs.FileType.File]
    files = tuple(
        SourceFile(i.path[prefix:], i.path, i.size, i.mtime_ns or 0)
        for i in there
        if info.type == pafs.FileType.File or _wanted(i.path[prefix:], pattern, config.format)
    )
    key = _key(name, config)
    read = [f.full for f in files] or [i.path for i in there]  # another format has no files where a lake's lie
    _refuse_lake_tables(name, config, storage, [i.path for i in infos], read)
    if not files:
        missing = info.type == pafs.FileType.NotFound
        what = "no such file or folder" if missing else _why_no_files(there, pattern, config)
        raise EtlError(f"{key}: {what}; the table {name!r} is missing")
    _refuse_packed(key, config.format, files)
    return FileList(storage, files)


def _refuse_packed(key: str, kind: str, files: Iterable[SourceFile]) -> None:
    """Raise EtlError for a file with the suffix of an archive, or of a compression that this format is not read from.

    Args:
        key: names the source.
        kind: format of the source.
        files: files of the source, by path.
    """
    known = DECOMPRESSED.get(kind, ())
    for file in files if known else ():
        packed = PACKED.search(file.path)
        if packed and packed[1].lower() not in known:
            raise EtlError(
                f"{key}: {file.path}: .{packed[1]} is not read; decompress it, or compress it as "
                f"{', '.join(f'.{suffix}' for suffix in known)}"
            )


def _key(name: str, config: FilesSource) -> str:
    return f"etl.sources.{name}.path = {config.path!r}"


def _list_partitions(name: str, config: FilesSource, storage: Storage, keep: Keep) -> FileList:
    """List the files of the kept partitions; `storage` is the table's root."""
    key, root = _key(name, config), storage.root.rstrip("/")
    check_types(f"etl.sources.{name}", config.partitions)
    is_glob = _split_glob(config.path)[1] is not None
    if is_glob or storage.fs.get_file_info(storage.root).type != pafs.FileType.Directory:
        what = "has wildcards" if is_glob else "is no folder"
        raise EtlError(f"{key}: {what}; the path of a table with partitions is the folder that holds their folders")
    lister = PartitionLister(key, storage.fs, config.partitions, keep, lambda path: _wanted(path, None, config.format))
    files = tuple(
        SourceFile(info.path[len(root) + 1 :], info.path, info.size, info.mtime_ns or 0, values)
        for info, values in lister.files(root)
    )
    if not files:
        there = sum(info.type == pafs.FileType.Directory for info in lister.seen)
        kept = f"that where = {config.where!r} keeps" if config.where else "below it"
        raise NoFiles(
            f"{key}: no {config.format} files in the partitions {kept} ({count_of(there, 'folder was')} seen there)"
        )
    _refuse_packed(key, config.format, files)
    _refuse_lake_tables(name, config, storage, [i.path for i in lister.seen], [f.full for f in files])
    return FileList(storage, tuple(sorted(files, key=lambda file: file.path)))


def _refuse_lake_tables(name: str, config: FilesSource, storage: Storage, paths: list[str], files: list[str]) -> None:
    """Raise EtlError if one of `files` is in a folder in which a table format keeps the versions of a table.

    Args:
        name: name of the source.
        config: configuration of the source.
        storage: storage at the source's root.
        paths: all files and folders that were found below the root.
        files: files that would be read.
    """
    root = storage.root.rstrip("/")
    for above in [root, *accumulate(root.split("/"), "{}/{}".format)]:
        with contextlib.suppress(OSError):  # the right to read a folder does not include those above it
            for found in storage.fs.get_file_info([f"{above}/{mark}" for mark in LAKE_MARKS]):
                if found.type == pafs.FileType.Directory:
                    paths += [i.path for i in storage.fs.get_file_info(pafs.FileSelector(found.path))]
    for path in sorted(paths):
        for mark, (kind, sign) in LAKE_MARKS.items():
            match = re.search(rf"^(.*/){mark}/{sign}", path)
            if match and any(file.startswith(match[1]) for file in files):
                remedy = _remedy(name, kind, _address(storage, match[1].rstrip("/")), path)
                raise EtlError(
                    f"{_key(name, config)}: {match[1]} is a table of {kind}; beside its rows it holds files of rows "
                    f"that were deleted or replaced. {remedy}"
                )


def _remedy(name: str, kind: str, address: str, sign: str) -> str:
    """Suggest what to declare for a table of this kind at `address`; `sign` is one of its files."""
    if kind == "Hudi":
        return (
            "Export the rows with the engine that keeps it (INSERT OVERWRITE DIRECTORY '...' USING parquet SELECT * "
            "FROM ...) and declare that folder"
        )
    where = f"path: {json.dumps(address, ensure_ascii=False)}"
    if kind == "Iceberg" and not re.search(r"/(v[0-9]+[^/]*\.metadata\.json|version-hint\.text)$", sign):
        where = (
            "table: catalog.namespace.table"  # only its catalog knows which of its metadata files is the current one
        )
    return f"Declare it as what it is:\n  {name}: {{format: {kind.lower()}, {where}}}"


def _address(storage: Storage, folder: str) -> str:
    """Return the path or URI of a folder at, below or above the root of `storage`."""
    root, (base, mark, query) = storage.root.rstrip("/"), storage.uri.partition("?")
    if storage.is_local:
        return folder
    base = base.rstrip("/")
    moved = base + folder[len(root) :] if folder.startswith(root) else base.removesuffix(root[len(folder) :])
    return moved + mark + query


def _split_glob(path: str) -> tuple[str, list[str] | None]:
    """Split `data/2013-*/x.csv` -> (`data`, [`2013-*`, `x.csv`]). Options of a URI (`?`) stay with the root."""
    base, mark, query = path.partition("?") if local_path(path) is None else (path, "", "")
    parts = base.split("/")
    first = next((i for i, part in enumerate(parts) if any(c in part for c in WILDCARDS)), None)
    if first is None:
        return path, None
    return ("/".join(parts[:first]) or ("/" if first else ".")) + mark + query, parts[first:]


def _wanted(relative: str, pattern: list[str] | None, kind: str) -> bool:
    """Return whether a file below the root belongs to the table, by the glob or the format's suffix."""
    parts = relative.split("/")
    if any(part.startswith(("_", ".")) for part in parts):
        return False
    if pattern is None:
        return kind in WHOLE_FILES or re.search(rf"\.{kind}({COMPRESSED})?$", relative, re.IGNORECASE) is not None
    return _matches(parts, pattern)


def _matches(parts: list[str], pattern: list[str]) -> bool:
    """Match folder by folder; only `**` stands for any number of them."""
    if not pattern:
        return not parts
    if pattern[0] == ANY_FOLDERS:
        return any(_matches(parts[n:], pattern[1:]) for n in range(len(parts) + 1))
    return bool(parts) and fnmatch.fnmatchcase(parts[0], pattern[0]) and _matches(parts[1:], pattern[1:])


def _why_no_files(there: list[Any], pattern: list[str] | None, config: FilesSource) -> str:
    if not there:
        return "no files below it"
    example = f"{count_of(len(there), 'file is')} there, such as {there[0].base_name!r}"
    if pattern is None:
        return f"no files named *.{config.format} below it ({example}: name them by a glob)"
    return f"no file matches it ({example}; a `*` stays within one folder, `**` stands for any folders)"


def spread(values: Sequence[T], most: int) -> tuple[T, ...]:
    """Select at most `most` values from first to last, evenly spaced."""
    if len(values) <= most:
        return tuple(values)
    return tuple(values[i * (len(values) - 1) // (most - 1)] for i in range(most))
