"""Tensor parallelism (Megatron-LM, https://arxiv.org/abs/1909.08053) and sequence parallelism (2205.05198).

Both by torch's DTensor styles, from the sharding plan next to the model.

Bytes sent per rank, block and pass of x_BTM (n bytes): 2 all-reduces forward and 2 backward, each 2 (t-1)/t x n; with
sequence parallelism the same volume as 4 all-gathers and 4 reduce-scatters of (t-1)/t x n. The embedding adds one
all-reduce, the loss three of (B, T). Memory per parameter: 1/t of all that is cut; norms are whole on every rank.
Every parameter, whole ones too, is a DTensor on the tp axis, so that no optimizer gets mixed meshes.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from sparkring.training.models.sharding_plan import KINDS, ShardingPlan


def tensor_styles(plan: ShardingPlan, model: nn.Module, sequence: bool) -> dict[str, ParallelStyle]:
    """Map each module to torch's parallel style. `sequence`: x_BTM between cut layers is Shard(1), over T."""
    between = Shard(1) if sequence else Replicate()
    kinds = plan.kinds(model)
    entered = tuple(f"{name}." for name, kind in kinds.items() if kind == "enter")
    styles: dict[str, ParallelStyle] = {}
    for name, kind in kinds.items():
        given = Replicate() if name.startswith(entered) else between
        styles[name] = _style(kind, between, given, name)
    return styles


def _style(kind: str, between: Placement, given: Placement, name: str) -> ParallelStyle:
    if kind == "column":
        return ColwiseParallel(input_layouts=given)
    if kind == "enter":
        return PrepareModuleInput(input_layouts=(between,), desired_input_layouts=(Replicate(),))
    if kind == "row":
        return RowwiseParallel(output_layouts=between)
    if kind == "vocab":
        return RowwiseParallel(input_layouts=Replicate(), output_layouts=between)
    if kind == "vocab_head":
        return ColwiseParallel(input_layouts=given, output_layouts=Shard(-1), use_local_output=False)
    if kind == "replicate":
        return SequenceParallel(use_local_output=True) if isinstance(between, Shard) else ReplicatedModule()
    raise ValueError(f"the sharding plan has {kind!r} for {name!r}: not one of {', '.join(KINDS)}")


class ReplicatedModule(ParallelStyle):
    """Compute the whole module on every rank; its parameters become DTensors like all others."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        distribute_whole(module, device_mesh)
        module.register_forward_pre_hook(lambda _, inputs: tuple(_replicated(x, device_mesh) for x in inputs))
        module.register_forward_hook(lambda _, inputs, output: output.to_local())
        return module


def _replicated(x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    return DTensor.from_local(x, mesh, [Replicate()], run_check=False)


def distribute_whole(module: nn.Module, mesh: DeviceMesh) -> None:
    """Turn parameters that are not DTensors yet into replicated ones."""
    for owner in module.modules():
        for name, parameter in list(owner.named_parameters(recurse=False)):
            if not isinstance(parameter, DTensor):
                whole = distribute_tensor(parameter.detach(), mesh, [Replicate()], src_data_rank=None)
                owner.register_parameter(name, nn.Parameter(whole, requires_grad=parameter.requires_grad))


def apply_tensor(model: nn.Module, plan: ShardingPlan, mesh: DeviceMesh, sequence: bool) -> nn.Module:
    """Cut `model` over `mesh` (1-D). ValueError for a parameter the plan leaves out.

    Tied weights stay tied, and frozen ones frozen: torch's SequenceParallel makes new, trainable parameters.
    """
    ties = _tied_modules(model)
    frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
    parallelize_module(model, mesh, tensor_styles(plan, model, sequence), src_data_rank=None)
    for (first, first_key), others in ties:
        shared = first.get_parameter(first_key)
        for module, key in others:
            module.register_parameter(key, shared)
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)
    for name, parameter in model.named_parameters():
        if not isinstance(parameter, DTensor):
            raise ValueError(
                f"parallel.tp: the sharding plan of {type(model).__name__} leaves out {name!r}; add its module as "
                f"column, row, vocab, vocab_head or replicate"
            )
    return model


Slot = tuple[nn.Module, str]  # a module, and the name of one of its own parameters


def _tied_modules(model: nn.Module) -> list[tuple[Slot, list[Slot]]]:
    """List, for each shared parameter, its first slot and the others."""
    places: dict[int, list[Slot]] = {}
    for module in model.modules():
        for key, parameter in module.named_parameters(recurse=False):
            places.setdefault(id(parameter), []).append((module, key))
    return [(slots[0], slots[1:]) for slots in places.values() if len(slots) > 1]


def vocabulary_parallel_loss() -> AbstractContextManager[Any]:
    """Compute cross entropy within the block on logits cut over the vocabulary, without gathering."""
    scope: AbstractContextManager[Any] = loss_parallel()
    return scope


def gathered(outputs: Any) -> Any:
    """Gather the whole logits on every rank (evaluation only)."""
    return outputs.full_tensor() if isinstance(outputs, DTensor) else outputs
