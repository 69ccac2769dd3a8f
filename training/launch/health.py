"""Which rank hangs, and which is slow: from heartbeats, stacks and timings."""

from __future__ import annotations

import math
import re
import statistics
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sparkring.conf.errors import first_line
from sparkring.training.launch.messages import WindowTiming
from sparkring.training.waiting import FRAME

# Frames of libraries in which a rank waits for the others: Horovod, torch.distributed, NCCL through torch. Our own
# functions are marked (`sparkring.training.waiting`).
_WAITING = re.compile(
    r"(horovod[/\\]torch[/\\]|torch[/\\]distributed[/\\]|torch[/\\]autograd[/\\]graph|torch[/\\]nn[/\\]parallel).*\bin "
    r"(\w*(all_?reduce|all_?gather|all_?to_?all|broadcast|barrier|reduce_scatter|synchronize|wait|poll|send|recv|join"
    r"|_engine_run_backward|monitored_barrier|init_process_group|rendezvous|init|_store_based_barrier)\w*)",
    re.IGNORECASE,
)
DUMP_S = 4.0  # for the stacks of all ranks to arrive
MAX_TIMINGS = 200_000  # kept for the figure, of all ranks together
MAX_OPEN = 16  # logging windows that are waited for at a time


@dataclass(frozen=True)
class RankProgress:
    """One rank as the driver sees it."""

    rank: int
    host: str
    step: int | None  # None: it has never reported one
    phase: str
    idle_s: float  # since step or phase last changed, or since it started


def hanging(ranks: Sequence[RankProgress], limit_s: float) -> list[RankProgress]:
    """Find ranks without progress for longer than the limit.

    Empty until some rank has reported a step: a script that never does cannot be judged by its steps.
    """
    if all(rank.step is None for rank in ranks):
        return []
    return [rank for rank in ranks if rank.idle_s > limit_s]


def waiting_for_work(ranks: Sequence[RankProgress], stacks: Mapping[int, str], limit_s: float) -> list[int]:
    """Find ranks over the limit that wait for one that makes progress.

    These do not hang. The other one hashes its files, or writes its part of a checkpoint. Empty where none makes
    progress: then all wait for nobody.
    """
    idle = hanging(ranks, limit_s)
    return [rank.rank for rank in idle if len(idle) < len(ranks) and waits_in(stacks.get(rank.rank, ""))]


def waits_in(stack: str) -> str | None:
    """Return the collective in which a stack's main thread waits, or None."""
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
    """Cut the main thread's part out of a faulthandler dump: it comes last."""
    return re.split(r"(?m)^(?=Thread 0x|Current thread 0x)", stack)[-1]


def innermost(stack: str) -> str:
    """Return the innermost frame of the main thread, `function (file:line)`.

    For a text without frames, its first line.
    """
    if found := re.search(r'File "([^"]+)", line (\d+) in (\S+)', main_thread(stack)):
        return f"{found[3]} ({found[1].rsplit('/', 1)[-1]}:{found[2]})"
    return first_line(stack) if stack.strip() else "no stack"


