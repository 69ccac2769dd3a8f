"""Inside a rank's process: environment, entry, result or error to the agent. Nothing here knows Spark."""

from __future__ import annotations

import atexit
import base64
import contextlib
import faulthandler
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
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from sparkring.conf.errors import first_line
from sparkring.conf.rank_info import RankInfo
from sparkring.conf.references import NoSuchName, load_reference, module_of
from sparkring.training.launch.channel.frames import ProtocolError, SocketChannel
from sparkring.training.launch.host.cuts import RankCuts
from sparkring.training.launch.host.processes import STACKS_SIGNAL
from sparkring.training.launch.host.search_path import put_after_library
from sparkring.training.launch.messages import (
    MAX_TRACEBACK_CHARS,
    CheckpointWanted,
    ChildError,
    ChildEvent,
    CutAt,
    CutOffered,
    Entry,
    FromRankToAgent,
    Heartbeat,
    MeanPart,
    OfferCut,
    RankMetrics,
    RankRunning,
    StartChild,
    StopTraining,
    ToRank,
    WindowTiming,
    WriteCheckpoint,
)
from sparkring.training.launch.results import pack
from sparkring.training.launch.topology import Child

PROGRESS_S = 1.0  # between the heartbeats of on_progress
FILES = "SPARKRING_FILES"  # variable: the folder of the files that Spark has shipped to this host


class WorkerContext:
    """What an entry is called with. Reporting never blocks training for long and never raises because of the driver."""

    def __init__(self, rank_info: RankInfo, attempt: int, payload: dict[str, Any], channel: SocketChannel):
        self.rank_info = rank_info
        self.attempt = attempt
        self.payload = payload
        self.servers: list[tuple[str, int]] = []  # (address, port) of the attempt's server processes, by index
        self.server_secret = b""  # by which ranks and servers know each other
        self.replacement = 0  # processes that this rank has had before in this attempt
        self.stop_seen = False  # a script has learned, from `progress` or by SIGTERM, that the driver wants the end
        self._channel = channel
        self._stop_wanted = self._checkpoint_wanted = False
        self._step, self._progress_at = 0, -PROGRESS_S
        self._cuts = RankCuts(lambda number, step: self.send(CutOffered(self.rank, self.attempt, number, step)))

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

    def metrics(
        self,
        step: int,
        values: dict[str, float],
        *,
        timing: WindowTiming | None = None,
        means: Mapping[str, tuple[float, float]] | None = None,
    ) -> None:
        """Report values; those of rank 0 become the run's.

        Args:
            step: the same on every rank.
            values: values of this rank.
            timing: seconds of the logging window that ends at this step; None: no window ends.
            means: (total, count) of this rank; the driver adds those of all ranks up, divides, and gives the quotients
                to rank 0's values. Every rank must report the same names at the same steps.
        """
        values = {name: float(value) for name, value in values.items()}
        parts = {name: MeanPart(float(total), float(count)) for name, (total, count) in (means or {}).items()}
        self.send(RankMetrics(self.rank, self.attempt, int(step), values, timing, parts))

    def heartbeat(self, step: int, phase: str) -> None:
        """Report progress. A rank whose step and phase do not change for launch.hang_timeout_s is taken to hang."""
        self._step = int(step)
        self.send(Heartbeat(self.rank, self.attempt, int(step), str(phase)))

    def on_progress(self, phase: str) -> None:
        """Report progress within a step, from a loop over small pieces, each time by another phase.

        One report a second is sent.
        """
        if time.monotonic() - self._progress_at >= PROGRESS_S:
            self._progress_at = time.monotonic()
            self.heartbeat(self._step, phase)

    def event(self, name: str, data: dict[str, Any]) -> None:
        """Send the driver's callback a ChildEvent. `data`: JSON."""
        self.send(ChildEvent(Child("rank", self.rank), self.attempt, str(name), data))

    def should_stop(self) -> bool:
        """Return whether the driver wants training to end at the next step, with a checkpoint."""
        return self._stop_wanted

    def should_checkpoint(self) -> bool:
        """Return whether the driver has asked for a checkpoint; True once per request."""
        wanted, self._checkpoint_wanted = self._checkpoint_wanted, False
        return wanted

    def begin_steps(self, step: int, last: int, lookahead: int = 1) -> None:
        """Take part in cuts: `step` of `last` steps have been made, and `cut_after` is called after each new one.

        `lookahead`: steps that a cut must be ahead (Strategy.lookahead).
        """
        self._cuts.begin(step, last, lookahead)

    def next_cut(self, least: int = 0) -> int | None:
        """Return the step of the next, possible, coordinated stop, or None. `least`: see RankCuts.next."""
        return self._cuts.next(least)

    def cut_after(self, step: int) -> tuple[bool, bool]:
        """Return whether all ranks stop, and whether all write a checkpoint, after this step."""
        return self._cuts.after(step)

    def ask_checkpoint(self) -> None:
        """Ask the driver to announce a checkpoint. Rank 0 asks for all; the others' calls do nothing."""
        if self.rank == 0:
            self.send(CheckpointWanted(self.rank, self.attempt))

    def request(self, message: ToRank) -> None:
        """Take a request of the driver."""
        match message:
            case StopTraining():
                self._stop_wanted = True
            case WriteCheckpoint():
                self._checkpoint_wanted = True
            case OfferCut() | CutAt():
                self._cuts.request(message)

    def send(self, message: FromRankToAgent) -> None:
        """Send to the agent.

        A value that is not JSON is the caller's error; a lost agent is not (the kernel ends us then).
        """
        with contextlib.suppress(OSError):
            self._channel.send(message)


