"""Why a launch failed: the first failure, apart from those it caused. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from sparkring.conf.errors import fold_traceback, is_raised_here
from sparkring.conf.plain_text import count_of
from sparkring.training.launch.topology import Child

Cause = Literal[
    "exception", "exit", "signal", "memory", "gpu memory", "gpu error", "disk", "lost", "hang", "start", "server"
]

# What ranks report when another one has gone. Seen with Gloo, NCCL, Horovod 0.28.1 and torch's store.
_RING_BROKE = re.compile(
    r"HorovodInternalError|Horovod has been shut down|Connection (closed|reset) by peer|Connection refused|Broken pipe"
    r"|\[.*gloo.*\]|gloo::|ncclRemoteError|ncclSystemError|NCCL communicator was aborted"
    r"|DistNetworkError|DistStoreError|TCPStore|Timed out waiting .*(recv|send|operation|key)|wait timeout"
    r"|HTTP request failed",
    re.IGNORECASE,
)
# ENOSPC and EDQUOT as Python, torch and pyarrow word them, and as a rank repeats what another one met.
_DISK_FULL = re.compile(r"No space left on device|Disk quota exceeded")

# Of torch's allocator, of the CUDA runtime and driver, and of cuBLAS, which needs memory for its own handle.
_GPU_FULL = re.compile(r"CUDA out of memory|CUDA (driver )?error: out of memory|CUBLAS_STATUS_ALLOC_FAILED")
_HOST_FULL = re.compile(r"can't allocate memory|Errno 12\] Cannot allocate memory")  # torch's, and the kernel's

# What the CUDA runtime reports of a kernel that went wrong, at some later call.
_GPU_ERROR = re.compile(
    r"CUDA error: (device-side assert|an illegal memory access|misaligned address|unspecified launch)"
)

# What to do, by cause. An exception and an exit code are the program's own words, and say it themselves.
REMEDIES: dict[str, str] = {
    "memory": "lower train.global_batch, use more ranks, or give each more memory (on a cluster, ranks live in "
    "spark.executor.memoryOverhead)",
    "gpu memory": "lower train.global_batch or raise parallel.accumulate; less is needed with activation_checkpointing,"
    " precision=bf16 or zero=1 to 3 of `parallel` (`sparkring plan show` says how much), and with more ranks",
    "gpu error": "it happened before the line that the traceback shows: run once with CUDA_LAUNCH_BLOCKING=1 in the "
    "environment, or with train.device=cpu, which names an index out of range (a label or code over the size)",
    "disk": "free space there, or keep less (checkpoint.keep_last); the last committed checkpoint is good",
    "signal": "SIGKILL and SIGTERM come from outside: a person, or the cluster's manager for memory or preemption; "
    "SIGSEGV, SIGBUS and SIGABRT from native code, whose last lines name it",
    "lost": "look at that host and its executor's log; launch.max_attempts is how often this may happen",
    "hang": "its stack is where it stands; launch.hang_timeout_s is how long is too long",
    "server": "what ended it is in its last lines, or came from outside, as for memory; training continues from the "
    "last checkpoint",
    "start": "look at that host's load; launch.start_timeout_s is how long ranks may take",
}


@dataclass(frozen=True)
class Failure:
    """How one rank, or server, ended that should not have."""

    child: Child
    host: str
    cause: Cause
    words: str  # "raised ValueError: ...", "killed by SIGKILL", ...
    error_type: str = ""
    message: str = ""
    traceback: str = ""
    last_lines: tuple[str, ...] = ()
    step: int | None = None  # last one reported
    phase: str = ""
    is_value_error: bool = False

    @property
    def headline(self) -> str:
        """Who, where, what, when; the words of an exception last, which may be sentences."""
        at = "" if self.step is None else f" at step {self.step}{f' ({self.phase})' if self.phase else ''}"
        if self.cause == "exception":
            return f"{self.child} on {self.host}{at} {self.words}"
        return f"{self.child} on {self.host} {self.words}{at}"


def is_secondary(failure: Failure) -> bool:
    """Return whether a rank probably noticed another one's end, and is not the first failure."""
    if failure.cause != "exception":
        # Gloo's C++ threads end a process by SIGABRT when a peer vanishes at the wrong moment.
        return failure.cause == "signal" and "SIGABRT" in failure.words
    return bool(_RING_BROKE.search(f"{failure.error_type}: {failure.message}"))


