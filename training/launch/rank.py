"""Inside a rank's process: environment, entry, result or error to the agent. Nothing here knows Spark."""

from __future__ import annotations

import atexit
import base64
import contextlib
import faulthandler
import importlib
import os
import pickle
import runpy
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from conf.rank_info import RankInfo
from training.launch.channel import Plain, ProtocolError
from training.launch.processes import STACKS_SIGNAL
from training.launch.results import pack

MAX_TRACEBACK_CHARS = 20_000
TICK_S = 1.0
FILES = "SPARKRING_FILES"  # variable: the folder of the files that Spark has shipped to this host


class WorkerContext:
    """What an entry is called with. Reporting never blocks training for long and never raises because of the driver."""

    def __init__(self, document: dict[str, Any], channel: Plain):
        self.rank_info = RankInfo.from_json(document["rank_info"])
        self.attempt: int = document["attempt"]
        self.payload: dict[str, Any] = document["payload"]
        self._channel = channel
        self._requests: set[str] = set()
        self._step, self._ticked = 0, -TICK_S
        self.told_to_stop = False  # a script has heard, from `progress` or by SIGTERM, that the driver wants the end

    @property
    def rank(self) -> int:
        return self.rank_info.rank

    @property
    def world_size(self) -> int:
        return self.rank_info.world_size

    @property
    def local_rank(self) -> int:
        return self.rank_info.local_rank

    @property
    def local_size(self) -> int:
        return self.rank_info.local_size

    def metrics(self, step: int, values: dict[str, float]) -> None:
        self.send({"kind": "metrics", "step": int(step), "values": {k: float(v) for k, v in values.items()}})

    def heartbeat(self, step: int, phase: str) -> None:
        """Progress: a rank whose step and phase do not change for launch.hang_timeout_s is taken to hang."""
        self._step = int(step)
        self.send({"kind": "heartbeat", "step": int(step), "phase": str(phase), "time": time.time()})

    def tick(self, phase: str) -> None:
        """Progress within a step, one small piece after another, said by the loop that makes it: each time another
        phase. One a second is sent."""
        if time.monotonic() - self._ticked >= TICK_S:
            self._ticked = time.monotonic()
            self.heartbeat(self._step, phase)

    def event(self, kind: str, data: dict[str, Any]) -> None:
        self.send({"kind": "event", "event": kind, "data": data})

    def should_stop(self) -> bool:
        """The driver wants training to end at the next step, with a checkpoint."""
        return "stop" in self._requests

    def should_checkpoint(self) -> bool:
        """The driver has asked for a checkpoint; True once per request."""
        if "checkpoint" in self._requests:
            self._requests.discard("checkpoint")
            return True
        return False

    def request(self, name: str) -> None:
        self._requests.add(name)

    def send(self, message: dict[str, Any]) -> None:
        """To the agent. A value that is not JSON is the caller's error; a lost agent is not (the kernel ends us
        then)."""
        with contextlib.suppress(OSError):
            self._channel.send(message)


_running: WorkerContext | None = None  # of this process; a plain script has no other way to it


def progress(step: int, phase: str = "step") -> bool:
    """For a plain script: `step` is reached. True once the driver wants the end, after a checkpoint; on one rank
    sooner than on another, so ranks must agree on it. Does nothing, and returns False, outside of a launch."""
    if _running is None:
        return False
    _running.heartbeat(step, phase)
    _running.told_to_stop |= _running.should_stop()
    return _running.told_to_stop


def run_rank(document: dict[str, Any], channel: socket.socket, stacks_fd: int, store_fd: int) -> int:
    """The exit code of this process: 0, the entry's sys.exit code, or 1 after an exception that has been reported."""
    global _running
    os.environ.clear()
    os.environ.update(document["env"])
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")  # as torchrun does
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    faulthandler.enable(file=2)
    faulthandler.register(STACKS_SIGNAL, file=stacks_fd, all_threads=True, chain=False)
    plain = Plain(channel)
    _running = context = WorkerContext(document, plain)
    threading.Thread(target=_listen, args=(plain, context), name="sparkring-requests", daemon=True).start()
    store = None
    try:
        store = _open_store(store_fd, document) if context.rank == 0 else None
        context.send({"kind": "running", "time": time.time()})
        code, result = call_entry(document, context)
        if code == 0:
            context.send({"kind": "result", **pack(result, document["entry"]["name"], document["results"])})
            # What interpreters do at their end; after an error the collectives are abandoned instead.
            threading._shutdown()  # type: ignore[attr-defined]
            atexit._run_exitfuncs()
    except BaseException as error:
        context.send({"kind": "error", **describe_error(error)})
        traceback.print_exc()
        code = 1
    finally:
        _flush()
        del store
    return code


