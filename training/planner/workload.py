"""Describe the training step to plan: a model, its layout, and its rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn

from sparkring.conf.blocks.parallel import ParallelConfig
from sparkring.conf.blocks.train import evaluation_batch
from sparkring.training.data.batch import Columns
from sparkring.training.models.sharding_plan import ShardingPlan, plan_of
from sparkring.training.models.task import Task
from sparkring.training.parallel.averaging.rules import RULES
from sparkring.training.parallel.batching import longest_part
from sparkring.training.parallel.mesh import Mesh, shard_groups
from sparkring.training.parallel.model_parallel.blocks import own_units, repeated_blocks
from sparkring.training.parallel.model_parallel.pipeline import PipelineStage, estimated_costs, layer_names, partition
from sparkring.training.planner.trace import Untraceable

Numels = dict[str, int]  # name of a parameter -> elements
CUT_DIM = {"column": 0, "row": 1, "vocab": 0, "vocab_head": 0}
OPTIMIZER_STATES = {"adamw": 2, "lamb": 2, "sgd": 1, "lars": 1}  # tensors as large as the parameter


@dataclass(frozen=True)
class SparseTable:
    """A table of the model's, whose rows all data ranks hold together.

    distinct: rows of a batch -> distinct ids in them. sent_bytes: of a row's weights on the wire. row_bytes: of a row
    with its optimizer's state. most_rows: that it will have; 0: not known. bucket_rows: of a bucket at most.
    replicated: every rank holds every row. lagged: rows travel while ranks compute.
    """

    name: str
    distinct: Callable[[int], int]
    sent_bytes: int
    row_bytes: int
    most_rows: int = 0
    bucket_rows: int | None = None
    replicated: bool = False
    lagged: bool = False


@dataclass(frozen=True)
class Workload:
    """The step to plan.

    Args:
        model: on any device.
        config: the recipe's `parallel` block.
        mesh: the block on its ranks.
        engine: what carries the gradients.
        inputs: the model's positional inputs for any one row, e.g. (tokens (1, T),), since shapes scale with the rows;
            or why there are none, which leaves activations and their traffic unplanned.
        global_batch: rows per step.
        optimizer_states: tensors as large as a parameter that a step needs: the optimizer's, and the weights' average.
        element_bytes: of a parameter.
        task: makes inputs of the batch's columns, and the loss; None: `inputs` are the batch, and no loss is planned.
        columns: one row of the batch, on the meta device.
        tables: sparse ones.
        reader_bytes: the most that a rank's reader holds on the host; None: not known.
        device_type: `cpu` or `cuda`, what ranks compute on; a CPU's memory is the host's.
        eval_batch: train.eval_batch.
        eval_rows: of the largest split that is evaluated; 0: none is.
        known: what was found out about the model; the same model's other layouts have it too.
    """

    model: nn.Module
    config: ParallelConfig
    mesh: Mesh
    engine: str
    inputs: tuple[Any, ...] | Untraceable
    global_batch: int
    optimizer_states: int = 2
    element_bytes: int = 4
    task: Task | None = None
    columns: Columns = field(default_factory=dict)
    tables: tuple[SparseTable, ...] = ()
    reader_bytes: int | None = None
    device_type: str = "cpu"
    eval_batch: int | None = None
    eval_rows: int = 0
    known: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)

    def once(self, key: Any, make: Callable[[], Any]) -> Any:
        """Return the result of `make` for this model, computed once per key."""
        if key not in self.known:
            self.known[key] = make()
        return self.known[key]

    @cached_property
    def sharding(self) -> ShardingPlan:
        return plan_of(self.model) or ShardingPlan()

    @cached_property
    def kinds(self) -> dict[str, str]:
        """Module name -> how its weight is cut over tp."""
        return self.sharding.kinds(self.model)

    @cached_property
    def stages(self) -> list[list[str]]:
        """Names of the layers of each pipeline stage, by estimated costs; [""] is the whole model."""
        if self.mesh.pp == 1:
            return [[""]]
        names = self.once("layers", lambda: layer_names(self.model))
        costs = self.once("costs", lambda: estimated_costs(self.model, names))
        return partition(names, costs, self.mesh.pp * self.config.stages_per_rank)

    @property
    def rows_per_pass(self) -> int:
        return -(-self.rows_per_rank // self.config.passes)

    @property
    def rows_per_rank(self) -> int:
        return longest_part(self.global_batch, self.mesh.dp)

    @property
    def evaluated_rows(self) -> int:
        """Rows that a rank evaluates at a time; 0: none."""
        if not self.eval_rows:
            return 0
        rows = evaluation_batch(self.eval_batch, self.global_batch, self.config.passes, self.eval_rows)
        return longest_part(rows, self.mesh.dp)

    @property
    def is_coded(self) -> bool:
        """Whether gradients go through a codec."""
        return self.config.compress.codec != "none" and self.mesh.dp * self.mesh.cp > 1

    @property
    def is_served(self) -> bool:
        """Whether servers hold weights and optimizer state, and get every rank's gradient."""
        return self.config.servers.per_host > 0

    @property
    def is_averaged(self) -> bool:
        """Whether ranks average weights, and no gradients."""
        return self.config.averaging.kind != "none" and self.mesh.dp > 1

    @property
    def states(self) -> int:
        """Tensors as large as the trained parameters besides weights and gradients."""
        carried = RULES[self.config.averaging.kind].carried if self.is_averaged else 0
        return self.optimizer_states + carried

    @property
    def fewer_bytes_by(self) -> str:
        """What makes the batch axes send less than a ring of whole gradients; empty: nothing."""
        if self.is_averaged:
            return f"{self.config.averaging.kind}, mean of {self.config.averaging.every} steps"
        return self.config.compress.codec if self.is_coded else ""

    @property
    def compute_bytes(self) -> int:
        """Bytes of an element of an activation."""
        return 2 if self.config.precision != "fp32" else self.element_bytes

    @cached_property
    def block_names(self) -> list[str]:
        blocks = {id(block) for _, _, block in repeated_blocks(self.model)}
        return [name for name, module in self.model.named_modules() if id(module) in blocks]

    @cached_property
    def attention_cores(self) -> list[str]:
        return [f"{name}.core" for name in self.sharding.attention_names(self.model)]

    def on_device(self, device_type: str) -> Workload:
        """Return the same step on ranks that compute on that type of device."""
        return replace(self, device_type=device_type)

    def with_layout(self, config: ParallelConfig, mesh: Mesh, engine: str, global_batch: int | None = None) -> Workload:
        """Return the same model in another layout, or batch, with known facts of the model kept.

        Args:
            config: block `parallel` of the recipe.
            mesh: mesh of the ranks.
            engine: what carries the gradients.
            global_batch: rows per step; None keeps the number.
        """
        other = replace(self, config=config, mesh=mesh, engine=engine, global_batch=global_batch or self.global_batch)
        other = replace(other, reader_bytes=None)  # of this layout's share
        for name in ("sharding", "kinds", "block_names", "attention_cores"):
            other.__dict__[name] = getattr(self, name)
        return other

    def names_on(self, pipeline_rank: int) -> list[str]:
        """List the layers of all stages of a pipeline rank."""
        return [name for stage in self.stages[pipeline_rank :: self.mesh.pp] for name in stage]

    def parameters_of(self, names: Sequence[str]) -> dict[str, nn.Parameter]:
        """Return the parameters of the named modules ("" is the whole model), by the first name in them."""
        every = self.once("parameters", lambda: [*self.model.named_parameters(remove_duplicate=False)])
        prefixes, seen, found = tuple(f"{name}." if name else "" for name in names), set[int](), {}
        for name, parameter in every:
            if name.startswith(prefixes) and id(parameter) not in seen:
                seen.add(id(parameter))
                found[name] = parameter
        return found

    def local_numel(self, name: str, parameter: torch.Tensor) -> int:
        """Count the elements of a parameter on one tensor rank."""
        kind = self.kinds.get(name.rpartition(".")[0], "")
        if self.mesh.tp == 1 or kind not in CUT_DIM or parameter.ndim <= CUT_DIM[kind]:
            return parameter.numel()
        rows = parameter.shape[CUT_DIM[kind]]
        return -(-rows // self.mesh.tp) * (parameter.numel() // rows)


class RankParameters:
    """One pipeline rank's parameters, as tensor ranks cut and ZeRO shards them."""

    def __init__(self, workload: Workload, pipeline_rank: int) -> None:
        self.workload, self.names = workload, workload.names_on(pipeline_rank)
        self.stages = workload.stages[pipeline_rank :: workload.mesh.pp]  # names of their layers
        model, mesh, config, once = workload.model, workload.mesh, workload.config, workload.once
        self.key = tuple(self.names)
        self.parameters: dict[str, nn.Parameter] = once(
            ("parameters", self.key), lambda: workload.parameters_of(self.names)
        )
        self.local: Numels = once(
            ("local", self.key, mesh.tp),
            lambda: {name: workload.local_numel(name, p) for name, p in self.parameters.items()},
        )
        self.sizes: list[int] = once(("sizes", self.key), lambda: [p.numel() for p in self.parameters.values()])
        self.whole = sum(self.local.values())  # elements on a tensor rank before ZeRO
        self.replicas, self.shard = shard_groups(mesh, config.shard)
        self.zero = config.zero if self.shard * self.replicas > 1 else 0
        layers = once("plan layers", lambda: workload.sharding.layer_names(model)) if self.zero == 3 else []
        self.layers: list[str] = [name for name in layers if self.names == [""] or name in self.key]
        stage = model if self.names == [""] else PipelineStage(model, self.names)
        self.units: list[str] = once(("units", self.key, *self.layers[:1]), lambda: own_units(stage, self.layers))
        self.on_horovod = bool(self.zero) and workload.engine == "horovod"

    @property
    def trained(self) -> list[str]:
        """Names of the parameters with a gradient."""
        return [name for name, p in self.parameters.items() if p.requires_grad]

    @property
    def is_offloaded(self) -> bool:
        """Whether shards and the optimizer's step on them are on the host. On a CPU they are in its memory anyway."""
        return self.workload.config.offload and self.zero > 0 and self.workload.device_type != "cpu"

    @cached_property
    def whole_trained(self) -> int:
        """Elements with a gradient on a tensor rank before ZeRO."""
        return sum(self.local[name] for name in self.trained)

    @property
    def owned(self) -> int:
        """Elements whose weights this rank keeps. Uneven shards differ between ranks by a row; this is their mean."""
        return self._shards("owned", self.parameters) if self.zero else self.whole

    @property
    def updated(self) -> int:
        """Elements that this rank updates: those of `owned` that are not frozen."""
        return self._shards("updated", self.trained) if self.zero else self.whole_trained

    def _shards(self, key: str, names: Iterable[str]) -> int:
        """Count the elements of this rank's shards of parameters, computed once per key."""
        found: int = self.workload.once(
            (key, self.key, self.workload.mesh.tp, self.shard),
            lambda: sum(
                self.local[name] if self.parameters[name].ndim == 0 else math.ceil(self.local[name] / self.shard)
                for name in names
            ),
        )
        return found

    @property
    def gather_bytes(self) -> int:
        """Bytes of an element of a gathered weight: fully_shard sends it in the dtype of compute."""
        element = self.workload.element_bytes
        return element if self.workload.config.precision == "fp32" or self.on_horovod else 2

    def numels_of(self, units: Sequence[str]) -> list[int]:
        """List the elements per unit that ZeRO gathers separately."""
        key = ("numels", self.key, self.workload.mesh.tp, *self.layers[:1])
        known = self.workload.once(key, lambda: self._numels_by_unit())
        return [known[unit] for unit in units]

    def _numels_by_unit(self) -> Numels:
        found = dict.fromkeys(self.units, 0)
        for name, numel in self.local.items():
            unit = next((unit for unit in _prefixes(name) if unit in found), None)
            if unit is not None:
                found[unit] += numel
        return found


def _prefixes(name: str) -> Iterator[str]:
    """Yield the modules around a parameter, the innermost first."""
    while "." in name:
        name = name.rpartition(".")[0]
        yield name
