"""The same step written directly against torch and Horovod, as their tutorials do: what ours is compared to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleavedZeroBubble
from torch.distributed.pipelining.schedules import PipelineScheduleMulti
from torch.nn.parallel import DistributedDataParallel

from training.models.gpt import PLAN
from training.parallel.pipeline import Stage, chain_names, cut_chain, estimated_costs
from training.parallel.tensor import apply_tensor, vocabulary_parallel_loss
from training.parallel.zero import AllToAllReduceScatter

Step = Callable[[], torch.Tensor | None]  # gives this rank's mean loss, where it has one


def _adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.01, fused=True)


def _step(run: nn.Module, parameters: list[Any], optimizer: Any, task: Any, part: Any) -> Step:
    def step() -> torch.Tensor:
        loss = task.loss(run(*task.inputs(part.columns)), part.columns).mean()
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def ddp(model: nn.Module, task: Any, part: Any, rank: int, world: int) -> Step:
    run = DistributedDataParallel(model, gradient_as_bucket_view=True)
    parameters = list(model.parameters())
    return _step(run, parameters, _adamw(parameters), task, part)


def horovod(model: nn.Module, task: Any, part: Any, rank: int, world: int) -> Step:
    import horovod.torch as hvd

    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    parameters = list(model.parameters())
    optimizer = hvd.DistributedOptimizer(_adamw(parameters), named_parameters=model.named_parameters())

    def step() -> torch.Tensor:
        loss = task.loss(model(*task.inputs(part.columns)), part.columns).mean()
        loss.backward()
        optimizer.synchronize()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        with optimizer.skip_synchronize():
            optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


class FlatShard:
    """Parameters and their gradients as views into two flat tensors, of which this rank owns one slice."""

    def __init__(self, name: str, parameters: list[nn.Parameter], rank: int, world: int) -> None:
        self.name, self.missing = name, len(parameters)
        self.parameters = parameters
        numel = -(-sum(p.numel() for p in parameters) // world) * world
        self.weights, self.gradients = torch.zeros(numel), torch.zeros(numel)
        start = 0
        for parameter in parameters:
            stop = start + parameter.numel()
            self.weights[start:stop] = parameter.detach().flatten()
            parameter.data = self.weights[start:stop].view_as(parameter)
            parameter.grad = self.gradients[start:stop].view_as(parameter)
            start = stop
            parameter.register_post_accumulate_grad_hook(self._ready)
        self.owned = nn.Parameter(self.weights.chunk(world)[rank])

    def _ready(self, _: torch.Tensor) -> None:
        import horovod.torch as hvd

        self.missing -= 1
        if not self.missing:
            self.handle = hvd.reducescatter_async(self.gradients, name=f"bare.{self.name}", op=hvd.Average)
            self.missing = len(self.parameters)


def zero1_horovod(model: nn.Module, task: Any, part: Any, rank: int, world: int) -> Step:
    """ZeRO-1 by hand: four flat buckets, reduce-scattered while backward runs, stepped by slice, gathered."""
    import horovod.torch as hvd

    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    parameters = list(model.parameters())[::-1]
    filled = torch.tensor([p.numel() for p in parameters]).cumsum(0)
    number = ((filled - 1) * 4 // filled[-1]).tolist()
    shards = [
        FlatShard(str(n), [p for p, at in zip(parameters, number, strict=True) if at == n], rank, world)
        for n in sorted(set(number))
    ]
    owned = [shard.owned for shard in shards]
    optimizer = _adamw(owned)

    def step() -> torch.Tensor:
        loss = task.loss(model(*task.inputs(part.columns)), part.columns).mean()
        loss.backward()
        for shard in shards:
            shard.owned.grad = hvd.synchronize(shard.handle)
        square = nn.utils.get_total_norm([p.grad for p in owned]).square()
        dist.all_reduce(square)
        nn.utils.clip_grads_with_norm_(owned, 1.0, square.sqrt())
        optimizer.step()
        handles = [hvd.allgather_async(shard.owned.detach(), name=f"bare.weights.{shard.name}") for shard in shards]
        for shard, handle in zip(shards, handles, strict=True):
            shard.weights.copy_(hvd.synchronize(handle))
            shard.gradients.zero_()
        return loss.detach()

    return step


def fsdp(reshard: bool) -> Any:
    """fully_shard with the same all-to-all reduce-scatter as ours: stock Gloo would move twice the bytes."""

    def make(model: nn.Module, task: Any, part: Any, rank: int, world: int) -> Step:
        for module in [*model.blocks, model]:  # type: ignore[misc,list-item]
            fully_shard(module, reshard_after_forward=reshard and module is not model)
            module.set_custom_reduce_scatter(AllToAllReduceScatter())
            module.set_force_sum_reduction_for_comms(True)
        parameters = list(model.parameters())
        return _step(model, parameters, _adamw(parameters), task, part)

    return make


def tensor(model: nn.Module, task: Any, part: Any, rank: int, world: int) -> Step:
    apply_tensor(model, PLAN, init_device_mesh("cpu", (world,)), sequence=False)
    parameters = list(model.parameters())
    optimizer = _adamw(parameters)

    def step() -> torch.Tensor:
        with vocabulary_parallel_loss():
            loss = task.loss(model(*task.inputs(part.columns)), part.columns).mean()
            loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


class Ulysses(nn.Module):
    """Attention over whole sequences and a part of the heads, by torch's differentiable all-to-all."""

    def __init__(self, core: nn.Module, world: int) -> None:
        super().__init__()
        self.core, self.world, self.group = core, world, dist.group.WORLD

    def forward(self, *qkv_BtHD: torch.Tensor) -> torch.Tensor:
        whole = [
            self._swap(x.unflatten(2, (self.world, -1)).movedim(2, 0)).movedim(0, 1).flatten(1, 2) for x in qkv_BtHD
        ]
        parts = self.core(*whole).unflatten(1, (self.world, -1)).movedim(1, 0)
        return self._swap(parts).movedim(0, 2).flatten(2, 3)

    def _swap(self, x: torch.Tensor) -> torch.Tensor:
        sent = [1] * self.world
        return all_to_all_single_autograd(x.contiguous(), sent, sent, self.group)  # type: ignore[arg-type]


