"""Ends that are hard to tell: the kernel's kill for memory, a clock that jumps, a driver that does not listen."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from training.launch.attempt import Limits
from training.launch.failure import Failure, WorkerFailed, cause_of, first_failure
from training.launch.job import JobSpec
from training.launch.local import local_crew, run_local
from training.launch.processes import describe_status, kernel_oom_kills

CGROUPS = [p for p in (Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")) if (p / "cgroup.procs").exists()]


def can_limit_memory() -> bool:
    return os.geteuid() == 0 and bool(CGROUPS) and os.access(CGROUPS[0], os.W_OK) and kernel_oom_kills() >= 0


def limited(ctx: Any) -> None:
    """Put this process into a cgroup of 96 MiB, and use more."""
    group = Path(ctx.payload["cgroup"])
    group.mkdir()
    v1 = (group / "memory.limit_in_bytes").exists()
    (group / ("memory.limit_in_bytes" if v1 else "memory.max")).write_text(str(96 << 20))
    (group / "cgroup.procs").write_text(str(os.getpid()))
    kept = []
    for _ in range(100):
        kept.append(bytearray(os.urandom(1 << 20)) * 8)


@pytest.mark.ranks
@pytest.mark.skipif(not can_limit_memory(), reason="needs root and a writable memory cgroup")
def test_the_kernels_kill_for_memory_is_named() -> None:
    group = CGROUPS[0] / f"sparkring-test-{os.getpid()}"
    try:
        with pytest.raises(WorkerFailed) as caught:
            run_local(JobSpec(limited, {"cgroup": str(group)}, preload=()), 1, lambda event: None)
    finally:
        if group.exists():
            group.rmdir()
    assert caught.value.failure.cause == "memory"
    assert "out of memory" in caught.value.failure.words


def test_words_for_wait_statuses() -> None:
    assert describe_status(7, False) == "exited with code 7"
    assert describe_status(-signal.SIGSEGV, False) == "killed by SIGSEGV"
    assert describe_status(-9, False) == "killed by SIGKILL"
    assert "OOM" in describe_status(-9, True)
    assert describe_status(-63, True) == "killed by signal 63"


def failed(rank: int, cause: str, words: str, error: str = "", message: str = "") -> Failure:
    return Failure(rank, f"h{rank}", cause, words, error_type=error, message=message)  # type: ignore[arg-type]


GLOO = "[/p/gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:3"
HVD = "Horovod has been shut down. This was caused by an exception on one of the ranks"


@pytest.mark.parametrize(
    ("failures", "first"),
    [
        ([failed(0, "exception", "x", "RuntimeError", GLOO), failed(1, "signal", "killed by SIGKILL")], 1),
        ([failed(0, "exception", "x", "HorovodInternalError", HVD), failed(1, "exception", "x", "KeyError", "'a'")], 1),
        ([failed(0, "exception", "x", "KeyError", "'a'"), failed(1, "signal", "killed by SIGKILL")], 0),
        ([failed(0, "exception", "x", "RuntimeError", GLOO), failed(1, "exception", "x", "RuntimeError", GLOO)], 0),
        ([failed(0, "signal", "killed by SIGABRT"), failed(1, "exit", "exited with code 3")], 1),
        ([failed(0, "exception", "x", "torch.distributed.DistBackendError", "NCCL communicator was aborted"),
          failed(1, "memory", "killed by the kernel: out of memory")], 1),
        ([failed(0, "exception", "x", "RuntimeError", "Connection closed by peer [h]:5"), failed(2, "lost", "was")], 2),
    ],
)  # fmt: skip
def test_the_failure_that_began(failures: list[Failure], first: int) -> None:
    assert first_failure(failures).rank == first


@pytest.mark.parametrize(
    ("error", "message", "cause"),
    [
        ("MemoryError", "", "memory"),
        ("OSError", "[Errno 28] No space left on device", "disk"),
        ("CheckpointError", "writing ... rank 1 of 3: OSError: [Errno 122] Disk quota exceeded", "disk"),
        ("OSError", "[Errno 13] Permission denied: '/runs'", "exception"),
    ],
)  # fmt: skip
def test_what_an_exception_says_of_the_machine(error: str, message: str, cause: str) -> None:
    assert cause_of(error, message) == cause


def test_an_error_says_who_what_when_and_what_to_do() -> None:
    first = Failure(1, "h1 (10.0.0.1)", "disk", "raised OSError: full", step=7, phase="checkpoint", last_lines=("bye",))
    lines = str(WorkerFailed(first, [failed(0, "signal", "killed by SIGABRT")])).splitlines()
    assert lines[0] == "rank 1 on h1 (10.0.0.1) raised OSError: full at step 7 (checkpoint)"
    assert lines[1] == "then: rank 0 killed by SIGABRT"
    assert lines[2].startswith("what to do: free space there")
    assert "what to do" not in str(WorkerFailed(failed(0, "exception", "raised KeyError: 'price'")))


@pytest.mark.ranks
def test_a_clock_that_jumps_neither_hangs_nor_ends_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    def entry(ctx: Any) -> int:
        for step in range(8):
            ctx.heartbeat(step, "step")
            time.sleep(0.2)
        return ctx.rank

    real, jump = time.time, [0.0]
    monkeypatch.setattr(time, "time", lambda: real() + jump[0])

    def on_event(event: dict[str, Any]) -> None:
        if event["kind"] == "heartbeat":
            jump[0] = 86400.0 if event["step"] % 2 else -86400.0

    result = run_local(JobSpec(entry, preload=()), 2, on_event, limits=Limits(60, 5.0))
    assert result.results == [0, 1]


@pytest.mark.ranks
def test_a_dead_log_connection_does_not_stop_training() -> None:
    """The agents' connections are cut again and again while ranks work; nothing that matters is lost."""

    def entry(ctx: Any) -> int:
        for step in range(40):
            ctx.metrics(step, {"x": float(step)})
            print("line", step)
            time.sleep(0.03)
        return ctx.rank

    with local_crew(2, ()) as crew:

        def on_event(event: dict[str, Any]) -> None:
            if event["kind"] == "metrics" and event["step"] % 10 == 5:
                for known in list(crew._hub._agents.values()):
                    if connection := known.connection:
                        crew._hub._loop.call_soon_threadsafe(connection.abort)

        result = crew.run(JobSpec(entry, preload=()), 2, on_event)
    assert result.results == [0, 1]
    assert [m["step"] for m in result.metrics] == list(range(40))


@pytest.mark.ranks
def test_a_slow_callback_holds_nobody_up() -> None:
    def entry(ctx: Any) -> float:
        began = time.monotonic()
        for step in range(200):
            ctx.metrics(step, {"x": 0.0})
        return time.monotonic() - began

    result = run_local(JobSpec(entry, preload=()), 1, lambda event: time.sleep(0.01))
    assert result.result < 1.0  # the callbacks took two seconds
