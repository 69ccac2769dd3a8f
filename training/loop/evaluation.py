"""Evaluate a split: means over all its rows, and metrics of all rows of all ranks together."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch

from sparkring.conf.blocks.train import TrainConfig
from sparkring.training.data.batch import Batch
from sparkring.training.models.task import Task
from sparkring.training.parallel.strategy import Ranks


def evaluate_split(
    ranks: Ranks,
    batches: Iterable[Batch],
    task: Task,
    on_batch: Callable[[Batch, Any], None] | None = None,
    on_progress: Callable[[int], None] = lambda number: None,
    whole: WholeSplit | None = None,
) -> dict[str, float]:
    """Compute loss and metrics over a whole split, the same on every rank. Collective.

    They are sums over rows and ranks, divided by the rows' weights; or by the task's `counted_share` of each.

    Args:
        ranks: ranks that hold the model.
        batches: batches of the split; the last one is padded.
        task: loss and metrics to compute.
        on_batch: gets every non-empty batch and its outputs, on the ranks that see outputs.
        on_progress: gets the number of each batch, so that a long split is not taken for a hang.
        whole: makes the task's `split_metrics` too; on every rank or on none.
    """
    names = ("loss", *task.metric_names())
    sums = torch.zeros(len(names) + 1, dtype=torch.float64)  # each metric's, and the divisor
    seen_by = [*([on_batch] if on_batch else []), *([whole.add] if whole else [])]
    for number, batch in enumerate(batches):
        on_progress(number)
        with ranks.measuring_evaluation(batch):
            sums += _batch_sums(ranks, batch, task, seen_by)
    sums = ranks.meeting.sum_over_data(sums)
    total = float(sums[-1])
    found = {name: float(sums[i]) / total if total else math.nan for i, name in enumerate(names)}
    return found if whole is None else found | whole.metrics()


def _batch_sums(
    ranks: Ranks, batch: Batch, task: Task, seen_by: Iterable[Callable[[Batch, Any], None]]
) -> torch.Tensor:
    """Sum a batch's weighted values and its weights (metrics + 1,); its outputs are freed on return."""
    names = ("loss", *task.metric_names())
    outputs = ranks.evaluate(batch)
    if outputs is None or batch.rows == 0:
        return torch.zeros(len(names) + 1, dtype=torch.float64)
    for see in seen_by:
        see(batch, outputs)
    # weight, each value: (B,)
    weight = batch.row_weights(outputs.device).double()
    values = task.row_values(outputs, batch.columns)
    share = task.counted_share(batch.columns)
    divisor = weight if share is None else share.to(weight) * weight
    return torch.stack([*((values[name].double() * weight).sum() for name in names), divisor.sum()]).cpu()


class WholeSplit:
    """Collects the task's `split_values` of this rank's real rows, and makes metrics of those of all ranks."""

    def __init__(
        self, task: Task, gather: Callable[[bytes], list[bytes]], reports: bool, weighted: bool = False
    ) -> None:
        """Start with no rows.

        Args:
            task: task with the metrics.
            gather: all-gather of bytes between all ranks.
            reports: whether this rank reports; exactly one of the ranks with the same rows does.
            weighted: whether rows have weights for the metrics.
        """
        self.task, self.gather, self.reports, self.weighted = task, gather, reports, weighted
        self._ids: list[np.ndarray] = []
        self._values: list[np.ndarray] = []

    def add(self, batch: Batch, outputs: Any) -> None:
        """Keep the values of a batch's rows that are no padding."""
        if not self.reports:
            return
        real = batch.real_rows()
        assert batch.ids is not None, "evaluation readers carry ids"
        self._ids.append(batch.ids[real].numpy())
        values = self.task.split_values(outputs, batch.columns).double().cpu()
        if self.weighted:
            values = torch.cat([values, batch.row_weights().double().cpu()[:, None]], dim=1)
        self._values.append(values[real].numpy())

    def metrics(self) -> dict[str, float]:
        """Compute the task's `split_metrics` over all rows in dataset order, the same on every rank. Collective.

        NaN where there are no rows, or a value is not finite, as of a model that diverged.
        """
        parts = [_unpacked(answer) for answer in self.gather(_packed(self._ids, self._values))]
        parts = [(ids, values) for ids, values in parts if len(ids)]
        nothing = dict.fromkeys(self.task.split_metric_names(), math.nan)
        if not parts:
            return nothing
        ids, values = (np.concatenate(part) for part in zip(*parts, strict=True))
        if not np.isfinite(values).all():
            return nothing
        ordered = torch.from_numpy(values[np.argsort(ids, kind="stable")])
        if self.weighted:
            return self.task.split_metrics(ordered[:, :-1], ordered[:, -1])
        return self.task.split_metrics(ordered)


def wants_whole_split(config: TrainConfig, names: Iterable[str]) -> bool:
    """Return whether one of these metrics chooses checkpoints or stops training.

    Otherwise evaluations gather no rows: 8 bytes a row and 8 for each of its values, to every rank.
    """
    stop = config.early_stopping
    return bool({config.best_metric, *([stop.metric] if stop else [])} & set(names))


def _packed(ids: list[np.ndarray], values: list[np.ndarray]) -> bytes:
    """Pack rows and values per row as int64, then the ids, then the values."""
    if not ids:
        return np.zeros(2, np.int64).tobytes()
    all_ids, all_values = np.concatenate(ids).astype(np.int64), np.concatenate(values)
    return np.array(all_values.shape, np.int64).tobytes() + all_ids.tobytes() + all_values.tobytes()


def _unpacked(answer: bytes) -> tuple[np.ndarray, np.ndarray]:
    rows, width = np.frombuffer(answer, np.int64, 2)
    ids = np.frombuffer(answer, np.int64, rows, offset=16)
    return ids, np.frombuffer(answer, np.float64, offset=16 + 8 * rows).reshape(rows, width)