def name_culprit(ranks: Sequence[RankProgress], stacks: Mapping[int, str]) -> tuple[int, str]:
    """Find (rank, words) of the rank that is missing while the others wait.

    Not in a collective beats an earlier step, which beats a longer time without progress.
    """
    waiting = {rank.rank: where for rank in ranks if (where := waits_in(stacks.get(rank.rank, "")))}
    suspects = [rank for rank in ranks if rank.rank not in waiting] or list(ranks)
    lowest = min(suspects, key=lambda r: (-1 if r.step is None else r.step, -r.idle_s, r.rank))
    stack = stacks.get(lowest.rank, "")
    words = f"hangs: no progress for {lowest.idle_s:.0f} s, in {innermost(stack) if stack else 'an unknown place'}"
    others = {where: [r for r in waiting if waiting[r] == where and r != lowest.rank] for where in waiting.values()}
    waits = [f"{_ranks(r)} wait{'s' if len(r) == 1 else ''} in {where}" for where, r in others.items() if r]
    return lowest.rank, "; ".join([words, *waits])


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, sorted(ranks)[:8])) + ("..." if len(ranks) > 8 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"


class HangDetector:
    """Asks for stacks once ranks make no progress for `limit_s`, and names the rank the others wait for.

    A rank that is seen to wait for one that works has the limit again from then; it is checked four times meanwhile.
    """

    def __init__(self, limit_s: float | None):
        """Watch for hangs after `limit_s` seconds; None: never."""
        self.stacks: dict[int, str] = {}  # by rank
        self._limit_s = math.inf if limit_s is None else limit_s
        self._dump_until: float | None = None
        self._next_check = 0.0
        self._seen_waiting: dict[int, float] = {}  # rank -> when

    def reset(self) -> None:
        """Take note that all ranks make progress."""
        self._dump_until = None

    def check(
        self, ranks: Sequence[RankProgress], now: float, request_stacks: Callable[[], None]
    ) -> tuple[int, str] | None:
        """Find (rank, words) of the rank that hangs.

        Not before `stacks` has those of all ranks, or DUMP_S have passed.
        """
        idle = hanging(ranks, self._limit_s)
        if not idle or now < self._next_check:
            self._dump_until = None
            return None
        if self._dump_until is None:
            self._dump_until, self.stacks = now + DUMP_S, {}
            request_stacks()
        if len(self.stacks) < len(ranks) and now < self._dump_until:
            return None
        self._seen_waiting |= dict.fromkeys(waiting_for_work(ranks, self.stacks, self._limit_s), now)
        if all(now - self._seen_waiting.get(rank.rank, -math.inf) <= self._limit_s for rank in idle):
            self._next_check = now + self._limit_s / 4
            return None
        return name_culprit(ranks, self.stacks)


def stragglers(timings: Mapping[int, WindowTiming], factor: float = 1.5, least_s: float = 0.005) -> list[int]:
    """Find ranks busy for `factor` times the median rank, slowest first.

    And for `least_s` longer than it, among two ranks at least.
    """
    if len(timings) < 2:
        return []
    ordered = sorted(t.busy_s for t in timings.values())
    middle = statistics.median_low(ordered)
    slow = [rank for rank, t in timings.items() if t.busy_s > factor * middle and t.busy_s - middle > least_s]
    return sorted(slow, key=lambda rank: -timings[rank].busy_s)


@dataclass(frozen=True)
class Slow:
    """Successive logging windows in which a rank was a straggler, and its busy seconds in them."""

    windows: int = 0
    seconds: float = 0.0

    def longer(self, seconds: float) -> Slow:
        return Slow(self.windows + 1, self.seconds + seconds)


class StragglerDetector:
    """Finds stragglers: ranks that are slow in `windows` successive logging windows, and for `lasting_s` in them.

    Where steps are short, three windows are a moment in which another process ran on the host.
    """

    def __init__(self, world: int, windows: int = 3, lasting_s: float = 10.0):
        self._world, self._windows, self._lasting_s = world, windows, lasting_s
        self._open: dict[int, dict[int, WindowTiming]] = {}  # step -> rank -> timing
        self._slow: dict[int, Slow] = {}  # rank -> how long it has been slow until now
        self._named: set[int] = set()
        self._last_step: int | None = None  # of the windows that are whole
        self.history: deque[tuple[int, dict[int, WindowTiming]]] = deque(maxlen=max(10, MAX_TIMINGS // world))

    def add(self, rank: int, step: int, timing: WindowTiming) -> list[tuple[int, float, float]]:
        """Add a rank's logging window and return the new stragglers; each is reported once.

        Each entry: (rank, busy seconds per step, other ranks' mean wait per step).
        """
        window = self._open.setdefault(step, {})
        window[rank] = timing
        if len(window) < self._world:
            if len(self._open) > MAX_OPEN:  # some rank does not report
                del self._open[min(self._open)]
            return []
        self._open = {s: w for s, w in self._open.items() if s > step}
        self.history.append((step, window))
        steps, self._last_step = step - (step if self._last_step is None else self._last_step), step
        self._slow = {r: self._slow.get(r, Slow()).longer(steps * window[r].busy_s) for r in stragglers(window)}
        new = [
            rank
            for rank, slow in self._slow.items()
            if slow.windows >= self._windows and slow.seconds >= self._lasting_s and rank not in self._named
        ]
        self._named.update(new)
        wait_s = sum(t.wait_s for t in window.values()) if new else 0.0
        return [(r, window[r].busy_s, (wait_s - window[r].wait_s) / (self._world - 1)) for r in new]

    def figure(self) -> dict[str, list[Any]]:
        """Return columns of busy and waiting seconds per step, by step and rank."""
        rows = [
            (s, r, t.busy_s, t.wait_s, t.busy_sd_s) for s, window in self.history for r, t in sorted(window.items())
        ]
        names = ("step", "rank", "busy_s", "wait_s", "busy_sd_s")
        return {name: [row[i] for row in rows] for i, name in enumerate(names)}
