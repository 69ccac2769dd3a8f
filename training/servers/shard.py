"""What one server holds, and how pushes change it: no sockets, no threads, one call at a time.

A server has slices of the dense parameters with an optimizer of its own, and some buckets of each table. A push is of
(worker, step): it is applied once, and a repeat is refused. With bound 0 the pushes of a step are kept until all have
come, summed in the order of the workers and applied as one step; else each is applied when it comes. With backup
workers (backup.py) those make the step that the first server names, and the others are dropped. A worker's gradient is
that of  n x sum over its rows of weight_i * loss_i / global_rows,  n shares of a global batch, so n pushes are one step
at their shares of its rate (Definition.rate_share).

Clocks count steps from the beginning of the run; `version` counts the updates of this server.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from sparkring.training.data.batch import BatchShare
from sparkring.training.servers.definition import LR_SCALE, Definition, OptimizerFactory
from sparkring.training.servers.event_log import Kind, PushEvent
from sparkring.training.servers.messages import ShardStatus
from sparkring.training.servers.partition import cut_parameters
from sparkring.training.servers.protocol import raw
from sparkring.training.tables.files import AT_ONCE, to_tensors
from sparkring.training.tables.hashing import Ids, bucket_owners
from sparkring.training.tables.table import Table, TableDump, summed

Array = NDArray[Any]


class BrokenPromise(RuntimeError):
    """The server's own bound was broken, or a worker does not keep to the protocol: it must not continue."""


@dataclass(frozen=True)
class Push:
    """One worker's gradient of one step, as far as it is of this server.

    attempt: number of the try at the step. version: at the pull. norm: of the worker's whole gradient. lr: of the
    step. dense: (elements,) of this server's slices. absent: numbers of the slices that no gradient reached. rows: by
    table distinct ids (u,) and gradients (u, dim).
    """

    worker: int
    clock: int
    attempt: int
    version: int
    norm: float
    lr: float
    dense: torch.Tensor
    absent: frozenset[int] = frozenset()
    rows: Sequence[tuple[Ids, Array]] = ()


@dataclass
class ShardCounts:
    """What a server has seen since it began; gaps and lags as histograms, value -> how often."""

    gaps: Counter[int] = field(default_factory=Counter)  # steps ahead of the slowest worker, at each pull
    lags: Counter[int] = field(default_factory=Counter)  # of each push that was applied
    applied: int = 0
    repeated: int = 0
    rejected: int = 0
    not_finite: Counter[int] = field(default_factory=Counter)  # by worker

    def to_json(self) -> dict[str, Any]:
        return {name: dict(sorted(v.items())) if isinstance(v, Counter) else v for name, v in vars(self).items()}


