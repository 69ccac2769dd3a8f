"""Where a model lies on the axes that are not batch axes: its tensor cut, its context exchange, this rank's stages."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from training.data.batch import Batch, Columns
from training.models.plan import ShardingPlan, expand, plan_of
from training.parallel.batching import to_device
from training.parallel.data_parallel.reduce import local_tensor, settle_partial
from training.parallel.model_parallel.blocks import checkpoint_blocks
from training.parallel.model_parallel.context import AllToAllCore, apply_context, gather_sequence
from training.parallel.model_parallel.pipeline import (
    Pipeline,
    Stage,
    chain_names,
    cut_chain,
    estimated_costs,
    graft,
    measured_costs,
)
from training.parallel.model_parallel.schedules import schedule_table
from training.parallel.model_parallel.tensor import apply_tensor, gathered, vocabulary_parallel_loss
from training.parallel.precision import DTYPES
from training.parallel.same import chain_problem, close, few_rows
from training.parallel.settings import ParallelSettings
from training.parallel.state import plain_name
from training.parallel.world import Mesh

log = logging.getLogger(__name__)
CUT_DIM = {"column": 0, "row": 1}  # of a Linear's weight
SliceSequence = Callable[[Columns, int, int], Columns]


class Layout:
    """Nothing but data parallelism; also what the other layout does where an axis has size 1."""

    pipeline: Pipeline | None = None

    def __init__(self, settings: ParallelSettings, rank: int) -> None:
        self.settings, self.rank = settings, rank

    def place(self, model: nn.Module, task: Any, sample: Batch | None) -> nn.Module:
        """Cut `model`. `sample`: rows of this data rank, to time and compare on."""
        if self.settings.activation_checkpointing:
            checkpoint_blocks(model)
        return model

    def columns(self, columns: Columns) -> Columns:
        """This rank's stretch of every sequence under context parallelism, else the columns as they are."""
        return columns

    def whole_outputs(self, outputs: Any) -> Any:
        """Outputs as one process would have them (collective)."""
        return outputs

    def loss_scope(self) -> AbstractContextManager[object]:
        return nullcontext()

    def settle(self, model: nn.Module) -> None:
        """After the batch axes: gradients as their parameters are cut, tied weights' gradients summed over stages."""
        return None

    def compare(self, model: nn.Module, task: Any, sample: Batch | None, evaluate: Callable[[Batch], Any]) -> None:
        """ValueError where the placed model computes something else than the whole one (collective)."""
        return None

    def groups(self) -> dict[str, str]:
        """Process groups by name -> the axis of the planner they serve, where their calls do not tell."""
        return {}

    def counted(self, name: str) -> bool:
        """Whether the norm counts this rank's copy of the parameter (a tied weight has two)."""
        return True


