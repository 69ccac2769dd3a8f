"""The problems every strategy must solve alike: models, batches, and ten recorded steps of training."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from training.data.batch import Batch
from training.optim import build_optimizer
from training.parallel import ParallelSettings, Place, build_strategy
from training.parallel.batching import part_bounds, slice_batch
from training.parallel.core import MeshStrategy
from training.parallel.reduce import local_tensor
from training.parallel.state import plain_name, whole_tensor

CPU = torch.device("cpu")


class Net(nn.Module):
    """A user's module: blocks in a ModuleList, a branch, biases, a scalar parameter."""

    def __init__(self, width: int = 16, blocks: int = 3) -> None:
        super().__init__()
        self.inner = nn.Linear(6, width)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(blocks))
        self.gain = nn.Parameter(torch.ones(()))
        self.head = nn.Linear(width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(x)
        for block in self.blocks:
            x = x + self.gain * block(x)
        return self.head(x).squeeze(-1)


class SquaredError:
    def inputs(self, columns: dict[str, Any]) -> tuple[Any, ...]:
        return (columns["x"],)

    def loss(self, outputs: torch.Tensor, columns: dict[str, Any]) -> torch.Tensor:
        return (outputs - columns["y"].to(outputs.dtype)).square()

    def metric_names(self) -> tuple[str, ...]:
        return ()

    def metric_sums(self, outputs: torch.Tensor, columns: dict[str, Any]) -> dict[str, torch.Tensor]:
        return {}


def table_batch(step: int, rows: int, dtype: torch.dtype = torch.float64) -> Batch:
    """Global batch `step`; every fifth row is padding."""
    make = torch.Generator().manual_seed(1000 + step)
    x = torch.randn(rows, 6, generator=make, dtype=torch.float64)
    weight = torch.ones(rows)
    weight[::5] = 0
    y = functional.softplus(x.sum(1)) + 0.1 * torch.randn(rows, generator=make, dtype=torch.float64)
    columns = {"x": x.to(dtype), "y": y.to(dtype)}
    return Batch(columns, rows, int(weight.sum()), cursor=(step + 1) * rows, weight=weight)


def rank_part(batch: Batch, strategy: MeshStrategy, uneven: bool = False) -> Batch:
    """The data rank's rows; `uneven` leaves the last rank none."""
    bounds = part_bounds(batch.rows, strategy.data_size)
    if uneven and strategy.data_size > 1:
        bounds = [*part_bounds(batch.rows, strategy.data_size - 1), (batch.rows, batch.rows)]
    return slice_batch(batch, *bounds[strategy.data_rank])


def make_strategy(
    rank: int, world: int, settings: dict[str, Any], clip: float | None = 0.5, local_size: int | None = None
) -> MeshStrategy:
    """`local_size`: as if every so many ranks were on one host."""
    local = local_size or world
    return build_strategy(ParallelSettings(**settings), Place(rank, world, rank % local, local), CPU, clip_norm=clip)


class Recorder:
    """Stands before the optimizer's first step: keeps its gradients by name, and spoils one if asked to."""

    def __init__(self, strategy: MeshStrategy, spoil: float = 0.0) -> None:
        self.strategy, self.spoil, self.gradients = strategy, spoil, None

    def make(self, name: str, named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        optimizer = build_optimizer(named, name, weight_decay=0.1)
        optimizer.register_step_pre_hook(lambda *_: self.before_step(named))
        return optimizer

    def before_step(self, named: list[tuple[str, nn.Parameter]]) -> None:
        if self.gradients is not None:
            return
        if self.spoil and self.strategy.rank == self.strategy.mesh.world - 1:
            local_tensor(named[-1][1].grad).view(-1)[0] += self.spoil
        aliases = self.strategy.aliases
        mine = {aliases.get(plain_name(name), plain_name(name)): whole_tensor(p.grad) for name, p in named}
        self.gradients = self.strategy.layout.gather_state(mine) or {}


def train(
    strategy: MeshStrategy,
    model: nn.Module,
    task: Any,
    batches: list[Batch],
    optimizer: str = "adamw",
    uneven: bool = False,
    lr: float = 1e-3,
    spoil: float = 0.0,
) -> dict[str, Any]:
    """Losses, norms, the first step's gradients and the final parameters, in a form to compare between strategies."""
    recorder = Recorder(strategy, spoil)
    sample = rank_part(batches[0], strategy, uneven)
    strategy.prepare(model, task, lambda named: recorder.make(optimizer, list(named)), sample)
    losses, infos = [], []
    for batch in batches:
        value = strategy.forward_backward(rank_part(batch, strategy, uneven))
        infos.append(strategy.step(lr))
        losses.append(float(strategy.sum_over_data(value.reshape(1).double()).sum()) / batch.global_rows)
    return {
        "losses": losses,
        "infos": infos,
        "gradients": recorder.gradients,
        "state": strategy.full_model_state(),
        "engine": strategy.engine,
    }


def worst_difference(got: dict[str, Any], expected: dict[str, Any]) -> float:
    """Largest difference over losses and norms (relative), first gradients and final parameters (absolute)."""
    pairs = list(zip(got["losses"], expected["losses"], strict=True))
    pairs += [(a.grad_norm, b.grad_norm) for a, b in zip(got["infos"], expected["infos"], strict=True)]
    differences = [abs(a - b) / max(1.0, abs(b)) for a, b in pairs]
    for part in ("gradients", "state"):
        if got[part]:
            missing = expected[part].keys() ^ got[part].keys()
            assert not missing, f"{part}: {missing}"
            differences += [float((got[part][k] - v).abs().max()) for k, v in expected[part].items()]
    return max(differences)
