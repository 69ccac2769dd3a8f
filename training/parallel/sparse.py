"""The tables of a model's SparseEmbeddings in a training step: pull, reduce, apply."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from sparkring.conf.blocks.tables import TablesConfig
from sparkring.conf.rules.strategies import table_problem
from sparkring.training.data.batch import Columns, Ragged
from sparkring.training.models.sparse_embedding import PulledRows, SparseEmbedding
from sparkring.training.parallel.mesh import Mesh
from sparkring.training.tables.exchange import Alone, Exchange, TorchExchange
from sparkring.training.tables.files import RowFile, stored_dumps, to_tensors
from sparkring.training.tables.hashing import Ids
from sparkring.training.tables.hot_ids import HotIds, hot_ids_of
from sparkring.training.tables.lookup import LookupTable
from sparkring.training.tables.sharded import ShardedTable
from sparkring.training.tables.table import TableSpec
from sparkring.training.tables.update_rules import UpdateRule


@dataclass(frozen=True)
class TableSettings:
    """The recipe's block, and what tables take from others.

    seed: of the run. dtype: of the rows, as the dense parameters'. lr_share: of the tables' rate in the step's.
    """

    config: TablesConfig = field(default_factory=TablesConfig)
    seed: int = 0
    dtype: str = "float32"
    lr_share: float = 1.0


class SparseTables:
    """One ShardedTable for each SparseEmbedding; false where the model has none."""

    def __init__(
        self,
        modules: Mapping[str, SparseEmbedding],
        settings: TableSettings,
        world: int,
        device: torch.device,
        exchange: Exchange | None = None,
    ) -> None:
        """Make empty tables.

        Args:
            modules: by table name.
            settings: of all tables.
            world: ranks, all of which are data ranks.
            device: of the rows that are pulled.
            exchange: between the ranks; None: all-to-all of torch.
        """
        self.modules, self._device, self._lr_share = modules, device, settings.lr_share
        self._exchange: Exchange = exchange or (TorchExchange() if world > 1 and modules else Alone())
        config = settings.config
        self.tables = {
            name: ShardedTable(_spec(name, module, settings), self._exchange, config.wire, config.place == "replicate")
            for name, module in modules.items()
        }
        self._pulled: dict[str, PulledRows] = {}
        self.hot = {name: HotIds() for name in modules}  # of this rank's batches, since the run began

    def __bool__(self) -> bool:
        return bool(self.tables)

    @property
    def rank(self) -> int:
        return self._exchange.rank

    @property
    def waited_s(self) -> float:
        return self._exchange.waited_s

    def pull(self, columns: Columns, training: bool) -> None:
        """Give every module the rows of the batch's ids. Collective; a rank without rows takes part."""
        for name, module in self.modules.items():
            ids, uses = distinct_ids(name, module, columns)
            self.give(name, ids, self.tables[name].pull(ids, training), training)
            if training:
                self.hot[name] = self.hot[name].with_uses(ids, uses)

    def give(self, name: str, ids: Ids, rows: NDArray[Any], training: bool) -> None:
        """Let a module look up the rows (n, dim) of ids (n,); `training`: their gradients are kept."""
        given = torch.from_numpy(rows).to(self._device).requires_grad_(training)
        pulled = PulledRows(torch.from_numpy(ids).to(self._device), given)
        self.modules[name].source = pulled
        if training:
            self._pulled[name] = pulled

    def reduce(self, divisor: float) -> float:
        """Send all gradients, over `divisor`, to their owners; returns this rank's sum of squares. Collective."""
        squares = 0.0
        for name, table in self.tables.items():
            squares += table.reduce((self.own_gradients(name) / divisor).cpu().numpy())
        return squares

    def own_gradients(self, name: str) -> torch.Tensor:
        """Take the gradients (n, dim) of the rows that a table has given for training."""
        rows = self._pulled.pop(name).rows
        return torch.zeros_like(rows) if rows.grad is None else rows.grad

    def apply(self, lr: float, factor: float) -> None:
        """Step on the reduced gradients times `factor`; `lr`: of the dense parameters."""
        for table in self.tables.values():
            table.apply(lr * self._lr_share, factor)

    def copies(self) -> dict[str, Callable[[int], dict[str, torch.Tensor]]]:
        """By table: a function that copies this rank's buckets for a checkpoint (ShardedTable.save)."""

        def copy(name: str, most_bytes: int) -> dict[str, torch.Tensor]:
            return to_tensors(self.tables[name].save(most_bytes)) | self.hot[name].to_tensors()

        return {name: partial(copy, name) for name in self.tables}

    def load(self, stored: Mapping[str, Sequence[Mapping[str, RowFile]]]) -> None:
        """Read this rank's buckets in place of what the tables hold; `stored`: files of all ranks, by table.

        ValueError where tables are missing or others are stored, before any is changed.
        """
        self.check_stored(stored)
        for name, each in self.tables.items():
            each.load(stored_dumps(name, stored[name], each.held_buckets))
            self.hot[name] = hot_ids_of(stored[name], self._exchange.rank, self._exchange.world)

    def check_stored(self, stored: Mapping[str, Any]) -> None:
        """ValueError where a checkpoint has not the model's tables, by name."""
        if differing := sorted(stored.keys() ^ self.tables.keys()):
            kind = "another model's" if differing[0] in stored else "missing"
            raise ValueError(f"tables of the checkpoint: {differing[0]!r} is {kind}; the model has {[*self.tables]}")

    def measured(self) -> dict[str, dict[str, int]]:
        """Measure this rank's part of each table: rows held, admitted and evicted so far, and the bytes they take."""
        found = {}
        for name, each in self.tables.items():
            admitted, evicted = each.table.counts[each.own_buckets].sum(axis=0).tolist()
            rows = admitted - evicted
            found[name] = {"rows": rows, "admitted": admitted, "evicted": evicted, "bytes": each.table.bytes}
        return found

    def begin_with(self, others: Mapping[str, LookupTable]) -> None:
        """Store this rank's buckets of another model's tables, with optimizer state 0."""
        for name, each in self.tables.items():
            for ids, rows in others[name].content(each.held_buckets):
                each.table.begin_with(ids, rows)

    def drop(self) -> None:
        for table in self.tables.values():
            table.drop()


