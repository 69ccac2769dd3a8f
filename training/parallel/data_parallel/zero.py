"""ZeRO 1, 2, 3 (https://arxiv.org/abs/1910.02054) on torch's fully_shard (FSDP2, https://arxiv.org/abs/2304.11277).

For Psi parameters, w ranks in a shard group, volume relative to the all-reduce's 2 (w-1)/w x bytes(Psi), per step of a
passes (`accumulate`):
- ZeRO-1: gather once, reduce-scatter once                       1.0
- ZeRO-2: gather once, reduce-scatter every pass                 0.5 + 0.5 a
- ZeRO-3: gather in forward and backward, reduce-scatter         1.5 a
Memory that stays after a step, fp32 with AdamW: 16/w bytes per parameter in all three; within a step ZeRO-1 and 2 hold
the whole weights (4) and one block's gradients, ZeRO-1 with several passes all gradients (4), ZeRO-3 one block of each.
Hybrid sharding (`shard` < dp) shards within a group and all-reduces the shards between groups.

Differs from stock fully_shard on Gloo, whose reduce-scatter moves an all-reduce's volume (pytorch#118911): an
all-to-all and a local sum move (w-1)/w.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from training.models.plan import chain_of
from training.parallel.backend import device_backend
from training.parallel.data_parallel.base import DataAxis
from training.parallel.data_parallel.ddp import GroupTransport, broadcast_tensors
from training.parallel.data_parallel.reduce import GradientReducer
from training.parallel.model_parallel.blocks import own_units, repeated_blocks
from training.parallel.model_parallel.pipeline import Stage
from training.parallel.precision import DTYPES

Waiting = Callable[[], AbstractContextManager[None]]


class TimedAllGather:
    """fully_shard's own all-gather, which on Gloo blocks until all ranks have come to it."""

    def __init__(self, waiting: Waiting) -> None:
        self.waiting = waiting

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        with self.waiting():
            return dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)


class AllToAllReduceScatter:
    """fully_shard's reduce-scatter as all-to-all plus a local sum in rank order."""

    def __init__(self, waiting: Waiting = nullcontext) -> None:
        self.waiting = waiting

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        received = torch.empty_like(input_tensor)
        with self.waiting():
            dist.all_to_all_single(received, input_tensor, group=group)
        torch.sum(received.view(group.size(), -1), dim=0, out=output_tensor.view(-1))


def _one_dtype(group: list[Any]) -> None:
    """What several passes have summed is in the dtype of the reduction, and fully_shard takes no mixture: what the last
    pass alone has reached, or none, is brought to it."""
    for each in group:
        each.accumulate_unsharded_grad_if_needed()
    if any(each.unsharded_accumulated_grad is not None for each in group):
        for each in group:
            each.to_accumulated_grad_if_needed()
            if each.unsharded_accumulated_grad is None and each._unsharded_param.grad is None:
                each.unsharded_accumulated_grad = torch.zeros_like(each._unsharded_param, dtype=each.reduce_dtype)


