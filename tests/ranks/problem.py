"""The problems every strategy must solve alike: models, batches, and ten recorded steps of training."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from sparkring.conf.blocks.optim import OptimConfig, ParameterGroup
from sparkring.conf.blocks.parallel import ParallelConfig
from sparkring.conf.rank_info import RankInfo
from sparkring.training.data.batch import Batch
from sparkring.training.data.transfer import moved
from sparkring.training.loop.optim.build import build_optimizer
from sparkring.training.models.task import Task
from sparkring.training.parallel.batching import part_bounds, slice_batch
from sparkring.training.parallel.compose import build_strategy
from sparkring.training.parallel.dtensor import local_tensor
from sparkring.training.parallel.state import TensorInfo, model_tensors, plain_name
from sparkring.training.parallel.step import MeshStrategy

CPU = torch.device("cpu")
RANKS_ON = "cuda" if os.environ.get("SPARKRING_TEST_GPU") else "cpu"
ENGINE = {"cpu": "torch-gloo", "cuda": "torch-nccl"}[RANKS_ON]
READS_AT = 2  # the step at which the host's reads of tensors are counted
EXACT = {"cpu": 1e-12, "cuda": 1e-9}[RANKS_ON]  # in float64; a GPU's kernels add in another order than the oracle's


def runs_here(case: dict[str, Any], world: int) -> bool:
    """Whether a layout is not refused on the ranks' device: on CUDA a pipeline has all ranks."""
    return RANKS_ON == "cpu" or case.get("pp", 1) in (1, world)


def rank_device(rank: int, world: int) -> torch.device:
    """The CPU, or with SPARKRING_TEST_GPU the rank's GPU, the first for all where there are fewer than ranks.

    One process is the oracle, on the CPU. NCCL refuses two ranks of one host on one GPU, so each then names a host of
    its own: they talk over sockets, and the GPU runs their kernels in turn (slow, and the same code).
    """
    if RANKS_ON == "cpu" or world == 1:
        return CPU
    shared = torch.cuda.device_count() < world
    if shared:
        os.environ.update(NCCL_HOSTID=str(rank), NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1", NCCL_MAX_NCHANNELS="1")
    device = torch.device("cuda", 0 if shared else rank)
    torch.cuda.set_device(device)
    return device


class Net(nn.Module):
    """A user's module: blocks in a ModuleList, a branch, biases, a scalar parameter, a frozen one, a weight that two
    blocks share, and an expert and a block that few rows reach: in some steps on no rank, in others on some."""

    def __init__(self, width: int = 16, blocks: int = 5) -> None:
        super().__init__()
        self.expert = nn.Linear(6, width)  # the first parameter there is
        self.inner = nn.Linear(6, width)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(blocks))
        self.gain = nn.Parameter(torch.ones(()))
        self.head = nn.Linear(width, 1)
        self.blocks[0][0].weight.requires_grad_(False)
        self.blocks[2][0].weight = self.blocks[1][0].weight  # 3 and 4 are gathered by themselves under ZeRO

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        x = self.inner(rows)
        chosen = rows[:, 0] > 1.7
        if chosen.any():
            x = x.index_put((chosen,), self.expert(rows[chosen]))
        routed = rows[:, 1] > 1.5
        for number, block in enumerate(self.blocks):
            if number != 3:
                x = x + self.gain * block(x)
            elif routed.any():
                x = x + routed[:, None] * block(x)
        return self.head(x).squeeze(-1)


class SquaredError(Task):
    def inputs(self, columns: dict[str, Any]) -> tuple[Any, ...]:
        return (columns["x"],)

    def loss(self, outputs: torch.Tensor, columns: dict[str, Any]) -> torch.Tensor:
        return (outputs - columns["y"].to(outputs.dtype)).square()


def table_batch(step: int, rows: int, dtype: torch.dtype = torch.float64) -> Batch:
    """Global batch `step`; rows weigh differently, every fifth one is padding."""
    make = torch.Generator().manual_seed(1000 + step)
    x = torch.randn(rows, 6, generator=make, dtype=torch.float64)
    weight = 0.5 + torch.rand(rows, generator=make)
    weight[::5] = 0
    y = functional.softplus(x.sum(1)) + 0.1 * torch.randn(rows, generator=make, dtype=torch.float64)
    columns = {"x": x.to(dtype), "y": y.to(dtype)}
    return Batch(columns, rows, int((weight > 0).sum()), consumed_samples=(step + 1) * rows, weight=weight)


def rank_part(batch: Batch, strategy: MeshStrategy, uneven: bool = False) -> Batch:
    """The data rank's rows; `uneven` leaves the last rank none."""
    bounds = part_bounds(batch.rows, strategy.data_size)
    if uneven and strategy.data_size > 1:
        bounds = [*part_bounds(batch.rows, strategy.data_size - 1), (batch.rows, batch.rows)]
    return on_device(slice_batch(batch, *bounds[strategy.data_rank]), strategy)


def on_device(batch: Batch, strategy: MeshStrategy) -> Batch:
    return moved(batch, lambda tensor: tensor.to(strategy.local.device))


def make_strategy(
    rank: int, world: int, settings: dict[str, Any], clip: float | None = 0.5, local_size: int | None = None
) -> MeshStrategy:
    """`local_size`: as if every so many ranks were on one host."""
    local = local_size or world
    info, device = RankInfo(rank, world, rank % local, local), rank_device(rank, world)
    return build_strategy(ParallelConfig(**settings), info, device, clip_norm=clip)


