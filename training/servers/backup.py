"""Backup workers: which share of which global batch each worker computes, and which gradients make a step.

Of n + b workers the first n gradients make a step, so none waits for the b slowest
(https://arxiv.org/abs/1604.00981). Unlike there no row is dropped: a global batch has n shares, and a share whose
gradient came too late is computed again in a later step, by its own worker or by another. Every batch share belongs to
exactly one step, each step has n shares, and so an epoch has as many steps as on n ranks of a ring.

Batch shares of a step have streams 0 .. n - 1: what data rank `stream` of n reads of that batch. Worker w < n reads
stream w, as long as that is not too far behind; the others help. Workers name a step that shares may not reach yet,
since a checkpoint, an evaluation or the end of an epoch is there: at that step exactly the shares below it are done.
No sockets, no threads, one call at a time.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from sparkring.training.data.batch import BatchShare

AHEAD = 2  # steps: a step takes batch shares of itself and of the next, so that all n + b workers get one
PATIENCE = 2  # steps that a batch share may be late before workers of other streams take it


@dataclass(frozen=True)
class StepOutcome:
    """What became of a step. norm: of its gradient before it was clipped. bad_worker: whose share was not finite."""

    norm: float
    bad_worker: int | None
    counted: frozenset[int]  # workers


class Backup:
    """The steps of one attempt."""

    def __init__(self, workers: int, backup: int, clock: int) -> None:
        """Start with step `clock`, of `workers` - `backup` batch shares."""
        self.streams, self.backup, self.step = workers - backup, backup, clock
        self.late: Counter[int] = Counter()  # by worker: gradients that came too late
        self._done = [clock] * self.streams  # by stream: steps before which all batch shares are done
        self._done_ahead: set[BatchShare] = set()  # beyond these
        self._taken: dict[int, BatchShare] = {}  # by worker, in the step that is being made
        self._ready: dict[int, BatchShare] = {}  # of these, whose gradients all servers have; in their order, n at most
        self._last_stream: dict[int, int] = {}  # that a worker read
        self._outcomes: dict[int, StepOutcome] = {}
        self._heard = [clock] * workers  # by worker, the steps before which it knows all outcomes
        self._counted: list[tuple[int, BatchShare]] = []  # (worker, batch share), since the last coordinated stop

    # --- parts ---------------------------------------------------------------------------------------------------

    def may_take(self, worker: int, step: int, limit: int) -> bool:
        """Return whether a worker's batch share for a step can be decided now.

        Before a synchronization point every share may be taken. Then the worker repeats another worker's share, but
        only when so few are missing that each waiting worker can take one: else the share might arrive anyway.
        """
        if not self._needs(worker, step):
            return True
        return bool(self._open_parts(worker, step, limit)) or self.streams - len(self._ready) <= self.backup

    def take(self, worker: int, step: int, limit: int) -> BatchShare | None:
        """Return the batch share a worker computes in a step; None if the step needs no more.

        `limit`: the step that shares may not reach. ValueError for a step that has not started.
        """
        if step > self.step:
            raise ValueError(f"rank {worker} takes a part of step {step}, and step {self.step} is being made")
        if not self._needs(worker, step):
            return None
        parts = self._open_parts(worker, step, limit)
        self._taken.pop(worker, None)  # a process of this rank that died
        self._taken[worker] = part = self._pick(worker, parts) if parts else self._missing()
        self._last_stream[worker] = part.stream
        return part

    def _needs(self, worker: int, step: int) -> bool:
        return step == self.step and worker not in self._ready and self.chosen(step) is None

    def _open_parts(self, worker: int, step: int, limit: int) -> list[BatchShare]:
        """List the first batch share per stream that is not done and not being computed by another."""
        taken = {part for other, part in self._taken.items() if other != worker}
        firsts = (self._first_open(stream, min(step + AHEAD, limit), taken) for stream in range(self.streams))
        return [part for part in firsts if part is not None]

    def _pick(self, worker: int, parts: list[BatchShare]) -> BatchShare:
        """Pick a late batch share, else one of the worker's own stream, else the first."""
        latest = self.step - PATIENCE
        own = {worker, self._last_stream.get(worker, worker)}
        return min(parts, key=lambda part: (part.clock > latest, part.stream not in own, part))

    def _missing(self) -> BatchShare:
        """Return the missing batch share that the fewest workers compute."""
        ready = set(self._ready.values())
        computed = Counter(part for part in self._taken.values() if part not in ready)
        return min(computed, key=lambda part: (computed[part], part))

    def _first_open(self, stream: int, limit: int, taken: set[BatchShare]) -> BatchShare | None:
        parts = (BatchShare(clock, stream) for clock in range(self._done[stream], limit))
        return next((part for part in parts if part not in taken and part not in self._done_ahead), None)

    # --- steps ---------------------------------------------------------------------------------------------------

    def ready(self, worker: int, step: int) -> None:
        """Record that all servers have the gradient of the batch share a worker took."""
        part = self._taken.get(worker)
        if step == self.step and part is not None and self.chosen(step) is None and part not in self._ready.values():
            self._ready[worker] = part

    def chosen(self, step: int) -> list[tuple[int, BatchShare]] | None:
        """Return (worker, batch share) of the step's gradients, sorted by share; None while there are too few.

        Also None for a completed step.
        """
        if step != self.step or len(self._ready) < self.streams:
            return None
        return sorted(self._ready.items(), key=lambda each: each[1])

    def made(self, step: int, norm: float, bad_worker: int | None) -> None:
        """Record that all servers have completed a step; only the first call counts."""
        if step != self.step:
            return
        assert len(self._ready) == self.streams
        self._outcomes[step] = StepOutcome(norm, bad_worker, frozenset(self._ready))
        self._counted += self._ready.items()
        self.late.update(worker for worker in self._taken if worker not in self._ready)
        self._done_ahead.update(self._ready.values())
        for stream, clock in enumerate(self._done):
            while BatchShare(clock, stream) in self._done_ahead:
                self._done_ahead.remove(BatchShare(clock, stream))
                clock += 1
            self._done[stream] = clock
        self._taken, self._ready = {}, {}
        self.step += 1

    def outcome(self, worker: int, step: int) -> StepOutcome | None:
        """Return the outcome of a step, once for each worker; None while it is being made."""
        found = self._outcomes.get(step)
        if found is not None:
            self._hear(worker, step + 1)
        return found

    def _hear(self, worker: int, step: int) -> None:
        """Record that a worker knows all outcomes before a step; drop outcomes that all know."""
        self._heard[worker] = step
        for old in [each for each in self._outcomes if each < min(self._heard)]:
            del self._outcomes[old]

    # --- between steps -------------------------------------------------------------------------------------------

    def restart(self, worker: int) -> int:
        """Return the first step for a replaced worker: the first whose outcome it does not know.

        It skips completed steps without computing, so it reaches the step at which the others wait.
        """
        return self._heard[worker]

    def counted_parts(self, worker: int) -> list[BatchShare]:
        """List this worker's batch shares in steps since the last coordinated stop, and in the current step."""
        return [part for who, part in (*self._counted, *self._ready.items()) if who == worker]

    def cut(self, clock: int) -> None:
        """Check a coordinated stop: ValueError unless exactly the batch shares before it are done."""
        if set(self._done) != {clock} or self.step != clock:
            raise ValueError(f"stop at step {clock}, during step {self.step}, where streams have done {self._done}")
        self._counted = []
