"""A rank's rows of a split, held for all rounds: the matrix in XGBoost's intervals, the labels and the weights.

Rows that do not fit into memory are read from the dataset again for each pass that XGBoost makes over them, and their
intervals are kept in pages on the local disk.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
import psutil
import torch
import xgboost

from sparkring.conf.plain_text import count_of
from sparkring.training.data.batch import Batch
from sparkring.training.data.request import no_progress
from sparkring.training.models.task import Task
from sparkring.training.trees.columns import Matrix, TreeColumns, infinite_columns

log = logging.getLogger(__name__)
CELL_BYTES = 4 + 2  # a number, and its interval, of at most 65,536
PAGE_ROWS = 1 << 18  # read at once where rows do not fit into memory


@dataclass(frozen=True)
class HeldBatch(Batch):
    """All rows of a split that this rank has, as one batch; `columns` are the labels alone."""

    matrix: xgboost.DMatrix | None = None

    @property
    def is_in_memory(self) -> bool:
        return not isinstance(self.matrix, xgboost.ExtMemQuantileDMatrix)


@dataclass(frozen=True)
class RowBlock:
    """Some rows: (rows, columns), labels as the task has them, weights and row numbers, (rows,) each."""

    values: Matrix
    labels: dict[str, torch.Tensor]
    weights: torch.Tensor
    ids: torch.Tensor


@dataclass(frozen=True)
class TreeRows:
    """Makes the matrices of splits. task: has the labels. labels: their columns."""

    columns: TreeColumns
    task: Task
    labels: list[str]
    max_bin: int
    threads: int
    on_progress: Callable[[str], None] = no_progress  # called while rows are read

    def blocks(self, batches: Iterable[Batch]) -> Iterator[RowBlock]:
        """Yield the rows of each batch."""
        for number, batch in enumerate(batches):
            self.on_progress(f"read batch {number + 1}")
            yield self.block(batch)

    def block(self, batch: Batch) -> RowBlock:
        """Return a batch's rows without padding. ValueError for values and labels that are not finite."""
        real = batch.real_rows()
        values = self.columns.matrix(batch.columns)[real.numpy()]
        if odd := infinite_columns(self.columns.names, values):
            raise ValueError(
                f"{odd}: {count_of(int(np.isinf(values).sum()), 'infinite value')} in {count_of(len(values), 'row')}; "
                "null or clip them in the recipe's SQL, or add a check"
            )
        assert batch.ids is not None, "evaluation readers carry ids"
        labels = {name: batch.columns[name][real] for name in self.labels}
        found = self.task.labels(labels)
        assert found is not None, "tasks of tables have labels"
        if bad := int((~torch.isfinite(found.double())).sum()):
            raise ValueError(
                f"label {self.labels}: {count_of(bad, 'infinite or NaN value')} in {count_of(len(found), 'row')}; "
                "leave such rows out in the recipe's SQL, or add a check of level row"
            )
        return RowBlock(values, labels, batch.row_weights()[real], batch.ids[real])

    def fit(self, rows: int, share: float, ranks: int) -> bool:
        """Return whether rows and their intervals fit into a share of this rank's part of the host's free memory.

        `ranks`: number of ranks on this host.
        """
        needed = rows * len(self.columns.names) * CELL_BYTES
        return needed <= share * psutil.virtual_memory().available / ranks

    def hold(self, batches: Iterable[Batch], like: xgboost.DMatrix | None = None) -> HeldBatch:
        """Read a split whole. `like`: the training rows' matrix, whose intervals other splits take. Collective."""
        blocks = [*self.blocks(batches)]
        labels, weights, ids = without_matrix(blocks)
        values = joined([block.values for block in blocks], len(self.columns.names))
        del blocks
        matrix = xgboost.QuantileDMatrix(
            values,
            self._targets(labels),
            weight=weights.numpy(),
            feature_names=self.columns.names,
            feature_types=self.columns.types,
            max_bin=self.max_bin,
            nthread=self.threads,
            enable_categorical=True,
            ref=like,
        )
        return self._held(matrix, labels, weights, ids)

    def hold_on_disk(self, batches: Callable[[], Iterator[Batch]], folder: str) -> HeldBatch:
        """Read the training split once for each pass of XGBoost's, and keep its intervals in `folder`. Collective."""
        labels, weights, ids = without_matrix([*map(without_values, self.blocks(batches()))])
        pages = _Pages(lambda: in_pages(self.blocks(batches())), self, folder)
        matrix = xgboost.ExtMemQuantileDMatrix(
            pages, max_bin=self.max_bin, nthread=self.threads, enable_categorical=True
        )
        return self._held(matrix, labels, weights, ids)

    def _targets(self, labels: Mapping[str, torch.Tensor]) -> np.ndarray:
        """Return labels in XGBoost's form, (rows,) or (rows, labels)."""
        found = self.task.labels(dict(labels))
        assert found is not None, "tasks of tables have labels"
        return found.numpy().astype(np.float32)

    def _held(
        self, matrix: xgboost.DMatrix, labels: dict[str, torch.Tensor], weights: torch.Tensor, ids: torch.Tensor
    ) -> HeldBatch:
        rows = len(weights)
        return HeldBatch(labels, rows, rows, rows, weight=weights, ids=ids, matrix=matrix)


class _Pages(xgboost.DataIter):
    """Gives XGBoost the training rows in pages, once for each of its passes."""

    def __init__(self, blocks: Callable[[], Iterator[RowBlock]], rows: TreeRows, folder: str) -> None:
        self._blocks, self._rows = blocks, rows
        self._pass: Iterator[RowBlock] = iter(())
        super().__init__(cache_prefix=f"{folder}/pages", release_data=True)

    def reset(self) -> None:
        self._pass = self._blocks()

    def next(self, input_data: Callable[..., None]) -> bool:
        block = next(self._pass, None)
        if block is None:
            return False
        input_data(
            data=block.values,
            label=self._rows._targets(block.labels),
            weight=block.weights.numpy(),
            feature_names=self._rows.columns.names,
            feature_types=self._rows.columns.types,
        )
        return True


def without_values(block: RowBlock) -> RowBlock:
    """Copy the block's labels, weights and row numbers alone."""
    return replace(block, values=np.zeros((0, 0), np.float32))


def in_pages(blocks: Iterator[RowBlock]) -> Iterator[RowBlock]:
    """Join blocks to pages of about PAGE_ROWS rows."""
    waiting: list[RowBlock] = []
    for block in blocks:
        waiting.append(block)
        if sum(len(each.weights) for each in waiting) >= PAGE_ROWS:
            yield _one(waiting)
            waiting = []
    if waiting:
        yield _one(waiting)


def _one(blocks: list[RowBlock]) -> RowBlock:
    return RowBlock(np.concatenate([block.values for block in blocks]), *without_matrix(blocks))


def without_matrix(blocks: list[RowBlock]) -> tuple[dict[str, torch.Tensor], torch.Tensor, torch.Tensor]:
    """Join the labels, weights and row numbers of blocks; there is at least one."""
    labels = {name: torch.cat([block.labels[name] for block in blocks]) for name in blocks[0].labels}
    return labels, torch.cat([block.weights for block in blocks]), torch.cat([block.ids for block in blocks])


def joined(parts: list[Matrix], columns: int) -> Matrix:
    """Join matrices, each of which is freed when it has been copied. `parts`: is emptied."""
    whole = np.empty((sum(map(len, parts)), columns), np.float32)
    end = len(whole)
    while parts:
        part = parts.pop()
        whole[end - len(part) : end] = part
        end -= len(part)
    return whole
