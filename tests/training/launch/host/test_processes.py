"""Linux processes: why one has ended, and the kernel's kill for memory."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from sparkring.training.launch.failure import WorkerFailed
from sparkring.training.launch.host.processes import describe_status, kernel_oom_kills
from sparkring.training.launch.job import JobSpec
from sparkring.training.launch.local import run_local

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
