"""Bytes on the wire and memory of a strategy, measured, beside what the planner says."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from sparkring.conf.blocks.optim import OptimConfig
from sparkring.training.data.batch import Batch, Ragged
from sparkring.training.loop.optim.build import build_optimizer
from sparkring.training.models.gpt import GPT, LanguageModelTask
from sparkring.training.models.task import Task
from sparkring.training.planner import Workload, make_plan
from sparkring.training.tables.sharded import sent_bytes
from tests.ranks.cases_tables import recommending
from tests.ranks.problem import make_strategy, rank_part

STEPS = 3
TABLE_IDS = 40_000  # distinct ids of a column and rank: the buckets of so many are spread evenly within half a percent


class Wide(nn.Module):
    """2.1 M parameters in eight equal blocks of width 512."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width, bias=False), nn.Tanh()) for _ in range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class MeanSquare(Task):
    def inputs(self, columns: dict[str, Any]) -> tuple[Any, ...]:
        return (columns["x"],)

    def loss(self, outputs: torch.Tensor, columns: dict[str, Any]) -> torch.Tensor:
        return outputs.square().mean(dim=1)


def wide_problem(width: int) -> tuple[nn.Module, Any, Batch, tuple[torch.Tensor]]:
    x = torch.randn(16, width)
    return Wide(width), MeanSquare(), Batch({"x": x}, 16, 16, 16), (x[:1],)


def gpt_problem(tied: bool) -> tuple[nn.Module, Any, Batch, tuple[torch.Tensor]]:
    model = GPT(vocab=512, width=128, layers=4, heads=4, hidden=256, tied=tied)
    tokens = torch.randint(0, 512, (16, 65))
    return model, LanguageModelTask(), Batch({"tokens": tokens}, 16, 16, 16), (tokens[:1, :-1],)


def loopback_bytes() -> int:
    """Sent over `lo` of this network namespace since it was made."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == "lo":
            return int(counts.split()[8])
    raise RuntimeError("no loopback interface")


def settled_bytes() -> int:
    """After every rank is here and the wire is quiet: Horovod's, which never is, are given 0.16 s."""
    dist.barrier()
    count = -1
    for wait_s in (0.05, 0.01, 0.05, 0.05):  # an acknowledgment may be 40 ms late
        time.sleep(wait_s)
        before, count = count, loopback_bytes()
        if before == count:
            break
    dist.barrier()
    return count


def cost(rank: int, world: int, payload: dict[str, Any]) -> dict[str, Any]:
    """Case -> predicted plan, measured bytes per rank and step, measured memory."""
    results = {}
    for name, (kind, settings) in payload["cases"].items():
        torch.manual_seed(0)
        wide = {"wide": 512, "wider": 1024}.get(kind)  # of what a codec leaves, little must still be much
        model, task, batch, inputs = wide_problem(wide) if wide else gpt_problem(kind == "gpt")
        strategy = make_strategy(rank, world, settings)
        plan = make_plan(
            Workload(model, strategy.local.config, strategy.local.mesh, strategy.engine, inputs, batch.rows)
        )
        strategy.prepare(model, task, lambda named: build_optimizer(named, OptimConfig()))
        part = rank_part(batch, strategy)
        for step in range(1 + STEPS):
            if step == 1:
                before = settled_bytes()
            strategy.forward_backward(part)
            strategy.step(1e-3)
        after = settled_bytes()
        results[name] = {
            "sent": (after - before) / world / STEPS,
            "predicted": plan.sent_bytes,
            "measured": strategy.measure(),
            "stage": asdict(plan.stages[strategy.local.mesh.coordinates(rank).pp]),
        }
        strategy.local.data_parallel.close(failed=True)
    dist.destroy_process_group()
    return results


def tables_cost(rank: int, world: int, payload: dict[str, Any]) -> dict[str, Any]:
    """Case -> bytes per rank and step that pull and push of a model's tables send, and what the formula says."""
    results = {}
    for name, settings in payload["cases"].items():
        strategy = recommending(rank, world, {"tables": settings, "dense": False}, torch.float32)
        tables = strategy.tables
        ids = torch.randint(-(1 << 62), 1 << 62, (3, TABLE_IDS), generator=torch.Generator().manual_seed(rank))
        offsets = torch.arange(TABLE_IDS + 1)
        columns = {"user": ids[0], "friend": ids[1], "tags": Ragged(ids[2].repeat(2), (2 * offsets,))}
        before = settled_bytes()
        for batch in tables.ahead(Batch(columns, TABLE_IDS, TABLE_IDS, TABLE_IDS) for _ in range(STEPS)):
            tables.pull(batch.columns, training=True)
            tables.reduce(1.0, exact=False)
            tables.apply(0.1, 1.0)
        tables.drain()
        after = settled_bytes()
        value_bytes = 2 if settings.get("wire") == "bf16" else 4
        predicted = sum(
            sent_bytes(settings.get("place") == "replicate", count, each.table.spec.dim * value_bytes, world)
            for each, count in zip(tables.tables.values(), (2 * TABLE_IDS, TABLE_IDS), strict=True)
        )
        results[name] = {"sent": (after - before) / world / STEPS, "predicted": predicted, "counted": tables.step_bytes}
        tables.close(failed=False)
        strategy.local.data_parallel.close(failed=True)
    dist.destroy_process_group()
    return results
