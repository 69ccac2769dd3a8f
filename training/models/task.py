"""Define a task: the inputs, the loss and the metrics beside a model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch

from sparkring.training.data.batch import Columns


class Task(ABC):
    """Base of every task, stateless; all but inputs and loss has a default."""

    @abstractmethod
    def inputs(self, columns: Columns) -> tuple[Any, ...]:
        """Positional arguments of the model's forward."""

    @abstractmethod
    def loss(self, outputs: Any, columns: Columns) -> torch.Tensor:
        """Per-row loss (B,), not reduced. For a language model its tokens' sum, divided by the row's length."""

    def metric_names(self) -> tuple[str, ...]:
        return ()

    def metric_sums(self, outputs: Any, columns: Columns) -> dict[str, torch.Tensor]:
        """Per-row contributions (B,) to each metric; the loop weights, sums over ranks and divides by rows."""
        return {}

    def row_values(self, outputs: Any, columns: Columns) -> dict[str, torch.Tensor]:
        """Per-row loss and contributions to each metric (B,), which evaluation adds up."""
        return {"loss": self.loss(outputs, columns)} | self.metric_sums(outputs, columns)

    def split_metric_names(self) -> tuple[str, ...]:
        """Metrics of all rows of a split together: AUC, F1 and the like."""
        return ()

    def split_values(self, outputs: Any, columns: Columns) -> torch.Tensor:
        """What `split_metrics` needs of each row, (B, any number of values); say its score, label and group."""
        raise NotImplementedError(f"{type(self).__name__} has split_metric_names, so it needs split_values")

    def split_metrics(self, values: torch.Tensor, weights: torch.Tensor | None = None) -> dict[str, float]:
        """Every metric of `split_metric_names`, of the `split_values` of all rows of all ranks.

        values (N, as many as split_values gave) float64, in the dataset's order, all finite, N > 0. The test split has
        them, and the validation split where train.best_metric or train.early_stopping names one. weights (N,) float64,
        at least 0 (0: the row counts for nothing): given where the dataset has weights (`etl.weight`), and only there.
        """
        raise NotImplementedError(f"{type(self).__name__} has split_metric_names, so it needs split_metrics")

    def counted_share(self, columns: Columns) -> torch.Tensor | None:
        """Share (B,) of each row that loss and metrics are about, by which evaluation divides; None: whole rows.

        A language model's last row is partly padding.
        """
        return None

    def probabilities(self, outputs: Any) -> torch.Tensor | None:
        """Scores (B,), (B, classes) or (B, labels) that the held-out report is drawn from; None: it shows none."""
        return None

    def labels(self, columns: Columns) -> torch.Tensor | None:
        """True values (B,), or (B, labels), that `probabilities` are compared with."""
        return None

    def slice_sequence(self, columns: Columns, part: int, parts: int) -> Columns:
        """One of `parts` equal stretches of every sequence; ValueError if not divisible."""
        raise ValueError(
            f"parallel.cp > 1: the task {type(self).__name__} has no slice_sequence(columns, part, parts), so its "
            f"sequences cannot be cut; LanguageModelTask has one"
        )
