"""Gather every private part of torch that is used, in one place.

Checked against the versions below; tests/training/models/test_torch_private.py fails when a part moves. The file is
next to the lowest package that needs it, since imports point from parallel to models.

Parts that import torch._dynamo, fsdp or sympy are imported by the functions that use them: they take two seconds of
CPU, which a driver that only looks at a model does not spend.
"""

from __future__ import annotations

import copyreg
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch._compile import _disable_dynamo as disable_dynamo  # torch.compiler.disable, which imports it at once
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes as without_modes
from torch.utils._pytree import tree_flatten, tree_map
from typing_extensions import TypeIs

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

CHECKED_TORCH = ("2.12", "2.13", "2.14", "2.15")
CHECKPOINT_PREFIX, COMPILE_PREFIX = "_checkpoint_wrapped_module.", "_orig_mod."  # in names of wrapped modules

__all__ = [
    "TorchDispatchMode",
    "disable_dynamo",
    "tree_flatten",
    "tree_map",
    "without_modes",
]

# --- tensors and storages --------------------------------------------------------------------------------------------


def storage_key(tensor: torch.Tensor) -> int:
    """Return a number per storage, also for meta tensors, which have no address."""
    return int(tensor.untyped_storage()._cdata)


def waited_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor that a running collective will fill, without waiting for it."""
    return tensor.elem if isinstance(tensor, AsyncCollectiveTensor) else tensor


def is_dtensor(value: object) -> TypeIs[DTensor]:
    """Return whether a tensor is a DTensor."""
    return isinstance(value, dtensor_types())


def dtensor_types() -> tuple[type[DTensor], ...]:
    """Return the class DTensor, or () while torch.distributed.tensor is not imported: no tensor is one."""
    module = sys.modules.get("torch.distributed.tensor")
    return (module.DTensor,) if module is not None else ()


def local_shape_and_offset(tensor: DTensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return sizes and offsets of this rank's shard of the whole tensor."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset  # private to torch

    return compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)


def foreach_norm(tensors: list[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
    """Compute the 2-norm of each tensor, summed in `dtype`."""
    return list(torch._foreach_norm(tensors, 2, dtype))


def foreach_multiply_(tensors: list[torch.Tensor], factor: float) -> None:
    torch._foreach_mul_(tensors, factor)


def foreach_copy_(into: list[torch.Tensor], source: list[torch.Tensor]) -> None:
    torch._foreach_copy_(into, source)


def make_wrapper_tensor(cls: type[torch.Tensor], like: torch.Tensor, device: torch.device) -> Any:
    """Make a tensor subclass's instance, shaped as `like`, without memory, that reports `device`."""
    return torch.Tensor._make_wrapper_subclass(
        cls, like.shape, strides=like.stride(), storage_offset=like.storage_offset(), dtype=like.dtype, device=device
    )


def plain_tensor_functions() -> AbstractContextManager[object]:
    """Disable `__torch_function__` of tensor subclasses within the block."""
    return torch._C.DisableTorchFunctionSubclass()


class DispatchMode(TorchDispatchMode):
    """A mode that torch._dynamo is not imported for, to be kept from compiling it: nothing is compiled within ours."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


class _WithoutMemory(DispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return call_without_memory(func, args, kwargs or {})


def call_without_memory(func: Any, args: Any, kwargs: Any) -> Any:
    """Call an operator; on the meta device no normal values are drawn: torch's Python for it imports torch._dynamo."""
    if func is torch.ops.aten.normal_.default and args[0].is_meta and _is_deviation(*args[2:]):
        return args[0]
    if func is torch.ops.aten.randn.default and torch.device(kwargs.get("device") or "cpu").type == "meta":
        return torch.empty(*args, **kwargs)
    return func(*args, **kwargs)


def _is_deviation(std: float = 1.0) -> bool:
    """Return whether `normal_` accepts the deviation; if not, torch raises the error."""
    return std >= 0


@contextmanager
def meta_device() -> Iterator[None]:
    """Make modules without memory within the block, skipping what only their values need."""
    with torch.device("meta"), _WithoutMemory():
        yield


def fake_tensors() -> AbstractContextManager[object]:
    """Give tensors a shape and device without memory; autocast sees the device, unlike on meta."""
    from torch._subclasses.fake_tensor import FakeTensorMode  # private to torch: a version without it fails here alone

    return FakeTensorMode()


