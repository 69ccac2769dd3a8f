"""Linux processes: why one has ended, and the kernel's kill for memory."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from sparkring.training.launch.failure import WorkerFailed
from sparkring.training.launch.host.processes import (
    cpu_limits,
    describe_status,
    kernel_oom_kills,
    quota_cores,
    usable_cores,
)
from sparkring.training.launch.job import JobSpec
from sparkring.training.launch.local import run_local


@pytest.mark.parametrize(
    ("limit", "cores"),
    [
        ("max 100000\n", None),
        ("200000 100000\n", 2),
        ("150000 100000", 1),
        ("10000 100000", 1),
        ("6400000 100000", 64),
        ("-1 100000", None),
        ("", None),
        ("100000 0", None),
        ("nonsense", None),
    ],
)
def test_the_quota_of_a_container_counts_in_whole_cores(limit: str, cores: int | None) -> None:
    assert quota_cores(limit) == cores


V1, V2 = "4:memory:/x\n3:cpu,cpuacct:{}\n1:name=systemd:/x\n", "0::{}\n"


@pytest.mark.parametrize(
    ("cgroups", "files", "cores"),
    [
        (V2.format("/a/b"), {"a/b/cpu.max": "max 100000\n", "a/cpu.max": "300000 100000\n"}, [3]),  # of a slice above
        (V2.format("/a/b"), {"a/b/cpu.max": "200000 100000\n", "a/cpu.max": "max 100000\n"}, [2]),
        (V2.format("/docker/f3"), {"cpu.max": "250000 100000\n"}, [2]),  # mounted as the root
        (V2.format("/"), {"memory.max": "1"}, []),  # of a machine: the root has no limit
        (V2.format("/../../other"), {"cpu.max": "max 100000\n"}, []),  # outside of the namespace
        (V1.format("/pod/one"), {"cpu/pod/cpu.cfs_quota_us": "400000\n", "cpu/pod/cpu.cfs_period_us": "100000\n"}, [4]),
        (V1.format("/"), {"cpu,cpuacct/cpu.cfs_quota_us": "50000\n", "cpu,cpuacct/cpu.cfs_period_us": "100000\n"}, [1]),
        (V1.format("/"), {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, []),
        (V1.format("/") + V2.format("/"), {"unified/cpu.max": "100000 100000\n"}, []),  # the controller is of version 1
        ("", {"cpu.max": "100000 100000\n"}, []),
    ],
)
def test_the_limits_of_all_cgroups_above_a_process_count(
    cgroups: str, files: dict[str, str], cores: list[int], tmp_path: Path
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert [n for n in map(quota_cores, cpu_limits(cgroups, tmp_path)) if n is not None] == cores


@pytest.mark.ranks
@pytest.mark.usefixtures("no_torch")
def test_ranks_share_the_cores_that_the_process_may_use() -> None:
    """Not those of the machine: each rank would have threads for all of them."""
    affinity = os.sched_getaffinity(0)

    def threads(ctx: Any) -> str:
        return os.environ["OMP_NUM_THREADS"]

    try:
        os.sched_setaffinity(0, {min(affinity)})
        assert usable_cores() == 1
        assert run_local(JobSpec(threads, preload=()), 1).results == ["1"]
    finally:
        os.sched_setaffinity(0, affinity)


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
@pytest.mark.usefixtures("no_torch")
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
