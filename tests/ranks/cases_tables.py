"""Sparse tables under many layouts: ids that repeat within and across ranks, new ids in every step, bags."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from torch import nn

from sparkring.conf.blocks.optim import OptimConfig
from sparkring.conf.blocks.parallel import ParallelConfig
from sparkring.conf.blocks.tables import TablesConfig
from sparkring.conf.rank_info import RankInfo
from sparkring.training.data.batch import Batch, Ragged
from sparkring.training.loop.optim.build import build_optimizer
from sparkring.training.models.sparse_embedding import SparseEmbedding
from sparkring.training.models.task import Task
from sparkring.training.parallel.compose import build_strategy
from sparkring.training.parallel.sparse import TableSettings
from sparkring.training.parallel.step import MeshStrategy
from sparkring.training.tables.exchange import Alone
from sparkring.training.tables.sharded import ShardedTable
from sparkring.training.tables.table import Table, TableSpec, summed
from tests.ranks.problem import full_state, rank_device, rank_part, table_batch

STEPS, ROWS = 20, 24


class Recommender(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.users = SparseEmbedding(["user", "friend"], 4)
        self.tags = SparseEmbedding("tags", 3, scale=[0.1, 0.5, 0.0], bag="mean")
        self.head = nn.Linear(6 + 4 + 4 + 3, 1)

    def forward(self, columns: dict[str, Any]) -> torch.Tensor:
        parts = [columns["x"], self.users(columns["user"]), self.users(columns["friend"]), self.tags(columns["tags"])]
        return self.head(torch.cat(parts, dim=1)).squeeze(-1)


class OnlyTables(nn.Module):
    """Nothing is trained but rows."""

    def __init__(self) -> None:
        super().__init__()
        self.users = SparseEmbedding(["user", "friend"], 4)
        self.tags = SparseEmbedding("tags", 3)

    def forward(self, columns: dict[str, Any]) -> torch.Tensor:
        match = (self.users(columns["user"]) * self.users(columns["friend"])).sum(dim=1)
        return match + self.tags(columns["tags"]).sum(dim=1)


class Rating(Task):
    def inputs(self, columns: dict[str, Any]) -> tuple[Any, ...]:
        return (columns,)

    def loss(self, outputs: torch.Tensor, columns: dict[str, Any]) -> torch.Tensor:
        return (outputs - columns["y"].to(outputs.dtype)).square()


def rating_batch(step: int, dtype: torch.dtype = torch.float64) -> Batch:
    """Half of the users are known, the others are new, two rows each; a bag may be empty."""
    batch = table_batch(step, ROWS, dtype)
    make = torch.Generator().manual_seed(50 + step)
    known = torch.randint(-20, 20, (ROWS,), generator=make) * (2**58 - 1)
    new = step * ROWS + torch.arange(ROWS) // 2 % (ROWS // 4)  # rows of several ranks share a new id
    sizes = torch.randint(0, 4, (ROWS,), generator=make)
    tags = torch.randint(0, 30, (int(sizes.sum()),), generator=make)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)])
    own = {
        "user": torch.where(torch.arange(ROWS) % 2 == 0, known, new),
        "friend": known.flip(0),
        "tags": Ragged(tags, (offsets,)),
    }
    return Batch(batch.columns | own, ROWS, batch.global_rows, batch.consumed_samples, batch.weight)


def recommending(rank: int, world: int, case: dict[str, Any], dtype: torch.dtype = torch.float64) -> MeshStrategy:
    """`case`: `tables` and `parallel` blocks, `clip_norm`; `dense`: False for a model of tables alone."""
    settings = TableSettings(TablesConfig(**case.get("tables", {})), 11, str(dtype).removeprefix("torch."), 5.0)
    parallel = ParallelConfig(**{"engine": "torch", **case.get("parallel", {})})
    info = RankInfo(rank, world, rank, world)
    strategy = build_strategy(
        parallel, info, rank_device(rank, world), clip_norm=case.get("clip_norm", 0.5), tables=settings
    )
    torch.manual_seed(7)
    config = OptimConfig(name="sgd", weight_decay=0.0)
    model = Recommender() if case.get("dense", True) else OnlyTables()
    strategy.prepare(model.to(dtype), Rating(), lambda named: build_optimizer(named, config))
    return strategy


def trained(strategy: MeshStrategy, dtype: torch.dtype = torch.float64, uneven: bool = False) -> dict[str, Any]:
    """What training gives: norms, dense weights, outputs, this rank's part of each table; a bad step in between."""
    norms, skipped = [], []
    batches = [rating_batch(step, dtype) for step in range(STEPS)]
    batches[5].columns["y"][1] = torch.nan  # a row of the first rank
    for batch in strategy.ahead(rank_part(batch, strategy, uneven) for batch in batches):
        strategy.forward_backward(batch)
        info = strategy.step(1e-2)
        norms.append(info.grad_norm)
        skipped.append(info.skipped)
    strategy.tables.drain()
    rows = {name: len(table.table) for name, table in strategy.tables.tables.items()}
    outputs = strategy.evaluate(rank_part(rating_batch(99, dtype), strategy, uneven))
    assert rows == {name: len(table.table) for name, table in strategy.tables.tables.items()}, "evaluation stored rows"
    dumps = {name: vars(table.table.dump(table.own_buckets)) for name, table in strategy.tables.tables.items()}
    return {
        "norms": norms,
        "skipped": skipped,
        "dense": full_state(strategy),
        "outputs": outputs,
        "tables": dumps,
        "rows": rows,
    }


