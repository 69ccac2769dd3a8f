"""A table spread over ranks: rows are pulled from their owners, and gradients are summed at them.

The owner of an id is that of its bucket (hashing.bucket_owners). A rank sends each id once, however many of its rows
have it, and an owner applies the sum over all ranks once: N ranks make what one process makes, but for the order of
sums. Applying the ranks' gradients one after the other would not, since Adagrad and Adam are not linear.

With a `lag` of s steps the rows of batch t + s are pulled before the gradients of batch t are pushed, so the rows of a
batch lack the gradients of the s batches before it. Every rank pulls and pushes in that one order.

Bytes sent per rank and step, u distinct ids of its rows, D values of b bytes a row, w ranks: ids and rows
(w-1)/w u (8 + 2 D b), counts 8 (w-1). Replicated, nothing is pulled, and ids and gradients go to every rank:
(w-1) (u (8 + D b) + 8).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from sparkring.training.tables.ahead import EVICTED, RowsAhead, ahead_tensors, pulled_ahead, rows_ahead_of
from sparkring.training.tables.exchange import Counts, Exchange
from sparkring.training.tables.files import RowFile
from sparkring.training.tables.hashing import BUCKETS, Ids, bucket_of, bucket_owners
from sparkring.training.tables.table import Table, TableDump, TableSpec, summed

Array = NDArray[Any]


def sent_bytes(replicated: bool, ids: int, row_bytes: int, world: int) -> float:
    """Return the bytes that a rank sends per step, by the formulas above.

    Args:
        replicated: every rank holds every row.
        ids: distinct ids of the rank's rows.
        row_bytes: bytes of a row's weights on the wire.
        world: number of ranks.
    """
    if replicated:
        return (world - 1) * (ids * (8 + row_bytes) + 8)
    return (world - 1) / world * ids * (8 + 2 * row_bytes) + 8 * (world - 1)


@dataclass(frozen=True)
class _Route:
    """How the ids of one batch travel: `order` sorts them by owner, who was `asked` for them by all ranks."""

    order: NDArray[np.int64]
    send: Counts
    receive: Counts
    asked: Ids


@dataclass(frozen=True)
class _Pull:
    """A batch whose gradients have not come yet. `ahead`: what its ids were answered; None without lag."""

    route: _Route
    ahead: RowsAhead | None


class ShardedTable:
    """This rank's shard of a table, or all of it where it is replicated."""

    def __init__(
        self, spec: TableSpec, exchange: Exchange, wire: str = "fp32", replicated: bool = False, lag: int = 0
    ) -> None:
        """Start without rows.

        Args:
            spec: shape and rules of the table.
            exchange: exchange between all ranks.
            wire: fp32 sends rows and gradients as they are, bf16 rounds those of training.
            replicated: every rank holds every row.
            lag: batches that are pulled before the gradients of the first of them are pushed.
        """
        self.table, self.exchange, self.replicated, self.lag = Table(spec), exchange, replicated, lag
        self._wire = torch.bfloat16 if wire == "bf16" else None
        self._owners = bucket_owners(exchange.world)
        self._pulls: deque[_Pull] = deque(maxlen=None if lag else 1)  # the first of them is pushed next
        self._stored_pulls: deque[RowsAhead] = deque()  # of the checkpoint that was loaded, to be made again
        self._pushed: tuple[Ids, Array] | None = None

    @property
    def own_buckets(self) -> NDArray[np.int64]:
        """The buckets that this rank stores in checkpoints and in the finished model."""
        return np.flatnonzero(self._owners == self.exchange.rank)

    @property
    def held_buckets(self) -> NDArray[np.int64]:
        return np.arange(BUCKETS) if self.replicated else self.own_buckets

    def pull(self, ids: Ids, training: bool) -> Array:
        """Pull the rows (n, dim) of distinct ids (n,). Collective. `training`: gradients will be pushed."""
        if self.replicated and not training:
            return self.table.pull(ids)
        route, ahead = self._routed(ids), None
        if training:
            if self.lag:
                again = self._stored_pulls.popleft() if self._stored_pulls else None
                ahead = pulled_ahead(self.table, route.asked, again)
            self._pulls.append(_Pull(route, ahead))
        if self.replicated:
            own = int(route.receive[: self.exchange.rank].sum())  # every rank asks every rank
            return self.table.pull(ids) if ahead is None else ahead.rows[own : own + len(ids)]
        found = self.table.pull(route.asked) if ahead is None else ahead.rows
        # evaluation sees rows as they are stored, as serving does
        rows = self._sent(found, route.receive, route.send, self._wire if training else None)
        pulled = np.empty_like(rows)
        pulled[route.order] = rows
        return pulled

    def reduce(self, grads: Array) -> float:
        """Send the gradients (n, dim) of the first batch without to their owners, who keep the sums. Collective.

        Those of rows that were evicted since their pull are dropped. Returns this rank's share of the sum of the
        squares, which is added over ranks.
        """
        assert self._pulls, "gradients come after a pull for training"
        pull = self._pulls.popleft()
        route, asked = pull.route, pull.route.asked
        arrived = self._sent(grads[route.order], route.send, route.receive, self._wire)
        if pull.ahead is not None:
            there = pull.ahead.state != EVICTED
            asked, arrived = asked[there], arrived[there]
        ids, sums = self._pushed = summed(asked, arrived)
        own = sums[self._owners[bucket_of(ids)] == self.exchange.rank].astype(np.float64)
        return float((own * own).sum())

    def apply(self, lr: float, factor: float) -> None:
        """Step on the kept sums times `factor`."""
        assert self._pushed is not None, "reduce comes first"
        (ids, sums), self._pushed = self._pushed, None
        evicted = self.table.push(ids, sums * sums.dtype.type(factor), lr)
        for pull in self._pulls:
            if pull.ahead is not None:
                pull.ahead.mark_evicted(evicted)

    def save(self, most_bytes: int) -> TableDump:
        """Copy this rank's buckets for a checkpoint: the changes since the last, or all where they are more."""
        return self.table.save(self.own_buckets, most_bytes)

    def save_ahead(self, batches: int) -> dict[str, torch.Tensor]:
        """Copy the rows of this rank's buckets that were pulled ahead, for a checkpoint.

        `batches`: trained by this process so far.
        """
        parts = [pull.ahead.of_buckets(self.own_buckets) for pull in self._pulls if pull.ahead is not None]
        return ahead_tensors(parts, batches, self.table.pull(np.zeros(0, np.int64)))

    def load_ahead(self, files: Sequence[Mapping[str, RowFile]]) -> None:
        """Answer the next pulls of training as they were before the checkpoint."""
        self._stored_pulls = deque(rows_ahead_of(files, self.held_buckets))

    def load(self, dumps: Iterable[TableDump]) -> None:
        """Hold the dumps' content and nothing else."""
        self._pulls.clear()
        self.table = Table(self.table.spec)  # the memory of what was held is free before the first is read
        for dump in dumps:
            self.table.load(dump)

    def drop(self) -> None:
        """Forget the kept sums: the step is skipped."""
        self._pushed = None

    def skip(self) -> None:
        """Forget the first batch without gradients: the step is skipped before any are sent."""
        self._pulls.popleft()

    def _routed(self, ids: Ids) -> _Route:
        """Tell the ranks which ids are asked of them: of each those it owns, or all where each holds all."""
        world = self.exchange.world
        if self.replicated:
            order, send = np.tile(np.arange(len(ids)), world), np.full(world, len(ids))
        else:
            owner = self._owners[bucket_of(ids)]
            order, send = np.argsort(owner, kind="stable"), np.bincount(owner, minlength=world)
        receive = self.exchange.counts(send)
        asked: Ids = self.exchange.rows(torch.from_numpy(ids[order]), send, receive).numpy()
        return _Route(order, send, receive, asked)

    def _sent(self, rows: Array, send: Counts, receive: Counts, wire: torch.dtype | None) -> Array:
        own = torch.from_numpy(np.ascontiguousarray(rows))
        sent = own if wire is None else own.to(wire)
        arrived: Array = self.exchange.rows(sent, send, receive).to(own.dtype).numpy()
        return arrived
