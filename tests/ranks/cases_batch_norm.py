"""Models with batch normalization under every split of rows, and their oracle by torch alone."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from sparkring.training.data.batch import Batch
from sparkring.training.parallel.batching import split_batch
from sparkring.training.parallel.state import model_tensors
from tests.ranks.problem import CPU, SquaredError, full_state, make_strategy, on_device, rank_part, table_batch

STEPS, LR = 4, 1e-2
LAYERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "cumulative": {"momentum": None},
    "without parameters": {"affine": False},
    "without running statistics": {"track_running_stats": False},
    "first": {},  # the rows themselves, which need no gradient
}


class Normalized(nn.Module):
    """Six columns as an image of 2 x 3, through layers of one, two and three dimensions."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        options = LAYERS[kind]
        self.first = nn.BatchNorm1d(6, **options) if kind == "first" else nn.Identity()
        volume = nn.Sequential(nn.Conv3d(1, 2, 1, bias=False), nn.BatchNorm3d(2, **options), nn.Tanh())
        plane = nn.Sequential(nn.Conv2d(2, 4, (1, 2)), nn.BatchNorm2d(4, **options), nn.Tanh())
        line = nn.Sequential(nn.Linear(4, 5, bias=False), nn.BatchNorm1d(5, **options), nn.Tanh())
        self.blocks = nn.ModuleList([volume, plane, line])  # each is recomputed and gathered by itself
        self.head = nn.Linear(5, 1)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        image = self.first(rows).view(-1, 1, 1, 2, 3)
        volume, plane, line = self.blocks
        image = plane(volume(image).squeeze(2))  # (B, 4, 2, 2)
        each = image.permute(0, 2, 3, 1).flatten(0, 2)  # (4 B, 4): rows are unfolded
        return self.head(line(each)).view(-1, 4).mean(dim=1)


def batches(rows: int) -> list[Batch]:
    return [table_batch(step, rows - step % 2 * 5) for step in range(STEPS)]


def passes(batch: Batch, world: int, accumulate: int, uneven: bool) -> list[torch.Tensor]:
    """The rows of each pass of all ranks, by number."""
    numbered = Batch({"n": torch.arange(batch.rows)}, batch.rows, batch.global_rows, 0)

    class Place:
        local = SimpleNamespace(device=CPU)
        data_size = world
        data_rank = 0

    found: list[list[torch.Tensor]] = [[] for _ in range(accumulate)]
    for rank in range(world):
        place = Place()
        place.data_rank = rank
        for number, part in enumerate(split_batch(rank_part(numbered, place, uneven), accumulate)):  # type: ignore[arg-type]
            found[number].append(part.columns["n"])
    return [torch.cat(each) for each in found]


@cache
def by_torch(kind: str, world: int, accumulate: int, uneven: bool, rows: int = 24) -> dict[str, torch.Tensor]:
    """Plain torch in one process: layers see the pass's rows whose weight is not 0, which are the only ones it has."""
    torch.manual_seed(7)
    model, task = Normalized(kind).double(), SquaredError()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
    for batch in batches(rows):
        assert batch.weight is not None
        for own in passes(batch, world, accumulate, uneven):
            own = own[batch.weight[own] != 0]
            columns = {name: column[own] for name, column in batch.columns.items()}
            losses = task.loss(model(*task.inputs(columns)), columns) * batch.weight[own].double()
            (losses.sum() / batch.global_rows).backward()
        optimizer.step()
        optimizer.zero_grad()
    found = {name: value.detach().clone() for name, value in model.state_dict().items()}
    model.eval()
    with torch.no_grad():
        found["outputs"] = model(table_batch(99, 16).columns["x"])
    return found


def trained(rank: int, world: int, case: dict[str, Any], kind: str, rows: int = 24) -> dict[str, Any]:
    """The exported model, what this rank's layers keep, and outputs."""
    case = {"bucket_bytes": 300, **case}
    uneven = case.pop("uneven", False)
    strategy = make_strategy(rank, world, case, clip=None)
    torch.manual_seed(7)
    model = Normalized(kind).double()
    strategy.prepare(model, SquaredError(), lambda named: torch.optim.SGD([p for _, p in named], lr=LR, momentum=0.9))
    for batch in batches(rows):
        strategy.forward_backward(rank_part(batch, strategy, uneven))
        strategy.step(LR)
    found: dict[str, Any] = {"exported": full_state(strategy)}
    kept = model_tensors(strategy.prepared.module, strategy.aliases)
    found["kept"] = {name: value.clone() for name, value in kept.items() if "running" in name or "tracked" in name}
    found["outputs"] = strategy.evaluate(
        on_device(replace(table_batch(99, 16), weight=None), strategy)
    )  # the same on every rank
    strategy.local.data_parallel.close(failed=True)
    return found


def many(rank: int, world: int, payload: dict[str, Any]) -> dict[str, Any]:
    results = {name: trained(rank, world, case, kind) for name, (kind, case) in payload["cases"].items()}
    dist.destroy_process_group()
    return results
