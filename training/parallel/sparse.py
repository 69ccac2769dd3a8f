"""The tables of a model's SparseEmbeddings in a training step: pull, reduce, apply.

With tables.lag a thread does all of it, in the order it is asked to and over a process group of its own, while this
rank computes: the pull of batch t + lag, then the push of batch t.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from sparkring.conf.blocks.tables import TablesConfig
from sparkring.conf.rules.rule import find_problems
from sparkring.conf.rules.strategies import SPARSE_TABLES, TableLayout
from sparkring.training.data.batch import Batch, Columns, Ragged
from sparkring.training.models.sparse_embedding import PulledRows, SparseEmbedding
from sparkring.training.parallel.mesh import Mesh
from sparkring.training.tables.exchange import Alone, Exchange, TorchExchange
from sparkring.training.tables.files import RowFile, stored_dumps, to_tensors
from sparkring.training.tables.hashing import Ids
from sparkring.training.tables.hot_ids import HotIds, hot_ids_of
from sparkring.training.tables.lookup import LookupTable
from sparkring.training.tables.ordered_calls import OrderedCalls
from sparkring.training.tables.sharded import ShardedTable
from sparkring.training.tables.table import TableSpec
from sparkring.training.tables.update_rules import UpdateRule
from sparkring.training.waiting import waits_for_ranks

T = TypeVar("T")


@dataclass(frozen=True)
class TableSettings:
    """The recipe's block, and what tables take from others.

    seed: of the run. dtype: of the rows, as the dense parameters'. lr_share: of the tables' rate in the step's.
    """

    config: TablesConfig = field(default_factory=TablesConfig)
    seed: int = 0
    dtype: str = "float32"
    lr_share: float = 1.0


@dataclass(frozen=True)
class _Found:
    """A batch's ids of one table, each once (n,), how often it has them (n,), and their rows (n, dim)."""

    ids: Ids
    uses: NDArray[np.int64]
    rows: NDArray[Any]