class SameOrder:
    """Lets a rank whose rows skip a block gather and reduce it all the same, when the ranks that enter it do: a skipped
    block is run as the identity on what the next one is given, so that forward and backward pass through its hooks."""

    def __init__(self, root: nn.Module, blocks: list[nn.Module]) -> None:
        self.blocks, self.next = blocks, 0
        root.register_forward_pre_hook(lambda *_: self._begin())
        for index, block in enumerate(blocks):
            block.register_forward_pre_hook(partial(self._enter, index), prepend=True)
        root.register_forward_hook(lambda _, __, output: self._skip_to(len(self.blocks), output), prepend=True)

    def _begin(self) -> None:
        self.next = 0

    def _enter(self, index: int, _: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if index < self.next:
            return None
        if self.next < index:
            given = (self._skip_to(index, given[0]), *given[1:])
        self.next = index + 1
        return given

    def _skip_to(self, index: int, x: Any) -> Any:
        while self.next < index:
            block = self.blocks[self.next]
            if torch.is_grad_enabled() and not x.requires_grad:
                x = x.detach().requires_grad_()
            kept = block.__dict__.get("forward")
            block.forward = lambda x: x
            try:
                x = block(x).to(x.dtype)
            finally:
                del block.forward
                if kept is not None:
                    block.forward = kept
        return x


def _unsharded_gradient(each: Any) -> torch.Tensor | None:
    """Of one of fully_shard's records; there is nothing before it was gathered once."""
    gradient: torch.Tensor | None = each._unsharded_param.grad if hasattr(each, "_unsharded_param") else None
    return gradient


class Zero(DataAxis):
    """`mesh`: 1-D (shard) or 2-D (replicate, shard) over the batch axes; `group`: all batch ranks."""

    averages = True
    forward_is_collective = True

    def __init__(
        self,
        level: int,
        mesh: DeviceMesh,
        group: dist.ProcessGroup | None,
        *,
        offload: bool,
        precision: str,
        bucket_bytes: int,
        device: torch.device,
        split_backward: bool = False,
    ) -> None:
        self.split_backward = split_backward
        self.level, self.mesh, self.group, self.size = level, mesh, group, mesh.size()
        self.bucket_bytes, self.device = bucket_bytes, device
        self.engine = f"torch-{device_backend(device)}"
        self.offload: OffloadPolicy = CPUOffloadPolicy(pin_memory=device.type == "cuda") if offload else OffloadPolicy()
        dtype = DTYPES.get(precision)
        self.precision = MixedPrecisionPolicy(
            param_dtype=dtype,
            reduce_dtype=torch.float32 if dtype else None,
            cast_forward_inputs=False,  # autocast casts what each operation takes, as under every other strategy
        )
        self.roots: list[FSDPModule] = []
        self.ignored: set[nn.Parameter] = set()
        self.whole: GradientReducer | None = None  # of the parameters that are not sharded
        self.reached: set[Any] = set()
        self.came_back: set[int] = set()  # roots that this pass' backward has come to
        self.unsharded: list[nn.Parameter] = []

    def shard(self, model: nn.Module, stages: list[nn.Module] | None) -> None:
        """Shard each stage's units, then the rest of it. 0-dim parameters, which have no dim to cut, and those that
        two stages of this rank share, which nothing gathers for both, stay whole. Of ZeRO-3 the last layer of all is
        kept from its forward to its backward, which comes next."""
        stages = stages or [model]
        holders = Counter(p for stage in stages for p in stage.parameters())
        self.ignored = {p for p, count in holders.items() if p.ndim == 0 or count > 1}
        for stage in stages:
            chain = stage.names if isinstance(stage, Stage) else chain_of(stage)
            units = [stage.get_submodule(name) for name in own_units(stage, chain if self.level == 3 else ())]
            units = [unit for unit in units if all(holders[p] == 1 for p in unit.parameters())]
            repeated = {id(block) for _, _, block in repeated_blocks(stage)}
            for unit in units:
                last = id(unit) not in repeated and unit is stage.get_submodule(chain[-1])
                self._shard(unit, self.ignored, reshard=self.level == 3 and not last)
            self.roots.append(self._shard(stage, self.ignored, reshard=False))
            SameOrder(stage, [unit for unit in units if id(unit) in repeated])

    def wrap(self, model: nn.Module) -> nn.Module:
        for each in self._all_sharded():
            each.reset_sharded_param()  # it keeps a view of what was on the meta device
        self.sharded = [each for each in self._all_sharded() if each.sharded_param.requires_grad]
        self.unsharded = [p for p in model.parameters() if p in self.ignored and p.requires_grad]
        if self.unsharded:
            self.whole = GradientReducer(self.unsharded, GroupTransport(self.group), self.bucket_bytes)
        return model

    def _shard(self, module: nn.Module, ignored: set[nn.Parameter], reshard: bool) -> FSDPModule:
        sharded = fully_shard(
            module,
            mesh=self.mesh,
            reshard_after_forward=reshard,
            mp_policy=self.precision,
            offload_policy=self.offload,
            ignored_params=ignored,
        )
        assert isinstance(sharded, FSDPModule)
        sharded.set_force_sum_reduction_for_comms(True)
        sharded.set_reduce_scatter_unused_params(True)  # else each rank would reduce what its own rows have reached
        for group in fully_shard.state(sharded)._fsdp_param_groups:  # type: ignore[attr-defined]
            group.post_backward = partial(self._post_backward, len(self.roots), group, group.post_backward)
        if device_backend(self.device, self.mesh.get_group(self.mesh.ndim - 1)) == "gloo":
            sharded.set_custom_reduce_scatter(AllToAllReduceScatter(self.waiting))  # type: ignore[arg-type]
            sharded.set_custom_all_gather(TimedAllGather(self.waiting))  # type: ignore[arg-type]
        return sharded

    def _post_backward(self, root: int, group: Any, post_backward: Callable[..., None], *unused: Any) -> None:
        """Note what the backward of a group has reached, before it is reduced and freed."""
        self.came_back.add(root)
        if self.counts:
            for each in group.fsdp_params:
                if each.unsharded_accumulated_grad is not None or _unsharded_gradient(each) is not None:
                    self.reached.add(each)
        if group.reduce_grads:
            _one_dtype(
                [e for e in group.fsdp_params if hasattr(e, "_unsharded_param") and e.sharded_param.requires_grad]
            )
        post_backward(*unused)

    def _all_sharded(self) -> Iterator[Any]:
        """fully_shard's own records of its parameters."""
        for root in self.roots:
            for module in root.modules():  # type: ignore[attr-defined]
                if isinstance(module, FSDPModule):
                    for group in fully_shard.state(module)._fsdp_param_groups:  # type: ignore[attr-defined]
                        yield from group.fsdp_params

    def _sharded(self) -> Iterator[Any]:
        """Those that have been gathered once."""
        return (each for each in self._all_sharded() if hasattr(each, "_unsharded_param"))

    def whole_parameters(self) -> Iterable[nn.Parameter]:
        """Known from the first pass on, and the same ones in every pass: their storage comes and goes."""
        return (each._unsharded_param for each in self._sharded() if each._unsharded_param.requires_grad)

    def whole_tensors(self) -> Iterator[torch.Tensor]:
        for each in self._sharded():
            weight = each._unsharded_param
            yield from (t for t in (weight, weight.grad, each.unsharded_accumulated_grad) if t is not None)

    @contextmanager
    def scope(self, last: bool) -> Iterator[None]:
        """What a pass reduces, and whether gathered weights are kept for the next pass.

        Every backward counts as a last one for FSDP's own books: else it would prefetch, in the last pass, a block of
        the pass before.
        """
        for root in self.roots:
            root.set_requires_gradient_sync(last or self.level >= 2)
            root.set_reshard_after_backward(last or self.level == 3)
        before = [p for p in self.unsharded if p.grad is None]
        yield
        self._complete()
        if not self.counts:
            for parameter in before:
                parameter.grad = None

    def _complete(self) -> None:
        """Where no backward came (a frozen stage, rows that reach nothing): gather and reduce as it would have, since
        other ranks may have had one, and free what forward gathered."""
        for number, root in enumerate(self.roots):
            if number not in self.came_back:
                state = fully_shard.state(root)  # type: ignore[attr-defined]
                inner = [g for s in state._state_ctx.all_states if s is not state for g in s._fsdp_param_groups]
                for group in state._fsdp_param_groups:
                    group.pre_backward(True)
                for group in reversed(inner):
                    group.pre_backward(True)
                    group.post_backward()
                for group in state._fsdp_param_groups:
                    group.post_backward()
                state._root_post_backward_final_callback()
        self.came_back.clear()

    def before_stage_backward(self, module: nn.Module, last: bool) -> None:
        """In a pipeline gradients stay whole until the stage's last micro-batch and are reduced once. Where backward is
        split no autograd hook sees the end of it, so the reduction is `after_pipeline`'s."""
        assert isinstance(module, FSDPModule)
        last = last and not self.split_backward
        module.set_is_last_backward(last)
        module.set_requires_gradient_sync(last)
        module.set_reshard_after_backward(last or self.level == 3)

    def after_pipeline(self) -> None:
        if not self.counts:
            for parameter in self.unsharded:
                parameter.grad = None
        for root in self.roots if self.split_backward else ():
            root.set_is_last_backward(True)
            root.set_requires_gradient_sync(True)
            root.set_reshard_after_backward(True)
            state = fully_shard.state(root)  # type: ignore[attr-defined]
            for each in state._state_ctx.all_states:
                for group in each._fsdp_param_groups:
                    group.post_backward()
            state._root_post_backward_final_callback()
        self._complete()

    def finish(self) -> None:
        if self.whole is not None:
            self.whole.finish()
            for bucket in self.whole.buckets:
                bucket.buffer.div_(self.size)
        lacking = [index for index, each in enumerate(self.sharded) if each not in self.reached]
        reached = torch.ones(len(self.sharded), dtype=torch.uint8, device=self.device)
        for index in lacking:
            reached[index] = 0
        dist.all_reduce(reached, dist.ReduceOp.MAX, group=self.group)
        if lacking:  # else the host need not wait, on a GPU, to look
            for each, by_some_rank in zip(self.sharded, reached.tolist(), strict=True):
                if not by_some_rank:
                    each.sharded_param.grad = None
        self.reached.clear()

    def share_buffers(self, buffers: list[torch.Tensor]) -> None:
        broadcast_tensors(buffers, self.group)

    def after_evaluate(self) -> None:
        """Free what evaluation gathered, so that no later pass sees weights from before a step or a load."""
        for root in self.roots:
            for module in root.modules():  # type: ignore[attr-defined]
                if isinstance(module, FSDPModule):
                    module.reshard()

    def close(self, failed: bool) -> None:
        if self.whole is not None:
            self.whole.close()
