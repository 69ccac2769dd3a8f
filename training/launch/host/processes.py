"""Linux processes: import before forks, end with the parent, adopt orphans, end a family, explain an end."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import os
import signal
import time
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

import psutil

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
STACKS_SIGNAL = signal.SIGRTMIN + 8  # free of the meanings users and schedulers give SIGUSR1 and SIGUSR2


def import_before_forks(names: Iterable[str]) -> None:
    """Import without the garbage collector, which would look through a million objects that all stay.

    That is an eighth of the time. It leaves them alone in forks too, so their memory pages stay shared.
    """
    gc.disable()
    for name in names:
        with contextlib.suppress(ImportError):  # the fork that needs it raises it
            importlib.import_module(name)
    gc.freeze()
    gc.enable()


def usable_cores() -> int:
    """Count the cores this process may use: by its affinity and its cgroup's quota; at least 1."""
    limits: list[str] = []
    with contextlib.suppress(OSError, ValueError):
        limits = cpu_limits(Path("/proc/self/cgroup").read_text())
    return min([len(os.sched_getaffinity(0)), *filter(None, map(quota_cores, limits))])


def quota_cores(limit: str) -> int | None:
    """Read whole cores of `QUOTA PERIOD`, microseconds, as cgroups write it; None without a limit."""
    quota, _, period = limit.strip().partition(" ")
    if not (quota.isdecimal() and period.isdecimal() and int(period)):  # "max 100000", or -1
        return None
    return max(1, int(quota) // int(period))


def cpu_limits(cgroups: str, root: Path = Path("/sys/fs/cgroup")) -> list[str]:
    """Read the limits of a process's cgroups, and of all above them, of version 2 and 1, as `QUOTA PERIOD`.

    Args:
        cgroups: content of its `/proc/<pid>/cgroup`.
        root: folder where they are mounted. In a container its own cgroup may be this.
    """
    found = []
    for folder, is_old in _cgroup_folders(cgroups, "cpu", root):
        names = ("cpu.cfs_quota_us", "cpu.cfs_period_us") if is_old else ("cpu.max",)
        with contextlib.suppress(OSError):
            found.append(" ".join((folder / name).read_text().strip() for name in names))
    return found


def usable_memory(cgroups: str | None = None, root: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the bytes of memory of this machine, up to the limits of this process's cgroups.

    `cgroups`, `root`: see `cpu_limits`; None: this process's.
    """
    found = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    with contextlib.suppress(OSError):
        cgroups = Path("/proc/self/cgroup").read_text() if cgroups is None else cgroups
    for folder, is_old in _cgroup_folders(cgroups or "", "memory", root):
        with contextlib.suppress(OSError, ValueError):  # "max": no limit
            found.append(int((folder / ("memory.limit_in_bytes" if is_old else "memory.max")).read_text()))
    return min(found)


def _cgroup_folders(cgroups: str, controller: str, root: Path) -> Iterator[tuple[Path, bool]]:
    """Yield folders of a process's cgroups and their parents, and whether each is of version 1."""
    for line in cgroups.splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        own = Path(path.lstrip("/"))
        for mount in {root / controller, root / controllers} if controllers else {root}:
            yield from ((mount / each, bool(controllers)) for each in (own, *own.parents))


def die_with_parent(parent: int, by: signal.Signals = signal.SIGKILL) -> None:
    """Make the kernel send `by` to this process when the thread that made it ends."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, by, 0, 0, 0)
    if os.getppid() != parent:  # it ended before the call above
        os._exit(1)


def adopt_orphans() -> None:
    """Make descendants whose parent ends children of this process. So none escapes `end_descendants`."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_descendants(keep: Collection[int] = (), timeout_s: float = 5.0) -> None:
    """Send SIGKILL to every process below this one until none is left.

    A family may fork while it is being killed.

    Args:
        keep: children that stay, with all below them.
        timeout_s: seconds after which it gives up.
    """
    me, deadline = psutil.Process(), time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        alive = [p for p in _below(me, keep) if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
        for process in alive:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        if not alive:
            return
        time.sleep(0.02)  # their parent reaps them, with their status


def _below(process: psutil.Process, keep: Collection[int]) -> list[psutil.Process]:
    """List all descendants but the children in `keep` and theirs."""
    found = []
    for child in process.children():
        if child.pid not in keep:
            with contextlib.suppress(psutil.NoSuchProcess):
                found += [child, *child.children(recursive=True)]
    return found


def kernel_oom_kills() -> int:
    """Count the processes that the kernel has killed for memory so far.

    In this cgroup where it counts them, and on the machine.
    """
    total = 0
    for path, key in _oom_counters():
        try:
            for line in path.read_text().splitlines():
                name, _, value = line.partition(" ")
                if name == key:
                    total += int(value)
        except (OSError, ValueError):
            continue
    return total


def _oom_counters() -> list[tuple[Path, str]]:
    counters = [(Path("/proc/vmstat"), "oom_kill")]
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return counters
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            counters.append((Path("/sys/fs/cgroup" + path) / "memory.events", "oom_kill"))
        elif "memory" in controllers.split(","):
            counters.append((Path("/sys/fs/cgroup/memory" + path) / "memory.oom_control", "oom_kill"))
    return counters


def state_of(pid: int) -> str:
    """Read a process's state: 'S (sleeping)', 'T (stopped)', ..., or 'gone'."""
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("State:"):
                return line.split(None, 1)[1]
    except OSError:
        pass
    return "gone"


def describe_status(status: int, out_of_memory: bool) -> str:
    """Describe an exit status; negative: minus the signal, as in subprocess."""
    if status >= 0:
        return f"exited with code {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    if out_of_memory and -status == signal.SIGKILL:
        return "killed by the kernel: out of memory (SIGKILL from the OOM killer)"
    return f"killed by {name}"