def _listen(channel: Plain, context: WorkerContext) -> None:
    """Requests of the driver, as the agent passes them on. A program with a handler of its own for SIGTERM hears of the
    end by that signal too, as it would from torchrun; one without is left to ask."""
    try:
        while True:
            kind = channel.receive()["kind"]
            context.request(kind)
            if kind == "stop" and callable(signal.getsignal(signal.SIGTERM)):
                context.told_to_stop = True
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)
    except (EOFError, OSError, ProtocolError):
        return


def _open_store(fd: int, document: dict[str, Any]) -> Any:
    """torch's store for every rank, served by rank 0 on the one interface `fd` is bound to. None without torch."""
    try:
        from torch.distributed import TCPStore
    except ImportError:
        os.close(fd)
        return None
    environment = document["env"]
    address, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
    return TCPStore(address, port, None, True, wait_for_workers=False, master_listen_fd=fd)


def call_entry(document: dict[str, Any], context: WorkerContext) -> tuple[int, Any]:
    """(exit code, returned value) of the job's entry."""
    entry = document["entry"]
    try:
        if entry["form"] == "script":
            _run_script(entry)
            return 0, {"stopped": True} if context.told_to_stop else None
        function, args, kwargs = load_call(entry)
        return 0, function(context, *args, **kwargs)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return (end.code or 0) & 0xFF, None
        raise RuntimeError(f"sys.exit({end.code!r})") from end


def load_call(entry: dict[str, str]) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """The function and what follows its context, from a pickle of our driver's (its frame was authenticated)."""
    function, args, kwargs = pickle.loads(base64.b64decode(entry["call"]))
    return function or load_function(entry), args, kwargs


def load_function(entry: dict[str, str]) -> Callable[..., Any]:
    """The callable behind "module:function"."""
    module, _, name = entry["name"].partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        if error.name != module and not module.startswith(f"{error.name}."):
            raise
        raise ModuleNotFoundError(
            f"entry = {entry['name']!r}: module {error.name!r} is not on this executor; ship it with --py-files "
            f"(a .zip or .py; executors do not import wheels) or install it there. sys.path = {sys.path}",
            name=error.name,
        ) from error
    except AttributeError:
        raise AttributeError(f"entry = {entry['name']!r}: module {module!r} has no {name!r}") from None


def _run_script(entry: dict[str, Any]) -> None:
    """As `python script args...` would in its folder; in a copy of both where this host does not have the same."""
    script, archive = Path(entry["name"]), entry["archive"] and Path(os.environ[FILES], entry["archive"])
    folder = Path(entry["folder"] or script.parent)
    with tempfile.TemporaryDirectory(prefix="sparkring-script-") as copy:
        if archive and not has_files_of(folder, archive):
            with zipfile.ZipFile(archive) as files:
                files.extractall(copy)
            print(f"{folder} is not the driver's here: running in a copy of it, removed at the end", flush=True)
            script, folder = Path(copy, script.relative_to(folder)), Path(copy)
        if not script.is_file() or script.read_text() != entry["source"]:
            script = Path(copy, script.name)
            script.write_text(entry["source"])
        if entry["folder"]:
            os.chdir(folder)
        sys.argv = [str(script), *entry["args"]]
        sys.path.insert(0, str(script.parent))
        runpy.run_path(str(script), run_name="__main__")


def has_files_of(folder: Path, archive: Path) -> bool:
    """Whether every file of the archive is in the folder with the same bytes."""
    with zipfile.ZipFile(archive) as files:
        return all(
            (folder / file.filename).is_file() and zlib.crc32((folder / file.filename).read_bytes()) == file.CRC
            for file in files.infolist()
        )


def describe_error(error: BaseException) -> dict[str, Any]:
    """Type, message and traceback as text; an exception that cannot be pickled, or even printed, is described all
    the same."""
    try:
        message = str(error)
    except Exception as second:
        message = f"<its __str__ raised {type(second).__name__}>"
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next  # our own frames say nothing to a user
    try:
        text = "".join(traceback.format_exception(type(error), error, trace))
    except Exception:
        text = "".join(traceback.format_tb(trace))
    return {
        "type": f"{type(error).__module__}.{type(error).__qualname__}".removeprefix("builtins."),
        "message": message[:MAX_TRACEBACK_CHARS],
        "traceback": text[-MAX_TRACEBACK_CHARS:],
        "value_error": isinstance(error, ValueError),
    }


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            continue