class ServerShard:
    """One server's shard of the model."""

    def __init__(self, definition: Definition, server: int, servers: int, make_optimizer: OptimizerFactory) -> None:
        """Start with zero weights and empty tables.

        Args:
            definition: parameters and tables of all servers.
            server: number of this server.
            servers: number of servers.
            make_optimizer: called with this server's slices.
        """
        self.definition, self.server, self.servers = definition, server, servers
        self.slices = cut_parameters(definition.shapes, servers)[server]
        dtype = getattr(torch, definition.dtype)
        self.weights = torch.zeros(sum(each.size for each in self.slices), dtype=dtype)
        self.parameters = [nn.Parameter(part) for part in self._parts(self.weights)]
        named = [(each.name, parameter) for each, parameter in zip(self.slices, self.parameters, strict=True)]
        # optimizers take no empty list
        self.optimizer = make_optimizer(named or [("", nn.Parameter(torch.zeros(0, dtype=dtype)))])
        self.tables = [Table(spec) for spec in definition.tables]
        self.own_buckets = np.flatnonzero(bucket_owners(servers) == server)
        self.version = 0
        self.applied = [0] * definition.workers  # steps that are done, by worker
        self.counts = ShardCounts()
        self.events: list[PushEvent] = []
        self._latest = [(-1, 0)] * definition.workers  # step and try of the last pull
        self._pulled: dict[int, int] = {}  # by worker, the version of a last pull whose push has not come
        self._tries = [0] * definition.workers  # of the last step that is done
        self._retrying: set[int] = set()  # workers that compute a rejected step again
        self._held: dict[int, Push] = {}  # with bound 0, by worker
        self._making: list[tuple[BatchShare, Push]] = []  # those of the sum, in its order
        self._sum: tuple[torch.Tensor, frozenset[int], list[tuple[Ids, Array]]] | None = None
        self._answer: tuple[int, float, int | None] | None = None  # of the last step that was complete
        self._copied = False  # to a checkpoint, since the last update
        self._loaded = [np.zeros(0, np.int64) for _ in self.tables]  # buckets, sorted

    def _parts(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Split (elements,) into views, shaped as the slices."""
        pieces = flat.split([each.size for each in self.slices]) if self.slices else []
        return [piece.view(each.shape) for piece, each in zip(pieces, self.slices, strict=True)]

    # --- pull ----------------------------------------------------------------------------------------------------

    @property
    def slowest(self) -> int:
        """Clocks that every worker has done."""
        return min(self.applied)

    def may_begin(self, worker: int, clock: int, attempt: int) -> bool:
        """Return whether a worker's pull may be answered.

        Every worker must have done `clock` - bound steps; while one recomputes a rejected step, no other starts a new
        one, so its next lag is below the number of workers.
        """
        bound = self.definition.bound
        if bound is not None and clock - self.slowest > bound:
            return False
        return attempt > 0 or not (self._retrying - {worker})

    def pull(self, worker: int, clock: int, attempt: int, ids: Sequence[Ids]) -> tuple[int, torch.Tensor, list[Array]]:
        """Return (version, weights (elements,), rows (n, dim) of `ids` by table), to compute a push with.

        ValueError for an outdated try: a newer one has pulled. A new try may repeat a step that is done here and not on
        other servers.
        """
        if self.definition.backup:
            self._latest[worker] = (clock, attempt)
            return self.version, self.weights.clone(), self.look_up(ids)
        latest, done = self._latest[worker], self.applied[worker]
        if not done - 1 <= clock <= done or (clock, attempt) < latest:
            raise ValueError(f"rank {worker} pulls step {clock}, try {attempt}, after step, try {latest}; {done} done")
        gap, bound = clock - self.slowest, self.definition.bound
        if bound is not None and gap > bound:
            raise BrokenPromise(
                f"rank {worker} starts step {clock} when all have done {self.slowest}: bound = {bound} does not allow "
                "it"
            )
        self._log_unused(worker)
        self._latest[worker], self._pulled[worker] = (clock, attempt), self.version
        if clock == done:
            self.counts.gaps[gap] += 1
        return self.version, self.weights.clone(), self.look_up(ids)

    def look_up(self, ids: Sequence[Ids]) -> list[Array]:
        """Return the current rows (n, dim) of ids (n,), by table."""
        return [table.pull(each) for table, each in zip(self.tables, ids, strict=True)]

    # --- push ----------------------------------------------------------------------------------------------------

    def push(self, push: Push) -> ShardStatus:
        """Take a worker's gradient of a step."""
        if self.definition.backup:
            return self._hold(push)
        worker, done = push.worker, self.applied[push.worker]
        if push.clock < done or worker in self._held:
            self.counts.repeated += 1
            if push.clock == done - 1 and push.attempt != self._tries[worker]:
                self._log_unused(worker)
            return ShardStatus.REPEATED
        if push.clock > done:
            raise BrokenPromise(f"rank {worker} pushes step {push.clock}, and has done {done} of them")
        lag, limit = self.version - push.version, self.definition.lag_limit
        if lag < 0 or (limit is not None and lag > limit):
            raise BrokenPromise(
                f"the push of rank {worker}, step {push.clock} has a version lag of {lag}: with bound = "
                f"{self.definition.bound} it is 0 to {limit}"
            )
        is_finite = math.isfinite(push.norm) and _is_finite(push)
        if not is_finite:
            self.counts.not_finite[worker] += 1
        if self.definition.synchronous:
            self._held[worker] = push
            if len(self._held) == self.definition.workers:
                self._add_up(
                    [(BatchShare(push.clock, each), self._held[each]) for each in range(self.definition.workers)]
                )
            return ShardStatus.HELD
        if is_finite and self.definition.max_lag is not None and lag > self.definition.max_lag:
            self.counts.rejected += 1
            self._retrying.add(worker)
            self._log_unused(worker)
            return ShardStatus.REJECTED
        self._done(push, is_finite)
        if not is_finite:
            return ShardStatus.SKIPPED
        self._step(push.dense, push.absent, push.rows, push.lr * self.definition.rate_share(lag))
        return ShardStatus.APPLIED

    def _done(self, push: Push, is_finite: bool) -> None:
        """Count and log a push that is about to be applied or skipped."""
        self.applied[push.worker] += 1
        self._count(push, is_finite)
        kind = Kind.APPLIED if is_finite else Kind.SKIPPED
        self._log(kind, push.worker, push.attempt, push.clock, push.version)

    def _count(self, push: Push, is_finite: bool) -> None:
        self._tries[push.worker] = push.attempt
        self._retrying.discard(push.worker)
        if self._latest[push.worker] == (push.clock, push.attempt):
            self._pulled.pop(push.worker, None)
        if is_finite:
            self.counts.applied += 1
            self.counts.lags[self.version - push.version] += 1

    def _log_unused(self, worker: int) -> None:
        """Log a worker's last pull, if its push was not applied here: it may be at another server."""
        if worker in self._pulled:
            clock, attempt = self._latest[worker]
            self._log(Kind.UNUSED, worker, attempt, clock, self._pulled.pop(worker))

    def _log(self, kind: Kind, worker: int, attempt: int, clock: int, version: int) -> None:
        """Log the outcome of a gradient.

        Args:
            kind: outcome of the gradient.
            worker: rank that computed the gradient.
            attempt: number of the try.
            clock: step of the gradient.
            version: server version at the pull.
        """
        event = PushEvent(kind, worker, attempt, clock, self.version - version)
        event.packed()  # raises now, not at the coordinated stop, where it does not fit
        self.events.append(event)

    def _step(self, dense: torch.Tensor, absent: frozenset[int], rows: Sequence[tuple[Ids, Array]], lr: float) -> None:
        """Apply one update of dense gradients (elements,) and of rows."""
        self.cut()
        for number, (parameter, grad) in enumerate(zip(self.parameters, self._parts(dense), strict=True)):
            parameter.grad = None if number in absent else grad
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group.get(LR_SCALE, 1.0)
        self.optimizer.step()
        for parameter in self.parameters:
            parameter.grad = None
        for table, (ids, grads) in zip(self.tables, rows, strict=True):
            table.push(ids, grads, lr * self.definition.lr_share)
        self.version += 1

    # --- bound 0 -------------------------------------------------------------------------------------------------

    def _add_up(self, making: list[tuple[BatchShare, Push]]) -> None:
        """Make the mean, in this order, of the pushes that make a step."""
        pushes = [push for _, push in making]
        bad_worker = next((p.worker for p in pushes if not (math.isfinite(p.norm) and _is_finite(p))), None)
        # zeros of absent slices change no sum
        dense = torch.zeros_like(self.weights)
        for push in pushes:
            dense += push.dense
        dense /= len(pushes)
        absent = frozenset.intersection(*(push.absent for push in pushes))
        rows = []
        for number, table in enumerate(self.tables):
            every = [push.rows[number] for push in pushes]
            ids, sums = summed(np.concatenate([i for i, _ in every]), np.concatenate([grads for _, grads in every]))
            rows.append((ids, (sums / len(pushes)).astype(table.spec.dtype, copy=False)))
        squares = float(np.square(dense.numpy(), dtype=np.float64).sum())  # numpy: equal for any number of threads
        squares += sum(float(np.square(grads, dtype=np.float64).sum()) for _, grads in rows)
        self._answer = (pushes[0].clock, squares, bad_worker)
        self._making, self._sum = making, (dense, absent, rows)

    def answer(self, clock: int) -> tuple[float, int | None] | None:
        """Return (sum of squares, rank with a non-finite gradient) of step `clock`; None until all pushes came.

        The sum covers this server's slices. It is kept until the next step is complete, and None after that.
        """
        return self._answer[1:] if self._answer is not None and self._answer[0] == clock else None

    def settle(self, clock: int, factor: float) -> None:
        """Apply a complete step's gradient times `factor`, or skip it where that is not finite. Once a step."""
        if clock < self.slowest:
            return
        if clock > self.slowest or self._sum is None:
            raise BrokenPromise(f"step {clock} is committed before all pushes have come")
        (dense, absent, rows), self._sum = self._sum, None
        making, self._making, self._held = self._making, [], {}
        for part, push in making:
            self._count(push, math.isfinite(factor))
            self._log(
                Kind.APPLIED if math.isfinite(factor) else Kind.SKIPPED,
                part.stream,
                0 if self.definition.backup else push.attempt,
                part.clock,
                push.version,
            )
        self.applied = [clock + 1] * self.definition.workers
        if math.isfinite(factor):
            scaled = [(ids, grads * grads.dtype.type(factor)) for ids, grads in rows]
            self._step(dense.mul_(factor), absent, scaled, making[0][1].lr)

    # --- backup workers ------------------------------------------------------------------------------------------

    def _hold(self, push: Push) -> ShardStatus:
        """Keep a gradient until the first server knows which make the step."""
        worker, held = push.worker, self._held.get(push.worker)
        if push.clock < self.slowest:
            return ShardStatus.LATE
        if push.clock > self.slowest or push.version != self.version:
            raise BrokenPromise(
                f"rank {worker} pushes step {push.clock} of version {push.version}, in step {self.slowest} of version "
                f"{self.version}"
            )
        if held is not None and held.attempt >= push.attempt:
            self.counts.repeated += 1
            return ShardStatus.REPEATED
        if not (math.isfinite(push.norm) and _is_finite(push)):
            self.counts.not_finite[worker] += 1
        self._held[worker] = push
        return ShardStatus.HELD

    def add_up(self, clock: int, chosen: Sequence[tuple[int, BatchShare]]) -> tuple[float, int | None] | None:
        """Add up the gradients that make a step, and answer as `answer` does; None for a step that is long made.

        `chosen`: (worker, part) in the order of the sum.
        """
        if clock == self.slowest and self._sum is None:
            if missing := [worker for worker, _ in chosen if worker not in self._held]:
                raise BrokenPromise(f"step {clock}: the gradients of ranks {missing} make it, and are not here")
            self._add_up([(part, self._held[worker]) for worker, part in chosen])
        return self.answer(clock)

    # --- between steps ------------------------------------------------------------------------------------------

    def begin(self, clock: int) -> None:
        """Make every worker start at a step."""
        self.applied = [clock] * self.definition.workers

    def restart(self, worker: int) -> tuple[int, int]:
        """Return a replaced worker's first step that is not done here, and the number of its new try."""
        return self.applied[worker], self._latest[worker][1] + 1

    def is_drained(self, clock: int) -> bool:
        """Return whether every worker has done exactly `clock` steps."""
        return set(self.applied) == {clock} and not self._held

    def take_events(self) -> list[PushEvent]:
        """Return the events since the last call."""
        for worker in sorted(self._pulled):
            self._log_unused(worker)
        taken, self.events = self.events, []
        return taken

    def dense_state(self) -> dict[str, torch.Tensor]:
        """Return the weights, and the optimizer state of each slice: `<number>.<key>`."""
        found = {"weights": self.weights}
        for number, parameter in enumerate(self.parameters):
            for key, value in self.optimizer.state.get(parameter, {}).items():
                if value is not None:
                    found[f"{number}.{key}"] = torch.as_tensor(value)
        return found

    def load_dense(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take what `dense_state` gave, of this or of other servers' slices put together."""
        self.weights.copy_(state["weights"])
        self.optimizer.state.clear()
        for name, value in state.items():
            number, _, key = name.partition(".")
            if key:
                parameter = self.parameters[int(number)]
                self.optimizer.state[parameter][key] = value.clone()

    def dump(self, table: int, buckets: NDArray[np.int64]) -> TableDump:
        """Copy the whole content of some buckets, for other uses than a checkpoint."""
        return self.tables[table].dump(buckets)

    def save(self, table: int, buckets: NDArray[np.int64], most_bytes: int) -> TableDump:
        """Copy the content of some buckets: what changed since the last checkpoint, or all where that is more.

        Workers ask for parts of the buckets, so changes are noted again from the next update, or cut, on.
        """
        self._copied = True
        return self.tables[table].copy_changes(buckets, most_bytes)

    def cut(self) -> None:
        """Start recording changes again, because a checkpoint now has everything.

        Called before an update, and before the next one.
        """
        if self._copied:
            self._mark_saved()

    def _mark_saved(self) -> None:
        for table in self.tables:
            table.mark_saved()
        self._copied = False

    def clear_tables(self) -> None:
        self.tables = [Table(table.spec) for table in self.tables]
        self._loaded = [np.zeros(0, np.int64) for _ in self.tables]

    def load_table(self, table: int, dump: TableDump) -> None:
        """Add the content of buckets, except of those loaded before: a replaced rank gives all of its own again."""
        new = np.setdiff1d(dump.buckets, self._loaded[table])
        if len(new):
            self.tables[table].load(dump if len(new) == len(dump.buckets) else dump.only(new))
            self._loaded[table] = np.union1d(self._loaded[table], new)

    def begin_table(self, table: int, ids: Ids, rows: Array) -> None:
        """Store rows (n, dim) of another model, except of ids stored before: a replaced rank gives all again."""
        new = ~self.tables[table].stores(ids)
        self.tables[table].begin_with(ids[new], rows[new])

    def digest(self) -> str:
        """Hash (sha256) weights, optimizer state and tables."""
        found = hashlib.sha256()
        for name, tensor in sorted(self.dense_state().items()):
            found.update(name.encode())
            found.update(raw(tensor))
        for table in self.tables:
            for start in range(0, len(self.own_buckets), AT_ONCE):  # memory holds so much of a table twice
                for name, tensor in to_tensors(table.dump(self.own_buckets[start : start + AT_ONCE])).items():
                    found.update(name.encode())
                    found.update(raw(tensor))
        return found.hexdigest()


def _is_finite(push: Push) -> bool:
    return bool(torch.isfinite(push.dense).all()) and all(np.isfinite(grads).all() for _, grads in push.rows)
