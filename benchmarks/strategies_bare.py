"""The same step written directly against torch and Horovod, as their tutorials do: what ours is compared to. Nothing of
ours is in it but the model that is trained.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleavedZeroBubble
from torch.distributed.pipelining.schedules import PipelineScheduleMulti
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from sparkring.training.models.gpt import GPT

Step = Callable[[], torch.Tensor | None]  # gives this rank's mean loss, where it has one
Make = Callable[..., Step]  # (model, tokens (B, T + 1), rank, world, passes, bf16)


def _adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.01, fused=True)


def mean_loss(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return cross_entropy(logits.flatten(0, 1), target.flatten())


def _passes(
    run: nn.Module,
    tokens: torch.Tensor,
    passes: int,
    bf16: bool,
    around: Callable[[bool], AbstractContextManager[Any]] = lambda last: nullcontext(),
) -> torch.Tensor:
    """Forward and backward of every part of the batch; the mean loss."""
    total: Any = 0
    for number, part in enumerate(tokens.chunk(passes)):
        with around(number == passes - 1):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16):
                loss = mean_loss(run(part[:, :-1]), part[:, 1:]) / passes
            loss.backward()
        total = total + loss.detach()
    return total.full_tensor() if isinstance(total, DTensor) else total  # type: ignore[no-any-return]


def ddp(model: GPT, tokens: torch.Tensor, rank: int, world: int, passes: int, bf16: bool) -> Step:
    run = DistributedDataParallel(model, gradient_as_bucket_view=True)
    parameters = list(model.parameters())
    optimizer = _adamw(parameters)

    def step() -> torch.Tensor:
        loss = _passes(run, tokens, passes, bf16, lambda last: nullcontext() if last else run.no_sync())
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def horovod(model: GPT, tokens: torch.Tensor, rank: int, world: int, passes: int, bf16: bool) -> Step:
    import horovod.torch as hvd

    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    parameters = list(model.parameters())
    optimizer = hvd.DistributedOptimizer(
        _adamw(parameters), named_parameters=model.named_parameters(), backward_passes_per_step=passes
    )

    def step() -> torch.Tensor:
        loss = _passes(model, tokens, passes, bf16)
        optimizer.synchronize()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        with optimizer.skip_synchronize():
            optimizer.step()
        optimizer.zero_grad()
        return loss

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


def zero1_horovod(model: GPT, tokens: torch.Tensor, rank: int, world: int, passes: int, bf16: bool) -> Step:
    """ZeRO-1 by hand: four flat buckets, reduce-scattered while backward runs, stepped by slice, gathered."""
    import horovod.torch as hvd

    assert passes == 1, "its hooks start the reduction in the first backward"
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
        loss = _passes(model, tokens, 1, bf16)
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
        return loss

    return step


class ExchangedSum:
    """A reduce-scatter that moves (w-1)/w of the bytes: stock Gloo's moves twice as many."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        exchanged = torch.empty_like(input_tensor)
        dist.all_to_all_single(exchanged, input_tensor, group=group)
        torch.sum(exchanged.view(group.size(), -1), 0, out=output_tensor.view(-1))


def fsdp(level: int) -> Make:
    def make(model: GPT, tokens: torch.Tensor, rank: int, world: int, passes: int, bf16: bool) -> Step:
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if bf16 else MixedPrecisionPolicy()
        for module in [*model.blocks, model]:
            fully_shard(module, reshard_after_forward=level == 3 and module is not model, mp_policy=policy)
            module.set_custom_reduce_scatter(ExchangedSum())  # type: ignore[operator,arg-type]
            module.set_force_sum_reduction_for_comms(True)  # type: ignore[operator]
        run: Any = model
        parameters = list(model.parameters())
        optimizer = _adamw(parameters)

        def around(last: bool) -> AbstractContextManager[None]:
            run.set_requires_gradient_sync(last or level > 1)
            run.set_reshard_after_backward(last or level == 3)
            return nullcontext()

        def step() -> torch.Tensor:
            loss = _passes(model, tokens, passes, bf16, around)
            nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            return loss

        return step

    return make


