"""One rank's side of a step: its shard of the model, forward, weighted loss, backward, norm, clip, update.

Two objects differ between layouts: a `DataParallel` combines gradients over the batch axes, a `ModelPlacement` places
the model on the others. compose.py decides which goes around which.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from sparkring.training.data.batch import Batch, Columns
from sparkring.training.models.initial import InitialModel, eager_model
from sparkring.training.models.sparse_embedding import SparseEmbedding, sparse_embeddings
from sparkring.training.models.task import Task
from sparkring.training.parallel.average import WeightAverage
from sparkring.training.parallel.batching import pad_rows, split_batch, to_device, weighted_sum
from sparkring.training.parallel.data_parallel.base import DataParallel
from sparkring.training.parallel.data_parallel.batch_norm import SyncedBatchNorm, batch_norms, torch_synced
from sparkring.training.parallel.dtensor import local_tensor
from sparkring.training.parallel.gradients import (
    UnreachedParameters,
    check_trainable,
    clip_factor,
    scale_gradients,
    square_sum,
)
from sparkring.training.parallel.initialize import initialize_parameters
from sparkring.training.parallel.measure import CommsMeter
from sparkring.training.parallel.memory.meters import (
    ActivationMeter,
    RankMemoryMeter,
    held_tensors,
    memory_bytes,
    storage_bytes,
)
from sparkring.training.parallel.model_parallel.blocks import compile_blocks
from sparkring.training.parallel.model_parallel.pipeline import PassFunctions, Pipeline
from sparkring.training.parallel.model_parallel.placement import ModelPlacement
from sparkring.training.parallel.precision import autocast, loss_scale
from sparkring.training.parallel.process_groups import RankContext
from sparkring.training.parallel.residuals import Residuals
from sparkring.training.parallel.sparse import SparseTables, TableSettings, check_tables, table_exchange
from sparkring.training.parallel.state import (
    load_optimizer_state,
    load_tensors,
    model_tensors,
    optimizer_tensors,
    persistent_buffers,
    plain_name,
)
from sparkring.training.tables.exchange import Alone
from sparkring.training.waiting import waits_for_ranks

log = logging.getLogger(__name__)
LR_SCALE = "lr_scale"  # key of an optimizer's parameter group: times the learning rate of the step; absent: 1
OptimizerFactory = Callable[[Iterable[tuple[str, nn.Parameter]]], torch.optim.Optimizer]
"""Named parameters -> optimizer; the strategy decides which parameters (or shards) these are."""
TablesFactory = Callable[[Mapping[str, SparseEmbedding]], SparseTables]


@dataclass(frozen=True)
class StepInfo:
    """What a rank knows of a step that has ended."""

    grad_norm: float  # global, before clipping
    skipped: bool = False  # gradients were not finite on some rank, so no rank stepped
    first_bad_rank: int | None = None
    # of parallel.averaging, whose replicas skip steps by themselves: what to add now to the run's count of skipped
    # steps, on every rank the same
    counted_skips: int | None = None
    counted: bool = True  # this rank's rows are in the step; with backup workers they may come again in a later one


@dataclass(frozen=True)
class PreparedModel:
    """What `prepare` makes: this rank's shard of the model, and its optimizer."""

    task: Task
    module: nn.Module
    runnable: nn.Module  # what forward is called on
    plain_keys: list[str]  # of the whole model's state dict
    named: list[tuple[str, nn.Parameter]]  # what this rank owns and trains
    buffers: list[torch.Tensor]  # that checkpoints hold
    optimizer: torch.optim.Optimizer
    average: WeightAverage | None
    unreached: UnreachedParameters
    comms: CommsMeter
    compiled: bool


