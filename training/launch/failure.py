"""Why a launch failed: one rank's failure, told from those it caused in the others. Pure, but for the exceptions
themselves."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Cause = Literal["exception", "exit", "signal", "memory", "disk", "lost", "hang", "start"]

# What ranks say when another one has gone. Seen with Gloo, NCCL, Horovod 0.28.1 and torch's store.
_RING_BROKE = re.compile(
    r"HorovodInternalError|Horovod has been shut down|Connection (closed|reset) by peer|Connection refused|Broken pipe"
    r"|\[.*gloo.*\]|gloo::|ncclRemoteError|ncclSystemError|NCCL communicator was aborted"
    r"|DistNetworkError|DistStoreError|TCPStore|Timed out waiting .*(recv|send|operation|key)|wait timeout"
    r"|HTTP request failed",
    re.IGNORECASE,
)
# ENOSPC and EDQUOT as Python, torch and pyarrow word them, and as a rank repeats what another one met.
_DISK_FULL = re.compile(r"No space left on device|Disk quota exceeded")


@dataclass(frozen=True)
class Failure:
    """How one rank ended that should not have."""

    rank: int
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
        """Who, where, what, when."""
        at = "" if self.step is None else f" at step {self.step}{f' ({self.phase})' if self.phase else ''}"
        return f"rank {self.rank} on {self.host} {self.words}{at}"

    def to_json(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k not in ("traceback", "last_lines")}


# What to do, by cause. An exception and an exit code are the program's own words, and say it themselves.
REMEDIES: dict[str, str] = {
    "memory": "lower train.global_batch, use more ranks, or give each more memory (on a cluster, ranks live in "
    "spark.executor.memoryOverhead)",
    "disk": "free space there, or keep less (checkpoint.keep_last); the last committed checkpoint is good",
    "signal": "SIGKILL and SIGTERM come from outside: a person, or the cluster's manager for memory or preemption; "
    "SIGSEGV, SIGBUS and SIGABRT from native code, whose last lines name it",
    "lost": "look at that host and its executor's log; launch.max_attempts is how often this may happen",
    "hang": "its stack is where it stands; launch.hang_timeout_s is how long is too long",
    "start": "look at that host's load; launch.start_timeout_s is how long ranks may take",
}


def is_secondary(failure: Failure) -> bool:
    """Whether this looks like a rank that noticed another one's end, rather than the one that began."""
    if failure.cause != "exception":
        # Gloo's C++ threads end a process by SIGABRT when a peer vanishes at the wrong moment.
        return failure.cause == "signal" and "SIGABRT" in failure.words
    return bool(_RING_BROKE.search(f"{failure.error_type}: {failure.message}"))


def first_failure(failures: Sequence[Failure]) -> Failure:
    """The one that began, out of failures in order of arrival: the first that names a cause of its own, else the
    first."""
    return next((f for f in failures if not is_secondary(f)), failures[0])


def cause_of(error_type: str, message: str) -> Cause:
    """What an exception says of the machine: out of memory, a full disk; `exception` where it says nothing of it."""
    if error_type == "MemoryError":
        return "memory"
    return "disk" if _DISK_FULL.search(message) else "exception"


class WorkerFailed(RuntimeError):
    """A rank failed, and with it the attempt. `failure` is the one that began, `others` what it brought down."""

    def __init__(self, failure: Failure, others: Sequence[Failure] = (), stacks: dict[int, str] | None = None):
        self.failure, self.others, self.stacks = failure, tuple(others), dict(stacks or {})
        super().__init__(failure, self.others, self.stacks)

    @property
    def rank(self) -> int:
        return self.failure.rank

    @property
    def host(self) -> str:
        return self.failure.host

    def __str__(self) -> str:
        f = self.failure
        parts = [f.headline]
        if self.others:
            parts.append("then: " + "; ".join(f"rank {o.rank} {o.words[:120]}" for o in self.others[:8]))
        if f.cause in REMEDIES:
            parts.append(f"what to do: {REMEDIES[f.cause]}")
        if f.traceback:
            parts.append(f"traceback of rank {f.rank}:\n{f.traceback.rstrip()}")
        if f.last_lines:
            parts.append(
                f"last {len(f.last_lines)} lines of rank {f.rank}:\n" + "\n".join(f"  {x}" for x in f.last_lines)
            )
        parts += [f"stacks of rank {rank}:\n{text.rstrip()}" for rank, text in sorted(self.stacks.items())]
        return "\n".join(parts)


class Cancelled(RuntimeError):
    """The driver asked for the end; all ranks are gone."""


class LaunchError(RuntimeError):
    """Ranks could not be started: too few slots, unreachable agents, no answer in time."""


class PreflightError(LaunchError):
    """The hosts are unlike each other, short of something, or out of reach. Another attempt would not help."""


@dataclass
class RankState:
    """What the driver knows of one rank of the running attempt."""

    rank: int
    agent: str
    host: str
    has_result: bool = False
    result: Any = None
    step: int | None = None
    phase: str = ""
    progressed: float = 0.0  # monotonic time of the last change of step or phase
    error: dict[str, Any] = field(default_factory=dict)

    def failure(self, ended: dict[str, Any]) -> Failure | None:
        """What its end means; None for a good one."""
        status, words = ended.get("status"), str(ended.get("words", ""))
        common: dict[str, Any] = {"rank": self.rank, "host": self.host, "step": self.step, "phase": self.phase}
        common["last_lines"] = tuple(ended.get("last_lines", ()))
        if self.error:
            kind, message = self.error["type"], self.error["message"]
            return Failure(
                cause=cause_of(kind, message),
                words=f"raised {kind}: {message.splitlines()[0] if message else ''}".rstrip(": "),
                error_type=kind,
                message=message,
                traceback=self.error["traceback"],
                is_value_error=bool(self.error.get("value_error")),
                **common,
            )
        if status == 0 and self.has_result:
            return None
        if status == 0:
            return Failure(cause="exit", words="exited with code 0 without returning from its entry", **common)
        if status is None:
            return Failure(cause="lost", words=words, **common)
        if status > 0:
            return Failure(cause="exit", words=words, **common)
        return Failure(cause="memory" if "out of memory" in words else "signal", words=words, **common)
