"""What petastorm expects of old pyarrow: file systems, and legacy datasets.

petastorm's modules see this module under the names `pq` and `pyarrow` (compat.py); it falls back to the real ones for
everything that is not here. Closures that petastorm ships to executors name it; importing it there runs the package's
`__init__`, which installs the import hook.
"""

from __future__ import annotations

import operator
import posixpath
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import fsspec.implementations.arrow
import fsspec.implementations.local
import pyarrow as pa
import pyarrow.parquet

Partition = tuple[str, int]
COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    "=": operator.eq, "==": operator.eq, "!=": operator.ne, "<": operator.lt, "<=": operator.le,
    ">": operator.gt, ">=": operator.ge, "in": lambda a, b: a in b, "not in": lambda a, b: a not in b,
}  # fmt: skip


def __getattr__(name: str) -> Any:
    """Look up names that are not here in `pyarrow.parquet`, then in `pyarrow`."""
    if name.startswith("__"):
        raise AttributeError(name)
    return getattr(pyarrow.parquet, name, None) or getattr(pa, name)


class LocalFileSystem:
    """fsspec's local file system; subclasses of fsspec's own cannot be pickled."""

    def __getattr__(self, name: str) -> Any:
        return getattr(fsspec.implementations.local.LocalFileSystem(), name)


localfs = LocalFileSystem()


class HadoopFileSystem(fsspec.implementations.arrow.HadoopFileSystem):
    """fsspec's HDFS client, in place of `pyarrow.hdfs`'s.

    Raises OSError where no active namenode answers: pyarrow connects without asking, and reports files of a silent or
    standby namenode as not found.
    """

    cachable = False  # petastorm's failover connects again
    fsid = property(operator.attrgetter("_fs_token"))  # petastorm's failover would wrap fsspec's cached one as a method

    def __init__(self, host: str = "default", port: int = 0, user: str | None = None, **options: Any) -> None:
        try:
            super().__init__(host=host, port=port, user=user, **options)
            problem = None if self.exists("/") else "no active namenode answers"
        except OSError as error:
            problem = str(error)
        if problem:
            raise OSError(
                f"hdfs://{host}:{port}: {problem}; check the address, that HADOOP_HOME or ARROW_LIBHDFS_DIR leads to "
                "libhdfs.so, and that CLASSPATH is what `hadoop classpath --glob` prints"
            )


class PartitionSet:
    """The values of one level of `name=value` folders, in the order they were found."""

    def __init__(self, name: str, keys: Sequence[str] = ()) -> None:
        self.name, self.keys = name, list(keys)

    def index(self, key: str) -> int:
        if key not in self.keys:
            self.keys.append(key)
        return self.keys.index(key)

    @property
    def dictionary(self) -> pa.Array:
        """int64 where every value is a whole number, else string."""
        try:
            return pa.array([int(key) for key in self.keys], pa.int64())
        except ValueError:
            return pa.array(self.keys, pa.string())


class ParquetPartitions:
    """The levels of `name=value` folders above a dataset's files."""

    def __init__(self) -> None:
        self.levels: list[PartitionSet] = []

    @property
    def partition_names(self) -> set[str]:
        return {level.name for level in self.levels}

    def place(self, depth: int, name: str, key: str) -> Partition:
        if depth == len(self.levels):
            self.levels.append(PartitionSet(name))
        if self.levels[depth].name != name:
            raise ValueError(f"folders partitioned by {self.levels[depth].name!r} and by {name!r} at one level")
        return name, self.levels[depth].index(key)

    def __len__(self) -> int:
        return len(self.levels)

    def __iter__(self) -> Iterator[PartitionSet]:
        return iter(self.levels)

    def __getitem__(self, number: int) -> PartitionSet:
        return self.levels[number]


