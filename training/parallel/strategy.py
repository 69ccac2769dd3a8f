"""Define what the loop needs of a strategy; one process is the oracle.

Every synchronous strategy computes the same thing: the gradient of  sum over the global batch of
weight_i * loss_i / global_rows,  clips it by its global norm, and steps the optimizer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import nn

from sparkring.training.data.audit.log import AuditLog
from sparkring.training.data.audit.parts import PartsAudit
from sparkring.training.data.batch import Batch, Reader
from sparkring.training.models.initial import InitialModel
from sparkring.training.models.task import Task
from sparkring.training.parallel.local import LocalStep, OptimizerFactory, PreparedModel, StepInfo
from sparkring.training.parallel.meeting import Meeting
from sparkring.training.parallel.sparse import SparseTables
from sparkring.training.parallel.state import TensorInfo, model_tensors, stream_tensors

MeetsAt = Callable[[int, int], int]
"""(step, steps per epoch) -> the next step at which ranks meet, by schedule or by a cut."""


class OpenShare(Protocol):
    """Opens the training rows of one of several streams of batch shares."""

    def __call__(self, stream: int, streams: int, verified: bool = True) -> Reader: ...


class Ranks(ABC):
    """What reading, evaluation and checkpoints need of a job's ranks, whatever model they train."""

    meeting: Meeting
    data_rank: int  # which share of each global batch this rank reads ...
    data_size: int  # ... of how many
    lookahead: int = 1  # steps: rows of a step may be of global batches up to so many, less one, further on

    @property
    @abstractmethod
    def engine(self) -> str:
        """What carries the collectives: "horovod", "torch-gloo", "torch-nccl", "servers", "xgboost", "none"."""

    @property
    @abstractmethod
    def is_data_leader(self) -> bool:
        """Whether this rank, of those that read the same rows, reports them."""

    @property
    @abstractmethod
    def waited_s(self) -> float:
        """Seconds blocked on other ranks so far; the rest of a step is this rank's own work."""

    def open_training(self, open_share: OpenShare, meets_at: MeetsAt) -> Reader:
        """Open the rows that this rank trains on: its share of each global batch."""
        return open_share(self.data_rank, self.data_size)

    def measuring_evaluation(self, batch: Batch) -> AbstractContextManager[object]:
        """Measure the evaluation of a batch, loss and metrics included, if memory is measured."""
        return nullcontext()

    @abstractmethod
    def evaluate(self, batch: Batch) -> Any:
        """Compute outputs without gradients; None on ranks that do not see them. Collective: every rank calls it."""


