"""Tables whose rows are on servers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, cast

import numpy as np
import torch
from numpy.typing import NDArray

from sparkring.training.data.batch import Columns
from sparkring.training.models.sparse_embedding import PulledRows, SparseEmbedding
from sparkring.training.parallel.servers.link import ServerLink
from sparkring.training.parallel.sparse import SparseTables, TableSettings, distinct_ids
from sparkring.training.servers.client import ALL_BYTES
from sparkring.training.tables.exchange import Counts
from sparkring.training.tables.files import RowFile, stored_dumps, to_tensors
from sparkring.training.tables.hashing import Ids
from sparkring.training.tables.hot_ids import hot_ids_of
from sparkring.training.tables.lookup import LookupTable
from sparkring.training.tables.table import TableDump

Array = NDArray[Any]


class RowServers(Protocol):
    """What tables need of the servers; training/servers/client.py says what each does."""

    @property
    def servers(self) -> int: ...
    def look_up(self, ids: Sequence[Ids]) -> list[Array]: ...
    def dump(self, table: int, buckets: NDArray[np.int64], most_bytes: int, saving: bool) -> TableDump: ...
    def load_table(self, table: int, dump: TableDump) -> None: ...
    def begin_table(self, table: int, ids: Ids, rows: Array) -> None: ...
    def counts(self) -> list[dict[str, Any]]: ...


class Position:
    """A rank's place among the ranks, which say nothing to each other."""

    waited_s = sent_bytes = 0.0

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world = rank, world

    def counts(self, send: Counts) -> Counts:
        raise NotImplementedError("rows are exchanged with servers only")

    def rows(self, rows: torch.Tensor, send: Counts, receive: Counts) -> torch.Tensor:
        raise NotImplementedError("rows are exchanged with servers only")


class ServedTables(SparseTables):
    """See SparseTables. A rank stores its buckets' share in checkpoints and in the finished model."""

    def __init__(
        self,
        modules: Mapping[str, SparseEmbedding],
        settings: TableSettings,
        link: ServerLink,
        device: torch.device,
    ) -> None:
        """Start with tables that stay empty in this process, except for an export.

        Args:
            modules: modules by table name.
            settings: settings of all tables; how rows are sent between ranks is ignored.
            link: connection to the servers, which hold the rows.
            device: device of the pulled rows.
        """
        unsent = settings.config.model_copy(update={"lag": 0, "wire": "fp32", "place": "shard"})
        super().__init__(modules, replace(settings, config=unsent), Position(link.rank, link.world), device)
        self._link, self._servers = link, cast(RowServers, link.client)

    def distinct(self, columns: Columns) -> list[Ids]:
        """Return the distinct ids (n,) of a training batch by table, and count their uses."""
        found = []
        for name, module in self.modules.items():
            ids, uses = distinct_ids(name, module, columns)
            self.hot[name] = self.hot[name].with_uses(ids, uses)
            found.append(ids)
        return found

    def take(self, ids: Sequence[Ids], rows: Sequence[Array]) -> None:
        """Give all modules the rows that were pulled for a step."""
        for name, own, values in zip(self.modules, ids, rows, strict=True):
            self.give(name, own, values, training=True)

    def give(self, name: str, ids: Ids, rows: Array, training: bool) -> None:
        """Let a module look up the rows (n, dim) of ids (n,); `training`: their gradients are kept."""
        given = torch.from_numpy(rows).to(self._device).requires_grad_(training)
        pulled = PulledRows(torch.from_numpy(ids).to(self._device), given)
        self.modules[name].source = pulled
        if training:
            self._pulled[name] = pulled

    def pull(self, columns: Columns, training: bool) -> None:
        """Look up the rows of a batch to evaluate; those of a step are there (`take`)."""
        if training or not self.modules:
            return
        ids = [distinct_ids(name, module, columns)[0] for name, module in self.modules.items()]
        for name, own, rows in zip(self.modules, ids, self._servers.look_up(ids), strict=True):
            self.give(name, own, rows, training=False)

    def gradients(self, factor: float) -> list[Array]:
        """Return the gradients (n, dim) of the pulled rows, times `factor`, by table."""
        rows_of = [self._pulled.pop(name).rows for name in self.modules]
        grads_of = [torch.zeros_like(rows) if rows.grad is None else rows.grad for rows in rows_of]
        return [(grads * factor).cpu().numpy() for grads in grads_of]

    def squares(self) -> float:
        """Sum the squares of the pulled rows' gradients."""
        grads = (pulled.rows.grad for pulled in self._pulled.values())
        return sum(float(grad.double().square().sum()) for grad in grads if grad is not None)

    def drop(self) -> None:
        self._pulled.clear()

    # --- checkpoints and the finished model ----------------------------------------------------------------------

    def copies(self) -> dict[str, Callable[[int], dict[str, torch.Tensor]]]:
        def copy(number: int, name: str, most_bytes: int) -> dict[str, torch.Tensor]:
            dump = self._servers.dump(number, self.tables[name].own_buckets, most_bytes, saving=True)
            return to_tensors(dump) | self.hot[name].to_tensors()

        return {name: partial(copy, number, name) for number, name in enumerate(self.tables)}

    def load(self, stored: Mapping[str, Sequence[Mapping[str, RowFile]]]) -> None:
        self.check_stored(stored)
        for number, (name, each) in enumerate(self.tables.items()):
            if not self._link.is_replacement:  # else what is loaded is on the servers already
                for dump in stored_dumps(name, stored[name], each.own_buckets):
                    self._servers.load_table(number, dump)
            self.hot[name] = hot_ids_of(stored[name], self._exchange.rank, self._exchange.world)

    def fetch(self) -> None:
        """Copy this rank's buckets here, to be exported."""
        for number, each in enumerate(self.tables.values()):
            each.load([self._servers.dump(number, each.own_buckets, ALL_BYTES, saving=False)])

    def measured(self) -> dict[str, dict[str, int]]:
        """Measure the servers, each counted by one rank."""
        rank, world = self._exchange.rank, self._exchange.world
        own = self._servers.counts()[rank::world] if rank < self._servers.servers else []
        found = {}
        for name in self.tables:
            admitted, evicted, held = (sum(each["tables"][name][part] for each in own) for part in range(3))
            found[name] = {"rows": admitted - evicted, "admitted": admitted, "evicted": evicted, "bytes": held}
        return found

    def begin_with(self, others: Mapping[str, LookupTable]) -> None:
        if self._link.is_replacement:
            return
        for number, (name, each) in enumerate(self.tables.items()):
            for ids, rows in others[name].content(each.own_buckets):
                self._servers.begin_table(number, ids, rows)