class ParquetDatasetPiece:
    """A file, or one row group of it."""

    def __init__(
        self,
        path: str,
        open_file_func: Callable[..., Any] = localfs.open,
        file_options: Any = None,
        row_group: int | None = None,
        partition_keys: Sequence[Partition] | None = None,
    ) -> None:
        """Describe one file, or one row group of it.

        Args:
            path: path of the file.
            open_file_func: function that opens the file.
            file_options: ignored; petastorm passes it by position.
            row_group: number of the row group; None for the whole file.
            partition_keys: (name, index into the level's keys) per level of folders.
        """
        self.path, self.open_file_func, self.row_group = path, open_file_func, row_group
        self.partition_keys = list(partition_keys or [])

    def get_metadata(self) -> Any:
        with self.open_file_func(self.path) as file:
            return pyarrow.parquet.read_metadata(file)

    def read(self, columns: Any = None, partitions: ParquetPartitions | None = None, **_: Any) -> pa.Table:
        """Read columns (unknown ones are left out), and the partition's values."""
        with self.open_file_func(self.path) as handle:
            file = pyarrow.parquet.ParquetFile(handle)
            wanted = None if columns is None else [c for c in file.schema_arrow.names if c in set(columns)]
            table = file.read(wanted) if self.row_group is None else file.read_row_group(self.row_group, wanted)
        for depth, (name, index) in enumerate(self.partition_keys):
            if partitions is not None:
                value = partitions[depth].dictionary[index]
                table = table.append_column(name, pa.repeat(value, table.num_rows))
        return table


class ParquetDataset:
    """The legacy dataset of a folder (without hidden files), a file, or several."""

    def __init__(
        self, path_or_paths: Any, filesystem: Any = None, validate_schema: bool = True, filters: Any = None, **_: Any
    ) -> None:
        self.fs = filesystem or localfs
        single = isinstance(path_or_paths, str)
        self.paths = path_or_paths.rstrip("/") if single else list(path_or_paths)
        self.partitions: ParquetPartitions | None = None
        self.metadata_path: str | None = None
        self.common_metadata_path: str | None = None
        if not single:
            self.pieces = [ParquetDatasetPiece(path, self.fs.open) for path in self.paths]
        elif self.fs.isfile(self.paths):
            self.pieces = [ParquetDatasetPiece(path_or_paths, self.fs.open)]
        else:
            self.pieces = self._find(filters)
        if not self.pieces:
            raise OSError(f"{path_or_paths}: no Parquet files")
        self.metadata = self._footer(self.metadata_path)
        self.common_metadata = self._footer(self.common_metadata_path) or self.metadata

    def _find(self, filters: Any) -> list[ParquetDatasetPiece]:
        base = str(self.paths)
        partitions, pieces = ParquetPartitions(), []
        root = self.fs._strip_protocol(base)
        for path in sorted(self._below(base)):
            parts = posixpath.relpath(path, root).split("/")
            if parts == ["_metadata"]:
                self.metadata_path = path
            elif parts == ["_common_metadata"]:
                self.common_metadata_path = path
            elif not any(part.startswith(("_", ".")) for part in parts) and self.fs.size(path):
                named = [part.split("=", 1) for part in parts[:-1] if "=" in part]
                keys = [partitions.place(depth, name, value) for depth, (name, value) in enumerate(named)]
                pieces.append(ParquetDatasetPiece(path, self.fs.open, partition_keys=keys))
        if len(partitions):
            self.partitions = partitions
        return [piece for piece in pieces if filters is None or self._passes(piece, filters)]

    def _below(self, folder: str) -> Iterator[str]:
        """Yield files below a folder; `find` would silently skip unreadable folders."""
        for entry in self.fs.ls(folder, detail=True):
            if entry["type"] != "directory":
                yield entry["name"]
            elif entry["name"].rstrip("/") != folder.rstrip("/"):
                yield from self._below(entry["name"])

    def _passes(self, piece: ParquetDatasetPiece, filters: Any) -> bool:
        """Return whether a piece meets all conditions, or all of one of several lists."""
        values = {
            name: self.partitions[d].keys[i] for d, (name, i) in enumerate(piece.partition_keys) if self.partitions
        }
        groups = filters if isinstance(filters[0], list) else [filters]
        return any(all(_holds(values, *condition) for condition in group) for group in groups)

    def _footer(self, path: str | None) -> Any:
        if path is None:
            return None
        with self.fs.open(path) as file:
            return pyarrow.parquet.read_metadata(file)


def _holds(values: dict[str, str], name: str, compare: str, wanted: Any) -> bool:
    if name not in values:
        raise ValueError(f"filter on {name!r}, but the dataset is partitioned by {sorted(values)}")
    sample = next(iter(wanted)) if isinstance(wanted, (list, tuple, set)) else wanted
    return COMPARE[compare](type(sample)(values[name]), wanted)