def first_failure(failures: Sequence[Failure]) -> Failure:
    """Find the cause in failures in order of arrival: the first that is not secondary, else the first.

    A server comes before the ranks: it notices nothing of them, and they fail without it, each in its own words.
    """
    servers = [f for f in failures if f.child.role == "server"]
    return next((f for f in [*servers, *failures] if not is_secondary(f)), failures[0])


def because_of_death(failure: Failure, death: Failure | None) -> Failure:
    """Return the cause of a replaced rank's failure: the last process's death, if it got no further.

    Otherwise two deaths at any steps would look like one exception of the user's at the first step of a process.

    Args:
        failure: failure of the rank.
        death: death of its last process; None for the first process.
    """
    if death is None or failure.cause != "exception" or (failure.step or 0) > (death.step or 0):
        return failure
    return replace(death, words=f"{death.words}; its next process {failure.words}", traceback=failure.traceback)


def cause_of(error_type: str, message: str) -> Cause:
    """Classify an exception: out of memory, a fault on the GPU, a full disk, or any other exception."""
    name = error_type.rpartition(".")[2]
    if name == "OutOfMemoryError" or _GPU_FULL.search(message):
        return "gpu memory"
    if name.endswith("MemoryError") or _HOST_FULL.search(message):  # numpy and Arrow have classes of their own
        return "memory"
    if _GPU_ERROR.search(message):
        return "gpu error"
    return "disk" if _DISK_FULL.search(message) else "exception"


class WorkerFailed(RuntimeError):
    """A rank failed, and with it the attempt. `failure` is the first one, `others` are those it caused."""

    def __init__(self, failure: Failure, others: Sequence[Failure] = (), stacks: dict[int, str] | None = None):
        self.failure, self.others, self.stacks = failure, tuple(others), dict(stacks or {})
        super().__init__(failure, self.others, self.stacks)

    @property
    def child(self) -> Child:
        return self.failure.child

    @property
    def host(self) -> str:
        return self.failure.host

    def __str__(self) -> str:
        f = self.failure
        parts = [f.headline]
        if self.others:
            same = (f.error_type, f.message)
            words_of = [
                (o.child, "the same" if f.message and same == (o.error_type, o.message) else o.words[:120])
                for o in self.others[:8]
            ]
            parts.append("then: " + "; ".join(f"{child} {words}" for child, words in words_of))
        if f.cause in REMEDIES:
            parts.append(f"what to do: {REMEDIES[f.cause]}")
        if f.traceback and not (f.is_value_error and is_raised_here(f.traceback)):  # else its message says it all
            parts.append(f"traceback of {f.child}:\n{fold_traceback(f.traceback).rstrip()}")
        if f.last_lines:
            lines = "\n".join(f"  {line}" for line in f.last_lines)
            parts.append(f"last {count_of(len(f.last_lines), 'line')} of {f.child}:\n{lines}")
        parts += [f"stacks of rank {rank}:\n{text.rstrip()}" for rank, text in sorted(self.stacks.items())]
        return "\n".join(parts)


class Cancelled(RuntimeError):
    """The driver asked for the end; all ranks are gone."""


class LaunchError(RuntimeError):
    """Ranks could not be started: too few slots, unreachable agents, no answer in time."""


class PreflightError(LaunchError):
    """The hosts differ, are short of something, or out of reach. Another attempt would not help."""
