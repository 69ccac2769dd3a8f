"""Shard by ZeRO 1, 2, 3 (https://arxiv.org/abs/1910.02054) on torch's fully_shard.

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
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from sparkring.training.models.sharding_plan import ShardingPlan, plan_of
from sparkring.training.models.torch_private import (
    complete_gradients,
    flattened,
    fsdp_groups,
    fsdp_parameters,
    gathered_parameter,
    has_gradient,
    reduce_after_split_backward,
    run_backward_hooks,
    was_gathered,
)
from sparkring.training.parallel.data_parallel.base import DataParallel
from sparkring.training.parallel.data_parallel.ddp import GroupTransport, broadcast_tensors
from sparkring.training.parallel.data_parallel.reduce import GradientReducer
from sparkring.training.parallel.model_parallel.blocks import own_units, repeated_blocks
from sparkring.training.parallel.model_parallel.pipeline import PipelineStage
from sparkring.training.parallel.precision import DTYPES
from sparkring.training.parallel.process_groups import RankContext, device_backend

Waiting = Callable[[], AbstractContextManager[None]]


class TimedAllGather:
    """Measure the waiting in fully_shard's all-gather, which blocks on Gloo."""

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
        """Sum this rank's shard over the group, in rank order.

        Args:
            output_tensor: (n,), the sum for this rank.
            input_tensor: (w x n,), slice r for rank r.
            group: group of w ranks.
            op: ignored operation of fully_shard.
            async_op: ignored; the sum is always complete on return.
        """
        received = torch.empty_like(input_tensor)
        with self.waiting():
            dist.all_to_all_single(received, input_tensor, group=group)
        torch.sum(received.view(group.size(), -1), dim=0, out=output_tensor.view(-1))  # (w, n) -> (n,)


class SkippedBlocks:
    """Make a rank whose rows skip a block gather and reduce it all the same.

    TRICK: a skipped block is run as the identity on the input of the next one, so that forward and backward pass
    through fully_shard's hooks (tests/ranks/test_ring.py, test_odd.py).
    """

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
            own_forward = block.__dict__.get("forward")  # a compiled one
            block.forward = lambda x: x
            try:
                x = block(x).to(x.dtype)
            finally:
                del block.forward
                if own_forward is not None:
                    block.forward = own_forward
        return x