def has_memory(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has values: it is neither on the meta device nor one of `fake_tensors`."""
    return not tensor.is_meta and type(tensor).__name__ != "FakeTensor"


def swap_tensor(tensor: torch.Tensor, new: torch.Tensor) -> None:
    """Turn `tensor`, which stays the same object, into `new`.

    torch.utils.swap_tensors does the same, but refuses tensors with weak references, which an LSTM has.
    """
    tensor.__dict__.pop("_is_param", None)
    tensor.__dict__.update(new.__dict__)
    tensor.__class__ = type(new)
    for slot in copyreg._slotnames(type(new)):  # type: ignore[attr-defined]
        setattr(tensor, slot, getattr(new, slot))
    torch._C._swap_tensor_impl(tensor, new)


def flash_attention_on_meta(q: Any, k: Any, v: Any, attn_mask: Any, dropout_p: float) -> torch.Tensor:
    """Compute attention that keeps for backward what the fused kernels keep, also on the meta device.

    Args: q, k, v (B, heads, T, D); attn_mask, broadcast to (B, heads, T, T), or None; dropout_p, a probability.
    """
    out: torch.Tensor = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, dropout_p, attn_mask=attn_mask
    )[0]
    return out


# --- modules ---------------------------------------------------------------------------------------------------------


def direct_children(module: nn.Module, key: str = "*") -> dict[str, nn.Module]:
    """Return children by key, all (`*`) or one; a module at two keys has both, unlike `named_children()`."""
    found = module._modules if key == "*" else {key: module._modules.get(key)}
    return {name: child for name, child in found.items() if child is not None}


def replace_child(container: nn.Module, key: str, module: nn.Module) -> None:
    """Replace a child also where `add_module` refuses, since the key exists."""
    container._modules[key] = module


def checkpoint_wrapper(module: nn.Module, **options: Any) -> nn.Module:
    """Wrap a module in torch's activation checkpointing."""
    from torch.distributed.algorithms._checkpoint import checkpoint_wrapper  # only where it is asked for

    wrapped: nn.Module = checkpoint_wrapper.checkpoint_wrapper(module, **options)
    return wrapped


def unwrapped(module: nn.Module) -> nn.Module:
    """Return the module inside torch's activation checkpointing wrapper, or the module itself."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (  # only where it is asked for
        CheckpointWrapper,
    )

    return module._checkpoint_wrapped_module if isinstance(module, CheckpointWrapper) else module


@contextmanager
def replaced_trunc_normal(make: Callable[[Callable[..., Any]], Callable[..., torch.Tensor]]) -> Iterator[None]:
    """Replace `nn.init.trunc_normal_` by make(torch's own function) within the block."""
    original = nn.init._no_grad_trunc_normal_
    nn.init._no_grad_trunc_normal_ = make(original)
    try:
        yield
    finally:
        nn.init._no_grad_trunc_normal_ = original


# --- a backward in two halves ----------------------------------------------------------------------------------------


def stage_backward_input(*args: Any, **kwargs: Any) -> Any:
    """Compute the gradients of a pipeline stage's inputs."""
    from torch.distributed.pipelining import _backward  # private to torch: a version without it fails here alone

    return _backward.stage_backward_input(*args, **kwargs)


def stage_backward_weight(*args: Any, **kwargs: Any) -> Any:
    """Compute the gradients of a pipeline stage's weights."""
    from torch.distributed.pipelining import _backward  # private to torch: a version without it fails here alone

    return _backward.stage_backward_weight(*args, **kwargs)


# --- calls that a TorchDispatchMode sees -----------------------------------------------------------------------------


def call_name(func: Any) -> str:
    """Return an operator's name: `all_reduce` for `_c10d_functional.all_reduce.default`."""
    return str(func._overloadpacket.__name__)


def written_arguments(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    """Return the arguments that the call writes to."""
    return [
        args[i] if i < len(args) else kwargs.get(argument.name)
        for i, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]


def process_group_of(arguments: Sequence[Any]) -> dist.ProcessGroup:
    """Return the process group of a collective's call: an object among the arguments or, last, its name."""
    for value in arguments:
        if isinstance(value, torch.ScriptObject) and "ProcessGroup" in str(value._type()):
            return dist.distributed_c10d._resolve_process_group(dist.ProcessGroup.unbox(value).group_name)
    name = [value for value in arguments if isinstance(value, str)][-1]
    return dist.distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]


# --- process groups --------------------------------------------------------------------------------------------------


def flattened(mesh: DeviceMesh) -> DeviceMesh:
    """Flatten the axes of a 2-D mesh to one, named `batch`."""
    return mesh._flatten("batch")


def set_group_timeout(timeout: timedelta) -> None:
    """Give each group that is formed from here on this timeout, those of meshes too, unless it is given its own.

    torch takes 30 minutes (10 for NCCL) where none is given, and has no public way to say it once.
    """
    dist.distributed_c10d.default_pg_timeout = timeout
    dist.distributed_c10d.default_pg_nccl_timeout = timeout


def nccl_backends() -> list[Any]:
    """List NCCL's backend of every process group that has one."""
    found: list[Any] = []
    for group in list(dist.distributed_c10d._world.pg_map):
        with suppress(RuntimeError):  # no backend for CUDA tensors
            backend = group._get_backend(torch.device("cuda"))
            if "nccl" in backend.name().lower():
                found.append(backend)
    return found


def abort_together(backends: Sequence[Any]) -> None:
    """Abort NCCL backends; those of several groups must not wait for one another (pytorch#119797)."""
    if not backends:
        return
    backends[0]._group_start()
    for backend in backends:
        backend.abort()
    backends[0]._group_end()


# --- fully_shard -----------------------------------------------------------------------------------------------------


def fsdp_groups(module: nn.Module | FSDPModule) -> list[Any]:
    """Return fully_shard's parameter groups of one module it was called on."""
    from torch.distributed.fsdp import fully_shard  # with sympy: a second

    return _groups_of(fully_shard.state(module))  # type: ignore[attr-defined]


def _groups_of(state: Any) -> list[Any]:
    """Return a module's parameter groups; at most one before torch 2.12, which GPU machines have."""
    if hasattr(state, "_fsdp_param_groups"):
        groups: list[Any] = state._fsdp_param_groups
        return groups
    return [state._fsdp_param_group] if state._fsdp_param_group is not None else []


def fsdp_parameters(root: FSDPModule) -> Iterator[Any]:
    """Yield fully_shard's records of the parameters of `root` and everything below."""
    from torch.distributed.fsdp import FSDPModule  # with sympy: a second

    for module in root.modules():  # type: ignore[attr-defined]
        if isinstance(module, FSDPModule):
            for group in fsdp_groups(module):
                yield from group.fsdp_params


def was_gathered(record: Any) -> bool:
    """Return whether the parameter was gathered before; until then its record has no whole tensor."""
    return hasattr(record, "_unsharded_param")


def gathered_parameter(record: Any) -> nn.Parameter:
    """Return the whole parameter; its storage comes and goes."""
    parameter: nn.Parameter = record._unsharded_param
    return parameter


def has_gradient(record: Any) -> bool:
    """Return whether a backward reached the parameter, in this pass or one not yet reduced."""
    return record.unsharded_accumulated_grad is not None or (
        was_gathered(record) and gathered_parameter(record).grad is not None
    )


def complete_gradients(records: Iterable[Any]) -> None:
    """Give every parameter of one group a gradient, all of one dtype; zeros where this rank's rows reached none.

    Else each rank would reduce only what its own rows have reached. Those that several passes have summed are in the
    dtype of the reduction, those that the last pass alone has reached are not, and it takes no mixture.
    """
    records = list(records)
    if not all(hasattr(record, "accumulate_unsharded_grad_if_needed") for record in records):
        _complete_own_gradients(records)  # from torch 2.15 on
        return
    for record in records:
        record.accumulate_unsharded_grad_if_needed()
    is_summed = any(record.unsharded_accumulated_grad is not None for record in records)
    for record in records:
        if is_summed:
            record.to_accumulated_grad_if_needed()
        if record.unsharded_accumulated_grad is not None or record._unsharded_param.grad is not None:
            continue
        if is_summed:
            record.unsharded_accumulated_grad = torch.zeros_like(record._unsharded_param, dtype=record.reduce_dtype)
        else:
            record._unsharded_param.grad = torch.zeros_like(record._unsharded_param)


def _complete_own_gradients(records: Iterable[Any]) -> None:
    """Complete gradients where autograd itself adds up several passes, in `.grad_dtype`."""
    for parameter in map(gathered_parameter, records):
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter, dtype=parameter.grad_dtype)


def _end_backward(state: Any) -> None:
    """Do what fully_shard does when autograd has passed the root; torch 2.15 wants to know how the backward began."""
    if getattr(state._state_ctx, "manual_backward_finalization_active", False) is None:
        state._state_ctx.manual_backward_finalization_active = False
    state._root_post_backward_final_callback()


def run_backward_hooks(root: FSDPModule) -> None:
    """Gather, reduce and free a root as if a backward had passed through all of it."""
    from torch.distributed.fsdp import fully_shard  # with sympy: a second

    state = fully_shard.state(root)  # type: ignore[attr-defined]
    inner = [g for s in state._state_ctx.all_states if s is not state for g in _groups_of(s)]
    for group in _groups_of(state):
        group.pre_backward(True)
    for group in reversed(inner):
        group.pre_backward(True)
        group.post_backward()
    for group in _groups_of(state):
        group.post_backward()
    _end_backward(state)


def reduce_after_split_backward(root: FSDPModule) -> None:
    """Reduce what a backward in two halves has left, whose end no autograd hook sees."""
    from torch.distributed.fsdp import fully_shard  # with sympy: a second

    state = fully_shard.state(root)  # type: ignore[attr-defined]
    for each in state._state_ctx.all_states:
        for group in _groups_of(each):
            group.post_backward()
    _end_backward(state)
