"""A process next to a host's agents that imports once what all their fork servers need, and forks these.

torch and Horovod take two to three seconds of a core to import. Without this process every rank's fork server imports
them itself. It takes requests over a socket from every process that has its other end: the one that made it, and what
that one has forked since. It ends when all of them have.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

from sparkring.training.launch.host.search_path import library_first, working_folder

# Of no use to a rank; the first is a secret of Spark's, and only the driver talks to MLflow.
PRIVATE_VARIABLES = (
    "PYTHON_WORKER_FACTORY_SECRET",
    "PYTHON_WORKER_FACTORY_PORT",
    "PYTHON_WORKER_FACTORY_SOCK_DIR",
    "MLFLOW_TRACKING_TOKEN",
    "MLFLOW_TRACKING_USERNAME",
    "MLFLOW_TRACKING_PASSWORD",
    "SPARKRING_SECRET",
    "SPARKRING_SECRET_FILE",
)
PRIVATE_PREFIX = "OPENLINEAGE_"  # settings of its client, keys among them
# What libraries read while they are imported. All else is set in a rank before its work begins.
READ_AT_IMPORT = (
    *("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "NUMEXPR_", "MALLOC_", "LD_"),
    *("TORCH", "PYTORCH_", "HOROVOD_", "CUDA_", "NVIDIA_", "NCCL_", "GLOO_", "PYTHONHASHSEED"),
)
# What libraries of this process set meanwhile, torch's inductor and scikit-learn; a rank's own would do the same.
SET_BY_LIBRARIES = ("TORCHINDUCTOR_CACHE_DIR", "KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK")
FORK_SERVER = "sparkring.training.launch.host.fork_server"
MOST_BYTES = 100_000  # of a request: a message is sent whole or not at all


class SharedImports:
    """This side of such a process, which is started with `environment` when the first fork server is asked for."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._requests, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._environment = rank_environment(environment)
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self.users = 0  # of `shared_imports`

    def serves(self, environment: Mapping[str, str]) -> bool:
        """Return whether libraries would be imported in the same way with this environment."""
        return _read_at_import(rank_environment(environment)) == _read_at_import(self._environment)

    def fork(self, preload: Iterable[str], server: socket.socket) -> bool:
        """Request a fork server with `preload` imported, connected to `server`; False if the request cannot be sent."""
        with self._lock:
            if self._process is None and self._theirs.fileno() >= 0:
                self._process = start_process("fork_on_request", [self._theirs], [], self._environment)
                self._theirs.close()
        with contextlib.suppress(OSError):  # that process was killed; or this one's folder was removed
            request = json.dumps({"preload": [*preload], "path": search_path(), "folder": os.getcwd()}).encode()
            if len(request) <= MOST_BYTES:
                return bool(socket.send_fds(self._requests, [request], [server.fileno()]))
        return False

    def start_when_asked(self) -> None:
        """Fork a process that becomes this one with the first request. Of a process without threads, before it forks.

        What this process forks later can ask for fork servers too.
        """
        if os.fork():
            self._theirs.close()
            return
        try:
            os.setsid()  # signals to the group of the process that forks us are not for us
            self._requests.close()
            fd = os.dup2(self._theirs.fileno(), 3)
            os.set_inheritable(fd, True)
            nothing = os.open(os.devnull, os.O_RDWR)
            os.dup2(nothing, 0)
            os.dup2(2, 1)
            os.closerange(4, os.sysconf("SC_OPEN_MAX"))
            requests = socket.socket(fileno=fd)
            if requests.recv(1, socket.MSG_PEEK):  # else all who could have asked have ended
                os.execve(sys.executable, _command("fork_on_request", [fd], []), self._environment)
        finally:
            os._exit(1)

    def close(self) -> None:
        """End it. Its fork servers stay."""
        self._requests.close()
        self._theirs.close()
        if self._process is not None:
            end_process(self._process)


_shared: list[SharedImports] = []
_lock = threading.Lock()


@contextmanager
def shared_imports(environment: Mapping[str, str]) -> Iterator[None]:
    """Make the fork servers that this process starts meanwhile import once, as libraries do with `environment`."""
    with _lock:
        shared = find_shared(environment)
        if shared is None:
            shared = SharedImports(environment)
            _shared.append(shared)
        shared.users += 1
    try:
        yield
    finally:
        with _lock:
            shared.users -= 1
            if not shared.users:
                _shared.remove(shared)
                shared.close()


def share_with_forks() -> None:
    """Make the fork servers of all processes that this one forks from now on import once."""
    shared = SharedImports(os.environ)
    shared.start_when_asked()
    _shared.append(shared)


def find_shared(environment: Mapping[str, str]) -> SharedImports | None:
    """Find the process that imports as libraries do with `environment`."""
    return next((each for each in _shared if each.serves(environment)), None)


def rank_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Take what a process of ranks is started with."""
    kept = {k: v for k, v in environment.items() if k not in PRIVATE_VARIABLES and not k.startswith(PRIVATE_PREFIX)}
    kept.pop("PYTHONPATH", None)  # Python would put it before its own library; `_command` sets it
    # A thread that waits for others spins 300,000 times by default. Where something else wants its core, that took
    # nine tenths of the speed (benchmarks/results/busy_machine_2core_202611.md). Read when torch is imported.
    if "OMP_WAIT_POLICY" not in kept:
        kept.setdefault("GOMP_SPINCOUNT", "10000")
    return kept


def search_path() -> list[str]:
    """Return the absolute module search path of this process; its working directory is the last."""
    return library_first(sys.path, working_folder())


def start_process(
    function: str, sockets: Iterable[socket.socket], arguments: Iterable[str], environment: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """Start a function of fork_server.py as a program, with sockets as its first arguments."""
    fds = [each.fileno() for each in sockets]
    return subprocess.Popen(
        _command(function, fds, arguments),
        env=environment,
        pass_fds=fds,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )


def end_process(process: subprocess.Popen[bytes]) -> None:
    """Wait for a process to exit; kill it after ten seconds."""
    try:
        process.wait(timeout=10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _command(function: str, fds: Iterable[int], arguments: Iterable[str]) -> list[str]:
    path = f"sys.path[:] = {search_path()!r}; os.environ['PYTHONPATH'] = os.pathsep.join(sys.path)"
    code = f"import os, sys; {path}; from {FORK_SERVER} import {function}; {function}()"
    return [sys.executable, "-P", "-c", code, *map(str, fds), *arguments]


def _read_at_import(environment: Mapping[str, str]) -> dict[str, str]:
    read = {name: value for name, value in environment.items() if name.startswith(READ_AT_IMPORT)}
    return {name: value for name, value in read.items() if name not in SET_BY_LIBRARIES}