class OneAfterAnother(ShardedTable):
    """What must not be: each rank's gradients are a step of their own."""

    def reduce(self, grads: np.ndarray) -> float:
        route = self._pulls[0].route
        self.asked, self.receive = route.asked, route.receive
        return super().reduce(grads)

    def _sent(self, rows: np.ndarray, send: np.ndarray, receive: np.ndarray, wire: Any) -> np.ndarray:
        self.arrived = super()._sent(rows, send, receive, wire)
        return self.arrived

    def apply(self, lr: float, factor: float) -> None:
        edges = np.cumsum(self.receive)[:-1]
        for ids, grads in zip(np.split(self.asked, edges), np.split(self.arrived, edges), strict=True):
            self.table.push(*summed(ids, grads * factor), lr)


class Lagged(ShardedTable):
    """The lag of one process, without a thread: rows are read from a copy of the table of so many steps ago."""

    def __init__(self, spec: TableSpec, behind: int) -> None:
        super().__init__(spec, Alone())
        self.behind, self.dropped = behind, 0
        self.versions: list[Table] = [copy.deepcopy(self.table)]  # after so many steps

    def pull(self, ids: np.ndarray, training: bool) -> np.ndarray:
        if not training:
            return self.table.pull(ids)
        self.ids, self.seen = ids, self.versions[-1 - self.behind :]  # the oldest is pulled from
        return self.seen[0].pull(ids)

    def reduce(self, grads: np.ndarray) -> float:
        gone = self.seen[0].stores(self.ids) & ~np.all([table.stores(self.ids) for table in self.seen], axis=0)
        self.dropped += int(gone.sum())
        self.kept = self.ids[~gone], grads[~gone]
        return float(np.square(grads[~gone], dtype=np.float64).sum())

    def apply(self, lr: float, factor: float) -> None:
        self.table.push(self.kept[0], self.kept[1] * factor, lr)
        self.versions.append(copy.deepcopy(self.table))

    def drop(self) -> None:
        self.versions.append(self.versions[-1])


def lagged(behind: int, case: dict[str, Any], dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    """What training one process with a lag gives; `dropped`: gradients of rows that were evicted in between."""
    strategy = recommending(0, 1, case, dtype)
    tables = strategy.tables.tables
    tables |= {name: Lagged(table.table.spec, behind) for name, table in tables.items()}
    return trained(strategy, dtype) | {"dropped": sum(table.dropped for table in tables.values())}


def many(rank: int, world: int, payload: dict[str, Any]) -> dict[str, Any]:
    """By case: what training gives on this rank."""
    results = {}
    for name, case in payload["cases"].items():
        dtype = getattr(torch, case.get("dtype", "float64"))
        strategy = recommending(rank, world, case, dtype)
        for table in strategy.tables.tables.values() if case.get("one_after_another") else ():
            table.__class__ = OneAfterAnother
        results[name] = trained(strategy, dtype, case.get("uneven", False))
        strategy.tables.close(failed=False)
        strategy.local.data_parallel.close(failed=True)
    strategy.close()
    return results
