"""After an attempt has ended: again, on fewer, on more, or never. Pure: history and slots in, a decision out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

PLANNED = ("grow", "decommission")  # ends we asked for ourselves; they are nobody's failure
# Errors that a programme makes every time: not worth a second launch when they come before the first step.
DETERMINISTIC = (
    "ModuleNotFoundError",
    "ImportError",
    "AttributeError",
    "NameError",
    "SyntaxError",
    "TypeError",
    "KeyError",
)
Action = Literal["retry", "shrink", "grow", "stop"]


@dataclass(frozen=True)
class Policy:
    """How far to go. Seconds end in `_s`."""

    world: int
    min_world: int | None = None  # None: never on fewer than world
    max_attempts: int = 3  # launches in all that may fail, planned ends not counted
    backoff_s: float = 1.0
    max_backoff_s: float = 60.0
    multiple_of: int = 1  # worlds must be a multiple: pipeline stages times tensor ranks
    fits: Callable[[int], bool] = lambda world: True  # whether the layout can be put on a multiple that is no `world`

    def __post_init__(self) -> None:
        if self.min_world is not None and self.min_world > self.world:
            raise ValueError(f"launch.min_world = {self.min_world}: must not be above launch.world = {self.world}")
        if self.world % self.multiple_of:
            raise ValueError(f"launch.world = {self.world}: must be a multiple of {self.multiple_of}")


@dataclass(frozen=True)
class Ended:
    """How one attempt ended."""

    attempt: int
    world: int
    cause: str  # a Failure's cause, "cancelled", "unfinished" (by itself, before its time), or one of PLANNED
    from_step: int  # checkpoint it began at; 0: from the start
    step: int | None = None  # last step the failing rank reported
    error_type: str = ""
    message: str = ""
    is_value_error: bool = False

    @property
    def signature(self) -> tuple[str, str, str, int | None]:
        """What makes two failures the same one."""
        return (self.cause, self.error_type, self.message.splitlines()[0] if self.message else "", self.step)


@dataclass(frozen=True)
class Decision:
    action: Action
    world: int
    wait_s: float
    why: str


def decide(history: Sequence[Ended], slots: int, policy: Policy) -> Decision:
    """What follows the last of `history`, with `slots` ranks' room in the cluster."""
    last = history[-1]
    if reason := reason_to_stop(history, policy):
        return Decision("stop", 0, 0.0, reason)
    world = best_world(slots, policy)
    if world == 0:
        least = policy.world if policy.min_world is None else policy.min_world
        why = f"{slots} slots are left: no world of at least {least} (launch.min_world) fits on them and the layout"
        return Decision("stop", 0, 0.0, why)
    wait_s = 0.0 if last.cause in PLANNED else backoff(history, policy)
    action: Action = "grow" if world > last.world else "shrink" if world < last.world else "retry"
    return Decision(action, world, wait_s, f"{last.cause} in attempt {last.attempt} on {last.world} ranks")


def reason_to_stop(history: Sequence[Ended], policy: Policy) -> str | None:
    """Why no further attempt would help, or may be made; None where one may."""
    last = history[-1]
    failures = [ended for ended in history if ended.cause not in PLANNED]
    if last.cause in ("cancelled", "preflight"):
        return last.cause
    if last.cause in PLANNED:
        return None
    if is_error_at_start(last):
        return f"the user's error: {last.error_type} before the first step"
    if len(failures) >= 2 and is_users(failures[-2], last):
        what, attempts = last.error_type or last.cause, f"{failures[-2].attempt} and {last.attempt}"
        return f"the user's error: the same {what} at step {last.step} in attempts {attempts}"
    if len(failures) >= policy.max_attempts:
        return f"launch.max_attempts = {policy.max_attempts} have failed"
    return None


def is_error_at_start(ended: Ended) -> bool:
    """A ValueError, or an error every run of the same code makes, before any step was made."""
    before = ended.step is None or ended.step <= ended.from_step
    return ended.cause == "exception" and before and (ended.is_value_error or ended.error_type in DETERMINISTIC)


def is_users(first: Ended, second: Ended) -> bool:
    """The same exception, or exit code, at the same step twice. Signals, lost hosts and hangs are the machine's."""
    return second.cause in ("exception", "exit") and first.signature == second.signature


def best_world(slots: int, policy: Policy) -> int:
    """The largest world allowed on `slots`; 0 where none is. Whether `policy.world` itself fits is not asked here: what
    is wrong with it was said before anything started."""
    least = max(1, policy.world if policy.min_world is None else policy.min_world)
    most = min(slots, policy.world) // policy.multiple_of * policy.multiple_of
    worlds = range(most, least - 1, -policy.multiple_of)
    return next((world for world in worlds if world == policy.world or policy.fits(world)), 0)


def backoff(history: Sequence[Ended], policy: Policy) -> float:
    """Seconds to wait: doubled with every failure since training last got further than a checkpoint."""
    in_a_row = 0
    furthest = history[-1].from_step
    for ended in reversed(history):
        if ended.cause in PLANNED or ended.from_step < furthest:
            break
        in_a_row += 1
    return min(policy.max_backoff_s, policy.backoff_s * 2 ** max(0, in_a_row - 1))


def should_grow(world: int, slots: int, policy: Policy) -> bool:
    """Whether a running attempt on fewer ranks than wanted should end at its next checkpoint, to go on with more."""
    return best_world(slots, policy) > world


def steps_lost(step: int | None, checkpoint_step: int) -> int:
    """Steps that the next attempt repeats."""
    return max(0, (step or 0) - checkpoint_step)
