"""Place a model on the axes that are not batch axes: tp, cp and pp."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from sparkring.training.data.batch import Batch, Columns
from sparkring.training.models.sharding_plan import required_plan
from sparkring.training.models.task import Task
from sparkring.training.parallel.batching import to_device
from sparkring.training.parallel.check import check_widths
from sparkring.training.parallel.dtensor import finalize_partial_grad, local_tensor
from sparkring.training.parallel.equivalence import close, few_rows, partition_problem
from sparkring.training.parallel.model_parallel.blocks import checkpoint_blocks
from sparkring.training.parallel.model_parallel.context import AllToAllCore, apply_context, gather_sequence
from sparkring.training.parallel.model_parallel.p2p import Links, StageChannel
from sparkring.training.parallel.model_parallel.pipeline import (
    Pipeline,
    PipelineStage,
    add_submodule,
    estimated_costs,
    layer_names,
    measured_costs,
    partition,
)
from sparkring.training.parallel.model_parallel.schedules import schedule_table
from sparkring.training.parallel.model_parallel.tensor import apply_tensor, gathered, vocabulary_parallel_loss
from sparkring.training.parallel.precision import DTYPES, autocast
from sparkring.training.parallel.process_groups import RankContext, device_backend
from sparkring.training.parallel.state import plain_name

log = logging.getLogger(__name__)


class ModelPlacement:
    """Place the whole model on every rank: data parallelism only."""

    def __init__(self, context: RankContext) -> None:
        self.context, self.config = context, context.config
        self.pipeline: Pipeline | None = None

    def place(self, model: nn.Module, task: Task, sample: Batch | None) -> nn.Module:
        """Cut `model`; returns this rank's shard. `sample`: rows of this data rank, to time and compare on."""
        if self.config.activation_checkpointing:
            checkpoint_blocks(model)
        return model

    def columns(self, columns: Columns) -> Columns:
        """Return this rank's stretch of every sequence under context parallelism, else all columns."""
        return columns

    def whole_outputs(self, outputs: Any) -> Any:
        """Return outputs as one process would have them (collective)."""
        return outputs

    def loss_scope(self) -> AbstractContextManager[object]:
        """Return the context around the loss."""
        return nullcontext()

    def finalize_grads(self, model: nn.Module) -> None:
        """Place gradients as their parameters and sum tied weights' over stages, after the batch axes."""
        return None

    def compare(self, task: Task, module: nn.Module, sample: Batch | None, evaluate: Callable[[Batch], Any]) -> None:
        """Raise ValueError if the placed model computes something else than the whole one (collective)."""
        return None

    def groups(self) -> dict[str, str]:
        """Map process groups to the planner's axis they serve, if their calls alone do not show it."""
        return {}

    def counts_in_norm(self, name: str) -> bool:
        """Return whether the norm counts this rank's copy of the parameter (a tied weight has two)."""
        return True