class LocalStep:
    """A rank's own computation in a step. A strategy decides what ranks exchange, and when they synchronize.

    Strategies change `averaged_ranks`, `is_alone`, `residuals` and `make_tables` before `prepare`.
    """

    def __init__(
        self,
        context: RankContext,
        data_parallel: DataParallel,
        placement: ModelPlacement,
        clip_norm: float | None,
        ema: float | None = None,
        tables: TableSettings | None = None,
    ) -> None:
        """Combine the components that compose.py has made.

        Args:
            context: this process among the ranks.
            data_parallel: combines gradients over the batch axes.
            placement: placement of the model on the other axes.
            clip_norm: largest global norm of the gradients; None disables clipping.
            ema: decay of the average of the weights; None disables averaging.
            tables: settings of the model's SparseEmbeddings; None for defaults.
        """
        self.context, self.config, self.mesh = context, context.config, context.mesh
        self.rank, self.device, self.clip_norm, self.ema = context.rank, context.device, clip_norm, ema
        self.data_parallel, self.placement = data_parallel, placement
        at, mesh = context.at, context.mesh
        self.aliases: dict[str, str] = {}
        self.is_output_rank = at.pp == mesh.pp - 1
        self.is_sequence_leader = self.is_output_rank and at.tp == 0  # one per cp rank reports its stretch
        self.is_data_leader = self.is_sequence_leader and at.cp == 0
        self.needs_sample = mesh.pp * mesh.cp > 1
        self.norm_is_local = mesh.pp == mesh.tp == 1 and (self.config.zero == 0 or mesh.world == 1)
        self.averaged_ranks = data_parallel.size if data_parallel.averages else 1  # 1 where gradients are summed
        self.is_alone = mesh.world == 1  # no other rank trains
        self.scaler = loss_scale(self.config.precision)
        self.steps = 0  # the optimizer has made
        self.residuals = Residuals(data_parallel, self.rank, mesh.world)
        self.memory: dict[str, float] = {}  # bytes at the first optimizer step
        self.activations = ActivationMeter()
        self.meter: RankMemoryMeter | None = None  # of the second step
        self.evaluation_meter: RankMemoryMeter | None = None  # of the first batch that is evaluated
        self.holder: object = self  # of all that a step may need: its strategy, where there is one
        self.loss_sum = torch.zeros((), dtype=torch.float64)  # of the last batch
        self.table_settings = tables or TableSettings()
        self.make_tables: TablesFactory = self._make_tables
        self.tables = SparseTables({}, self.table_settings, Alone(), self.device)
        self.batch_norm = SyncedBatchNorm([], None)
        self._prepared: PreparedModel | None = None

    @property
    def prepared(self) -> PreparedModel:
        assert self._prepared is not None, "prepare() comes first"
        return self._prepared

    @property
    def pipeline(self) -> Pipeline | None:
        return self.placement.pipeline

    @property
    def waited_s(self) -> float:
        waited_s = self.data_parallel.waited_s + self.tables.waited_s
        return waited_s + (self.pipeline.channel.waited_s if self.pipeline is not None else 0.0)

    # --- prepare -------------------------------------------------------------------------------------------------

    def prepare(
        self,
        model: nn.Module | InitialModel,
        task: Task,
        make_optimizer: OptimizerFactory,
        sample: Batch | None = None,
        compiled: bool = False,
    ) -> None:
        """Cut, initialize and wrap the model (Strategy.prepare), then make the optimizer of what is owned.

        Args:
            model: recorded, or a plain module.
            task: the loss and the metrics.
            make_optimizer: called with the parameters that this rank owns.
            sample: a batch of this data rank's; required with a pipeline or context parallelism.
            compiled: torch.compile each block once it is placed.
        """
        initial = model if isinstance(model, InitialModel) else eager_model(model, "it has memory", self.rank == 0)
        check_trainable(initial.module)
        if embeddings := sparse_embeddings(initial.module):
            check_tables(embeddings, self.mesh, self.ema, self.config.averaging.kind)
        self.tables = self.make_tables(embeddings)
        plain_keys = list(initial.module.state_dict(keep_vars=True))
        self.aliases = dict(initial.aliases)
        group = self._batch_norm_group(initial.module)
        module = initial.module if group is None or self.device.type == "cpu" else torch_synced(initial.module, group)
        module = self.placement.place(module, task, sample)
        stages = list(self.pipeline.stages.values()) if self.pipeline else None
        if compiled:  # after the cut: a compiled model could not be cut any more
            for stage in stages or [module]:
                compile_blocks(stage)
        self.data_parallel.shard(module, stages)
        if self.device.type != "meta":  # else built to be looked at
            initialize_parameters(module, initial, self.device, self.config.offload, self.mesh.world)
        alone = self.is_alone and self.device.type != "meta"
        if self.config.sync_batch_norm and (alone or group is not None):
            self.batch_norm = SyncedBatchNorm(batch_norms(module), group)
        runnable = self.data_parallel.wrap(module)
        named = list(self.data_parallel.owned_parameters(module))
        plain = [(plain_name(name), p) for name, p in named]
        self._prepared = PreparedModel(
            task=task,
            module=module,
            runnable=runnable,
            plain_keys=plain_keys,
            named=named,
            buffers=list(persistent_buffers(module).values()),
            # a stage may be frozen as a whole: optimizers take no empty list
            optimizer=make_optimizer(plain or [("", nn.Parameter(torch.zeros(0)))]),
            average=WeightAverage(self.ema, named) if self.ema is not None else None,
            unreached=UnreachedParameters((name for name, _ in plain), self.mesh.world),
            comms=CommsMeter(self.placement.groups()),
            compiled=compiled,
        )
        self.placement.compare(task, module, sample, self.evaluate)

    def _make_tables(self, modules: Mapping[str, SparseEmbedding]) -> SparseTables:
        exchange = table_exchange(self.mesh.world if modules else 1, self.table_settings, self.context.timeout)
        return SparseTables(modules, self.table_settings, exchange, self.device)

    def _batch_norm_group(self, module: nn.Module) -> dist.ProcessGroup | None:
        """Return the ranks over which batch normalization averages; None: each by itself. Collective."""
        count, world = len(batch_norms(module)), self.mesh.world
        if not count or world == 1 or self.device.type == "meta":
            return None
        whole = self.mesh.dp == self.data_parallel.size == world
        if self.rank == 0 and self.config.sync_batch_norm and whole:
            log.info("parallel.sync_batch_norm: %d layers normalize over the rows of all %d data ranks", count, world)
        elif self.rank == 0:
            why = "parallel.sync_batch_norm is false" if whole else "the layout has more than data ranks of one model"
            log.warning("%d batch normalization layers see each rank's own rows, since %s", count, why)
        # its own group: gradients are sent behind backward, in an order of their own
        return dist.new_group(timeout=self.context.timeout) if self.config.sync_batch_norm and whole else None

    # --- one step ------------------------------------------------------------------------------------------------

    def compute(self, batch: Batch) -> torch.Tensor:
        """Accumulate the gradients of a batch; returns the sum of its weighted losses (Strategy.forward_backward)."""
        self.data_parallel.set_loss_scale(self.scaler.scale)
        self.prepared.runnable.train()
        with self.measuring(batch):
            self.tables.pull(batch.on_host, training=True)
            self.loss_sum = self._pipelined(self.pipeline, batch) if self.pipeline else self._accumulated(batch)
        return self.loss_sum

    def _accumulated(self, batch: Batch) -> torch.Tensor:
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        parts = split_batch(batch, self.config.accumulate)
        for number, part in enumerate(parts):
            self.data_parallel.has_rows = part.rows > 0
            with self.data_parallel.pass_scope(last=number == len(parts) - 1):
                if part.rows or self.data_parallel.forward_is_collective:
                    total = total + self._part(part)
                elif self.batch_norm.is_collective:
                    self._join_without_rows(part)
        return total

    def _join_without_rows(self, part: Batch) -> None:
        """Take part in the collectives of a pass in which this rank has no rows. No parameter gets a gradient."""
        columns, task = self._columns(part), self.prepared.task
        self.batch_norm.begin_without_rows()
        with autocast(self.config.precision, self.device):
            value = weighted_sum(task.loss(self.prepared.runnable(*task.inputs(columns)), columns), part)
        self.batch_norm.finish_without_rows(value)

    def _pipelined(self, pipeline: Pipeline, batch: Batch) -> torch.Tensor:
        task = self.prepared.task

        def inputs(part: Batch) -> torch.Tensor:
            given = task.inputs(self._columns(part))
            if len(given) != 1:
                raise ValueError(f"parallel.pp > 1: the first stage takes one tensor, the task gives {len(given)}")
            first: torch.Tensor = given[0]
            return first

        def loss(outputs: Any, part: Batch) -> tuple[torch.Tensor, torch.Tensor]:
            value = weighted_sum(task.loss(outputs, self._columns(part)), part)
            return value * self.loss_factor(part.global_rows), value.detach().double()

        self.data_parallel.has_rows = batch.rows > 0
        before_backward = self.data_parallel.before_stage_backward
        with self.placement.loss_scope():
            total = pipeline.train(batch, PassFunctions(inputs, loss, before_backward, self._measuring_activations))
        self.data_parallel.after_pipeline()
        if not batch.rows and not self.data_parallel.forward_is_collective:  # ZeRO has reduced by now
            self.prepared.module.zero_grad(set_to_none=True)
        return total

    def _some_rows(self, batch: Batch) -> Batch:
        """Pad a pass over no rows under tensor parallelism to one row of weight 0.

        DTensor's views of 0 rows may loop forever (torch 2.13, `view_groups`).
        """
        return pad_rows(batch, 1) if self.mesh.tp > 1 and not batch.rows else batch

    def _columns(self, batch: Batch) -> Columns:
        return self.placement.columns(to_device(batch.columns, self.device))

    def _part(self, part: Batch) -> torch.Tensor:
        """Run forward and backward of one pass; return its sum of weighted losses."""
        part = self._some_rows(part)
        columns, task = self._columns(part), self.prepared.task
        self.batch_norm.begin(part)
        with self.placement.loss_scope():
            with autocast(self.config.precision, self.device):
                given = task.inputs(columns)
                with self._measuring_activations(self.prepared.module, given):
                    outputs = self.prepared.runnable(*given)
                value = weighted_sum(task.loss(outputs, columns), part)
            if value.requires_grad:  # else these rows reach no parameter
                (value * self.loss_factor(part.global_rows)).backward()
        return value.detach().double()

    def loss_factor(self, global_rows: int) -> float:
        """Turn a sum of weighted row losses into this rank's share of the global mean, as the batch axes combine it."""
        return self.scaler.scale * self.averaged_ranks / (self.mesh.cp * global_rows)

    @contextmanager
    def measuring(self, batch: Batch | None = None) -> Iterator[None]:
        """Measure the second step's collectives and memory, with `batch` at its start: the first step sets up.

        Compiled code can only be measured by running it differently, so under torch.compile nothing is counted.
        """
        if not self.is_measured:
            yield
            return
        if self.meter is None:
            self.meter = self._memory_meter(batch)
        with self.meter, self.prepared.comms, self.data_parallel.measuring_gathered():
            yield

    @contextmanager
    def measuring_evaluation(self, batch: Batch) -> Iterator[None]:
        """Measure the memory of the first evaluated batch, except under torch.compile."""
        if self.evaluation_meter is not None or self.prepared.compiled:
            yield
            return
        self.evaluation_meter = self._memory_meter(batch)
        with self.evaluation_meter:
            yield

    def _memory_meter(self, batch: Batch | None) -> RankMemoryMeter:
        """Create a meter that knows what this rank holds now, and the rows of the batch."""
        meter = RankMemoryMeter(self.device, self.data_parallel.gathered_tensors)
        meter.count_rows([] if batch is None else held_tensors(batch.columns))
        meter.count_existing(held_tensors(self.holder))
        return meter

    def _measuring_activations(self, module: nn.Module, batch: tuple[Any, ...]) -> AbstractContextManager[object]:
        """Measure a forward pass's activations in the second step.

        Not under activation checkpointing, which keeps them where autograd's hooks do not see them.
        """
        counted = self.is_measured and not self.config.activation_checkpointing
        return self.activations.measuring(module, batch) if counted else nullcontext()

    @property
    def is_measured(self) -> bool:
        return self.steps == 1 and not self.prepared.compiled

    def step(self, lr: float) -> StepInfo:
        """Clip and apply the reduced gradients, unless they are not finite; zero them."""
        with self.measuring():
            info = self._step(lr)
        self.end_step(info.skipped)
        return info

    def end_step(self, skipped: bool) -> None:
        """Begin with the next step, after one that was made or skipped."""
        self.data_parallel.broadcast_buffers(self.prepared.buffers)
        self.prepared.optimizer.zero_grad(set_to_none=True)
        self.scaler.update(skipped)
        if not skipped:
            self.steps += 1
        elif self.steps == 1:
            self.prepared.comms.sent.clear()

    def _step(self, lr: float) -> StepInfo:
        prepared = self.prepared
        with self.data_parallel.waiting():
            self.data_parallel.finish_reduction()
        self.placement.finalize_grads(prepared.module)
        prepared.unreached.after_backward(plain_name(name) for name, p in prepared.named if p.grad is not None)
        self.residuals.add_late(prepared.named, self.aliases, self.scaler.scale)
        gradients = [p.grad for _, p in prepared.named if p.grad is not None]
        norm = self._norm() / self.scaler.scale
        if not math.isfinite(norm):
            self.tables.drop()
            return StepInfo(norm, skipped=True)
        factor = clip_factor(norm, self.clip_norm) / self.scaler.scale
        scale_gradients(gradients, factor)
        self.tables.apply(lr, factor)
        for group in prepared.optimizer.param_groups:
            group["lr"] = lr * group.get(LR_SCALE, 1.0)
        prepared.optimizer.step()
        if prepared.average is not None:
            prepared.average.update()
        self.count_memory()
        self.data_parallel.after_step()
        self.residuals.commit()
        return StepInfo(norm)

    def _norm(self) -> float:
        """Return the global norm of the combined, still scaled gradients, the same float on every rank."""
        named = self.prepared.named
        mine = [p.grad for n, p in named if p.grad is not None and self.placement.counts_in_norm(plain_name(n))]
        if self.norm_is_local and not self.tables:
            return float(square_sum(mine, self.device, holders=1).sqrt())
        total = square_sum(mine, self.device, holders=self.mesh.dp * self.mesh.cp * self.mesh.tp)
        if self.tables:
            total += self.tables.reduce(self.averaged_ranks, exact=self.clip_norm is not None)
        return float(total.sqrt()) if self.mesh.world == 1 else _root_of_sum(total)

    def count_memory(self) -> None:
        """Measure the bytes held at the first optimizer step."""
        prepared = self.prepared
        if not self.memory:
            means = prepared.average.means if prepared.average is not None else []
            self.memory = memory_bytes(prepared.module, [p for _, p in prepared.named], prepared.optimizer, means)

    # --- between steps -------------------------------------------------------------------------------------------

    def evaluate(self, batch: Batch) -> Any:
        """Compute the model's outputs without gradients (Strategy.evaluate)."""
        module = self.prepared.module
        module.eval()
        self.batch_norm.begin(batch)
        self.tables.pull(batch.on_host, training=False)
        try:
            with torch.no_grad(), autocast(self.config.precision, self.device):
                given = self.prepared.task.inputs(self._columns(self._some_rows(batch)))
                outputs = self.pipeline.evaluate(*given) if self.pipeline is not None else module(*given)
                outputs = self.placement.whole_outputs(outputs)
                return outputs[: batch.rows] if isinstance(outputs, torch.Tensor) and not batch.rows else outputs
        finally:
            self.data_parallel.after_evaluate()
            module.train()

    def close(self, failed: bool) -> None:
        """End threads, and the collectives that the batch axes have of their own."""
        self.tables.close(failed)
        if self._prepared is not None:
            self.data_parallel.close(failed)

    def measure(self) -> dict[str, float]:
        """Measure this rank's share of what Strategy.measure gives."""
        sent = {f"sent_bytes {axis}": count for axis, count in self.prepared.comms.sent.items()}
        if self.data_parallel.step_bytes:
            sent["sent_bytes dp x cp"] = sent.get("sent_bytes dp x cp", 0.0) + self.data_parallel.step_bytes
        if self.tables.step_bytes:
            sent["sent_bytes dp x cp"] = sent.get("sent_bytes dp x cp", 0.0) + self.tables.step_bytes
        peaks = {"gathered_bytes": self.data_parallel.gathered_bytes, "activations_bytes": self.activations.peak}
        peaks["peak_bytes"] = self.meter.peak if self.meter is not None else 0
        peaks["evaluation_bytes"] = self.evaluation_meter.peak if self.evaluation_meter is not None else 0
        peaks["residuals_bytes"] = 2 * storage_bytes(self.data_parallel.codec_state().residuals.values())
        found = {name: float(peak) for name, peak in peaks.items() if peak}
        return self.memory | found | sent | (self.pipeline.seconds if self.pipeline is not None else {})

    def own_state(self) -> dict[str, Any]:
        """Return this rank's training state by checkpoint section (the tensors themselves)."""
        prepared = self.prepared
        state = {
            "model": model_tensors(prepared.module, self.aliases),
            "optimizer": optimizer_tensors(prepared.optimizer, prepared.named, self.aliases),
            "scaler": self.scaler.state(),
        }
        if prepared.average is not None:
            state |= {"ema": prepared.average.tensors(self.aliases), "ema_steps": {"steps": prepared.average.steps}}
        return state

    def state_dict(self, stored: Mapping[str, Sequence[int] | None] | None = None) -> dict[str, Any]:
        """Return `own_state` and the codec's part of a checkpoint (Strategy.state_dict)."""
        state, named = self.own_state(), self.prepared.named
        if stored is None:
            return state | self.residuals.tensors()
        like = named[0][1] if named else torch.empty(0)  # a stage may be frozen as a whole
        return state | self.residuals.room_for(stored, local_tensor(like.detach()))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a loaded `state_dict`."""
        mine = self.own_state()
        for part in (name for name in mine if name not in ("scaler", "optimizer")):
            load_tensors(mine[part], state[part], part)
        load_optimizer_state(self.prepared.optimizer, self.prepared.named, self.aliases, state["optimizer"])
        self.scaler.load(state["scaler"])
        names = {plain_name(name) for name, _ in self.prepared.named}
        self.residuals.load(state, {self.aliases.get(name, name) for name in names})
        self.data_parallel.share_weights()


@waits_for_ranks
def _root_of_sum(total: torch.Tensor) -> float:
    """Return the square root of a sum over all ranks. Collective.

    On the device: over NCCL on GPUs, with no copy to the host before it. There a rank waits for the others at the first
    value that the host reads of a step, which is this one, and not in the collective.
    """
    dist.all_reduce(total)
    return float(total.sqrt())
