"""Define what the loop needs of a strategy; one process is the oracle.

Every synchronous strategy computes the same thing: the gradient of  sum over the global batch of
weight_i * loss_i / global_rows,  clips it by its global norm, and steps the optimizer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from sparkring.training.data.batch import Batch
from sparkring.training.models.initial import InitialModel
from sparkring.training.models.task import Task
from sparkring.training.parallel.sparse import SparseTables
from sparkring.training.parallel.state import TensorInfo

LR_SCALE = "lr_scale"  # key of an optimizer's parameter group: times the learning rate of the step; absent: 1
Gather = Callable[[bytes], list[bytes]]
"""All-gather of bytes between all ranks: every rank gets all values, in the order of the ranks."""
OptimizerFactory = Callable[[Iterable[tuple[str, nn.Parameter]]], torch.optim.Optimizer]
"""Named parameters -> optimizer; the strategy decides which parameters (or shards) these are."""


@dataclass(frozen=True)
class StepInfo:
    grad_norm: float  # global, before clipping
    skipped: bool = False  # gradients were not finite on some rank, so no rank stepped
    first_bad_rank: int | None = None
    # of parallel.averaging, whose replicas skip steps by themselves: what to add now to the run's count of skipped
    # steps, on every rank the same
    counted_skips: int | None = None
    counted: bool = True  # this rank's rows are in the step; with backup workers they may come again in a later one


class Ranks(ABC):
    """What reading, evaluation and checkpoints need of a job's ranks, whatever model they train."""

    engine: str  # what carries the collectives: "horovod", "torch-gloo", "torch-nccl", "xgboost", "none"
    data_rank: int  # which part of each global batch this rank reads ...
    data_size: int  # ... of how many
    is_data_leader: bool  # of the ranks that read the same rows, this one reports them
    lookahead: int = 1  # steps: rows of a step may be of global batches up to so many, less one, further on

    @property
    def parts(self) -> int:
        """Parts that a global batch of training is cut into."""
        return self.data_size

    @property
    @abstractmethod
    def waited_s(self) -> float:
        """Seconds blocked on other ranks so far; the rest of a step is this rank's own work."""

    @abstractmethod
    def evaluate(self, batch: Batch) -> Any:
        """Model outputs without gradients; None on ranks that do not see them. Collective: every rank calls it."""

    @abstractmethod
    def sum_over_data(self, values: torch.Tensor) -> torch.Tensor:
        """Sum a small float64 tensor over the data ranks, the same result on every rank of the world."""

    def open_gather(self, behind: int = 0) -> Gather | None:
        """Open an all-gather of its own; None: a process group of torch's carries it. Collective.

        `behind`: it is called from a thread beside training too, so many times in a row for one purpose; 0: it is not.
        """
        return None


class Strategy(Ranks):
    """Life: prepare -> (forward_backward, step, evaluate, state_dict)* -> close."""

    aliases: dict[str, str]  # further names of shared parameters and buffers -> the first; empty before `prepare`
    is_output_rank: bool  # this rank sees the model's outputs (the last pipeline stage)
    tables: SparseTables  # of the model's SparseEmbeddings; false where it has none
    needs_sample: bool  # `prepare` skips checks or measurements if it is called without a sample
    meets_each_step: bool = True  # ranks wait for each other in every step; else nothing else may make them, either

    @abstractmethod
    def prepare(
        self,
        model: nn.Module | InitialModel,
        task: Task,
        make_optimizer: OptimizerFactory,
        sample: Batch | None = None,
        compiled: bool = False,
    ) -> None:
        """Cut the model while it has no memory, initialize this rank's part of it, and wrap that.

        ValueError where the cut model and the whole one compute different outputs. Every rank ends with the same
        initial values; those of a model that has memory are rank 0's, and it loses its memory.

        Args:
            model: recorded, or a plain module.
            task: the loss and the metrics.
            make_optimizer: called with the parameters that this rank owns.
            sample: a batch of this data rank's, to time blocks and to compare the cut model with the whole one.
            compiled: torch.compile each block as it is placed on this rank.
        """

    def ahead(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Yield the batches of training; a strategy may look at some before their turn (tables.lag)."""
        return batches

    @abstractmethod
    def forward_backward(self, batch: Batch) -> torch.Tensor:
        """Accumulate gradients of the batch (micro-batched as configured) and start their reduction.

        Returns this data rank's sum of weight_i * loss_i, float64 0-dim, detached (0 where not `is_output_rank`).
        """

    @abstractmethod
    def step(self, lr: float) -> StepInfo:
        """Finish the reduction, clip, step at learning rate `lr`, zero the gradients."""

    def begin(self, step: int, meets_after: Callable[[int], bool] = lambda step: False) -> tuple[int, bytes] | None:
        """Learn, before the first step, how many steps the run has made. Collective.

        `meets_after`: whether ranks evaluate or write a checkpoint on schedule after so many steps.

        Where this rank takes the place of one that died while the others went on, returns the steps it had made and
        what `keep` was last given; else None.
        """
        return None

    def keep(self, state: bytes) -> None:
        """Keep the loop's state after an evaluation, for a rank that takes another's place."""
        return None

    def server_counts(self) -> list[dict[str, Any]]:
        """What each server has seen; empty without servers."""
        return []

    def share_of_sum(self, values: torch.Tensor) -> torch.Tensor:
        """This rank's summand of `sum_over_data`, on the CPU; 0 where another rank reports the same rows."""
        return values.detach().to("cpu", torch.float64)

    @abstractmethod
    def measure(self) -> dict[str, float]:
        """The quantities the planner predicts, measured, under its names; the same on every rank. Collective.

        Bytes held at the first optimizer step (the fullest rank's). In the second step, unless under torch.compile:
        the most that forward kept for backward (not under activation checkpointing) and the bytes sent (the ranks'
        mean). A pipeline's bubble since the second step.
        """

    @abstractmethod
    def state_dict(self, stored: Mapping[str, Sequence[int] | None] | None = None) -> dict[str, Any]:
        """`{"model": ..., "optimizer": ..., "scaler": ...}` for torch.distributed.checkpoint, under names that do not
        depend on the layout; with averages `ema` and `ema_steps` too, with a gradient codec `residuals` of this rank
        and `factors`, with parallel.averaging `averaging`.

        `stored`: shapes by name in a checkpoint that is to be loaded into the result, which then has room for what
        this rank takes over of the codec of another world or recipe.
        """

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None: ...

    def averaged(self) -> AbstractContextManager[None]:
        """Within, the weights are their averages (optim.ema), if there are any. Collective; nothing trains there."""
        return nullcontext()

    @abstractmethod
    def stream_model(self) -> tuple[list[TensorInfo], Iterator[torch.Tensor | None]]:
        """The whole model's parameters and persistent buffers under the first of their plain names, and their values.

        One value at a time: on rank 0's CPU, None on the other ranks. Collective; every rank exhausts the iterator.
        """

    @abstractmethod
    def close(self, failed: bool = False) -> None:
        """Destroy collectives on success, abort them on error; never waits for a dead peer."""
