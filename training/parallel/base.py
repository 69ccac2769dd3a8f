"""What the loop asks of a strategy. One process is the degenerate case and the oracle.

Every synchronous strategy computes the same thing: the gradient of  sum over the global batch of
weight_i * loss_i / global_rows,  clips it by its global norm, and steps the optimizer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from training.data.batch import Batch, Columns
from training.models.initial import InitialModel
from training.parallel.state import Described

OptimizerFactory = Callable[[Iterable[tuple[str, nn.Parameter]]], torch.optim.Optimizer]
"""Named parameters -> optimizer; the strategy decides which parameters (or shards) it is given."""


class Task(Protocol):
    """Loss and metrics beside a model, which itself knows of neither."""

    def inputs(self, columns: Columns) -> tuple[Any, ...]:
        """Positional arguments of the model's forward."""
        ...

    def loss(self, outputs: Any, columns: Columns) -> torch.Tensor:
        """Per-row loss (B,), not reduced. For a language model its tokens' sum, divided by the row's length."""
        ...

    def metric_names(self) -> tuple[str, ...]: ...

    def metric_sums(self, outputs: Any, columns: Columns) -> dict[str, torch.Tensor]:
        """Per-row contributions (B,) to each metric; the loop weights, sums over ranks and divides by rows.

        A task may also have `counted(columns)` -> (B,): how much of each row loss and metrics are about, which the loop
        then divides by in place of the rows (a language model's last row is partly padding).
        """
        ...


@dataclass(frozen=True)
class StepInfo:
    grad_norm: float  # global, before clipping
    skipped: bool = False  # gradients were not finite on some rank, so no rank stepped
    first_bad_rank: int | None = None


class Strategy(ABC):
    """Life: prepare -> (forward_backward, step)* with evaluate and state_dict between -> close."""

    engine: str  # what carries the collectives: "horovod", "torch-gloo", "torch-nccl", "none"
    data_rank: int  # which part of each global batch this rank reads ...
    data_size: int  # ... of how many
    aliases: dict[str, str]  # further names of shared parameters and buffers -> the first
    speaks_for_data_rank: bool  # of the ranks that read the same rows, this is the one that reports them
    wants_sample: bool  # what `prepare` does with a sample it would leave undone without one
    is_output_rank: bool  # this rank sees the model's outputs (the last pipeline stage)

    @property
    @abstractmethod
    def waited_s(self) -> float:
        """Seconds blocked on the other ranks' gradients and weights so far: what is left of a step is its own work."""

    @abstractmethod
    def prepare(
        self,
        model: nn.Module | InitialModel,
        task: Task,
        make_optimizer: OptimizerFactory,
        sample: Batch | None = None,
        compiled: bool = False,
    ) -> None:
        """Cut `model` while it has no memory, make this rank's part of it and wrap that. A model that has its memory
        gives it up, and every rank ends with rank 0's parameters.

        `sample`: a batch of this data rank's where `wants_sample`, to time blocks and to compare the cut model with the
        whole one on. ValueError where they compute different outputs.
        `compiled`: torch.compile each block as it is placed on this rank.
        """

    @abstractmethod
    def forward_backward(self, batch: Batch) -> torch.Tensor:
        """Accumulate gradients of the batch (micro-batched as configured) and start their reduction.

        Returns this data rank's sum of weight_i * loss_i, float64 0-dim, detached (0 where not `is_output_rank`).
        """

    @abstractmethod
    def step(self, lr: float) -> StepInfo:
        """Finish the reduction, clip, step at learning rate `lr`, zero the gradients."""

    @abstractmethod
    def evaluate(self, batch: Batch) -> Any:
        """Model outputs without gradients; None where not `is_output_rank`. Collective: every rank calls it."""

    @abstractmethod
    def sum_over_data(self, values: torch.Tensor) -> torch.Tensor:
        """Sum a small float64 tensor over the data ranks, the same result on every rank of the world."""

    @abstractmethod
    def measure(self) -> dict[str, float]:
        """What the planner predicts as it turned out, by the planner's names, the same on every rank. Collective.

        Bytes held at the first optimizer step (the fullest rank's); in the second, not counted under torch.compile, the
        most that forward kept for backward (not under activation checkpointing) and the bytes sent (the ranks' mean);
        and a pipeline's bubble since the second.
        """

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """`{"model": ..., "optimizer": ..., "scaler": ...}` for torch.distributed.checkpoint: names independent of the
        layout."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None: ...

    @abstractmethod
    def stream_model(self) -> tuple[list[Described], Iterator[torch.Tensor | None]]:
        """The whole model's parameters and persistent buffers under the first of their plain names, and their values
        one at a time: on rank 0's CPU, None on the other ranks. Collective; every rank exhausts the iterator."""

    @abstractmethod
    def close(self, failed: bool = False) -> None:
        """Destroy collectives on success, abort them on error; never waits for a dead peer."""
