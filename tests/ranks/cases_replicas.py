"""Ranks that train weights of their own (parallel.averaging), and their naive twin in one process."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
from torch import nn

from sparkring.conf.storage import open_storage
from sparkring.training.checkpoint.checkpointer import Checkpointer
from sparkring.training.checkpoint.peers import solo, torch_peers
from sparkring.training.data.batch import Batch
from sparkring.training.parallel.batching import part_bounds, slice_batch
from sparkring.training.parallel.state import model_tensors
from tests.ranks.problem import Net, SquaredError, make_strategy, rank_part, table_batch

ROWS, LR, CLIP = 24, 1e-2, 0.5
Named = dict[str, torch.Tensor]


class Dense(nn.Module):
    """Every row reaches every parameter; running means are buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.layers(rows).squeeze(-1)


MODELS = {"net": Net, "dense": Dense}


def optimizer_of(name: str, parameters: Any) -> torch.optim.Optimizer:
    if name == "adamw":
        return torch.optim.AdamW(parameters, weight_decay=0.1)
    return torch.optim.SGD(parameters, momentum=0.9 if name == "momentum" else 0.0)


class Run:
    """A strategy over the table. `model`, `optimizer`, `uneven`, `clip` and `local_size` of a case are not settings."""

    def __init__(self, rank: int, world: int, case: dict[str, Any]) -> None:
        case = dict(case)
        self.uneven, self.name = case.pop("uneven", False), case.pop("optimizer", "sgd")
        model, clip, local_size = case.pop("model", "dense"), case.pop("clip", None), case.pop("local_size", None)
        torch.manual_seed(7)
        self.strategy = make_strategy(rank, world, {"bucket_bytes": 3000, **case}, clip, local_size)
        self.strategy.prepare(MODELS[model]().double(), SquaredError(), self.make_optimizer)

    def make_optimizer(self, named: Any) -> torch.optim.Optimizer:
        return optimizer_of(self.name, [p for _, p in named])

    def steps(self, steps: range, bad_step: int | None = None, lr: float = LR) -> list[Any]:
        """Train; the last row of `bad_step` has no finite loss."""
        infos = []
        for step in steps:
            batch = table_batch(step, ROWS)
            if step == bad_step:
                batch.weight[-2] = float("nan")
            self.strategy.forward_backward(rank_part(batch, self.strategy, self.uneven))
            infos.append(self.strategy.step(lr))
        return infos

    def weights(self) -> Named:
        found = model_tensors(self.strategy.prepared.module, self.strategy.aliases)
        return {name: tensor.clone() for name, tensor in found.items()}

    def moments(self) -> Named:
        state = self.strategy.local.own_state()["optimizer"]
        return {name: torch.as_tensor(value).clone() for name, value in state.items()}

    def evaluated(self) -> Named:
        with self.strategy.averaged():
            return self.weights()

    def close(self) -> None:
        self.strategy.local.data_parallel.close(failed=True)


def trained(rank: int, world: int, payload: dict[str, Any]) -> dict[str, Any]:
    """By case: weights, what is evaluated, and whether the weights are themselves again afterward."""
    results, run = {}, None
    for name, case in payload["cases"].items():
        run = Run(rank, world, case)
        infos = run.steps(range(payload["steps"]), payload.get("bad_step"))
        before = run.weights()
        evaluated, after = run.evaluated(), run.weights()
        results[name] = {
            "weights": before,
            "evaluated": evaluated,
            "restored": all(torch.equal(before[key], after[key]) for key in before),
            "infos": infos,
            "moments": run.moments(),
            "measured": run.strategy.measure(),
        }
        run.close()
    assert run is not None
    run.strategy.close()
    return results


def checkpointer(folder: str, world: int) -> Checkpointer:
    return Checkpointer(open_storage(folder), torch_peers(timedelta(seconds=60)) if world > 1 else solo())


def load(run: Run, checkpoints: Checkpointer) -> None:
    latest = checkpoints.latest()
    assert latest is not None
    state = run.strategy.state_dict(checkpoints.shapes(latest))
    checkpoints.load(latest, state)
    run.strategy.load_state_dict(state)