class MeshPlacement(ModelPlacement):
    """Context, tensor and pipeline parallelism, in this order, then activation checkpointing."""

    def __init__(self, context: RankContext) -> None:
        super().__init__(context)
        self.mesh, self.at = context.mesh, context.at
        self.ties: list[tuple[str, dist.ProcessGroup]] = []  # name of a weight here, ranks that have it too
        self.uncounted: set[str] = set()  # copies that the norm does not count
        self.whole_sequences = False  # during a comparison: sequences are not cut
        self.slice_sequence: Callable[[Columns, int, int], Columns] | None = None

    def place(self, model: nn.Module, task: Task, sample: Batch | None) -> nn.Module:
        check_widths(model, self.mesh)
        names = layer_names(model) if self.mesh.pp > 1 else []
        runs = self.context.device.type != "meta"  # else built to be looked at
        if names and runs and (rows := self._rows_to_compare(task, sample)) is not None:
            self._agree(lambda: partition_problem(model, names, task.inputs(rows.columns)[0]))
        if self.mesh.cp > 1:
            self.slice_sequence = task.slice_sequence
            apply_context(model, required_plan(model, "cp"), self.context.axis("cp").get_group())
        if self.mesh.tp > 1:
            apply_tensor(model, required_plan(model, "tp"), self.context.axis("tp"), self.config.sequence_parallel)
        if self.mesh.pp == 1:
            return super().place(model, task, sample)
        costs = self._costs(model, names, task, sample)
        return self._cut(model, partition(names, costs, self.mesh.pp * self.config.stages_per_rank))

    def _rows_to_compare(self, task: Task, sample: Batch | None) -> Batch | None:
        """Return rank 0's first rows, on every rank's CPU; None if it has no row."""
        rows: list[Any] = [None]
        if self.context.rank == 0 and sample is not None and sample.rows:
            rows = [few_rows(sample, task, self.mesh.cp * self.mesh.tp)]
        dist.broadcast_object_list(rows, src=0)
        if rows[0] is None:
            log.warning("there is no row to compare the cut model with the whole one on")
        return rows[0]

    def _agree(self, problem_of: Callable[[], str | None]) -> None:
        """Raise ValueError on every rank if rank 0 finds a problem."""
        problem = [problem_of() if self.context.rank == 0 else None]
        dist.broadcast_object_list(problem, src=0)
        if problem[0]:
            raise ValueError(problem[0])

    def _autocast(self) -> AbstractContextManager[object]:
        return autocast(self.config.precision, self.context.device)

    def _costs(self, model: nn.Module, names: list[str], task: Task, sample: Batch | None) -> list[float]:
        """Return the cost per layer; measured ones are rank 0's on every rank."""
        if self.config.balance == "estimated":
            return estimated_costs(model, names)
        if sample is None:
            raise ValueError("parallel.balance=measured: there is no batch to time the blocks on")
        with self._autocast():
            columns = self.columns(to_device(sample.columns, self.context.device))
            seconds = torch.tensor(measured_costs(model, names, task.inputs(columns)[0]))  # (layers,)
        dist.broadcast(seconds, src=0)
        return [float(each) for each in seconds]

    def _cut(self, model: nn.Module, stages: list[list[str]]) -> nn.Module:
        """Keep this rank's stages; returns one module that holds them all under the plain names."""
        config, ranks = self.config, self.mesh.pp
        table = schedule_table(config.schedule, ranks, config.passes, config.stages_per_rank)
        self._tie(model, stages)
        mine: dict[int, nn.Module] = {}
        local = nn.Module()
        for index in range(self.at.pp, len(stages), ranks):
            mine[index] = PipelineStage(model, stages[index])
            if config.activation_checkpointing:
                checkpoint_blocks(mine[index])
            for name in stages[index]:
                add_submodule(local, name, mine[index].get_submodule(name))
        column = self.mesh.ranks_along("pp", self.context.rank)
        channel = StageChannel(self._links(), self.at.pp, column, self.context.device)
        self.pipeline = Pipeline(table, self.at.pp, mine, len(stages), channel, self._autocast)
        return local

    def _tie(self, model: nn.Module, stages: list[list[str]]) -> None:
        """Make a group per weight that stages of two ranks share: its gradients are summed, its norm counts once."""
        rank_of_layer = {name: number % self.mesh.pp for number, names in enumerate(stages) for name in names}
        copies: dict[int, list[tuple[str, int]]] = {}  # parameter -> its names and pipeline ranks
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if parameter.requires_grad:
                layer = next(layer for layer in rank_of_layer if name.startswith(f"{layer}."))
                copies.setdefault(id(parameter), []).append((name, rank_of_layer[layer]))
        for shared in copies.values():
            ranks = sorted({rank for _, rank in shared})
            if len(ranks) == 1:
                continue
            group = self._pipeline_group(ranks)
            mine = [name for name, rank in shared if rank == self.at.pp]
            if mine:
                self.ties.append((mine[0], group))
            if self.at.pp != shared[0][1]:
                self.uncounted.update(mine)

    def _links(self) -> Links:
        """Make the group of each direction between pipeline neighbors (p2p.py says why). Collective."""
        ranks = range(self.mesh.pp)
        pairs = sorted({pair for r in ranks for pair in ((r, (r + 1) % len(ranks)), ((r + 1) % len(ranks), r))})
        if device_backend(self.context.device) != "nccl":
            return dict.fromkeys(pairs, self.context.axis("pp").get_group())
        return {pair: self._pipeline_group(sorted(pair)) for pair in pairs}

    def _pipeline_group(self, pipeline_ranks: list[int]) -> dist.ProcessGroup:
        """Make the group of each pipeline's ranks; returns the one this rank is in, if any. Collective."""
        mine = None
        for first in range(self.mesh.world):
            if self.mesh.coordinates(first).pp != 0:
                continue
            column = self.mesh.ranks_along("pp", first)
            group = dist.new_group([column[rank] for rank in pipeline_ranks])
            if self.context.rank in column and self.at.pp in pipeline_ranks:
                mine = group
        return mine if mine is not None else dist.group.WORLD  # type: ignore[return-value]

    def columns(self, columns: Columns) -> Columns:
        if self.slice_sequence is None or self.whole_sequences:
            return columns
        return self.slice_sequence(columns, self.at.cp, self.mesh.cp)

    def whole_outputs(self, outputs: Any) -> Any:
        if outputs is None:
            return None
        outputs = gathered(outputs)
        if self.mesh.cp == 1 or self.whole_sequences:
            return outputs
        return gather_sequence(outputs, self.context.axis("cp").get_group())

    def loss_scope(self) -> AbstractContextManager[object]:
        return vocabulary_parallel_loss() if self.mesh.tp > 1 else nullcontext()

    def finalize_grads(self, model: nn.Module) -> None:
        if self.mesh.tp > 1:
            for parameter in model.parameters():
                finalize_partial_grad(parameter)
        parameters = {plain_name(name): p for name, p in model.named_parameters(remove_duplicate=False)}
        for name, group in self.ties:
            sum_tied(parameters[name], group)

    def compare(self, task: Task, module: nn.Module, sample: Batch | None, evaluate: Callable[[Batch], Any]) -> None:
        """Compare stretches of sequences with whole sequences, on the ranks that see outputs."""
        if self.mesh.cp == 1 or (rows := self._rows_to_compare(task, sample)) is None:
            return
        stretches = evaluate(rows)
        self._set_whole_sequences(module, True)
        whole = evaluate(rows)
        self._set_whole_sequences(module, False)
        same = torch.tensor(float(whole is None or close(stretches, whole, DTYPES.get(self.config.precision))))
        dist.all_reduce(same, op=dist.ReduceOp.MIN)
        if not same:
            raise ValueError(
                f"parallel.cp = {self.mesh.cp}: on a stretch of each sequence the model computes something else than "
                f"on whole sequences, so it would train another model: what it does outside of its attention cores may "
                f"not depend on a token's position or neighbors (learned positions restart at 0 in every stretch)"
            )

    def _set_whole_sequences(self, module: nn.Module, whole: bool) -> None:
        self.whole_sequences = whole
        for core in (each for each in module.modules() if isinstance(each, AllToAllCore)):
            core.whole_sequences = whole

    def groups(self) -> dict[str, str]:
        found = {str(group.group_name): "pp tied weights" for _, group in self.ties}
        if self.mesh.tp > 1:
            found[str(self.context.axis("tp").get_group().group_name)] = "tp"
        return found

    def counts_in_norm(self, name: str) -> bool:
        return name not in self.uncounted


def sum_tied(parameter: nn.Parameter, group: dist.ProcessGroup) -> None:
    """Sum the gradients of a weight's copies; None if no copy has one."""
    here = parameter.grad is not None
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    mine = local_tensor(parameter.grad)
    reached = mine.new_full((), float(here))
    dist.all_reduce(mine, group=group)
    dist.all_reduce(reached, group=group)
    if not here and not reached:
        parameter.grad = None


def make_placement(context: RankContext) -> ModelPlacement:
    """Make the placement of the mesh: plain if only dp is used."""
    mesh = context.mesh
    return ModelPlacement(context) if mesh.pp * mesh.cp * mesh.tp == 1 else MeshPlacement(context)
