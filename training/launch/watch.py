"""What heartbeats and timings say about ranks: who hangs, who is missing from the collective, who is slow. Pure
functions."""

from __future__ import annotations

import re
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from training.waiting import FRAME

# Frames of libraries in which a rank waits for the others: Horovod, torch.distributed, NCCL through torch. Our own
# functions are marked (`training.waiting`).
_WAITING = re.compile(
    r"(horovod[/\\]torch[/\\]|torch[/\\]distributed[/\\]|torch[/\\]autograd[/\\]graph|torch[/\\]nn[/\\]parallel).*\bin "
    r"(\w*(all_?reduce|all_?gather|all_?to_?all|broadcast|barrier|reduce_scatter|synchronize|wait|poll|send|recv|join"
    r"|_engine_run_backward|monitored_barrier|init_process_group|rendezvous|init|_store_based_barrier)\w*)",
    re.IGNORECASE,
)


MAX_TIMINGS = 200_000  # kept for the figure, of all ranks together
MAX_OPEN = 16  # logging windows that are waited for at a time


@dataclass(frozen=True)
class Progress:
    """One rank as the driver sees it."""

    rank: int
    host: str
    step: int | None  # None: it has never said
    phase: str
    idle_s: float  # since step or phase last changed, or since it started


def hanging(ranks: Sequence[Progress], limit_s: float) -> list[Progress]:
    """Ranks without progress for longer than the limit. Empty until some rank has reported a step: whoever never does
    (a script of the user's) cannot be judged by its steps."""
    if all(rank.step is None for rank in ranks):
        return []
    return [rank for rank in ranks if rank.idle_s > limit_s]


def waiting_for_work(ranks: Sequence[Progress], stacks: Mapping[int, str], limit_s: float) -> list[int]:
    """Ranks over the limit that only wait for others, of which one makes progress: it hashes its files, or writes its
    part of a checkpoint. These do not hang. Empty where none makes progress: then all wait for nobody."""
    idle = hanging(ranks, limit_s)
    return [rank.rank for rank in idle if len(idle) < len(ranks) and waits_in(stacks.get(rank.rank, ""))]


def waits_in(stack: str) -> str | None:
    """The collective in which a stack's main thread waits, None where it does something else."""
    inner = None  # the frame below the mark is the function that has it
    for line in main_thread(stack).splitlines():
        name = line.rpartition(" in ")[2]
        if name == FRAME:
            return inner
        if found := _WAITING.search(line):
            return found[2]
        inner = name
    return None


def main_thread(stack: str) -> str:
    """The main thread's part of a faulthandler dump: it comes last."""
    return re.split(r"(?m)^(?=Thread 0x|Current thread 0x)", stack)[-1]


def innermost(stack: str) -> str:
    """`function (file:line)` of the innermost frame of the main thread; the first line where there is no frame."""
    if found := re.search(r'File "([^"]+)", line (\d+) in (\S+)', main_thread(stack)):
        return f"{found[3]} ({found[1].rsplit('/', 1)[-1]}:{found[2]})"
    return stack.strip().splitlines()[0] if stack.strip() else "no stack"


def name_culprit(ranks: Sequence[Progress], stacks: Mapping[int, str]) -> tuple[int, str]:
    """(rank, words): who is missing while the others wait. Not in a collective beats an earlier step, that beats
    idleness."""
    waiting = {rank.rank: where for rank in ranks if (where := waits_in(stacks.get(rank.rank, "")))}
    suspects = [rank for rank in ranks if rank.rank not in waiting] or list(ranks)
    lowest = min(suspects, key=lambda r: (-1 if r.step is None else r.step, -r.idle_s, r.rank))
    stack = stacks.get(lowest.rank, "")
    words = f"hangs: no progress for {lowest.idle_s:.0f} s, in {innermost(stack) if stack else 'an unknown place'}"
    others = {where: [r for r in waiting if waiting[r] == where and r != lowest.rank] for where in waiting.values()}
    told = [f"{_ranks(r)} wait{'s' if len(r) == 1 else ''} in {where}" for where, r in others.items() if r]
    return lowest.rank, "; ".join([words, *told])


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, sorted(ranks)[:8])) + ("..." if len(ranks) > 8 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"


@dataclass(frozen=True)
class Timing:
    """Mean seconds per step of one rank over one logging window."""

    busy_s: float  # of its own: compute, data
    wait_s: float  # for the others


def timing_of(values: Mapping[str, float]) -> Timing | None:
    """From a rank's metrics (`perf/step_s`, `perf/wait_s`, `perf/data_stall_s`); None where it does not measure
    waiting."""
    if "perf/wait_s" not in values or "perf/step_s" not in values:
        return None
    wait_s = values["perf/wait_s"]
    return Timing(max(0.0, values["perf/step_s"] - wait_s) + values.get("perf/data_stall_s", 0.0), wait_s)


def stragglers(timings: Mapping[int, Timing], factor: float = 1.5, least_s: float = 0.005) -> list[int]:
    """Ranks busy for `factor` times the median rank and `least_s` longer, slowest first. Two ranks at least."""
    if len(timings) < 2:
        return []
    ordered = sorted(t.busy_s for t in timings.values())
    middle = statistics.median_low(ordered)
    slow = [rank for rank, t in timings.items() if t.busy_s > factor * middle and t.busy_s - middle > least_s]
    return sorted(slow, key=lambda rank: -timings[rank].busy_s)


class StragglerWatch:
    """Windows of all ranks' timings; a rank slow in `windows` successive ones is a straggler, told once per spell."""

    def __init__(self, world: int, windows: int = 3):
        self._world, self._windows = world, windows
        kept = max(10, MAX_TIMINGS // world)
        self._open: dict[int, dict[int, Timing]] = {}  # step -> rank -> timing
        self._spells: dict[int, int] = {}
        self.history: deque[tuple[int, dict[int, Timing]]] = deque(maxlen=kept)

    def add(self, rank: int, step: int, values: Mapping[str, float]) -> list[dict[str, Any]]:
        """Events for ranks that have just become stragglers."""
        timing = timing_of(values)
        if timing is None:
            return []
        window = self._open.setdefault(step, {})
        window[rank] = timing
        if len(window) < self._world:
            if len(self._open) > MAX_OPEN:  # some rank does not report
                del self._open[min(self._open)]
            return []
        self._open = {s: w for s, w in self._open.items() if s > step}
        self.history.append((step, window))
        slow = stragglers(window)
        self._spells = {r: self._spells.get(r, 0) + 1 for r in slow}
        told = [r for r in slow if self._spells[r] == self._windows]
        waits_s = sum(t.wait_s for t in window.values()) if told else 0.0
        others = self._world - 1
        return [
            {"rank": r, "step": step, "busy_s": t.busy_s, "others_wait_s": (waits_s - t.wait_s) / others}
            for r, t in ((r, window[r]) for r in told)
        ]

    def figure(self) -> dict[str, list[Any]]:
        """Columns for a figure of busy and waiting seconds per step, by step and rank."""
        rows = [(s, r, t.busy_s, t.wait_s) for s, window in self.history for r, t in sorted(window.items())]
        names = ("step", "rank", "busy_s", "wait_s")
        return {name: [row[i] for row in rows] for i, name in enumerate(names)}
