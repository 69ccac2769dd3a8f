"""The strategy every engine and layout runs: forward, weighted loss, backward, norm, clip, step.

What differs is given from outside: a `DataAxis` combines gradients over the batch axes, a `Layout` places the model on
the others. Which goes around which is decided in compose.py alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from training.data.batch import Batch, Columns
from training.models.initial import InitialModel, whole_model
from training.parallel import state as names
from training.parallel.backend import abort_process_groups
from training.parallel.base import OptimizerFactory, StepInfo, Strategy, Task
from training.parallel.batching import pad_rows, split_batch, to_device, weighted_sum
from training.parallel.data_parallel.base import DataAxis
from training.parallel.layout import Layout
from training.parallel.materialize import materialize
from training.parallel.measure import ActivationMeter, WireMeter, combined, held_bytes
from training.parallel.model_parallel.blocks import compile_blocks
from training.parallel.model_parallel.pipeline import Pipeline
from training.parallel.norm import clip_factor, scale_gradients, square_sum
from training.parallel.precision import autocast, loss_scale
from training.parallel.settings import ParallelSettings
from training.parallel.state import Described
from training.parallel.world import Mesh

REACH_STEPS = 10  # within which a gradient must have reached every trainable parameter


class MeshStrategy(Strategy):
    """See base.Strategy. One process is the same code with `NoAxis` and nothing placed."""

    def __init__(
        self,
        settings: ParallelSettings,
        mesh: Mesh,
        rank: int,
        device: torch.device,
        clip_norm: float | None,
        axis: DataAxis,
        layout: Layout,
    ) -> None:
        at = mesh.coordinates(rank)
        self.settings, self.mesh, self.rank, self.device = settings, mesh, rank, device
        self.clip_norm, self.axis, self.layout = clip_norm, axis, layout
        self.engine = axis.engine
        self.data_rank, self.data_size = at.dp, mesh.dp
        self.is_output_rank = at.pp == mesh.pp - 1
        self.wants_sample = mesh.pp * mesh.cp > 1
        self.speaks = self.is_output_rank and at.tp == 0
        self.speaks_for_data_rank = self.speaks and at.cp == 0
        self.norm_is_local = mesh.pp == mesh.tp == 1 and (settings.zero == 0 or mesh.world == 1)
        self.scaler = loss_scale(settings.precision)
        self.batches = 0  # since prepare
        self.steps = 0  # the optimizer has made
        self.held: dict[str, float] = {}
        self.pending = self.wrapped = False

    @property
    def waited_s(self) -> float:
        return self.axis.waited_s + (self.pipeline.link.waited_s if self.pipeline is not None else 0.0)

    # --- prepare -------------------------------------------------------------------------------------------------

    def prepare(
        self,
        model: nn.Module | InitialModel,
        task: Task,
        make_optimizer: OptimizerFactory,
        sample: Batch | None = None,
        compiled: bool = False,
    ) -> None:
        self.task, self.compiled = task, compiled
        initial = model if isinstance(model, InitialModel) else whole_model(model, "it was made before", self.rank == 0)
        check_trainable(initial.module)
        self.plain_keys = list(initial.module.state_dict(keep_vars=True))
        self.aliases = dict(initial.aliases)
        self.module = self.layout.place(initial.module, task, sample)
        self.pipeline = self.layout.pipeline
        stages = list(self.pipeline.stages.values()) if self.pipeline else None
        if compiled:  # what each rank runs, as it is placed: a compiled model could not be cut any more
            for stage in stages or [self.module]:
                compile_blocks(stage)
        self.axis.shard(self.module, stages)
        if self.device.type != "meta":  # else built to be looked at
            materialize(self.module, initial, self.device, self.settings.offload, self.mesh.world)
        self.runnable, self.wrapped = self.axis.wrap(self.module), True
        self.named = list(self.axis.parameters(self.module))
        self.unreached = {names.plain_name(name) for name, _ in self.named}
        self.buffers = list(names.persistent_buffers(self.module).values())
        # a stage may be frozen as a whole: optimizers take no empty list
        trained = [(names.plain_name(name), p) for name, p in self.named] or [("", nn.Parameter(torch.zeros(0)))]
        self.optimizer = make_optimizer(trained)
        self.layout.compare(self.module, task, sample, self.evaluate)
        self.meter, self.activations = WireMeter(self.layout.groups()), ActivationMeter()

    # --- one step ------------------------------------------------------------------------------------------------

    def forward_backward(self, batch: Batch) -> torch.Tensor:
        if self.pending:
            raise RuntimeError("forward_backward was called twice without step(): parts are the strategy's own affair")
        self.pending = True
        self.runnable.train()
        with self._metered():
            total = self._pipelined(self.pipeline, batch) if self.pipeline is not None else self._accumulated(batch)
        self.loss_sum = total
        return total

    def _accumulated(self, batch: Batch) -> torch.Tensor:
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        parts = split_batch(batch, self.settings.accumulate)
        for number, part in enumerate(parts):
            self.axis.counts = part.rows > 0
            with self.axis.scope(last=number == len(parts) - 1):
                if part.rows or self.axis.forward_is_collective:
                    total = total + self._part(part)
        return total

    def _pipelined(self, pipeline: Pipeline, batch: Batch) -> torch.Tensor:
        def inputs(part: Batch) -> torch.Tensor:
            given = self.task.inputs(self._columns(part))
            if len(given) != 1:
                raise ValueError(f"parallel.pp > 1: the first stage takes one tensor, the task gives {len(given)}")
            return given[0]

        def loss(outputs: Any, part: Batch) -> tuple[torch.Tensor, torch.Tensor]:
            value = weighted_sum(self.task.loss(outputs, self._columns(part)), part)
            return value * self.loss_factor(part.global_rows), value.detach().double()

        self.axis.counts = batch.rows > 0
        with self.layout.loss_scope():
            total = pipeline.train(batch, inputs, loss, self.axis.before_stage_backward, self._watched)
        self.axis.after_pipeline()
        if not batch.rows and not self.axis.forward_is_collective:  # ZeRO has summed by now, and noted what counts
            self.module.zero_grad(set_to_none=True)
        return total

    def _some_rows(self, batch: Batch) -> Batch:
        """Of a pass over no rows under tensor parallelism one of weight 0: DTensor's views of 0 rows may loop for ever
        (torch 2.13, `view_groups`)."""
        return pad_rows(batch, 1) if self.mesh.tp > 1 and not batch.rows else batch

    def _columns(self, batch: Batch) -> Columns:
        return self.layout.columns(to_device(batch.columns, self.device))

    def _part(self, part: Batch) -> torch.Tensor:
        part = self._some_rows(part)
        columns = self._columns(part)
        with self.layout.loss_scope():
            with autocast(self.settings.precision, self.device):
                given = self.task.inputs(columns)
                with self._watched(self.module, given):
                    outputs = self.runnable(*given)
                value = weighted_sum(self.task.loss(outputs, columns), part)
            if value.requires_grad:  # else these rows reach no parameter
                (value * self.loss_factor(part.global_rows)).backward()
        return value.detach().double()

    def loss_factor(self, global_rows: int) -> float:
        """Turns a sum of weighted row losses into this rank's part of the global mean, as the axis combines it."""
        combined = self.axis.size if self.axis.averages else 1
        return self.scaler.scale * combined / (self.mesh.cp * global_rows)

    @contextmanager
    def _metered(self) -> Iterator[None]:
        """The second step's collectives, and what it holds whole, are counted: the first one sets things up. Compiled
        code cannot be looked into without running it another way, so under torch.compile nothing is counted."""
        if not self._is_measured() or self.mesh.world == 1:
            yield
            return
        with self.meter, self.axis.watching_whole():
            yield

    def _watched(self, module: nn.Module, batch: tuple[Any, ...]) -> AbstractContextManager[object]:
        """Around a forward pass, whose activations are counted in the second step too. What is checkpointed keeps its
        own books of what backward needs, which nothing else sees."""
        counted = self._is_measured() and not self.settings.activation_checkpointing
        return self.activations.watching(module, batch) if counted else nullcontext()

    def _is_measured(self) -> bool:
        return self.steps == 1 and not self.compiled

    def step(self, lr: float) -> StepInfo:
        self.pending = False
        with self._metered():
            info = self._step(lr)
        self.axis.share_buffers(self.buffers)
        self.optimizer.zero_grad(set_to_none=True)
        self.scaler.update(info.skipped)
        if not info.skipped:
            self.steps += 1
        elif self.steps == 1:
            self.meter.sent.clear()
        return info

    def _step(self, lr: float) -> StepInfo:
        with self.axis.waiting():
            self.axis.finish()
        self.layout.settle(self.module)
        self._require_gradients()
        gradients = [p.grad for _, p in self.named if p.grad is not None]
        norm = self._norm() / self.scaler.scale
        if not math.isfinite(norm):
            return StepInfo(norm, skipped=True, first_bad_rank=self._first_bad_rank())
        scale_gradients(gradients, clip_factor(norm, self.clip_norm) / self.scaler.scale)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        if not self.held:
            self.held = held_bytes(self.module, [p for _, p in self.named], self.optimizer)
        self.axis.after_step()
        return StepInfo(norm)

    def _norm(self) -> float:
        """Global norm of the combined (still loss-scaled) gradients, the same float on every rank."""
        mine = [p.grad for name, p in self.named if p.grad is not None and self.layout.counted(names.plain_name(name))]
        if self.norm_is_local:
            return float(square_sum(mine, self.device, holders=1).sqrt())
        total = square_sum(mine, self.device, holders=self.mesh.dp * self.mesh.cp * self.mesh.tp)
        dist.all_reduce(total)  # on the device: over NCCL where there is one, with no copy to the host before it
        return float(total.sqrt())

    def _first_bad_rank(self) -> int | None:
        """The lowest rank whose own loss was not finite; None when all losses were and only gradients overflowed."""
        first = torch.tensor(self.mesh.world if math.isfinite(float(self.loss_sum)) else self.rank)
        if self.mesh.world > 1:
            dist.all_reduce(first, op=dist.ReduceOp.MIN)
        return int(first) if int(first) < self.mesh.world else None

    def _require_gradients(self) -> None:
        """A step need not reach every parameter; one that none of the first steps has reached on any rank is refused:
        it would silently never train. Collective in the last of these steps."""
        self.unreached -= {names.plain_name(name) for name, p in self.named if p.grad is not None}
        self.batches += 1
        if self.batches != REACH_STEPS:
            return
        everyone: list[Any] = [self.unreached] * self.mesh.world
        if self.mesh.world > 1:
            dist.all_gather_object(everyone, self.unreached)
        missing = sorted(set().union(*everyone))
        if missing:
            more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
            raise ValueError(
                f"no gradient reached {missing[:5]}{more} in the first {REACH_STEPS} steps: the loss does not depend "
                f"on them. Use them in forward, remove them, or freeze them with requires_grad_(False)"
            )

    # --- between steps -------------------------------------------------------------------------------------------

    def evaluate(self, batch: Batch) -> Any:
        self.module.eval()
        try:
            with torch.no_grad(), autocast(self.settings.precision, self.device):
                given = self.task.inputs(self._columns(self._some_rows(batch)))
                outputs = self.pipeline.evaluate(*given) if self.pipeline is not None else self.module(*given)
                outputs = self.layout.whole_outputs(outputs)
                return outputs[: batch.rows] if isinstance(outputs, torch.Tensor) and not batch.rows else outputs
        finally:
            self.axis.after_evaluate()
            self.module.train()

    def sum_over_data(self, values: torch.Tensor) -> torch.Tensor:
        if self.mesh.world == 1:
            return values
        share = values.detach().to("cpu", torch.float64) if self.speaks else torch.zeros(values.shape).double()
        share = share / self.mesh.cp
        dist.all_reduce(share)
        return share

    def measure(self) -> dict[str, float]:
        sent = {f"sent_bytes {axis}": count for axis, count in self.meter.sent.items()}
        if self.axis.step_bytes:
            sent["sent_bytes dp x cp"] = sent.get("sent_bytes dp x cp", 0.0) + self.axis.step_bytes
        peaks = {"gathered_bytes": self.axis.whole_bytes, "activations_bytes": self.activations.peak}
        kept = {name: float(peak) for name, peak in peaks.items() if peak}
        mine = self.held | kept | sent | (self.pipeline.seconds if self.pipeline is not None else {})
        everyone: list[Any] = [mine] * self.mesh.world
        if self.mesh.world > 1:
            dist.all_gather_object(everyone, mine)
        return combined(everyone)

    def state_dict(self) -> dict[str, Any]:
        return {
            "model": names.model_tensors(self.module, self.aliases),
            "optimizer": names.optimizer_tensors(self.optimizer, self.named, self.aliases),
            "scaler": self.scaler.state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        mine = self.state_dict()
        for part in ("model", "optimizer"):
            names.load_tensors(mine[part], state[part], part)
        self.scaler.load(state["scaler"])
        self.axis.after_step()

    def stream_model(self) -> tuple[list[Described], Iterator[torch.Tensor | None]]:
        mine = names.model_tensors(self.module, self.aliases)
        return names.stream_tensors(mine, self.plain_keys, self.rank, self.mesh.world)

    def close(self, failed: bool = False) -> None:
        if self.wrapped:
            self.axis.close(failed)
        if not dist.is_initialized():
            return
        if failed:
            abort_process_groups()
        else:
            dist.destroy_process_group()


def check_trainable(model: nn.Module) -> None:
    """ValueError where there is nothing to train, or a gradient that strategies cannot sum."""
    if not any(p.requires_grad for p in model.parameters()):
        raise ValueError("the model has no trainable parameters (requires_grad): nothing to train")
    sparse = [name for name, module in model.named_modules() if getattr(module, "sparse", False) is True]
    if sparse:
        raise ValueError(
            f"{sparse[0]!r} is {type(model.get_submodule(sparse[0])).__name__}(sparse=True): its gradient is a sparse "
            f"tensor, which no strategy sums and clips; make it with sparse=False"
        )
