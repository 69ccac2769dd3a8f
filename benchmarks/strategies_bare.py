"""The same step written directly against torch and Horovod, as their tutorials do: what ours is compared to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.parallel import DistributedDataParallel

from training.models.gpt import PLAN
from training.parallel.pipeline import Stage, chain_names, cut_chain, estimated_costs
from training.parallel.tensor import apply_tensor, vocabulary_parallel_loss
from training.parallel.zero import AllToAllReduceScatter

Step = Callable[[], None]


def _adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.01, fused=True)


def _step(run: nn.Module, parameters: list[Any], optimizer: Any, task: Any, part: Any) -> Step:
    def step() -> None:
        loss = task.loss(run(*task.inputs(part.columns)), part.columns).mean()
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def ddp(model: nn.Module, task: Any, part: Any, rank: int, world: int) -> Step:
    run = DistributedDataParallel(model, gradient_as_bucket_view=True)
    parameters = list(model.parameters())
    return _step(run, parameters, _adamw(parameters), task, part)


def zero_redundancy(model: nn.Module, task: Any, part: Any, rank: int, world: int) -> Step:
    run = DistributedDataParallel(model, gradient_as_bucket_view=True)
    parameters = list(model.parameters())
    optimizer = ZeroRedundancyOptimizer(parameters, torch.optim.AdamW, lr=1e-3, weight_decay=0.01, fused=True)
    return _step(run, parameters, optimizer, task, part)


def horovod(model: nn.Module, task: Any, part: Any, rank: int, world: int) -> Step:
    import horovod.torch as hvd

    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    parameters = list(model.parameters())
    optimizer = hvd.DistributedOptimizer(_adamw(parameters), named_parameters=model.named_parameters())

    def step() -> None:
        loss = task.loss(model(*task.inputs(part.columns)), part.columns).mean()
        loss.backward()
        optimizer.synchronize()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        with optimizer.skip_synchronize():
            optimizer.step()
        optimizer.zero_grad()

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

    def step() -> None:
        with vocabulary_parallel_loss():
            loss = task.loss(model(*task.inputs(part.columns)), part.columns).mean()
            loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def pipeline(micro_batches: int) -> Any:
    """torch's Schedule1F1B over the same cut, with the tied weight's gradient and the norm summed over the stages."""

    def make(model: nn.Module, task: Any, part: Any, rank: int, world: int) -> Step:
        names = chain_names(model, PLAN)
        mine = Stage(model, cut_chain(names, estimated_costs(model, names), world)[rank])
        stage = PipelineStage(mine, rank, world, torch.device("cpu"))
        columns = part.columns["tokens"]

        def loss(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            return nn.functional.cross_entropy(outputs.flatten(0, 1), target.flatten())

        schedule = Schedule1F1B(stage, micro_batches, loss)
        parameters = list(mine.parameters())
        optimizer = _adamw(parameters)
        tied = dist.new_group([0, world - 1])

        def step() -> None:
            if rank == 0:
                schedule.step(columns[:, :-1].long())
            else:
                schedule.step(target=columns[:, 1:].long(), losses=[])
            if rank in (0, world - 1):
                dist.all_reduce(model.embed.weight.grad, group=tied)  # type: ignore[union-attr]
            counted = [p.grad for p in parameters if rank == 0 or p is not model.embed.weight]  # type: ignore[union-attr]
            square = nn.utils.get_total_norm(counted).square()
            dist.all_reduce(square)
            nn.utils.clip_grads_with_norm_(parameters, 1.0, square.sqrt())
            optimizer.step()
            optimizer.zero_grad()

        return step

    return make


BARE: dict[str, Any] = {
    "ddp": ddp,
    "horovod": horovod,
    "zero1 (torch)": fsdp(reshard=False),
    "zero1 (horovod)": zero_redundancy,
    "zero2": fsdp(reshard=False),
    "zero3": fsdp(reshard=True),
    "tensor": tensor,
    "1f1b": pipeline(8),
}