class TorchZero(DataParallel):
    """Shard parameters, gradients and optimizer state over groups of batch ranks."""

    averages = True
    forward_is_collective = True

    def __init__(self, context: RankContext) -> None:
        config, self.device, self.mesh = context.config, context.device, context.batch_mesh()
        super().__init__(self.mesh.size(), f"torch-{device_backend(context.device)}")
        self.level, self.bucket_bytes = config.zero, config.bucket_bytes
        self.split_backward = context.mesh.pp > 1 and config.schedule == "zero-bubble"
        self.group = (flattened(self.mesh) if self.mesh.ndim == 2 else self.mesh).get_group()  # all batch ranks
        self.offload = CPUOffloadPolicy(pin_memory=self.device.type == "cuda") if config.offload else OffloadPolicy()
        dtype = DTYPES.get(config.precision)
        self.precision = MixedPrecisionPolicy(
            param_dtype=dtype,
            reduce_dtype=torch.float32 if dtype else None,
            cast_forward_inputs=False,  # autocast casts the inputs of each operation, as under every other strategy
        )
        self.roots: list[FSDPModule] = []
        self.sharded: list[Any] = []  # fully_shard's records of trainable parameters
        self.reached: set[Any] = set()  # of them, those with a gradient in this step
        self.roots_done: set[int] = set()  # roots that this pass' backward has come to
        self.ignored: set[nn.Parameter] = set()  # not sharded
        self.unsharded: list[nn.Parameter] = []  # of them, the trainable ones
        self.unsharded_reducer: GradientReducer | None = None

    def shard(self, model: nn.Module, stages: list[nn.Module] | None) -> None:
        """Shard each stage's units, then the rest of it.

        Unsharded are 0-dim parameters, which have no dim to cut, and those that two stages of this rank share, which
        nothing gathers for both. Under ZeRO-3 the last layer of all stays gathered from its forward to its backward,
        which comes next.
        """
        stages = stages or [model]
        holders = Counter(p for stage in stages for p in stage.parameters())
        self.ignored = {p for p, count in holders.items() if p.ndim == 0 or count > 1}
        for stage in stages:
            plan = plan_of(stage) or ShardingPlan()
            layers = stage.names if isinstance(stage, PipelineStage) else plan.layer_names(stage)
            units = [stage.get_submodule(name) for name in own_units(stage, layers if self.level == 3 else ())]
            units = [unit for unit in units if all(holders[p] == 1 for p in unit.parameters())]
            repeated = {id(block) for _, _, block in repeated_blocks(stage)}
            for unit in units:
                last = id(unit) not in repeated and unit is stage.get_submodule(layers[-1])
                self._shard(unit, reshard=self.level == 3 and not last)
            self.roots.append(self._shard(stage, reshard=False))
            SkippedBlocks(stage, [unit for unit in units if id(unit) in repeated])

    def wrap(self, model: nn.Module) -> nn.Module:
        for record in self._records():
            record.reset_sharded_param()  # its view is of memory on the meta device
        self.sharded = [record for record in self._records() if record.sharded_param.requires_grad]
        self.unsharded = [p for p in model.parameters() if p in self.ignored and p.requires_grad]
        if self.unsharded:
            self.unsharded_reducer = GradientReducer(self.unsharded, GroupTransport(self.group), self.bucket_bytes)
        return model

    def _shard(self, module: nn.Module, reshard: bool) -> FSDPModule:
        sharded = fully_shard(
            module,
            mesh=self.mesh,
            reshard_after_forward=reshard,
            mp_policy=self.precision,
            offload_policy=self.offload,
            ignored_params=self.ignored,
        )
        assert isinstance(sharded, FSDPModule)
        sharded.set_force_sum_reduction_for_comms(True)
        for group in fsdp_groups(sharded):
            group.post_backward = partial(self._post_backward, len(self.roots), group, group.post_backward)
        if device_backend(self.device, self.mesh.get_group(self.mesh.ndim - 1)) == "gloo":
            sharded.set_custom_reduce_scatter(AllToAllReduceScatter(self.waiting))  # type: ignore[arg-type]
            sharded.set_custom_all_gather(TimedAllGather(self.waiting))  # type: ignore[arg-type]
        return sharded

    def _post_backward(self, root: int, group: Any, post_backward: Callable[..., None], *unused: Any) -> None:
        """Record what the backward of a group has reached, before it is reduced and freed."""
        self.roots_done.add(root)
        if self.has_rows:
            self.reached.update(record for record in group.fsdp_params if has_gradient(record))
        if group.reduce_grads:
            complete_gradients(r for r in group.fsdp_params if was_gathered(r) and r.sharded_param.requires_grad)
        post_backward(*unused)

    def _records(self) -> Iterator[Any]:
        """Yield fully_shard's records of all parameters."""
        return (record for root in self.roots for record in fsdp_parameters(root))

    def gathered_parameters(self) -> Iterable[nn.Parameter]:
        """Yield gathered parameters, known after the first pass and the same in every pass."""
        gathered = (gathered_parameter(record) for record in self._records() if was_gathered(record))
        return (parameter for parameter in gathered if parameter.requires_grad)

    def gathered_tensors(self) -> Iterator[torch.Tensor]:
        for record in self._records():
            if was_gathered(record):
                weight = gathered_parameter(record)
                yield from (t for t in (weight, weight.grad, record.unsharded_accumulated_grad) if t is not None)

    @contextmanager
    def pass_scope(self, last: bool) -> Iterator[None]:
        """Set what a pass reduces, and whether gathered weights stay for the next pass.

        Every backward counts as a last one in fully_shard's state: else it would prefetch, in the last pass, a block of
        the pass before.
        """
        for root in self.roots:
            root.set_requires_gradient_sync(last or self.level >= 2)
            root.set_reshard_after_backward(last or self.level == 3)
        before = [p for p in self.unsharded if p.grad is None]
        yield
        self._complete()
        if not self.has_rows:
            for parameter in before:
                parameter.grad = None

    def _complete(self) -> None:
        """Gather and reduce the roots that no backward came to, since other ranks may have had one, and free them.

        Such are a frozen stage, and rows that reach nothing.
        """
        for number, root in enumerate(self.roots):
            if number not in self.roots_done:
                run_backward_hooks(root)
        self.roots_done.clear()

    def before_stage_backward(self, stage: nn.Module, last: bool) -> None:
        """Keep gradients whole until the stage's last micro-batch, and reduce them once.

        Where backward is split no autograd hook sees the end of it, so the reduction is `after_pipeline`'s.
        """
        assert isinstance(stage, FSDPModule)
        last = last and not self.split_backward
        stage.set_is_last_backward(last)
        stage.set_requires_gradient_sync(last)
        stage.set_reshard_after_backward(last or self.level == 3)

    def after_pipeline(self) -> None:
        if not self.has_rows:
            for parameter in self.unsharded:
                parameter.grad = None
        for root in self.roots if self.split_backward else ():
            root.set_is_last_backward(True)
            root.set_requires_gradient_sync(True)
            root.set_reshard_after_backward(True)
            reduce_after_split_backward(root)
        self._complete()

    def finish_reduction(self) -> None:
        """Average the unsharded gradients, and drop the gradients that no rank's rows have reached."""
        if self.unsharded_reducer is not None:
            self.unsharded_reducer.finish()
            for bucket in self.unsharded_reducer.buckets:
                bucket.buffer.div_(self.size)
        lacking = [index for index, record in enumerate(self.sharded) if record not in self.reached]
        reached = torch.ones(len(self.sharded), dtype=torch.uint8, device=self.device)  # (sharded parameters,)
        for index in lacking:
            reached[index] = 0
        dist.all_reduce(reached, dist.ReduceOp.MAX, group=self.group)
        if lacking:  # else the host need not wait for a GPU's values
            for record, by_some_rank in zip(self.sharded, reached.tolist(), strict=True):
                if not by_some_rank:
                    record.sharded_param.grad = None
        self.reached.clear()

    def broadcast_buffers(self, buffers: list[torch.Tensor]) -> None:
        broadcast_tensors(buffers, self.group)

    def after_evaluate(self) -> None:
        """Free gathered weights, so that no later pass sees weights from before a step or a load."""
        for root in self.roots:
            for module in root.modules():  # type: ignore[attr-defined]
                if isinstance(module, FSDPModule):
                    module.reshard()

    def close(self, failed: bool) -> None:
        if self.unsharded_reducer is not None:
            self.unsharded_reducer.close()