class Strategy(Ranks):
    """How ranks make steps from what each computes (`local`); synchronization points are in `meeting`.

    Life: prepare -> (forward_backward, step, evaluate, state_dict)* -> close.
    """

    meets_each_step: bool = True  # if False, no other code may add a collective per step
    replaces_ranks: bool = False  # a new process may take a dead rank's place, so the checkpoint it starts from is kept

    def __init__(self, local: LocalStep, meeting: Meeting, data_rank: int, data_size: int) -> None:
        """Begin unprepared. This rank reads share `data_rank` of `data_size` of each global batch."""
        self.local, self.meeting, self.rank = local, meeting, meeting.rank
        local.holder = self
        self.data_rank, self.data_size = data_rank, data_size
        self.awaits_step = False  # forward_backward was called

    @property
    def parts(self) -> int:
        """Parts that a global batch of training is cut into."""
        return self.data_size

    @property
    def engine(self) -> str:
        """What carries the collectives: "horovod", "torch-gloo", "torch-nccl", "servers", "none"."""
        return self.local.data_parallel.engine

    @property
    def prepared(self) -> PreparedModel:
        """This rank's shard of the model, and its optimizer."""
        return self.local.prepared

    @property
    def tables(self) -> SparseTables:
        """Of the model's SparseEmbeddings; false where it has none."""
        return self.local.tables

    @property
    def aliases(self) -> dict[str, str]:
        """Further names of shared parameters and buffers -> the first; empty before `prepare`."""
        return self.local.aliases

    @property
    def is_data_leader(self) -> bool:
        """Whether this rank, of those that read the same rows, reports them."""
        return self.local.is_data_leader

    @property
    def is_output_rank(self) -> bool:
        """Whether this rank sees the model's outputs (the last pipeline stage)."""
        return self.local.is_output_rank

    @property
    def needs_sample(self) -> bool:
        """Whether `prepare` skips checks or measurements if it is called without a sample."""
        return self.local.needs_sample

    @property
    def waited_s(self) -> float:
        """Seconds blocked on other ranks' gradients and weights so far; the rest of a step is this rank's own work."""
        return self.local.waited_s

    def prepare(
        self,
        model: nn.Module | InitialModel,
        task: Task,
        make_optimizer: OptimizerFactory,
        sample: Batch | None = None,
        compiled: bool = False,
    ) -> None:
        """Cut the model while it has no memory, initialize this rank's shard of it, and wrap that.

        ValueError where the cut model and the whole one compute different outputs. Every rank ends with the same
        initial values; those of a model that has memory are rank 0's, and it loses its memory.

        Args:
            model: recorded, or a plain module.
            task: the loss and the metrics.
            make_optimizer: called with the parameters that this rank owns.
            sample: a batch of this data rank's, to time blocks and to compare the cut model with the whole one.
            compiled: torch.compile each block as it is placed on this rank.
        """
        self.local.prepare(model, task, make_optimizer, sample, compiled)

    def ahead(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Yield the batches of training; tables may look at some before their turn (tables.lag)."""
        return self.tables.ahead(batches)

    @abstractmethod
    def forward_backward(self, batch: Batch) -> torch.Tensor:
        """Accumulate gradients of the batch (micro-batched as configured) and start their reduction.

        Returns this data rank's sum of weight_i * loss_i, float64 0-dim, detached (0 where not `is_output_rank`).
        """

    def expect_step(self) -> None:
        """Record that gradients wait for `step`; RuntimeError if some already do."""
        if self.awaits_step:
            raise RuntimeError("forward_backward was called twice without step(): the strategy itself cuts a batch")
        self.awaits_step = True

    @abstractmethod
    def step(self, lr: float) -> StepInfo:
        """Finish the reduction, clip, step at learning rate `lr`, zero the gradients."""

    def measuring_evaluation(self, batch: Batch) -> AbstractContextManager[object]:
        return self.local.measuring_evaluation(batch)

    def evaluate(self, batch: Batch) -> Any:
        """Compute outputs without gradients; None unless `is_output_rank`. Collective: every rank calls it."""
        return self.local.evaluate(batch)

    def begin(self, step: int, meets_after: Callable[[int], bool] = lambda step: False) -> tuple[int, bytes] | None:
        """Learn, before the first step, how many steps the run has made. Collective.

        `meets_after`: whether ranks evaluate or write a checkpoint on schedule after so many steps.

        Where this rank takes the place of one that died while the others went on, returns the steps it had made and
        what `Meeting.keep` was last given; else None.
        """
        return None

    def record_again(self, audit: AuditLog | PartsAudit, training: Reader, begun: int, step: int) -> None:
        """Record rows that a dead rank, which this process replaces, trained on without recording.

        Servers have its pushes of these steps, and a replay of their logs would not give the run's bits with other
        rows.

        Args:
            audit: audit log of this rank.
            training: reader from `open_training`.
            begun: steps done when the attempt began.
            step: steps done by the rank that died.
        """
        assert isinstance(audit, AuditLog)
        audit.record_steps(training, begun, step)

    def measure(self) -> dict[str, float]:
        """Measure the quantities the planner predicts, under its names; the same on every rank. Collective.

        Bytes held at the first optimizer step (the fullest rank's). In the second step, unless under torch.compile: the
        most that forward kept for backward (not under activation checkpointing) and the bytes sent (the ranks' mean). A
        pipeline's bubble since the second step.
        """
        return self.meeting.combine(self.local.measure())

    @abstractmethod
    def state_dict(self, stored: Mapping[str, Sequence[int] | None] | None = None) -> dict[str, Any]:
        """Return `{"model": ..., "optimizer": ..., "scaler": ...}` for torch.distributed.checkpoint.

        Names do not depend on the layout; with averages `ema` and `ema_steps` too, with a gradient codec `residuals` of
        this rank and `factors`, with parallel.averaging `averaging`.
        """

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None: ...

    def averaged(self) -> AbstractContextManager[None]:
        """Use averaged weights (optim.ema), if any, within the block. Collective; no training inside."""
        return nullcontext()

    def stream_model(self) -> tuple[list[TensorInfo], Iterator[torch.Tensor | None]]:
        """Return names and values of the whole model's parameters and persistent buffers, by plain name.

        One value at a time: on rank 0's CPU, None on the other ranks. Collective; every rank exhausts the iterator.
        """
        prepared, meeting = self.prepared, self.meeting
        own = model_tensors(prepared.module, self.aliases)
        return stream_tensors(own, prepared.plain_keys, meeting.rank, meeting.world)

    def close(self, failed: bool = False) -> None:
        """Destroy collectives on success, abort them on error; never waits for a dead peer."""
        self.meeting.close(failed)
