"""Questions that all workers answer, and whose answers all of them get: what is left of collectives.

A round has a key, so a worker that was replaced may take part again: what it gave before counts, and it gets the same
answers. Rounds of a scope are kept until all workers have come to a later scope; those of START for good.
"""

from __future__ import annotations

from dataclasses import dataclass

START = -1  # scope of what workers agree on before the first step


@dataclass(frozen=True)
class RoundKey:
    """scope: a step, or START. channel: rounds of a channel are counted by themselves. number: in its channel."""

    scope: int
    channel: str
    number: int


class Rounds:
    """The open and the kept rounds of one attempt."""

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self._given: dict[RoundKey, dict[int, bytes]] = {}

    def give(self, key: RoundKey, worker: int, value: bytes) -> None:
        """Take a worker's value, if it has not given one."""
        self._given.setdefault(key, {}).setdefault(worker, value)
        if key.scope != START and self.answers(key) is not None:
            old = [k for k in self._given if START < k.scope < key.scope and k.channel == key.channel]
            for each in old:
                del self._given[each]

    def answers(self, key: RoundKey) -> list[bytes] | None:
        """Return all workers' values, in order; None while some are missing."""
        given = self._given.get(key, {})
        return [given[worker] for worker in range(self.workers)] if len(given) == self.workers else None

    def last_scope(self, channel: str, worker: int) -> int:
        """Return the latest scope in which a worker joined a round of a channel, else START."""
        return max(
            (k.scope for k, given in self._given.items() if k.channel == channel and worker in given), default=START
        )
