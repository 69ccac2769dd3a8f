"""What to run on every rank, and what comes back."""

from __future__ import annotations

import base64
import contextlib
import inspect
import io
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.machinery import PathFinder
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, Literal

import cloudpickle

from sparkring.conf.references import REFERENCE
from sparkring.training.launch.messages import Entry, RankMetrics
from sparkring.training.launch.results import unreturnable

PRELOAD = ("torch", "horovod.torch")
DROPPED_FILE = "<dynamic-code>"  # cloudpickle's, in place of a function's file


@dataclass(frozen=True)
class JobSpec:
    """One piece of work for all ranks.

    `entry` is "module:function" or a callable, called as `entry(ctx, *args, **kwargs)` with a WorkerContext, or the
    path of a script, which runs as `__main__` with the words of `args` behind its name; with `as_module` it is the name
    of a module, which runs as `python -m` would run it in `folder`. What entry returns reaches the
    driver: numbers, strings, tensors, numpy arrays, lists and dicts of them, and dataclasses, which arrive as dicts.
    """

    entry: str | Callable[..., Any]
    payload: dict[str, Any] = field(default_factory=dict)  # JSON, the same for all ranks
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    preload: tuple[str, ...] = PRELOAD  # what the fork server imports first; absent ones are skipped
    # Each rank sees its own GPUs only, or all of its host's ranks', the first of its own at index LOCAL_RANK.
    visible_devices: Literal["own", "host"] | None = None  # None: "host" for a script, else "own"
    collective_timeout_s: float = 300.0
    results: str | None = None  # folder (URI) for results over 8 MiB; None: the temporary one, if the driver is there
    folder: str | None = None  # where a script runs, on hosts that have the same files there
    as_module: bool = False  # entry is the dotted name of a module or package
    archive: str | None = None  # a .zip of that folder, among the files Spark ships, for hosts that do not
    servers_per_host: int = 0  # processes that are no ranks, for ranks to ask; an attempt ends with the first that ends
    server_entry: str = ""  # "module:function", called in each with a ServerContext, until it is killed
    replaceable_ranks: bool = False  # a rank whose process dies is started again while the others continue
    max_replacements: int = 3  # of one rank in a row, without a new step of it between them

    def __post_init__(self) -> None:
        if not (isinstance(self.entry, str) or callable(self.entry)):
            raise TypeError(
                f"entry = {self.entry!r}: neither 'module:function' nor the path of a script nor a callable"
            )
        if isinstance(self.args, str | bytes) or not isinstance(self.args, Sequence):
            raise TypeError(f"args = {self.args!r}: must be a tuple or a list, one element per argument")
        if not isinstance(self.kwargs, Mapping):
            raise TypeError(f"kwargs = {self.kwargs!r}: must be a dict, argument by name")
        if self.servers_per_host < 0:
            raise ValueError(f"servers_per_host = {self.servers_per_host}: must be 0 (no servers) or more")
        if self.servers_per_host and not REFERENCE.fullmatch(self.server_entry):
            raise ValueError(
                f"server_entry = {self.server_entry!r}: must be 'module:function', as servers_per_host is set"
            )

    @property
    def devices(self) -> Literal["own", "host"]:
        """Whose GPUs each rank sees."""
        is_script = isinstance(self.entry, str) and (self.as_module or not REFERENCE.fullmatch(self.entry))
        return self.visible_devices or ("host" if is_script else "own")

    def check(self) -> None:
        """Raise ValueError or TypeError where a part cannot travel to the ranks."""
        self.describe_entry()
        self.checked_payload()

    def checked_payload(self) -> dict[str, Any]:
        """Return the payload as it arrives at the ranks; TypeError if it is not JSON."""
        try:
            payload: dict[str, Any] = json.loads(json.dumps(self.payload))
        except (TypeError, ValueError) as error:
            raise TypeError(f"payload of the job: not JSON ({error}); put large or odd objects into files") from error
        return payload

    def describe_entry(self) -> Entry:
        """Describe the entry and its arguments as they travel.

        By name, a script with its source, or a pickled function.
        """
        entry, kwargs = self.entry, dict(self.kwargs)
        if callable(entry):
            check_function(entry, self.args, kwargs)
            return self._entry("function", name_of(entry), call=pickle_call(entry, self.args, kwargs))
        if self.as_module:
            find_module(entry, self.folder or ".")
            self._check_words()
            return self._entry("module", entry, args=tuple(self.args))
        if REFERENCE.fullmatch(entry):
            return self._entry("name", entry, call=pickle_call(None, self.args, kwargs))
        path = Path(entry)
        if path.suffix != ".py" and not path.is_file():
            raise ValueError(f"entry = {entry!r}: neither 'module:function' nor the path of a script nor a callable")
        if not path.is_file():
            raise ValueError(f"entry = {entry!r}: no such script; give the path of a file on the driver's machine")
        self._check_words()
        return self._entry("script", str(path.resolve()), source=path.read_text(), args=tuple(self.args))

    def _check_words(self) -> None:
        if self.kwargs or not all(isinstance(word, str) for word in self.args):
            raise TypeError(
                f"args = {tuple(self.args)}, kwargs = {dict(self.kwargs)}: {self.entry} takes words (str) in args only"
            )

    def _entry(self, form: Literal["function", "name", "script", "module"], name: str, **fields: Any) -> Entry:
        return Entry(form, name, folder=self.folder, archive=self.archive, **fields)


