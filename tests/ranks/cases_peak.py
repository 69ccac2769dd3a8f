"""Peak memory of a strategy's step, measured, beside what the planner says."""

from __future__ import annotations

import gc
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from sparkring.conf.blocks.optim import OptimConfig
from sparkring.training.data.batch import Batch
from sparkring.training.loop.evaluation import evaluate_split
from sparkring.training.loop.optim.build import build_optimizer
from sparkring.training.models.gpt import GPT, LanguageModelTask
from sparkring.training.parallel.step import MeshStrategy
from sparkring.training.planner import Workload, make_plan
from sparkring.training.planner.memory import StageMemory
from tests.ranks.problem import make_strategy, rank_part

ROWS = 32
EVALUATED_ROWS = 128
EVALUATION = ", evaluation"  # after the name of a case
ACTIVATIONS = {"vocab": 512, "width": 128, "layers": 4, "heads": 4, "hidden": 256, "length": 64}  # most of the peak
WEIGHTS = {"vocab": 1024, "width": 256, "layers": 4, "heads": 4, "hidden": 768, "length": 4}
OF_THE_MODEL = ("tied", "kv_heads")


def peaks(rank: int, world: int, payload: dict[str, Any]) -> dict[str, tuple[float, int]]:
    """Case -> peak bytes of this rank's second step, and of an evaluation: measured, planned."""
    shape, found = payload.get("shape", ACTIVATIONS), dict[str, tuple[float, int]]()
    for name, case in payload["cases"].items():
        found[name], found[name + EVALUATION] = case_peaks(rank, world, case, shape)
    if dist.is_initialized():
        dist.destroy_process_group()
    return found


def case_peaks(rank: int, world: int, case: dict[str, Any], shape: dict[str, int]) -> list[tuple[float, int]]:
    torch.manual_seed(0)
    gc.collect()
    settings = {"engine": "torch"} | {key: value for key, value in case.items() if key not in OF_THE_MODEL}
    optimizer = settings.pop("optimizer", "adamw")
    strategy = make_strategy(rank, world, settings)
    sizes = {name: size for name, size in shape.items() if name != "length"}
    model = GPT(**sizes | {key: case[key] for key in OF_THE_MODEL if key in case})
    planned = planned_memory(strategy, model, 1 if optimizer == "lars" else 2, shape["length"])
    tokens = torch.randint(0, shape["vocab"], (EVALUATED_ROWS, shape["length"] + 1))
    part = rank_part(Batch({"tokens": tokens[:ROWS].clone()}, ROWS, ROWS, ROWS), strategy)
    evaluated = rank_part(Batch({"tokens": tokens}, EVALUATED_ROWS, EVALUATED_ROWS, EVALUATED_ROWS), strategy)
    make_optimizer = partial(build_optimizer, optim=OptimConfig(name=optimizer))
    strategy.prepare(model, LanguageModelTask(), make_optimizer, part)
    del model, tokens
    gc.collect()
    for _ in range(2):
        strategy.forward_backward(part)
        strategy.step(1e-3)
    with strategy.averaged():
        evaluate_split(strategy, [evaluated], LanguageModelTask())
    measured = strategy.local.measure()
    strategy.local.data_parallel.close(failed=True)
    assert planned.peak is not None and planned.evaluation is not None
    return [(measured["peak_bytes"], planned.peak), (measured["evaluation_bytes"], planned.evaluation)]


def planned_memory(strategy: MeshStrategy, model: GPT, states: int, length: int) -> StageMemory:
    """This rank's."""
    task, mesh = LanguageModelTask(), strategy.local.mesh
    columns = {"tokens": torch.zeros(1, length + 1, dtype=torch.int64, device="meta")}
    plan = make_plan(
        Workload(
            model,
            strategy.local.config,
            mesh,
            strategy.engine,
            task.inputs(columns),
            ROWS,
            optimizer_states=states,
            task=task,
            columns=columns,
            eval_batch=EVALUATED_ROWS,
            eval_rows=EVALUATED_ROWS,
        )
    )
    return plan.stages[mesh.coordinates(strategy.rank).pp]
