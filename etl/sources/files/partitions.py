"""The folders of a partitioned table, `day=2024-01-31/country=DE`: which are read, and the values of their names."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

import pyarrow.fs as pafs

from sparkring.etl.errors import EtlError
from sparkring.etl.sources.values import arrow_type, scalar

NULL_NAME = "__HIVE_DEFAULT_PARTITION__"  # what Spark and Hive write for null, and for the empty text
LIST_THREADS = 16
Values = dict[str, Any]  # partition column -> value as `values.scalar` gives it, None for null
Keep = Callable[[Values], bool]  # whether a folder is opened; it is asked on every level, with the columns so far


@dataclass(frozen=True)
class Partition:
    """A folder, and the values that its name and those of the folders above it stand for."""

    folder: str
    values: Values = field(default_factory=dict)


def check_types(key: str, types: Mapping[str, str]) -> None:
    """Raise EtlError for a type that the name of a folder cannot have."""
    for name, kind in types.items():
        try:
            known = arrow_type(kind) is not None and kind != "binary"
        except ValueError:  # a decimal of too many digits
            known = False
        if not known:
            raise EtlError(
                f"{key}.partitions.{name} = {kind!r}: not the type of a partition column; it may be string, a number, "
                "boolean, date, timestamp or timestamp_ntz, by the name Spark gives it (`int`, `decimal(10,2)`)"
            )


@dataclass
class PartitionLister:
    """Lists the folders of a partitioned table level by level, so that those not wanted are never opened."""

    key: str  # names the source in errors, with its path
    fs: pafs.FileSystem
    types: Mapping[str, str]  # of the partition columns, from the outermost folder inwards
    keep: Keep
    is_data: Callable[[str], bool]  # whether a file, by its path, holds rows of the table
    seen: list[pafs.FileInfo] = field(default_factory=list)  # all that was found on the way

    def files(self, root: str) -> Iterator[tuple[pafs.FileInfo, tuple[Any, ...]]]:
        """List the data files of the kept partitions below `root`, each with the values of its partition."""
        level = [Partition(root)]
        with ThreadPoolExecutor(LIST_THREADS) as pool:
            for name, kind in self.types.items():
                listings = list(pool.map(lambda partition: self._list(partition.folder), level))
                level = [
                    child
                    for parent, infos in zip(level, listings, strict=True)
                    for child in self._children(parent, infos, name, kind)
                ]
            contents = list(pool.map(lambda partition: self._list(partition.folder, deep=True), level))
        for partition, infos in zip(level, contents, strict=True):
            for info in infos:
                below = info.path[len(partition.folder) + 1 :]
                if info.type == pafs.FileType.Directory and "=" in info.base_name and not _is_hidden(below):
                    raise self._error(info.path, "is no declared partition; add its column to partitions")
                if info.type == pafs.FileType.File and not _is_hidden(below) and self.is_data(below):
                    yield info, tuple(partition.values.values())

    def _list(self, folder: str, *, deep: bool = False) -> list[pafs.FileInfo]:
        infos = self.fs.get_file_info(pafs.FileSelector(folder, recursive=deep))
        self.seen.extend(infos)
        return sorted(infos, key=lambda info: info.path)

    def _children(self, parent: Partition, infos: list[pafs.FileInfo], name: str, kind: str) -> Iterator[Partition]:
        for info in infos:
            if _is_hidden(info.base_name):
                continue
            if info.type == pafs.FileType.Directory:
                child = Partition(info.path, parent.values | {name: self._value(info, name, kind)})
                if self.keep(child.values):
                    yield child
            elif self.is_data(info.base_name):
                raise self._error(info.path, f"is in no folder {name}=..., and has no value of that partition column")

    def _value(self, info: pafs.FileInfo, name: str, kind: str) -> Any:
        """Parse the value in a folder's name `name=value`. Percent codes are bytes of UTF-8."""
        found, equals, encoded = info.base_name.partition("=")
        if not equals or unquote(found) != name:
            raise self._error(info.path, f"stands where a folder {name}=... is declared; have they another order?")
        if encoded == NULL_NAME:
            return None
        if not encoded:
            raise self._error(info.path, f"gives {name!r} no value; null is written {name}={NULL_NAME}")
        try:
            return scalar(unquote(encoded, errors="strict"), kind)
        except (ValueError, ArithmeticError) as error:  # UnicodeDecodeError is one
            what = "text in UTF-8" if isinstance(error, UnicodeDecodeError) else kind
            raise self._error(info.path, f"is declared {kind}, and its value {encoded!r} is no {what}") from error

    def _error(self, path: str, what: str) -> EtlError:
        return EtlError(f"{self.key}: {path!r} {what}")


def _is_hidden(relative: str) -> bool:
    """Return whether Spark ignores the path: `_x` is hidden, the partition `_x=1` is not."""
    return any(part.startswith(".") or (part.startswith("_") and "=" not in part) for part in relative.split("/"))