_running: WorkerContext | None = None  # of this process; a plain script has no other way to it


def progress(step: int, phase: str = "step") -> bool:
    """Report from a plain script that `step` is reached.

    True once the driver wants the end, after a checkpoint. One rank may see it sooner than another, so ranks must agree
    on it. Outside of a launch it does nothing and returns False.
    """
    if _running is None:
        return False
    _running.heartbeat(step, phase)
    _running.stop_seen |= _running.should_stop()
    return _running.stop_seen


def run_rank(start: StartChild, sock: socket.socket, stacks_fd: int, store_fd: int) -> int:
    """Run the entry and return the exit code of this process.

    0, that of sys.exit, or 1 after an exception, which has been reported.

    Args:
        start: what to run, and as which rank.
        sock: connected to the agent.
        stacks_fd: file for the stacks of all threads.
        store_fd: listening socket for torch's store, served by rank 0.
    """
    global _running
    os.environ.clear()
    os.environ.update(start.env)
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")  # as torchrun does
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    faulthandler.enable(file=2)
    faulthandler.register(STACKS_SIGNAL, file=stacks_fd, all_threads=True, chain=False)
    channel, own = SocketChannel(sock, ToRank), start.rank
    assert own is not None
    _running = context = WorkerContext(own.rank_info, start.attempt, start.payload, channel)
    context.servers = [(server.address, server.port) for server in own.servers]
    context.server_secret, context.replacement = bytes.fromhex(start.server_secret), own.replacement
    threading.Thread(target=_read_requests, args=(channel, context), name="sparkring-requests", daemon=True).start()
    store = None
    try:
        store = _open_store(store_fd, start.env) if context.rank == 0 else None
        context.send(RankRunning(context.rank, context.attempt))
        code, result = call_entry(start.entry, context)
        if code == 0:
            context.send(pack(result, start.entry.name, own.results, context.rank, context.attempt))
            # What interpreters do at their end; after an error the collectives are abandoned instead.
            threading._shutdown()  # type: ignore[attr-defined]
            atexit._run_exitfuncs()
    except BaseException as error:
        context.send(describe_error(error, start.child, context.attempt))  # the driver shows it, and nobody else
        code = 1
    finally:
        flush_output()
        del store
    return code


def _read_requests(channel: SocketChannel, context: WorkerContext) -> None:
    """Handle the driver's requests. A program that handles SIGTERM gets that signal too, as it would from torchrun."""
    try:
        while True:
            message = channel.receive()
            context.request(message)
            if isinstance(message, StopTraining) and callable(signal.getsignal(signal.SIGTERM)):
                context.stop_seen = True
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)
    except (EOFError, OSError, ProtocolError):
        return


def _open_store(fd: int, environment: dict[str, str]) -> Any:
    """Serve torch's store on the one interface `fd` is bound to; None without torch."""
    try:
        from torch.distributed import TCPStore
    except ImportError:
        os.close(fd)
        return None
    address, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
    return TCPStore(address, port, None, True, wait_for_workers=False, master_listen_fd=fd)


