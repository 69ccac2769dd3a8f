"""Peak memory of a strategy's step, measured, beside what the planner says."""

from __future__ import annotations

import gc
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from sparkring.conf.blocks.optim import OptimConfig
from sparkring.training.data.batch import Batch
from sparkring.training.models.gpt import GPT, LanguageModelTask
from sparkring.training.optim.build import build_optimizer
from sparkring.training.parallel.measure import all_tensors, storage_bytes
from sparkring.training.planner import Workload, make_plan
from tests.ranks.problem import make_strategy, rank_part

ROWS = {"long": (32, 64), "short": (8, 8)}  # activations are the most, or weights
SHAPE = {"vocab": 512, "width": 128, "layers": 4, "heads": 4, "hidden": 256}


def peaks(rank: int, world: int, payload: dict[str, Any]) -> dict[str, Any]:
    """Case -> peak bytes of the second step, as measured and as planned."""
    results: dict[str, Any] = {}
    for name, case in payload["cases"].items():
        settings = {"engine": "torch"} | case
        optimizer = settings.pop("optimizer", "adamw")
        shape = SHAPE | {key: settings.pop(key) for key in ("tied", "kv_heads") if key in settings}
        if settings.pop("shared", False):
            continue
        torch.manual_seed(0)
        gc.collect()
        before = storage_bytes(all_tensors())
        model, task = GPT(**shape), LanguageModelTask()
        rows, length = ROWS[payload["shape"]]
        tokens = torch.randint(0, 512, (rows, length + 1))
        batch = Batch({"tokens": tokens}, rows, rows, rows)
        strategy = make_strategy(rank, world, settings)
        local = strategy.local
        plan = make_plan(
            Workload(
                model,
                local.config,
                local.mesh,
                strategy.engine,
                (tokens[:1, :-1].to("meta"),),
                batch.rows,
                optimizer_states=1 if optimizer in ("lars", "sgd") else 2,
                task=task,
                columns={"tokens": tokens[:1].to("meta")},
            )
        )
        part = rank_part(batch, strategy)
        strategy.prepare(model, task, partial(build_optimizer, optim=OptimConfig(name=optimizer)), part)
        del model, batch, tokens
        gc.collect()
        for _ in range(2):
            strategy.forward_backward(part)
            strategy.step(1e-3)
        stage = plan.stages[local.mesh.coordinates(rank).pp]
        assert local.meter is not None
        results[name] = {
            "measured": local.meter.peak - before,
            "predicted": stage.peak or 0,
            "parts": dict(stage.at_peak),
            "why": plan.untraced,
        }
        strategy.local.data_parallel.close(failed=True)
        del strategy, local
    if dist.is_initialized():
        dist.destroy_process_group()
    return results
