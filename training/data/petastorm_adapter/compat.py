"""Let unmodified petastorm 0.12.1 run on today's libraries and Python.

Importing the package installs an import hook that acts when petastorm's modules are first imported and gives each of
them what pyarrow and numpy no longer have. It must be active in every process that imports petastorm, Spark's executors
and petastorm's own process pool too; therefore it acts on import, and what Spark pickles for its executors names this
module first. pyarrow and numpy themselves are not changed, but for stand-ins under names they lack.
"""

from __future__ import annotations

import collections
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import pickle
import re
import subprocess
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet

import sparkring.training.data.petastorm_adapter.legacy_pyarrow as legacy_pyarrow

RENAMED = {"unicode_": "str_", "string_": "bytes_", "in1d": "isin", "float": "float64"}


class _Namespace(types.ModuleType):
    """A module's stand-in: given names first, the real module's for the rest."""

    def __init__(self, real: types.ModuleType, **given: Any) -> None:
        super().__init__(real.__name__)
        self.__dict__.update(given)
        self._real = real

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_real"], name)


class _Table:
    """`pyarrow.Table` whose `from_pandas` makes string, not pandas 3's large_string."""

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
    """Start a process of petastorm's pool, with this module imported first."""
    python, _, module, *rest = args
    program = f"import runpy, {__name__}; runpy.run_module({module!r}, run_name='__main__', alter_sys=True)"
    return subprocess.Popen([python, "-c", program, *rest], **options)


def _patch(module: types.ModuleType) -> None:
    """Replace names in a petastorm module that pyarrow and numpy no longer have."""
    names = vars(module)
    if names.get("pq") is pyarrow.parquet:
        names["pq"] = legacy_pyarrow
    if module.__name__ == "petastorm.fs_utils":
        names["pyarrow"] = legacy_pyarrow
    if module.__name__ == "petastorm.arrow_reader_worker":
        names["pa"] = _Namespace(pa, Table=_Table())
    if module.__name__ == "petastorm.workers_pool.exec_in_new_process":
        names["subprocess"] = _Namespace(subprocess, Popen=_start_process)
    if module.__name__ == "petastorm.unischema":
        _ship_with_closures()
    if module.__name__ == "petastorm.etl.legacy":
        _restore_namedtuples()
        names["RestrictedUnpickler"].find_class = find_class(names["RestrictedUnpickler"].find_class)


def _ship_with_closures() -> None:
    """Make pickles that name petastorm import this module first, on executors too."""
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
    """Restore a function of Spark that schemas pickled under older versions name."""
    if importlib.util.find_spec("pyspark") is None:
        return
    serializers = importlib.import_module("pyspark.serializers")
    if not hasattr(serializers, "_restore"):
        serializers._restore = restore_namedtuple  # type: ignore[attr-defined]


def find_class(found: Callable[[Any, str, str], Any]) -> Callable[[Any, str, str], Any]:
    """Wrap an unpickler's `find_class` for schemas that use names numpy has dropped."""
    return lambda self, module, name: found(self, module, RENAMED.get(name, name) if module == "numpy" else name)


def restore_namedtuple(name: str, fields: Sequence[str], value: Sequence[Any]) -> Any:
    return collections.namedtuple(name, fields)(*value)


def renamed(source: str) -> str:
    """Replace names that numpy dropped in a petastorm module's source."""
    return re.sub(rf"\bnp\.({'|'.join(RENAMED)})\b", lambda name: f"np.{RENAMED[name[1]]}", source)


class _Loader(importlib.abc.ExecutionLoader):
    """A module's own loader that replaces names numpy dropped, and calls `_patch`."""

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
            _add_missing_names()
            spec.loader = _Loader(spec.loader)
        return spec


def _add_missing_names() -> None:
    """Add the modules and the class that petastorm imports from pyarrow by name."""
    if "pyarrow.filesystem" not in sys.modules:
        filesystem, hdfs = types.ModuleType("pyarrow.filesystem"), types.ModuleType("pyarrow.hdfs")
        filesystem.LocalFileSystem = legacy_pyarrow.LocalFileSystem  # type: ignore[attr-defined]
        hdfs.HadoopFileSystem = hdfs.connect = legacy_pyarrow.HadoopFileSystem  # type: ignore[attr-defined]
        sys.modules |= {"pyarrow.filesystem": filesystem, "pyarrow.hdfs": hdfs}
        pa.hdfs = hdfs
    if not hasattr(pa, "LocalFileSystem"):
        pa.LocalFileSystem = legacy_pyarrow.LocalFileSystem


def install() -> None:
    """Install the import hook, once. RuntimeError if petastorm was imported before."""
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    if "petastorm" in sys.modules:
        raise RuntimeError(f"petastorm was imported before {__package__}; import {__package__} first")
    sys.meta_path.insert(0, _Finder())