def call_entry(entry: Entry, context: WorkerContext) -> tuple[int, Any]:
    """Call the job's entry: (exit code, returned value)."""
    try:
        if entry.form in ("script", "module"):
            _run_script(entry)
            return 0, {"stopped": True} if context.stop_seen else None
        function, args, kwargs = load_call(entry)
        return 0, function(context, *args, **kwargs)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return (end.code or 0) & 0xFF, None
        raise RuntimeError(f"sys.exit({end.code!r})") from end


def load_call(entry: Entry) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """Load (function, args, kwargs) from a pickle of our driver's (its frame was authenticated)."""
    function, args, kwargs = pickle.loads(base64.b64decode(entry.call))
    return function or load_function(entry.name), args, kwargs


def load_function(reference: str) -> Callable[..., Any]:
    """Import the callable behind "module:function"; the error says how to ship its module, or what it needs here."""
    module = module_of(reference)
    try:
        function: Callable[..., Any] = load_reference(reference)
        return function
    except NoSuchName as error:
        raise AttributeError(f"entry = {reference!r}: {error}") from None
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}."):
            raise ModuleNotFoundError(
                f"entry = {reference!r}: module {error.name!r} is not on this host; install it there, or ship it with "
                f"spark-submit's --py-files (a .zip or .py; executors do not import wheels). sys.path = {sys.path}",
                name=error.name,
            ) from error
        if not module.startswith("sparkring."):
            raise
        # Ours imports where the driver runs, so a package of this host is missing, or its compiled library.
        raise ImportError(
            f"this host lacks what {module} imports ({type(error).__name__}: {first_line(error)}); install the "
            f"packages of the driver for {sys.executable} there, with its extras, such as sparkring[trees] for xgboost"
        ) from None


def _run_script(entry: Entry) -> None:
    """Run a script as `python script args...` in its folder, or a module as `python -m module args...`.

    In a copy of the folder where this host has other files.
    """
    script, archive = Path(entry.name), Path(os.environ[FILES], entry.archive) if entry.archive else None
    folder = Path(entry.folder or script.parent)
    with tempfile.TemporaryDirectory(prefix="sparkring-script-") as copy:
        if archive and not has_files_of(folder, archive):
            with zipfile.ZipFile(archive) as files:
                files.extractall(copy)
            print(f"{folder} is not the driver's here: running in a copy of it, removed at the end", flush=True)
            script = script if entry.form == "module" else Path(copy, script.relative_to(folder))
            folder = Path(copy)
        if entry.form == "module":
            os.chdir(folder)
            sys.argv = [entry.name, *entry.args]
            put_after_library(str(folder))
            runpy.run_module(entry.name, run_name="__main__", alter_sys=True)
            return
        if not script.is_file() or script.read_text() != entry.source:
            script = Path(copy, script.name)
            script.write_text(entry.source)
        if entry.folder:
            os.chdir(folder)
        sys.argv = [str(script), *entry.args]
        put_after_library(str(script.parent))
        runpy.run_path(str(script), run_name="__main__")


def has_files_of(folder: Path, archive: Path) -> bool:
    """Return whether every file of the archive is in the folder with the same bytes."""
    with zipfile.ZipFile(archive) as files:
        return all(
            (folder / file.filename).is_file() and zlib.crc32((folder / file.filename).read_bytes()) == file.CRC
            for file in files.infolist()
        )


def describe_error(error: BaseException, child: Child, attempt: int) -> ChildError:
    """Describe an exception by type, message and traceback, even one that cannot be pickled or printed."""
    try:
        message = str(error)
    except Exception as second:
        message = f"<its __str__ raised {type(second).__name__}>"
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next  # our own frames say nothing to a user
    try:
        text = "" if _says_it_all(error) else "".join(traceback.format_exception(type(error), error, trace))
    except Exception:
        text = "".join(traceback.format_tb(trace))
    return ChildError(
        child,
        attempt,
        error_type=f"{type(error).__module__}.{type(error).__qualname__}".removeprefix("builtins."),
        message=message[:MAX_TRACEBACK_CHARS],
        traceback=text[-MAX_TRACEBACK_CHARS:],
        is_value_error=isinstance(error, ValueError),
    )


def _says_it_all(error: BaseException) -> bool:
    """Return whether only this folder's code led to the error, so that no frame adds to its message."""
    files = {frame.filename for frame in traceback.extract_tb(error.__traceback__)}
    return error.__cause__ is None and {os.path.dirname(file) for file in files} == {os.path.dirname(__file__)}


def flush_output() -> None:
    """Flush standard output and error, as far as they are open."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            continue
