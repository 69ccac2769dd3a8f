"""Define a task: the inputs, the loss and the metrics of a model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch

from sparkring.training.data.batch import Columns


class Task(ABC):
    """Base of every task, stateless; all but inputs and loss has a default."""

    @abstractmethod
    def inputs(self, columns: Columns) -> tuple[Any, ...]:
        """Return the positional arguments of the model's forward."""

    @abstractmethod
    def loss(self, outputs: Any, columns: Columns) -> torch.Tensor:
        """Return the per-row loss (B,), not reduced; a language model's mean over the row's tokens."""

    def metric_names(self) -> tuple[str, ...]:
        return ()

    def metric_sums(self, outputs: Any, columns: Columns) -> dict[str, torch.Tensor]:
        """Return each metric's per-row values (B,); the loop weights, sums over ranks and divides by rows."""
        return {}

    def row_values(self, outputs: Any, columns: Columns) -> dict[str, torch.Tensor]:
        """Return the per-row loss and metric values (B,), which evaluation adds up."""
        return {"loss": self.loss(outputs, columns)} | self.metric_sums(outputs, columns)

    def split_metric_names(self) -> tuple[str, ...]:
        """List the metrics of all rows of a split together: AUC, F1 and the like."""
        return ()

    def split_values(self, outputs: Any, columns: Columns) -> torch.Tensor:
        """Return the values `split_metrics` needs per row, (B, values): for example score, label and group."""
        raise NotImplementedError(f"{type(self).__name__} has split_metric_names, so it needs split_values")

    def split_metrics(self, values: torch.Tensor, weights: torch.Tensor | None = None) -> dict[str, float]:
        """Compute each metric of `split_metric_names` from the `split_values` of all rows of all ranks.

        values (N, as many as split_values gave) float64, in the dataset's order, all finite, N > 0. The test split has
        them, and the validation split where train.best_metric or train.early_stopping names one. weights (N,) float64,
        at least 0 (0: the row counts for nothing): given where the dataset has weights (`etl.weight`), and only there.
        """
        raise NotImplementedError(f"{type(self).__name__} has split_metric_names, so it needs split_metrics")

    def counted_share(self, columns: Columns) -> torch.Tensor | None:
        """Return the share (B,) of each row that loss and metrics cover; None for whole rows.

        Evaluation divides by it: a language model's last row is partly padding.
        """
        return None

    def probabilities(self, outputs: Any) -> torch.Tensor | None:
        """Return scores (B,), (B, classes) or (B, labels) for the held-out report; None shows none."""
        return None

    def labels(self, columns: Columns) -> torch.Tensor | None:
        """Return true values (B,), or (B, labels), to compare `probabilities` with."""
        return None

    def slice_sequence(self, columns: Columns, part: int, parts: int) -> Columns:
        """Return one of `parts` equal stretches of every sequence; ValueError if not divisible."""
        raise ValueError(
            f"parallel.cp > 1: the task {type(self).__name__} has no slice_sequence(columns, part, parts), so its "
            f"sequences cannot be cut; LanguageModelTask has one"
        )
