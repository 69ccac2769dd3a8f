"""A table spread over ranks: rows are pulled from their owners, and gradients are summed at them.

The owner of an id is that of its bucket (hashing.bucket_owners). A rank sends each id once, however many of its rows
have it, and an owner applies the sum over all ranks once: N ranks make what one process makes, but for the order of
sums. Applying the ranks' gradients one after the other would not, since Adagrad and Adam are not linear.

Bytes sent per rank and step, u distinct ids of its rows, D values of b bytes a row, w ranks: ids and rows
(w-1)/w u (8 + 2 D b), counts 8 (w-1). Replicated, nothing is pulled, and ids and gradients go to every rank:
(w-1) (u (8 + D b) + 8).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from sparkring.training.tables.exchange import Counts, Exchange
from sparkring.training.tables.hashing import BUCKETS, Ids, bucket_of, bucket_owners
from sparkring.training.tables.table import Table, TableDump, TableSpec, summed

Array = NDArray[Any]


def sent_bytes(replicated: bool, ids: int, row_bytes: int, world: int) -> float:
    """Bytes that a rank sends in a step, by the formulas above.

    Args:
        replicated: every rank holds every row.
        ids: distinct ids of the rank's rows.
        row_bytes: of a row's weights on the wire.
        world: ranks.
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


class ShardedTable:
    """This rank's part of a table, or all of it where it is replicated."""

    def __init__(self, spec: TableSpec, exchange: Exchange, wire: str = "fp32", replicated: bool = False) -> None:
        """Begin without rows.

        Args:
            spec: of the table.
            exchange: between all ranks.
            wire: fp32 sends rows and gradients as they are, bf16 rounds those of training.
            replicated: every rank holds every row.
        """
        self.table, self.exchange, self.replicated = Table(spec), exchange, replicated
        self._wire = torch.bfloat16 if wire == "bf16" else None
        self._owners = bucket_owners(exchange.world)
        self._route: _Route | None = None
        self._pushed: tuple[Ids, Array] | None = None

    @property
    def own_buckets(self) -> NDArray[np.int64]:
        """The buckets that this rank stores in checkpoints and in the finished model."""
        return np.flatnonzero(self._owners == self.exchange.rank)

    @property
    def held_buckets(self) -> NDArray[np.int64]:
        return np.arange(BUCKETS) if self.replicated else self.own_buckets

    def pull(self, ids: Ids, training: bool) -> Array:
        """The rows (n, dim) of distinct ids (n,). Collective. `training`: their gradients will be pushed."""
        if self.replicated:
            if training:
                self._route = self._routed(ids, np.tile(np.arange(len(ids)), self.exchange.world))
            return self.table.pull(ids)
        owner = self._owners[bucket_of(ids)]
        route = self._routed(ids, np.argsort(owner, kind="stable"), np.bincount(owner, minlength=self.exchange.world))
        # evaluation sees rows as they are stored, as serving does
        rows = self._sent(self.table.pull(route.asked), route.receive, route.send, self._wire if training else None)
        pulled = np.empty_like(rows)
        pulled[route.order] = rows
        if training:
            self._route = route
        return pulled

    def reduce(self, grads: Array) -> float:
        """Send the gradients (n, dim) of the ids last pulled to their owners, who keep the sums. Collective.

        Returns this rank's share of the sum of their squares, which is added over ranks.
        """
        route = self._route
        assert route is not None, "gradients come after a pull for training"
        self._route = None
        arrived = self._sent(grads[route.order], route.send, route.receive, self._wire)
        ids, sums = self._pushed = summed(route.asked, arrived)
        own = sums[self._owners[bucket_of(ids)] == self.exchange.rank].astype(np.float64)
        return float((own * own).sum())

    def apply(self, lr: float, factor: float) -> None:
        """Step on the kept sums times `factor`."""
        assert self._pushed is not None, "reduce comes first"
        (ids, sums), self._pushed = self._pushed, None
        self.table.push(ids, sums * sums.dtype.type(factor), lr)

    def save(self, most_bytes: int) -> TableDump:
        """Copy this rank's buckets for a checkpoint: the changes since the last, or all where they are more."""
        return self.table.save(self.own_buckets, most_bytes)

    def load(self, dumps: Iterable[TableDump]) -> None:
        """Hold the dumps' content and nothing else."""
        self.table = Table(self.table.spec)  # the memory of what was held is free before the first is read
        for dump in dumps:
            self.table.load(dump)

    def drop(self) -> None:
        """Forget the kept sums: the step is skipped."""
        self._pushed = None

    def _routed(self, ids: Ids, order: NDArray[np.int64], send: Counts | None = None) -> _Route:
        """Tell the ranks which ids are asked of them. `send`: ids for each rank; None: all of them."""
        send = np.full(self.exchange.world, len(ids)) if send is None else send
        receive = self.exchange.counts(send)
        asked: Ids = self.exchange.rows(torch.from_numpy(ids[order]), send, receive).numpy()
        return _Route(order, send, receive, asked)

    def _sent(self, rows: Array, send: Counts, receive: Counts, wire: torch.dtype | None) -> Array:
        own = torch.from_numpy(np.ascontiguousarray(rows))
        sent = own if wire is None else own.to(wire)
        arrived: Array = self.exchange.rows(sent, send, receive).to(own.dtype).numpy()
        return arrived