class Recorder:
    """Stands before the optimizer's first step: keeps this rank's gradients by name, whole; spoils one if asked to."""

    def __init__(self, strategy: MeshStrategy, spoil: float = 0.0) -> None:
        self.strategy, self.spoil = strategy, spoil
        self.gradients: dict[str, torch.Tensor] | None = None

    def make(self, name: str, named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        biases = ParameterGroup(match=r".*bias", lr_scale=0.5, weight_decay=0.2)  # by names that no strategy may change
        optimizer = build_optimizer(named, OptimConfig(name=name, weight_decay=0.1, groups=[biases]))
        optimizer.register_step_pre_hook(lambda *_: self.before_step())
        return optimizer

    def before_step(self) -> None:
        if self.gradients is not None:
            return
        reached = [(name, p.grad) for name, p in self.strategy.prepared.named if p.grad is not None]
        if self.spoil and self.strategy.rank == self.strategy.local.mesh.world - 1:
            values = local_tensor(reached[-1][1]).view(-1)
            values[values.abs().argmax()] *= 1 + self.spoil
        self.gradients = {self.canonical(name): whole_tensor(gradient) for name, gradient in reached}

    def canonical(self, name: str) -> str:
        return self.strategy.aliases.get(plain_name(name), plain_name(name))


class HostReads(TorchFunctionMode):
    """Counts the moments at which the host asks for values of a tensor, for which it would wait on a GPU. Reads by
    torch's own C++ code are not seen, nor copies from the host that wait."""

    READS = {getattr(torch.Tensor, name) for name in ("item", "tolist", "numpy", "__array__", "__contains__")}
    READS |= {getattr(torch.Tensor, f"__{name}__") for name in ("bool", "float", "int", "index")}
    READS |= {torch.equal, torch.nonzero, torch.Tensor.equal, torch.Tensor.nonzero}

    count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in self.READS
        return func(*args, **(kwargs or {}))


def train(
    strategy: MeshStrategy,
    model: nn.Module,
    task: Any,
    batches: list[Batch],
    optimizer: str = "adamw",
    uneven: bool = False,
    lr: float = 1e-3,
    spoil: float = 0.0,
    before_step: Callable[[int], None] = lambda step: None,
) -> dict[str, Any]:
    """Losses and norms; the first step's gradients and the final parameters that this rank has, whole; on rank 0 the
    exported model."""
    recorder = Recorder(strategy, spoil)
    sample = rank_part(batches[0], strategy, uneven)
    strategy.prepare(model, task, lambda named: recorder.make(optimizer, list(named)), sample)
    losses, infos, reads = [], [], 0
    for step, batch in enumerate(batches):
        before_step(step)
        part = rank_part(batch, strategy, uneven)
        host = HostReads()
        with host if step == READS_AT else nullcontext():  # which makes a step a third slower
            value = strategy.forward_backward(part)
            infos.append(strategy.step(lr))
        reads += host.count
        losses.append(float(strategy.meeting.sum_over_data(value.reshape(1).double()).sum()) / batch.global_rows)
    return {
        "losses": losses,
        "infos": infos,
        "reads": reads,
        "gradients": recorder.gradients,
        "state": {n: whole_tensor(t) for n, t in model_tensors(strategy.prepared.module, strategy.aliases).items()},
        "exported": full_state(strategy),
        "engine": strategy.engine,
    }


def on_first_rank(described: list[TensorInfo], values: Iterator[torch.Tensor | None]) -> dict[str, torch.Tensor]:
    """Whole tensors by name; none on the other ranks."""
    return {each.name: value.clone() for each, value in zip(described, values, strict=True) if value is not None}


def full_state(strategy: MeshStrategy) -> dict[str, torch.Tensor]:
    """The whole model under all of its names, on rank 0."""
    whole = on_first_rank(*strategy.stream_model())
    return {key: whole[strategy.aliases.get(key, key)] for key in strategy.prepared.plain_keys if whole}


def whole_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The full value, on every rank that holds a part."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def worst_difference(ranks: list[dict[str, Any]], expected: dict[str, Any]) -> float:
    """Largest difference of any rank: losses and norms, relative; gradients and parameters, to the largest element of
    the same one. All ranks together have all parameters."""
    for part in ("gradients", "state", "exported"):
        there = set().union(*(rank[part] for rank in ranks))
        assert there == set(expected[part]), f"{part}: {there ^ set(expected[part])}"
    return max(_difference(rank, expected) for rank in ranks)


def _difference(got: dict[str, Any], expected: dict[str, Any]) -> float:
    pairs = list(zip(got["losses"], expected["losses"], strict=True))
    pairs += [(a.grad_norm, b.grad_norm) for a, b in zip(got["infos"], expected["infos"], strict=True)]
    differences = [abs(a - b) / max(1.0, abs(b)) for a, b in pairs]
    for part in ("gradients", "state", "exported"):
        largest = max(float(t.abs().max()) for t in expected[part].values())
        for name, tensor in got[part].items():
            other = expected[part][name]
            scale = max(float(other.abs().max()), 1e-3 * largest)
            differences.append(float((tensor - other).abs().max()) / scale)
    return max(differences)