def save_and_resume(rank: int, world: int, payload: dict[str, Any]) -> dict[str, Any]:
    """Weights and moments after going on from `saved` steps, and after a resume there; evaluated at both places."""
    results, run = {}, None
    for name, (case, saved) in payload["cases"].items():
        run, checkpoints = Run(rank, world, case), checkpointer(f"{payload['folder']}/{name}", world)
        run.steps(range(saved), bad_step=saved - 1)
        found: dict[str, Any] = {"saved": run.weights(), "evaluated": run.evaluated(), "moments": run.moments()}
        checkpoints.save(saved, run.strategy.state_dict(), {})
        infos = run.steps(range(saved, saved + 4))
        found["went_on"] = [run.weights(), run.moments(), run.evaluated(), [i.counted_skips for i in infos]]
        checkpoints.wait()
        run.close()
        run = Run(rank, world, case)
        load(run, checkpoints)
        found["evaluated_again"] = run.evaluated()
        infos = run.steps(range(saved, saved + 4))
        found["resumed"] = [run.weights(), run.moments(), run.evaluated(), [i.counted_skips for i in infos]]
        results[name] = found
        run.close()
    assert run is not None
    run.strategy.close()
    return results


def resume_elsewhere(rank: int, world: int, payload: dict[str, Any]) -> dict[str, Any]:
    """What a run of another world or kind begins with, and that it trains on."""
    results, run = {}, None
    for name, (saved, case) in payload["cases"].items():
        run, checkpoints = Run(rank, world, case), checkpointer(f"{payload['folder']}/{saved}", world)
        load(run, checkpoints)
        found: dict[str, Any] = {"began": run.weights(), "moments": run.moments(), "evaluated": run.evaluated()}
        found["clock"] = getattr(run.strategy, "clock", None)
        run.steps(range(4, 8))
        found["after"] = run.evaluated()
        results[name] = found
        run.close()
    assert run is not None
    run.strategy.close()
    return results


# --- the twin ----------------------------------------------------------------------------------------------------


def part_of(batch: Batch, replica: int, replicas: int, uneven: bool) -> Batch:
    bounds = part_bounds(batch.rows, replicas)
    if uneven:
        bounds = [*part_bounds(batch.rows, replicas - 1), (batch.rows, batch.rows)]
    return slice_batch(batch, *bounds[replica])


class Naive:
    """Replicas side by side in one process, by torch alone."""

    def __init__(self, replicas: int, case: dict[str, Any]) -> None:
        self.case, self.settings = case, case["averaging"]
        self.models = []
        for _ in range(replicas):
            torch.manual_seed(7)
            self.models.append(initial(case))
        trained = [[p for p in model.parameters() if p.requires_grad] for model in self.models]
        self.weights = trained
        self.optimizers = [optimizer_of(case.get("optimizer", "sgd"), each) for each in trained]

    def train(self, steps: int, on_window: Any) -> None:
        task = SquaredError()
        for step in range(steps):
            for replica, model in enumerate(self.models):
                batch = table_batch(step, ROWS)
                part = part_of(batch, replica, len(self.models), self.case.get("uneven", False))
                if part.rows:
                    losses = task.loss(model(*task.inputs(part.columns)), part.columns) * part.weight
                    (losses.sum() * len(self.models) / batch.global_rows).backward()
                if self.case.get("clip"):
                    nn.utils.clip_grad_norm_(self.weights[replica], self.case["clip"])
                for group in self.optimizers[replica].param_groups:
                    group["lr"] = LR
                self.optimizers[replica].step()
                self.optimizers[replica].zero_grad()
            if (step + 1) % self.settings["every"] == 0:
                with torch.no_grad():
                    on_window(self)

    def average_weights(self) -> None:
        for same in zip(*self.weights, strict=True):
            mean = sum(same) / len(same)
            for weight in same:
                weight.copy_(mean)

    def average_moments(self) -> None:
        for same in zip(*self.weights, strict=True):
            states = [optimizer.state[p] for optimizer, p in zip(self.optimizers, same, strict=True)]
            for key in ("exp_avg", "exp_avg_sq"):
                mean = sum(state[key] for state in states) / len(states)
                for state in states:
                    state[key].copy_(mean)

    def named(self, replica: int) -> Named:
        return {n: p.detach().clone() for n, p in self.models[replica].named_parameters() if p.requires_grad}


def initial(case: dict[str, Any]) -> nn.Module:
    """With the initial weights of a strategy, which draws them by name."""
    run = Run(0, 1, {key: value for key, value in case.items() if key in ("model", "optimizer")})
    return run.strategy.prepared.module
