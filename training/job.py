"""What to run on every rank, and what comes back."""

from __future__ import annotations

import base64
import json
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import cloudpickle

PRELOAD = ("torch", "horovod.torch")
_REFERENCE = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


@dataclass(frozen=True)
class JobSpec:
    """One piece of work for all ranks.

    `entry` is "module:function" or a callable, called as `entry(ctx)` with a WorkerContext, or the path of a script,
    which runs unmodified as `__main__` with `args` behind its name. What entry returns must be JSON-able; it reaches
    the driver.
    """

    entry: str | Callable[..., Any]
    payload: dict[str, Any] = field(default_factory=dict)  # JSON, the same for all ranks
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    preload: tuple[str, ...] = PRELOAD  # what the helper imports before it forks; absent ones are skipped
    visible_devices: Literal["own", "host"] = (
        "own"  # each rank sees its GPU only, or all of the host's in local-rank order
    )
    collective_timeout_s: float = 300.0

    def to_json(self) -> dict[str, Any]:
        """ValueError or TypeError, before anything is started, where a part cannot travel."""
        try:
            payload = json.loads(json.dumps(self.payload))
        except (TypeError, ValueError) as error:
            raise TypeError(f"payload of the job: not JSON ({error}); put large or odd objects into files") from error
        return {
            "entry": describe_entry(self.entry),
            "payload": payload,
            "args": list(self.args),
            "env": dict(self.env),
            "visible_devices": self.visible_devices,
            "collective_timeout_s": self.collective_timeout_s,
        }


def describe_entry(entry: str | Callable[..., Any]) -> dict[str, str]:
    """JSON form of an entry: by name, a script with its source, or a pickled function."""
    if callable(entry):
        return {"form": "function", "name": name_of(entry), "pickle": pickle_function(entry)}
    if _REFERENCE.fullmatch(entry):
        return {"form": "name", "name": entry}
    path = Path(entry)
    if path.suffix == ".py" or path.is_file():
        if not path.is_file():
            raise ValueError(f"entry = {entry!r}: no such script; give the path of a file on the driver's machine")
        return {"form": "script", "name": str(path.resolve()), "source": path.read_text()}
    raise ValueError(f"entry = {entry!r}: neither 'module:function' nor the path of a script nor a callable")


def name_of(function: Callable[..., Any]) -> str:
    return f"{getattr(function, '__module__', '?')}.{getattr(function, '__qualname__', repr(function))}"


def pickle_function(function: Callable[..., Any]) -> str:
    """Base64 of the pickled function; TypeError names the captured object that cannot be pickled."""
    try:
        return base64.b64encode(_dump_with_module(function)).decode()
    except Exception as error:
        culprits = ", ".join(unpicklable_parts(function)) or "something it refers to"
        raise TypeError(
            f"{name_of(function)} cannot be sent to the workers: {culprits} cannot be pickled ({error}); "
            "create it inside the function, or give entry as 'module:function'"
        ) from error


def _dump_with_module(function: Callable[..., Any]) -> bytes:
    """Pickle whose function needs no import of the module it was written in: executors need not have the user's
    file."""
    module = sys.modules.get(getattr(function, "__module__", None) or "")
    by_value = module is not None and module.__name__ != "__main__" and not _is_ours_or_installed(module)
    if not by_value:
        return cloudpickle.dumps(function)
    cloudpickle.register_pickle_by_value(module)
    try:
        return cloudpickle.dumps(function)
    finally:
        cloudpickle.unregister_pickle_by_value(module)


def _is_ours_or_installed(module: ModuleType) -> bool:
    path = Path(getattr(module, "__file__", None) or "/site-packages/built-in")
    return module.__name__.split(".")[0] in ("training", "pipelines", "etl", "conf") or "site-packages" in path.parts


def unpicklable_parts(function: Callable[..., Any]) -> list[str]:
    """Names and types of closure variables, globals and defaults of `function` that cannot be pickled on their own."""
    code = getattr(function, "__code__", None)
    found: list[str] = []
    if code is None:
        return found
    captured: dict[str, Any] = {}
    for name, cell in zip(code.co_freevars, getattr(function, "__closure__", None) or (), strict=False):
        try:
            captured[name] = cell.cell_contents
        except ValueError:  # not yet bound
            continue
    values = getattr(function, "__globals__", {})
    captured |= {name: values[name] for name in code.co_names if name in values}
    captured |= {f"default {i}": v for i, v in enumerate(getattr(function, "__defaults__", None) or ())}
    for name, value in captured.items():
        try:
            cloudpickle.dumps(value)
        except Exception:
            found.append(f"{name!r} ({type(value).__module__}.{type(value).__qualname__})")
    return found


@dataclass
class JobResult:
    """What came back: results by rank (None from scripts), rank 0's metric history, and how long the start took."""

    results: list[Any]
    world: int
    attempt: int
    metrics: list[dict[str, Any]] = field(default_factory=list)  # {"step": int, "values": {name: float}} of rank 0
    timings: dict[str, list[Any]] = field(default_factory=dict)  # columns step, rank, busy_s, wait_s: a figure's data
    start_s: float = 0.0  # from the call until every rank's entry was about to run
    run_s: float = 0.0

    @property
    def result(self) -> Any:
        """Rank 0's."""
        return self.results[0]