class MeshLayout(Layout):
    """Context, tensor and pipeline parallelism, in this order, then activation checkpointing."""

    def __init__(
        self,
        settings: ParallelSettings,
        rank: int,
        mesh: Mesh,
        device_mesh: DeviceMesh,
        device: torch.device,
        scope: Callable[[], AbstractContextManager[object]],
    ) -> None:
        super().__init__(settings, rank)
        self.mesh, self.device_mesh, self.device, self.scope = mesh, device_mesh, device, scope
        self.at = mesh.coordinates(rank)
        self.ties: list[tuple[str, dist.ProcessGroup]] = []
        self.uncounted: set[str] = set()
        self.uncut = False  # sequences are whole, to compare with

    def place(self, model: nn.Module, task: Any, sample: Batch | None) -> nn.Module:
        plan = plan_of(model)
        check_widths(model, plan, self.mesh)
        names = chain_names(model, plan) if self.mesh.pp > 1 else []
        looked_at = self.device.type == "meta"  # built to be looked at, never run
        if names and not looked_at and (rows := self._rows_to_compare(task, sample)) is not None:
            self._agree(lambda: chain_problem(model, names, task.inputs(rows.columns)[0]))
        if self.mesh.cp > 1:
            self.slice_sequence: SliceSequence = sequence_slicer(task)
            apply_context(model, needed(plan, model, "cp"), self.device_mesh["cp"].get_group())
        if self.mesh.tp > 1:
            sequence = self.settings.sequence_parallel
            apply_tensor(model, needed(plan, model, "tp"), self.device_mesh["tp"], sequence)
        if self.mesh.pp == 1:
            return super().place(model, task, sample)
        return self._cut(model, names, self._costs(model, names, task, sample))

    def _rows_to_compare(self, task: Any, sample: Batch | None) -> Batch | None:
        """Rank 0's, on every rank (on the CPU); None where it has none."""
        rows: list[Any] = [None]
        if self.rank == 0 and sample is not None and sample.rows:
            rows = [few_rows(sample, task, self.mesh.cp * self.mesh.tp)]
        dist.broadcast_object_list(rows, src=0)
        if rows[0] is None:
            log.warning("there is no row to compare the cut model with the whole one on")
        return rows[0]

    def _agree(self, problem_of: Callable[[], str | None]) -> None:
        """ValueError on every rank where rank 0 finds a problem."""
        problem = [problem_of() if self.rank == 0 else None]
        dist.broadcast_object_list(problem, src=0)
        if problem[0]:
            raise ValueError(problem[0])

    def _costs(self, model: nn.Module, names: list[str], task: Any, sample: Batch | None) -> list[float]:
        """Per module of the chain; measured ones are rank 0's on every rank."""
        if self.settings.balance == "estimated":
            return estimated_costs(model, names)
        if sample is None:
            raise ValueError("parallel.balance=measured: there is no batch to time the blocks on")
        with self.scope():
            columns = self.columns(to_device(sample.columns, self.device))
            seconds = torch.tensor(measured_costs(model, names, task.inputs(columns)[0]))
        dist.broadcast(seconds, src=0)
        return [float(each) for each in seconds]

    def _cut(self, model: nn.Module, names: list[str], costs: list[float]) -> nn.Module:
        settings, ranks = self.settings, self.mesh.pp
        count = ranks * settings.stages_per_rank
        stages = cut_chain(names, costs, count)
        table = schedule_table(
            settings.schedule, ranks, settings.micro_batches * settings.accumulate, settings.stages_per_rank
        )
        self._tie(model, stages)
        mine: dict[int, nn.Module] = {}
        local = nn.Module()
        for index in range(self.at.pp, count, ranks):
            mine[index] = Stage(model, stages[index])
            if settings.activation_checkpointing:
                checkpoint_blocks(mine[index])
            for name in stages[index]:
                graft(local, name, mine[index].get_submodule(name))
        group = self.device_mesh["pp"].get_group()
        self.pipeline = Pipeline(table, self.at.pp, group, mine, count, self.device, self.scope)
        return local

    def _tie(self, model: nn.Module, stages: list[list[str]]) -> None:
        """A group per weight that stages of two ranks share: its gradients are summed, its norm counted once."""
        stage_of = {name: number for number, names in enumerate(stages) for name in names}
        spots: dict[int, list[tuple[str, int]]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if not parameter.requires_grad:
                continue
            chain = next(c for c in stage_of if name.startswith(f"{c}."))
            spots.setdefault(id(parameter), []).append((name, stage_of[chain] % self.mesh.pp))
        for shared in spots.values():
            ranks = sorted({rank for _, rank in shared})
            if len(ranks) == 1:
                continue
            group = self._tie_group(ranks)
            mine = [name for name, rank in shared if rank == self.at.pp]
            if mine:
                self.ties.append((mine[0], group))
            if self.at.pp != shared[0][1]:
                self.uncounted.update(mine)

    def _tie_group(self, stages: list[int]) -> dist.ProcessGroup:
        """Each pipeline's ranks at `stages`; collective over the world, returns the one this rank is in, if any."""
        mine = None
        for first in range(self.mesh.world):
            at = self.mesh.coordinates(first)
            if at.pp != 0:
                continue
            column = self.mesh.ranks_along(("pp",), first)
            group = dist.new_group([column[stage] for stage in stages])
            if self.rank in column and self.at.pp in stages:
                mine = group
        return mine if mine is not None else dist.group.WORLD  # type: ignore[return-value]

    def columns(self, columns: Columns) -> Columns:
        if self.mesh.cp == 1 or self.uncut:
            return columns
        return self.slice_sequence(columns, self.at.cp, self.mesh.cp)

    def whole_outputs(self, outputs: Any) -> Any:
        if outputs is None:
            return None
        outputs = gathered(outputs)
        if self.mesh.cp == 1 or self.uncut:
            return outputs
        return gather_sequence(outputs, self.device_mesh["cp"].get_group())

    def loss_scope(self) -> AbstractContextManager[object]:
        return vocabulary_parallel_loss() if self.mesh.tp > 1 else nullcontext()

    def settle(self, model: nn.Module) -> None:
        if self.mesh.tp > 1:
            for parameter in model.parameters():
                settle_partial(parameter)
        parameters = {plain_name(name): p for name, p in model.named_parameters(remove_duplicate=False)}
        for name, group in self.ties:
            sum_tied(parameters[name], group)

    def compare(self, model: nn.Module, task: Any, sample: Batch | None, evaluate: Callable[[Batch], Any]) -> None:
        """Stretches of sequences against whole sequences, on the ranks that see outputs."""
        if self.mesh.cp == 1 or (rows := self._rows_to_compare(task, sample)) is None:
            return
        cores = [module for module in model.modules() if isinstance(module, AllToAllCore)]
        stretches = evaluate(rows)
        self.uncut = True
        for core in cores:
            core.uncut = True
        whole = evaluate(rows)
        self.uncut = False
        for core in cores:
            core.uncut = False
        same = torch.tensor(float(whole is None or close(stretches, whole, DTYPES.get(self.settings.precision))))
        dist.all_reduce(same, op=dist.ReduceOp.MIN)
        if not same:
            raise ValueError(
                f"parallel.cp = {self.mesh.cp}: on a stretch of each sequence the model computes something else than "
                f"on whole sequences, so it would train another model: what it does outside of its attention cores may "
                f"not depend on a token's position or neighbors (learned positions restart at 0 in every stretch)"
            )

    def groups(self) -> dict[str, str]:
        found = {str(group.group_name): "pp tied weights" for _, group in self.ties}
        if self.mesh.tp > 1:
            found[str(self.device_mesh["tp"].get_group().group_name)] = "tp"
        return found

    def counted(self, name: str) -> bool:
        return name not in self.uncounted


def sum_tied(parameter: nn.Parameter, group: dist.ProcessGroup) -> None:
    """Sum the gradients of a weight's copies; None where none of them has one."""
    here = parameter.grad is not None
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    mine = local_tensor(parameter.grad)
    reached = mine.new_full((), float(here))
    dist.all_reduce(mine, group=group)
    dist.all_reduce(reached, group=group)
    if not here and not reached:
        parameter.grad = None


def needed(plan: ShardingPlan | None, model: nn.Module, axis: str) -> ShardingPlan:
    if plan is None:
        raise ValueError(
            f"parallel.{axis} > 1: {type(model).__name__} has no sharding plan; define PLAN = ShardingPlan(...) beside "
            f"the class (training/models/plan.py says how)"
        )
    return plan


def check_widths(model: nn.Module, plan: ShardingPlan | None, mesh: Mesh) -> None:
    """Attention is cut by whole heads, matrices into equal parts (a vocabulary need not be). ValueError names the
    counts."""
    for pattern in plan.heads if plan is not None else ():
        for name in expand(pattern, model):
            attention: Any = model.get_submodule(name)
            if attention.heads % (mesh.tp * mesh.cp) or attention.kv_heads % (mesh.tp * mesh.cp):
                raise ValueError(
                    f"{name} has {attention.heads} heads and {attention.kv_heads} key/value heads, not divisible by "
                    f"tp({mesh.tp}) * cp({mesh.cp}); change model.args.heads or kv_heads, or parallel.tp or cp"
                )
    for pattern, kind in plan.tensor.items() if plan is not None and mesh.tp > 1 else ():
        for name in expand(pattern, model) if kind in CUT_DIM else ():
            width = model.get_parameter(f"{name}.weight").shape[CUT_DIM[kind]]
            if width % mesh.tp:
                sides = "outputs" if kind == "column" else "inputs"
                raise ValueError(
                    f"{name} has {width} {sides}, not divisible by tp({mesh.tp}): "
                    f"change the width in model.args, or parallel.tp, or make it 'replicate' in the sharding plan"
                )


def sequence_slicer(task: Any) -> SliceSequence:
    found = getattr(task, "slice_sequence", None)
    if found is None:
        raise ValueError(
            f"parallel.cp > 1: the task {type(task).__name__} has no slice_sequence(columns, part, parts), so its "
            f"sequences cannot be cut; LanguageModelTask has one"
        )
    slicer: SliceSequence = found
    return slicer