def tensor(model: GPT, tokens: torch.Tensor, rank: int, world: int, passes: int, bf16: bool) -> Step:
    """Megatron's cut by torch's styles, written out for this model; norms stay plain, whole tensors."""
    mesh = init_device_mesh("cpu", (world,))
    enter = PrepareModuleInput(input_layouts=(Replicate(),), desired_input_layouts=(Replicate(),))
    for block in model.blocks:
        parallelize_module(block, mesh, {"attn": enter, "mlp": enter})
        columns = {name: ColwiseParallel() for name in ("attn.q", "attn.k", "attn.v", "mlp.gate", "mlp.up")}
        parallelize_module(block, mesh, {**columns, "attn.o": RowwiseParallel(), "mlp.down": RowwiseParallel()})
    head = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    parallelize_module(model, mesh, {"embed": RowwiseParallel(input_layouts=Replicate()), "head": head})
    model.head.weight = model.embed.weight
    kinds: tuple[list[nn.Parameter], list[nn.Parameter]] = ([], [])
    for parameter in model.parameters():
        kinds[isinstance(parameter, DTensor)].append(parameter)
    optimizer = _adamw([{"params": kind} for kind in kinds])

    def step() -> torch.Tensor:
        with loss_parallel():
            loss = _passes(model, tokens, passes, bf16)
        whole, cut = (nn.utils.get_total_norm([p.grad for p in kind]) for kind in kinds)
        norm = torch.hypot(whole, cut.full_tensor())  # type: ignore[attr-defined]
        for kind in kinds:
            for parameter in kind:
                grad: Any = parameter.grad
                local = grad.to_local() if isinstance(grad, DTensor) else grad
                local.mul_((1.0 / (norm + 1e-6)).clamp(max=1.0))
        optimizer.step()
        optimizer.zero_grad()
        return loss

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


def context(model: GPT, tokens: torch.Tensor, rank: int, world: int, passes: int, bf16: bool) -> Step:
    """DeepSpeed-Ulysses by hand under DDP: each rank its stretch of every row."""
    for block in model.blocks:
        block.attn.core = Ulysses(block.attn.core, world)  # type: ignore[union-attr,assignment,arg-type]
    length = (tokens.shape[1] - 1) // world
    return ddp(model, tokens[:, rank * length : (rank + 1) * length + 1], rank, world, passes, bf16)


class Part(nn.Module):
    """An equal share of the blocks, with the embedding before the first and the head behind the last."""

    def __init__(self, model: GPT, rank: int, world: int) -> None:
        super().__init__()
        share = len(model.blocks) // world
        ends = [model.embed] * (rank == 0), [model.norm, model.head] * (rank == world - 1)
        self.layers = nn.Sequential(*ends[0], *model.blocks[rank * share : (rank + 1) * share], *ends[1])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layers(x)
        return out


def pipeline(schedule_class: Any, micro_batches: int) -> Make:
    """torch's own schedule, with the tied weight's gradient and the norm summed over the stages."""

    def make(model: GPT, tokens: torch.Tensor, rank: int, world: int, passes: int, bf16: bool) -> Step:
        mine = Part(model, rank, world)
        stage = PipelineStage(mine, rank, world, torch.device("cpu"))
        several = issubclass(schedule_class, PipelineScheduleMulti)
        schedule = schedule_class([stage] if several else stage, micro_batches, loss_fn=mean_loss)
        parameters = list(mine.parameters())
        optimizer = _adamw(parameters)
        tied = dist.new_group([0, world - 1])

        def step() -> torch.Tensor | None:
            losses: list[torch.Tensor] = []
            if rank == 0:
                schedule.step(tokens[:, :-1])
            elif rank == world - 1:
                schedule.step(target=tokens[:, 1:], losses=losses)
            else:
                schedule.step()
            weight = model.embed.weight
            if rank in (0, world - 1):
                dist.all_reduce(weight.grad, group=tied)
            counted = [p.grad for p in parameters if rank == 0 or p is not weight]
            square = nn.utils.get_total_norm(counted).square()  # type: ignore[arg-type]
            dist.all_reduce(square)
            nn.utils.clip_grads_with_norm_(parameters, 1.0, square.sqrt())
            optimizer.step()
            optimizer.zero_grad()
            return torch.stack(losses).mean().detach() if losses else None

        return step

    return make


BARE: dict[str, Make] = {  # by the strategy's name, without what comes after a comma
    "ddp": ddp,
    "horovod": horovod,
    "zero1 (torch)": fsdp(1),
    "zero1 (horovod)": zero1_horovod,
    "zero2": fsdp(2),
    "zero3": fsdp(3),
    "tensor": tensor,
    "1f1b": pipeline(Schedule1F1B, 8),
    "zero-bubble": pipeline(ScheduleInterleavedZeroBubble, 8),
    "context": context,
}
