"""Find one step after which all ranks stop or write a checkpoint, though no rank ever waits for another.

The driver asks each rank to offer a step that it has not passed and will not pass before the driver answers. The
largest offer is the step of the coordinated stop: it is announced to all ranks, and each acts when it has made exactly
that step. A rank that reaches its own offer before the announcement waits there, for milliseconds. Once a rank has made
all steps and returned, no other may act before the end: the announced step is then one that nobody reaches.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

from sparkring.training.launch.messages import CutAt, OfferCut

Orders: TypeAlias = list[tuple[int, OfferCut | CutAt]]
"""(rank, message to it)."""
NEVER = 1 << 62  # a step after the end of any training


class Cuts:
    """What the driver sends, given what has come. One cut at a time is being agreed; requests meanwhile join it."""

    def __init__(self, ranks: Iterable[int]):
        self._ranks = set(ranks)  # that have not returned
        self._has_returned = False  # whether any rank has
        self._wanted = (False, False)  # (stop, checkpoint), of requests not announced yet
        self._offers: dict[int, int] | None = None  # rank -> step, of the cut being agreed
        self._announced: list[CutAt] = []

    @property
    def _number(self) -> int:
        return len(self._announced) + 1

    def ask(self, stop: bool, checkpoint: bool) -> Orders:
        """Begin a cut, or join the one being agreed."""
        self._wanted = (self._wanted[0] or stop, self._wanted[1] or checkpoint)
        if self._offers is not None:
            return []
        self._offers = {}
        return [(rank, OfferCut(self._number)) for rank in sorted(self._ranks)]

    def offered(self, rank: int, number: int, step: int) -> Orders:
        """Take an offer. A rank repeats one that it waits at: then a message was lost with its connection."""
        if number <= len(self._announced):
            return [(rank, self._announced[number - 1])]
        if self._offers is None or number != self._number:
            return []
        repeated = rank in self._offers
        self._offers[rank] = step
        if repeated:
            return [(other, OfferCut(number)) for other in sorted(self._ranks - self._offers.keys())]
        return self._announce()

    def returned(self, rank: int) -> Orders:
        """Take note that a rank has ended; nobody waits for its offer."""
        self._ranks.discard(rank)
        self._has_returned = True
        return self._announce()

    def replaced(self, rank: int, step: int) -> Orders:
        """Take note that a new process of the rank is at about `step`; what the last one has offered is void."""
        self._ranks.add(rank)
        orders: Orders = [(rank, cut) for cut in self._announced if cut.step >= step]
        if self._offers is not None:
            self._offers.pop(rank, None)
            orders.append((rank, OfferCut(self._number)))
        return orders

    def _announce(self) -> Orders:
        if not self._offers or not self._ranks <= self._offers.keys():
            return []
        stop, checkpoint = self._wanted
        step = NEVER if self._has_returned else max(self._offers.values())
        cut = CutAt(self._number, step, stop, checkpoint)
        self._announced.append(cut)
        self._offers, self._wanted = None, (False, False)
        return [(rank, cut) for rank in sorted(self._ranks)]