def find_module(name: str, folder: str) -> Path | None:
    """Find the file of a module without importing anything; None where it has none (a built-in, a bare package).

    Looked for in `folder` first, then where Python would look. ValueError for a name that is not found, and for a
    package without a `__main__`.
    """
    found, where = None, [folder, *sys.path]
    words = name.split(".")
    for i in range(len(words)):
        prefix = ".".join(words[: i + 1])
        found = PathFinder.find_spec(prefix, where)
        if found is None:
            raise ValueError(f"-m {name}: no module {prefix!r} in {folder} or on the driver's sys.path")
        where = list(found.submodule_search_locations or [])
    if found is not None and found.submodule_search_locations is not None:
        found = PathFinder.find_spec(f"{name}.__main__", where)
        if found is None:
            raise ValueError(f"-m {name}: a package without a __main__.py cannot be run; name one of its modules")
    return Path(found.origin).resolve() if found is not None and found.origin else None


def check_function(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise TypeError where the arguments or the declared result do not fit."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a builtin without a signature
        return
    try:
        signature.bind("ctx", *args, **kwargs)
    except TypeError as error:
        raise TypeError(
            f"{name_of(function)}{signature} is called with a WorkerContext, then args = {tuple(args)}, "
            f"kwargs = {dict(kwargs)}: {error}"
        ) from None
    if kind := unreturnable(function):
        raise TypeError(
            f"{name_of(function)} is declared to return {signature.return_annotation!r}: a {kind} cannot come back; "
            "return numbers, strings, tensors, numpy arrays, dataclasses, or write it to storage and return where"
        )


def name_of(function: Callable[..., Any]) -> str:
    return f"{getattr(function, '__module__', '?')}.{getattr(function, '__qualname__', repr(function))}"


def pickle_call(function: Callable[..., Any] | None, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Pickle (function, args, kwargs) to base64; TypeError names the object in it that cannot be pickled."""
    call = (function, tuple(args), dict(kwargs))
    try:
        return base64.b64encode(_dump_with_module(function, call)).decode()
    except Exception as error:
        parts = {f"args[{i}]": value for i, value in enumerate(args)} | {f"kwargs[{k!r}]": v for k, v in kwargs.items()}
        culprits = ", ".join(unpicklable(parts | captured_by(function))) or "something it refers to"
        raise TypeError(
            f"{name_of(function) if function else 'the call'} cannot be sent to the workers: {culprits} cannot be "
            f"pickled ({error}); create it inside the function"
            + (", or give entry as 'module:function'" if function else "")
        ) from error


def _dump_with_module(function: Callable[..., Any] | None, call: Any) -> bytes:
    """Pickle so that the function needs no import of its own module. Executors need not have the user's file."""
    module = sys.modules.get(getattr(function, "__module__", None) or "")
    by_value = module is not None and module.__name__ != "__main__" and not _is_ours_or_installed(module)
    if not by_value:
        return _dumped(call)
    cloudpickle.register_pickle_by_value(module)
    try:
        return _dumped(call)
    finally:
        cloudpickle.unregister_pickle_by_value(module)


class _FilePickler(cloudpickle.CloudPickler):
    """Keeps the files of functions, whose lines tracebacks show; cloudpickle 3.1.3 drops them."""

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, CodeType):
            return super().reducer_override(obj)
        make, values = self.dispatch_table[CodeType](obj)
        return make, tuple(obj.co_filename if value == DROPPED_FILE else value for value in values)


def _dumped(call: Any) -> bytes:
    buffer = io.BytesIO()
    _FilePickler(buffer).dump(call)
    return buffer.getvalue()


def _is_ours_or_installed(module: ModuleType) -> bool:
    path = Path(getattr(module, "__file__", None) or "/site-packages/built-in")
    return module.__name__.split(".")[0] == "sparkring" or "site-packages" in path.parts


def captured_by(function: Callable[..., Any] | None) -> dict[str, Any]:
    """List closure variables, globals and defaults of a function, by name."""
    code = getattr(function, "__code__", None)
    if code is None:
        return {}
    captured: dict[str, Any] = {}
    for name, cell in zip(code.co_freevars, getattr(function, "__closure__", None) or (), strict=False):
        with contextlib.suppress(ValueError):  # not yet bound
            captured[repr(name)] = cell.cell_contents
    values = getattr(function, "__globals__", {})
    captured |= {repr(name): values[name] for name in code.co_names if name in values}
    return captured | {f"'default {i}'": v for i, v in enumerate(getattr(function, "__defaults__", None) or ())}


def unpicklable(values: Mapping[str, Any]) -> list[str]:
    """List the values that cannot be pickled on their own, with their types."""
    found = []
    for name, value in values.items():
        try:
            cloudpickle.dumps(value)
        except Exception:
            found.append(f"{name} ({type(value).__module__}.{type(value).__qualname__})")
    return found


@dataclass
class JobResult:
    """What came back from the ranks. A script's result is None."""

    results: list[Any]
    world: int
    attempt: int
    metrics: list[RankMetrics] = field(default_factory=list)  # of rank 0
    timings: dict[str, list[Any]] = field(default_factory=dict)  # StragglerDetector.columns
    start_s: float = 0.0  # from the call until every rank's entry was about to run
    run_s: float = 0.0

    @property
    def result(self) -> Any:
        """Rank 0's."""
        return self.results[0]