def check_tables(modules: Mapping[str, SparseEmbedding], mesh: Mesh, ema: float | None, averaging: str) -> None:
    """Raise ValueError where the layout, or averages of the weights, do not go with tables."""
    if problem := table_problem(mesh.tp, mesh.pp, mesh.cp, ema, averaging if mesh.world > 1 else "none"):
        raise ValueError(f"{problem} (tables: {', '.join(modules)})")


def _spec(name: str, module: SparseEmbedding, settings: TableSettings) -> TableSpec:
    config = settings.config
    return TableSpec(
        name=name,
        dim=module.dim,
        scale=module.scale,
        seed=settings.seed,
        rule=UpdateRule(config.optimizer, config.betas, config.eps),
        dtype=settings.dtype,
        max_rows=config.max_rows,
        admit_after=config.admit_after,
    )


def distinct_ids(name: str, module: SparseEmbedding, columns: Columns) -> tuple[Ids, NDArray[np.int64]]:
    """The ids of the module's columns, each once, sorted, and how often each is there.

    ValueError names a column that is missing or of no ids.
    """
    parts: list[Any] = []
    for column in module.columns:
        if column not in columns:
            raise ValueError(
                f"SparseEmbedding {name!r}: column {column!r} is not among those the model is given: {sorted(columns)}"
            )
        values = columns[column].values if isinstance(columns[column], Ragged) else columns[column]
        if not isinstance(values, torch.Tensor) or values.is_floating_point() or values.is_complex():
            kind = values.dtype if isinstance(values, torch.Tensor) else type(values).__name__
            raise ValueError(f"SparseEmbedding {name!r}: column {column!r} is {kind}; ids are whole numbers")
        parts.append(values.reshape(-1).cpu().numpy().astype(np.int64, copy=False))
    return np.unique(np.concatenate(parts), return_counts=True)