class SparseTables:
    """One ShardedTable for each SparseEmbedding; false where the model has none."""

    def __init__(
        self,
        modules: Mapping[str, SparseEmbedding],
        settings: TableSettings,
        exchange: Exchange,
        device: torch.device,
    ) -> None:
        """Make empty tables.

        Args:
            modules: modules by table name.
            settings: settings of all tables.
            exchange: with the other ranks, all of which are data ranks.
            device: device of the pulled rows.
        """
        self.modules, self._device, self._lr_share = modules, device, settings.lr_share
        config = settings.config
        self.lag = config.lag if modules else 0
        self._exchange = exchange
        self.tables = {
            name: ShardedTable(
                _spec(name, module, settings), self._exchange, config.wire, config.place == "replicate", self.lag
            )
            for name, module in modules.items()
        }
        self._pulled: dict[str, PulledRows] = {}
        self.hot = {name: HotIds() for name in modules}  # of this rank's batches, since the run began
        self._batches = 0  # trained by this process
        self._thread: OrderedCalls | None = None  # started by the first call where there is a lag
        self._ahead: deque[tuple[Columns, Future[dict[str, _Found]]]] = deque()  # pulled before their turn
        self._unsent: dict[str, NDArray[Any]] = {}  # gradients that are sent when they are applied
        self._waited_s = 0.0
        self._sent: dict[str, tuple[float, int]] = {}  # "pull", "push" of training with lag: bytes, calls

    def __bool__(self) -> bool:
        return bool(self.tables)

    @property
    def rank(self) -> int:
        return self._exchange.rank

    @property
    def waited_s(self) -> float:
        """Seconds that training waited for rows and for the sending of gradients."""
        return self._waited_s if self.lag else self._exchange.waited_s

    @property
    def step_bytes(self) -> float:
        """Bytes sent to other ranks in a step's pull and push, the mean; 0 without lag, where torch's are counted."""
        return sum(sent / calls for sent, calls in self._sent.values())

    def ahead(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Yield the batches, each once the rows of the `lag` batches after it are asked for."""
        if not self.lag:
            yield from batches
            return
        waiting: deque[Batch] = deque()
        for batch in batches:
            found = self._submit(partial(self._counted, "pull", partial(self._find, batch.on_host, True)))
            self._ahead.append((batch.on_host, found))
            waiting.append(batch)
            if len(waiting) > self.lag:
                yield waiting.popleft()
        yield from waiting

    def pull(self, columns: Columns, training: bool) -> None:
        """Give every module the rows of the batch's ids. Collective; a rank without rows takes part.

        With a lag the batches of training are those of `ahead`, whose rows are there already.
        """
        if training and self.lag:
            asked, found = self._ahead.popleft() if self._ahead else (None, None)
            if asked is not columns or found is None:
                raise RuntimeError(f"tables.lag = {self.lag}: train the batches that Strategy.ahead yields, in order")
            rows_of = self._wait(found)
        else:
            rows_of = self._run(partial(self._find, columns, training))
        for name, found_rows in rows_of.items():
            ids, rows = found_rows.ids, torch.from_numpy(found_rows.rows).to(self._device)
            pulled = PulledRows(torch.from_numpy(ids).to(self._device), rows.requires_grad_(training))
            self.modules[name].source = pulled
            if training:
                self._pulled[name] = pulled
                self.hot[name] = self.hot[name].with_uses(ids, found_rows.uses)
        self._batches += training

    def reduce(self, divisor: float, exact: bool = True) -> float:
        """Send all gradients, over `divisor`, to their owners; returns this rank's sum of squares. Collective.

        With a lag and not `exact` they are sent in `apply`, and the squares are of what this rank will send.
        """
        grads_of = {}
        for name in self.tables:
            rows = self._pulled.pop(name).rows
            grads = torch.zeros_like(rows) if rows.grad is None else rows.grad
            grads_of[name] = (grads / divisor).cpu().numpy()
        if exact or not self.lag:
            return self._run(partial(self._counted, "push", partial(self._reduced, grads_of)))
        self._unsent = grads_of
        return float(sum(np.square(grads, dtype=np.float64).sum() for grads in grads_of.values()))

    def apply(self, lr: float, factor: float) -> None:
        """Update rows by the reduced gradients times `factor`; `lr`: rate of the dense parameters."""
        unsent, self._unsent = self._unsent, {}

        def push() -> None:
            if unsent:
                squares = self._counted("push", partial(self._reduced, unsent))
                if not np.isfinite(squares):
                    raise ValueError("tables: gradients of ranks are finite, and their sum is not; lower tables.lr")
            for table in self.tables.values():
                table.apply(lr * self._lr_share, factor)

        if self.lag:
            self._submit(push)
        else:
            push()

    def _find(self, columns: Columns, training: bool) -> dict[str, _Found]:
        """Find the batch's ids and their rows, by table. Collective."""
        found = {}
        for name, module in self.modules.items():
            ids, uses = distinct_ids(name, module, columns)
            found[name] = _Found(ids, uses, self.tables[name].pull(ids, training))
        return found

    def _reduced(self, grads_of: Mapping[str, NDArray[Any]]) -> float:
        return sum(self.tables[name].reduce(grads) for name, grads in grads_of.items())

    def _counted(self, kind: str, function: Callable[[], T]) -> T:
        """Call `function`, and count the bytes it sends where a thread does it: torch's meter does not see them."""
        before = self._exchange.sent_bytes
        result = function()
        if self.lag:
            sent, calls = self._sent.get(kind, (0.0, 0))
            self._sent[kind] = sent + self._exchange.sent_bytes - before, calls + 1
        return result

    def _run(self, function: Callable[[], T]) -> T:
        """Call `function` after all that was asked before."""
        return self._wait(self._submit(function)) if self.lag else function()

    def _submit(self, function: Callable[[], T]) -> Future[T]:
        if self._thread is None:
            self._thread = OrderedCalls("sparkring-tables")
        return self._thread.submit(function)

    @waits_for_ranks
    def _wait(self, result: Future[T]) -> T:
        began = time.monotonic()
        try:
            return result.result()
        finally:
            self._waited_s += time.monotonic() - began

    def drain(self) -> None:
        """Return when every push that was asked for is applied."""
        if self._thread is not None:
            self._run(lambda: None)

    def close(self, failed: bool) -> None:
        """End the thread; without waiting for it where ranks may be dead."""
        if self._thread is not None:
            self._thread.close(wait=not failed)
            self._thread = None

    def copies(self) -> dict[str, Callable[[int], dict[str, torch.Tensor]]]:
        """Return, by table, a function that copies this rank's buckets for a checkpoint (ShardedTable.save).

        Every push is applied by then. Rows that were pulled ahead are copied too: a resumed run pulls them again as
        they were, from any number of ranks.
        """

        def copied(name: str, most_bytes: int) -> dict[str, torch.Tensor]:
            table = self.tables[name]
            found = to_tensors(table.save(most_bytes)) | self.hot[name].to_tensors()
            return found | table.save_ahead(self._batches) if self.lag else found

        def copy(name: str, most_bytes: int) -> dict[str, torch.Tensor]:
            return self._run(partial(copied, name, most_bytes))

        return {name: partial(copy, name) for name in self.tables}

    def load(self, stored: Mapping[str, Sequence[Mapping[str, RowFile]]]) -> None:
        """Read this rank's buckets in place of what the tables hold; `stored`: files of all ranks, by table.

        ValueError where tables are missing or others are stored, before any is changed.
        """
        self.check_stored(stored)
        self.drain()
        self._ahead.clear()
        for name, each in self.tables.items():
            each.load(stored_dumps(name, stored[name], each.held_buckets))
            self.hot[name] = hot_ids_of(stored[name], self._exchange.rank, self._exchange.world)
            if self.lag:
                each.load_ahead(stored[name])

    def check_stored(self, stored: Mapping[str, Any]) -> None:
        """Raise ValueError where a checkpoint has not the model's tables, by name."""
        if differing := sorted(stored.keys() ^ self.tables.keys()):
            kind = "another model's" if differing[0] in stored else "missing"
            raise ValueError(f"tables of the checkpoint: {differing[0]!r} is {kind}; the model has {[*self.tables]}")

    def measured(self) -> dict[str, dict[str, int]]:
        """Measure this rank's shard of each table: rows held, admitted and evicted so far, and the bytes they take."""
        self.drain()
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
        """Forget the gradients of the batch: its step is skipped."""
        unsent, self._unsent = self._unsent, {}
        for table in self.tables.values():
            self._run(table.skip if unsent else table.drop)


def table_exchange(world: int, settings: TableSettings, timeout: timedelta) -> Exchange:
    """Make the exchange of rows between ranks. Collective with a lag: ranks form a process group.

    Args:
        world: number of ranks.
        settings: settings of all tables.
        timeout: timeout of that group's collectives.
    """
    if world == 1:
        return Alone()
    return TorchExchange(dist.new_group(timeout=timeout, backend="gloo") if settings.config.lag else None)


def check_tables(modules: Mapping[str, SparseEmbedding], mesh: Mesh, ema: float | None, averaging: str) -> None:
    """Raise ValueError where the layout, or averages of the weights, do not go with tables."""
    layout = TableLayout(mesh.tp, mesh.pp, mesh.cp, ema, averaging if mesh.world > 1 else "none")
    if problems := find_problems(SPARSE_TABLES, layout):
        raise ValueError(f"{'; '.join(problems)} (tables: {', '.join(modules)})")


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
    """Return the distinct sorted ids of the module's columns, and their counts.

    The ValueError names a column that is missing or has no ids.
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
