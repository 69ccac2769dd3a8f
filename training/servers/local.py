"""Servers in this process, as a worker sees them: for replays, which have no connections."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from sparkring.training.servers.client import cut_states, route_of, state_parts, whole_states
from sparkring.training.servers.definition import Definition, OptimizerFactory
from sparkring.training.servers.shard import ServerShard
from sparkring.training.tables.files import joined
from sparkring.training.tables.hashing import Ids, bucket_owners
from sparkring.training.tables.table import TableDump

Array = NDArray[Any]


class LocalServers:
    """What Client has for use before the first step, on shards of this process."""

    def __init__(self, servers: int, workers: int, make_optimizer: OptimizerFactory) -> None:
        self.servers, self.workers, self._make_optimizer = servers, workers, make_optimizer
        self.shards: list[ServerShard] = []

    @property
    def definition(self) -> Definition:
        return self.shards[0].definition

    def define(self, definition: Definition) -> bool:
        self.shards = [ServerShard(definition, n, self.servers, self._make_optimizer) for n in range(self.servers)]
        return False

    def load_dense(self, weights: torch.Tensor, states: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        for shard, state in zip(self.shards, cut_states(self.definition, self.servers, weights, states), strict=True):
            shard.load_dense(state)

    def begin_table(self, table: int, ids: Ids, rows: Array) -> None:
        route = route_of([ids], self.servers)
        (ordered,) = route.sorted([rows])
        for number, shard in enumerate(self.shards):
            shard.begin_table(table, route.of_server(number, route.ids)[0], route.of_server(number, [ordered])[0])

    def begin(self, clock: int) -> None:
        for shard in self.shards:
            shard.begin(clock)

    def round(self, scope: int, channel: str, number: int, value: bytes) -> list[bytes]:
        """Return `value` once per worker: all local workers give the same value."""
        return [value] * self.workers

    def moved(self, servers: int, definition: Definition) -> LocalServers:
        """Return the same content on another number of servers and workers, as a checkpoint moves it."""
        found = LocalServers(servers, definition.workers, self._make_optimizer)
        found.define(definition)
        states = [state for shard in self.shards for state in self._parts(shard)]
        weights = torch.cat([shard.weights for shard in self.shards])
        found.load_dense(weights, whole_states(self.definition, states))
        owners = bucket_owners(servers)
        for table in range(len(definition.tables)):
            whole = joined([shard.dump(table, shard.own_buckets) for shard in self.shards])
            for number, shard in enumerate(found.shards):
                shard.load_table(table, whole.only(np.flatnonzero(owners == number)))
        return found

    def _parts(self, shard: ServerShard) -> Sequence[Any]:
        state = shard.dense_state()
        del state["weights"]
        return state_parts(shard.slices, state)

    # of RowServers, for tables that are only pulled

    def look_up(self, ids: Sequence[Ids]) -> list[Array]:
        raise NotImplementedError("a replay evaluates nothing")

    def dump(self, table: int, buckets: NDArray[np.int64], most_bytes: int, saving: bool) -> TableDump:
        raise NotImplementedError("a replay writes no checkpoint")

    def load_table(self, table: int, dump: TableDump) -> None:
        raise NotImplementedError("a replay begins where its run began")

    def counts(self) -> list[dict[str, Any]]:
        raise NotImplementedError("a replay counts nothing")
