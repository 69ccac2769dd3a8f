"""A task needs inputs and a loss; everything else has a default."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sparkring.training.models.task import Task


class Smallest(Task):
    def inputs(self, columns: dict[str, Any]) -> tuple[Any, ...]:
        return (columns["x"],)

    def loss(self, outputs: Any, columns: dict[str, Any]) -> torch.Tensor:
        return outputs


def test_a_task_without_metrics_and_predictions_counts_whole_rows() -> None:
    task = Smallest()
    assert (task.metric_names(), task.metric_sums(None, {})) == ((), {})
    assert task.counted_share({}) is task.probabilities(None) is task.labels({}) is None


def test_a_task_that_cannot_cut_sequences_says_so() -> None:
    with pytest.raises(ValueError, match=r"parallel\.cp > 1: the task Smallest has no slice_sequence"):
        Smallest().slice_sequence({}, 0, 2)


def test_a_task_without_a_loss_cannot_be_made() -> None:
    with pytest.raises(TypeError, match="loss"):
        type("NoLoss", (Task,), {"inputs": Smallest.inputs})()