def context(model: nn.Module, task: Any, part: Any, rank: int, world: int) -> Step:
    """DeepSpeed-Ulysses by hand under DDP: each rank its stretch of every row."""
    for block in model.blocks:  # type: ignore[union-attr]
        block.attn.core = Ulysses(block.attn.core, world)  # type: ignore[union-attr]
    mine = replace(part, columns=task.slice_sequence(part.columns, rank, world))
    return ddp(model, task, mine, rank, world)


def pipeline(schedule_class: Any, micro_batches: int) -> Any:
    """torch's own schedule over the same cut, with the tied weight's gradient and the norm summed over the stages."""

    def make(model: nn.Module, task: Any, part: Any, rank: int, world: int) -> Step:
        names = chain_names(model, PLAN)
        mine = Stage(model, cut_chain(names, estimated_costs(model, names), world)[rank])
        stage = PipelineStage(mine, rank, world, torch.device("cpu"))
        columns = part.columns["tokens"]

        def loss(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            return nn.functional.cross_entropy(outputs.flatten(0, 1), target.flatten())

        several = issubclass(schedule_class, PipelineScheduleMulti)
        schedule = schedule_class([stage] if several else stage, micro_batches, loss_fn=loss)
        parameters = list(mine.parameters())
        optimizer = _adamw(parameters)
        tied = dist.new_group([0, world - 1])

        def step() -> torch.Tensor | None:
            losses: list[torch.Tensor] = []
            if rank == 0:
                schedule.step(columns[:, :-1].long())
            elif rank == world - 1:
                schedule.step(target=columns[:, 1:].long(), losses=losses)
            else:
                schedule.step()
            if rank in (0, world - 1):
                dist.all_reduce(model.embed.weight.grad, group=tied)  # type: ignore[union-attr]
            counted = [p.grad for p in parameters if rank == 0 or p is not model.embed.weight]  # type: ignore[union-attr]
            square = nn.utils.get_total_norm(counted).square()
            dist.all_reduce(square)
            nn.utils.clip_grads_with_norm_(parameters, 1.0, square.sqrt())
            optimizer.step()
            optimizer.zero_grad()
            return torch.stack(losses).mean().detach() if losses else None

        return step

    return make


BARE: dict[str, Any] = {
    "ddp": ddp,
    "horovod": horovod,
    "zero1 (torch)": fsdp(reshard=False),
    "zero1 (horovod)": zero1_horovod,
    "zero2": fsdp(reshard=False),
    "zero3": fsdp(reshard=True),
    "tensor": tensor,
    "1f1b": pipeline(Schedule1F1B, 8),
    "zero-bubble": pipeline(ScheduleInterleavedZeroBubble, 8),
    "context": context,
}
