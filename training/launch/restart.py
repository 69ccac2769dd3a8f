"""Decide what follows an attempt: a retry, on fewer or more ranks, or none. Pure functions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from sparkring.conf.blocks.launch import HOSTS_WAIT_S
from sparkring.conf.errors import first_line
from sparkring.conf.plain_text import count_of
from sparkring.training.launch.topology import check_world

REQUESTED = ("grow", "decommission")  # ends that recovery itself has asked for: no failures
# Errors that a program makes every time: not worth a second launch when they come before the first step.
DETERMINISTIC = (
    "ModuleNotFoundError",
    "ImportError",
    "AttributeError",
    "NameError",
    "SyntaxError",
    "TypeError",
    "KeyError",
)
MOST_DOUBLINGS = 7  # of the cool-down: an hour at its default
Action = Literal["retry", "shrink", "grow", "stop"]


@dataclass(frozen=True)
class RestartPolicy:
    """When training is tried again, and on how many ranks. Seconds end in `_s`."""

    world: int
    min_world: int | None = None  # None: never on fewer than world
    max_attempts: int = 3  # failures in a row, without a new checkpoint between them
    backoff_s: float = 1.0
    max_backoff_s: float = 60.0
    # Before the world grows again after a host was lost; doubled each time it is the same one.
    cool_down_s: float = 60.0
    # For room to come, where there is too little for the least world (launch.hosts_wait_s).
    room_wait_s: float = HOSTS_WAIT_S
    grace_s: float | None = None  # for the ranks of a host that leaves to end by themselves; None: no limit
    multiple_of: int = 1  # worlds must be a multiple: pipeline stages times tensor ranks
    fits: Callable[[int], bool] = lambda world: True  # whether the layout fits such a world

    def __post_init__(self) -> None:
        check_world(self.world, "launch.world")
        check_world(1 if self.min_world is None else self.min_world, "launch.min_world")
        if self.min_world is not None and self.min_world > self.world:
            raise ValueError(f"launch.min_world = {self.min_world}: must not be above launch.world = {self.world}")
        if self.world % self.multiple_of:
            raise ValueError(f"launch.world = {self.world}: must be a multiple of {self.multiple_of}")


class ReplacementLimit:
    """Counts the replaced processes of each rank, and ends them where a rank makes no step between its deaths."""

    def __init__(self, max_in_a_row: int):
        self._max_in_a_row = max_in_a_row
        self._counts: Counter[int] = Counter()
        self._in_a_row: Counter[int] = Counter()
        self._furthest: dict[int, int] = {}  # rank -> step at the deaths so far

    def allows(self, rank: int, step: int | None) -> bool:
        """Return whether to replace a rank that died at `step`, and count it."""
        before, reached = self._furthest.get(rank, -1), -1 if step is None else step
        self._in_a_row[rank] = 1 if reached > before else self._in_a_row[rank] + 1
        self._furthest[rank] = max(before, reached)
        if self._in_a_row[rank] > self._max_in_a_row:
            return False
        self._counts[rank] += 1
        return True

    def count(self, rank: int) -> int:
        """Count the replacements of the rank so far."""
        return self._counts[rank]


@dataclass(frozen=True)
class AttemptOutcome:
    """How one attempt ended."""

    attempt: int
    world: int
    cause: str  # a Failure's cause, "cancelled", "unfinished" (by itself, before its time), or one of REQUESTED
    from_step: int  # checkpoint it began at; 0: from the start
    step: int | None = None  # last step the failing rank reported
    error_type: str = ""
    message: str = ""
    is_value_error: bool = False
    lost_hosts: frozenset[str] = frozenset()  # addresses and names of hosts that have fallen silent
    at: float = 0.0  # monotonic time of the end

    @property
    def signature(self) -> tuple[str, str, str, int | None]:
        """What two failures have in common that are the same one."""
        return (self.cause, self.error_type, first_line(self.message) if self.message else "", self.step)


@dataclass(frozen=True)
class Decision:
    """What follows an attempt that has failed: the action, its number of ranks, the seconds to wait first, and why."""

    action: Action
    world: int
    wait_s: float
    why: str


def decide(history: Sequence[AttemptOutcome], slots: int, policy: RestartPolicy) -> Decision:
    """Decide what follows the last of `history`, with room for `slots` ranks in the cluster."""
    last = history[-1]
    if reason := reason_to_stop(history, policy):
        return Decision("stop", 0, 0.0, reason)
    world = best_world(slots, policy)
    if world == 0:
        key, least = "launch.world", policy.world
        if policy.min_world is not None:
            key, least = "launch.min_world", policy.min_world
        why = f"{count_of(slots, 'slot')} left: no world of at least {least} ({key}) fits on them and the layout"
        return Decision("stop", 0, 0.0, why)
    wait_s = 0.0 if last.cause in REQUESTED else backoff(history, policy)
    action: Action = "grow" if world > last.world else "shrink" if world < last.world else "retry"
    return Decision(action, world, wait_s, f"{last.cause} in attempt {last.attempt} on {count_of(last.world, 'rank')}")


def reason_to_stop(history: Sequence[AttemptOutcome], policy: RestartPolicy) -> str | None:
    """Explain why no further attempt would help, or may be made; None where one may."""
    last = history[-1]
    failures = [outcome for outcome in history if outcome.cause not in REQUESTED]
    if last.cause in ("cancelled", "preflight"):
        return last.cause
    if last.cause in REQUESTED:
        return None
    if is_error_at_start(last):
        return f"the user's error: {last.error_type} before the first step"
    if len(failures) >= 2 and is_users(failures[-2], last):
        what, attempts = last.error_type or last.cause, f"{failures[-2].attempt} and {last.attempt}"
        return f"the user's error: the same {what} at step {last.step} in attempts {attempts}"
    if in_a_row(history) >= policy.max_attempts:
        return f"launch.max_attempts = {policy.max_attempts} have failed in a row without a new checkpoint"
    return None


def is_error_at_start(outcome: AttemptOutcome) -> bool:
    """Return whether a ValueError, or a deterministic error, came before any step was made."""
    before = outcome.step is None or outcome.step <= outcome.from_step
    return outcome.cause == "exception" and before and (outcome.is_value_error or outcome.error_type in DETERMINISTIC)


def is_users(first: AttemptOutcome, second: AttemptOutcome) -> bool:
    """Return whether the same exception, or exit code, came at the same step twice.

    Signals, lost hosts and hangs are the machine's.
    """
    return second.cause in ("exception", "exit", "gpu memory", "gpu error") and first.signature == second.signature


def best_world(slots: int, policy: RestartPolicy) -> int:
    """Find the largest world allowed on `slots`; 0 where none is.

    Whether `policy.world` itself fits is not checked: preflight has refused it before anything started.
    """
    least = max(1, policy.world if policy.min_world is None else policy.min_world)
    most = min(slots, policy.world) // policy.multiple_of * policy.multiple_of
    worlds = range(most, least - 1, -policy.multiple_of)
    return next((world for world in worlds if world == policy.world or policy.fits(world)), 0)


def in_a_row(history: Sequence[AttemptOutcome]) -> int:
    """Count failures since training last got further than a checkpoint."""
    furthest = history[-1].from_step
    return sum(outcome.cause not in REQUESTED and outcome.from_step >= furthest for outcome in history)


def backoff(history: Sequence[AttemptOutcome], policy: RestartPolicy) -> float:
    """Return the seconds to wait: doubled with every failure in a row."""
    return min(policy.max_backoff_s, policy.backoff_s * 2 ** max(0, in_a_row(history) - 1))


def cool_until(history: Sequence[AttemptOutcome], policy: RestartPolicy) -> float:
    """Return the monotonic time before which the world does not grow: free slots may be a lost host's."""
    losses = Counter[str]()
    until = 0.0
    for outcome in history:
        losses.update(outcome.lost_hosts)
        times = max((losses[host] for host in outcome.lost_hosts), default=0)
        until = max(until, outcome.at + policy.cool_down_s * 2 ** (min(times, MOST_DOUBLINGS) - 1) if times else 0.0)
    return until


def steps_lost(step: int | None, checkpoint_step: int) -> int:
    """Count the steps that the next attempt repeats."""
    return max(0, (step or 0) - checkpoint_step)
