"""Unmodified petastorm 0.12.1 on today's pyarrow, numpy, pandas and Python.

Importing this module installs an import hook that acts when petastorm's modules are first imported and gives each of
them what pyarrow and numpy no longer have. It must be active in every process that imports petastorm, Spark's
executors and petastorm's own process pool too; therefore it acts on import, and closures that petastorm ships to
executors name this module, which they call `pq` and `pyarrow`: it stands for `pyarrow.parquet`'s legacy dataset
interface and falls back to the real one for everything else. pyarrow and numpy themselves are not changed, but for
stand-ins under names they lack.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import operator
import pickle
import posixpath
import re
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import fsspec.implementations.arrow
import fsspec.implementations.local
import pyarrow as pa
import pyarrow.parquet

SUPPORTED = "0.12.1"
Partition = tuple[str, int]

RENAMED = {"unicode_": "str_", "string_": "bytes_", "in1d": "isin", "float": "float64"}

COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    "=": operator.eq, "==": operator.eq, "!=": operator.ne, "<": operator.lt, "<=": operator.le,
    ">": operator.gt, ">=": operator.ge, "in": lambda a, b: a in b, "not in": lambda a, b: a not in b,
}  # fmt: skip


def __getattr__(name: str) -> Any:
    """What is not here is `pyarrow.parquet`'s, or `pyarrow`'s."""
    if name.startswith("__"):
        raise AttributeError(name)
    return getattr(pyarrow.parquet, name, None) or getattr(pa, name)


class LocalFileSystem:
    """fsspec's, behind a plain class: of its own, users' subclasses inherit a lock that Spark cannot pickle."""

    def __getattr__(self, name: str) -> Any:
        return getattr(fsspec.implementations.local.LocalFileSystem(), name)


localfs = LocalFileSystem()


class PartitionSet:
    """The values of one level of `name=value` folders, in the order they were met."""

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
    """A file, or one row group of it. `partition_keys`: (name, index into the level's keys) per level."""

    def __init__(
        self,
        path: str,
        open_file_func: Callable[..., Any] = localfs.open,
        file_options: Any = None,
        row_group: int | None = None,
        partition_keys: Sequence[Partition] | None = None,
    ) -> None:
        self.path, self.open_file_func, self.row_group = path, open_file_func, row_group
        self.partition_keys = list(partition_keys or [])

    def get_metadata(self) -> Any:
        with self.open_file_func(self.path) as file:
            return pyarrow.parquet.read_metadata(file)

    def read(self, columns: Any = None, partitions: ParquetPartitions | None = None, **_: Any) -> pa.Table:
        """The columns (any collection; unknown names are left out), and the partition's values beside them."""
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
    """The legacy dataset: files below one folder (hidden ones and `_files` apart), one file, or a list of files."""

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
        """Files below a folder. Not `find`, which leaves out what cannot be listed."""
        for entry in self.fs.ls(folder, detail=True):
            if entry["type"] != "directory":
                yield entry["name"]
            elif entry["name"].rstrip("/") != folder.rstrip("/"):
                yield from self._below(entry["name"])

    def _passes(self, piece: ParquetDatasetPiece, filters: Any) -> bool:
        """Filters are on partitions: a list of conditions that all hold, or a list of such lists, one of which does."""
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


class _Namespace(types.ModuleType):
    """A module's stand-in: given names first, the real module's for the rest."""

    def __init__(self, real: types.ModuleType, **given: Any) -> None:
        super().__init__(real.__name__)
        self.__dict__.update(given)
        self._real = real

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_real"], name)


class _Table:
    """`pyarrow.Table` whose `from_pandas` makes string, as ever, of what pandas 3 makes large_string."""

    def __getattr__(self, name: str) -> Any:
        return getattr(pa.Table, name)

    @staticmethod
    def from_pandas(frame: Any, **options: Any) -> pa.Table:
        table = pa.Table.from_pandas(frame, **options)
        for number, field in enumerate(table.schema):
            if pa.types.is_large_string(field.type):
                table = table.set_column(number, field.name, table.column(number).cast(pa.string()))
        return table


def _start_process(args: Sequence[str], **options: Any) -> Any:
    """petastorm's pool starts `python -m <entry point> <file>`: the same, with this module imported first."""
    import subprocess

    python, _, module, *rest = args
    program = f"import runpy, {__name__}; runpy.run_module({module!r}, run_name='__main__', alter_sys=True)"
    return subprocess.Popen([python, "-c", program, *rest], **options)


def _patch(module: types.ModuleType) -> None:
    """Give a petastorm module that has just run what it will look for."""
    names = vars(module)
    if names.get("pq") is pyarrow.parquet:
        names["pq"] = sys.modules[__name__]
    if module.__name__ == "petastorm.fs_utils":
        names["pyarrow"] = sys.modules[__name__]
    if module.__name__ == "petastorm.arrow_reader_worker":
        names["pa"] = _Namespace(pa, Table=_Table())
    if module.__name__ == "petastorm.workers_pool.exec_in_new_process":
        import subprocess

        names["subprocess"] = _Namespace(subprocess, Popen=_start_process)
    if module.__name__ == "petastorm.unischema":
        _ship_with_closures()
    if module.__name__ == "petastorm.etl.legacy":
        _restore_namedtuples()
        names["RestrictedUnpickler"].find_class = find_class(names["RestrictedUnpickler"].find_class)


def _ship_with_closures() -> None:
    """What Spark sends to its Python workers and names petastorm names this module first: unpickled there it installs
    the hook, and only then imports petastorm."""
    if importlib.util.find_spec("pyspark") is None:
        return
    serializer = importlib.import_module("pyspark.serializers").CloudPickleSerializer
    dumps = serializer.dumps

    def dumps_with_hook(self: Any, value: Any) -> bytes:
        pickled: bytes = dumps(self, value)
        return dumps(self, _Shipped(pickled)) if b"petastorm" in pickled else pickled

    serializer.dumps = dumps_with_hook


class _Shipped:
    """A pickle inside a pickle, whose outer one imports this module."""

    def __init__(self, pickled: bytes) -> None:
        self._pickled = pickled

    def __reduce__(self) -> tuple[Callable[[bytes], Any], tuple[bytes]]:
        return load_shipped, (self._pickled,)


def load_shipped(pickled: bytes) -> Any:
    return pickle.loads(pickled)


def _restore_namedtuples() -> None:
    """Schemas pickled under older Sparks name a function that Spark no longer has."""
    if importlib.util.find_spec("pyspark") is None:
        return
    serializers = importlib.import_module("pyspark.serializers")
    if not hasattr(serializers, "_restore"):
        serializers._restore = restore_namedtuple  # type: ignore[attr-defined]


def find_class(found: Callable[[Any, str, str], Any]) -> Callable[[Any, str, str], Any]:
    """An unpickler's `find_class` for schemas that name what numpy has renamed since."""
    return lambda self, module, name: found(self, module, RENAMED.get(name, name) if module == "numpy" else name)


def restore_namedtuple(name: str, fields: Sequence[str], value: Sequence[Any]) -> Any:
    import collections

    return collections.namedtuple(name, fields)(*value)


def renamed(source: str) -> str:
    """A petastorm module's source with numpy's names of today."""
    return re.sub(rf"\bnp\.({'|'.join(RENAMED)})\b", lambda name: f"np.{RENAMED[name[1]]}", source)


class _Loader(importlib.abc.ExecutionLoader):
    """A module's own loader: names that numpy dropped are replaced in its source, and `_patch` runs after it."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def get_filename(self, fullname: str) -> str:
        return str(self._loader.get_filename(fullname))

    def get_source(self, fullname: str) -> str:
        return renamed(self._loader.get_source(fullname))

    def exec_module(self, module: types.ModuleType) -> None:
        super().exec_module(module)
        _patch(module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name.split(".")[0] != "petastorm":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            _lend_names()
            spec.loader = _Loader(spec.loader)
        return spec


class HadoopFileSystem(fsspec.implementations.arrow.HadoopFileSystem):
    """fsspec's HDFS client, in place of `pyarrow.hdfs`'s. Raises OSError where no active namenode answers: pyarrow
    connects without asking, and reports files of a silent or standby namenode as not found."""

    cachable = False  # petastorm's failover connects anew
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


def _lend_names() -> None:
    """The modules and the class petastorm imports from pyarrow by name."""
    if "pyarrow.filesystem" not in sys.modules:
        filesystem, hdfs = types.ModuleType("pyarrow.filesystem"), types.ModuleType("pyarrow.hdfs")
        filesystem.LocalFileSystem = LocalFileSystem  # type: ignore[attr-defined]
        hdfs.HadoopFileSystem = hdfs.connect = HadoopFileSystem  # type: ignore[attr-defined]
        sys.modules |= {"pyarrow.filesystem": filesystem, "pyarrow.hdfs": hdfs}
        pa.hdfs = hdfs
    if not hasattr(pa, "LocalFileSystem"):
        pa.LocalFileSystem = LocalFileSystem


def install() -> None:
    """Idempotent. RuntimeError where petastorm was imported before."""
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    if "petastorm" in sys.modules:
        raise RuntimeError(f"petastorm was imported before {__name__}; import {__name__} first")
    sys.meta_path.insert(0, _Finder())


install()
