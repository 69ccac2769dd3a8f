"""A rank's side of a cut: what it offers, where it waits, and after which step it acts (launch/cuts.py)."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

from sparkring.training.launch.messages import CutAt, OfferCut
from sparkring.training.waiting import waits_for_ranks

LEAD_S = 0.5  # for offers and the announcement to travel while training continues
FIRST_LEAD = 2  # steps, while none has been timed
REPEAT_S = 1.0  # after which an offer is sent again, since its answer may be lost


def steps_ahead(step_s: float | None, left: int, least: int = 1) -> int:
    """Return the steps from the last one passed to the one to offer: the running one and LEAD_S more.

    If a step is longer than that, an announcement nearly always comes in time, and waiting for one costs less than one
    more step before a stop. So it does near the end, where a stop would come too late.

    Args:
        step_s: seconds of a step; None if unknown.
        left: number of steps to the end of training.
        least: least steps ahead, see RankCuts.begin.
    """
    ahead = max(least, FIRST_LEAD if step_s is None else 1 + int(LEAD_S / max(step_s, 1e-6)))
    return ahead if ahead < left else max(1, min(least, left))


class RankCuts:
    """Used by two threads: one reads the driver's messages, the other makes steps."""

    def __init__(self, send_offer: Callable[[int, int], None], clock: Callable[[], float] = time.monotonic):
        """Start outside of training. `send_offer`: sends (number of the stop, step) to the driver."""
        self._send_offer, self._clock = send_offer, clock
        self._changed = threading.Condition()
        self._passed: int | None = None  # steps made; None: a program that does not take part, or not yet
        self._passed_at, self._last, self._least = 0.0, 0, 1
        self._recent_s: deque[float] = deque(maxlen=8)  # of the last steps
        self._asked: int | None = None  # number of the cut that the driver waits for our offer to
        self._offer: tuple[int, int] | None = None  # (number, step) that is not announced yet
        self._announced: dict[int, tuple[bool, bool]] = {}  # step -> (stop, checkpoint)
        self._last_number = 0  # of the cuts announced

    def begin(self, step: int, last: int, least: int = 1) -> None:
        """Take part in coordinated stops from now on.

        Args:
            step: number of steps done.
            last: number of steps in all.
            least: steps from the last one passed to a stop; more than one if a step uses rows of later ones.
        """
        with self._changed:
            self._passed, self._passed_at, self._last, self._least = step, self._clock(), last, least
            self._recent_s.clear()
            # the rank whose place this one takes has acted there
            self._announced = {at: what for at, what in self._announced.items() if at > step}
            self._answer()

    def after(self, step: int) -> tuple[bool, bool]:
        """Return (whether to stop, whether to write a checkpoint) after `step` steps."""
        with self._changed:
            self._recent_s.append(self._clock() - self._passed_at)
            if self._offer is not None and self._offer[1] <= step:
                self._wait()
            self._passed, self._passed_at = step, self._clock()
            return self._announced.pop(step, (False, False)) if self._announced else (False, False)

    def next(self, least: int = 0) -> int | None:
        """Return the step of the next coordinated stop, announced or offered by this rank, or None.

        `least`: steps done before it started: a replacement process may receive old announcements.
        """
        with self._changed:
            offered = [] if self._offer is None else [self._offer[1]]
            return min((step for step in [*self._announced, *offered] if step >= least), default=None)

    def request(self, message: OfferCut | CutAt) -> None:
        """Take a message of the driver. It may come twice."""
        with self._changed:
            if message.number <= self._last_number:
                return
            if isinstance(message, OfferCut):
                self._asked = message.number
                self._answer()
            else:
                self._last_number, self._asked, self._offer = message.number, None, None
                stop, checkpoint = self._announced.get(message.step, (False, False))
                self._announced[message.step] = (stop or message.stop, checkpoint or message.checkpoint)
                self._changed.notify_all()

    def _answer(self) -> None:
        """Offer a step, or repeat what was offered; nothing before the first step. With the lock."""
        if self._asked is None or self._passed is None:
            return
        if self._offer is None or self._offer[0] != self._asked:
            ahead = steps_ahead(min(self._recent_s, default=None), self._last - self._passed, self._least)
            self._offer = (self._asked, self._passed + ahead)
        self._send_offer(*self._offer)

    @waits_for_ranks  # that have not offered yet
    def _wait(self) -> None:
        """Wait for the announcement. Where the driver is gone, the agent ends this process. With the lock."""
        while self._offer is not None:
            if not self._changed.wait(REPEAT_S) and self._offer is not None:
                self._send_offer(*self._offer)
