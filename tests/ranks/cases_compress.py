"""Gradients through codecs on real ranks: what no step has sent is in the residuals, through checkpoints too."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from sparkring.conf.storage import open_storage
from sparkring.training.checkpoint.checkpointer import Checkpointer
from sparkring.training.checkpoint.peers import solo, torch_peers
from sparkring.training.parallel.state import model_tensors, plain_name
from tests.ranks.cases_tower import tower
from tests.ranks.problem import Net, SquaredError, make_strategy, rank_part, table_batch

STILL, MOVING = 4, 5  # steps at rate 0, whose gradients are those of one process, then steps that train
Named = dict[str, torch.Tensor]


MODELS = {"net": lambda: Net().double(), "tower": tower}


class Run:
    """A strategy over the table, and the sum of the gradients that its optimizer was given."""

    def __init__(self, rank: int, world: int, settings: dict[str, Any]) -> None:
        torch.manual_seed(7)
        settings = {"accumulate": 2, "bucket_bytes": 3000, **settings}
        model, local_size = settings.pop("model", "net"), settings.pop("local_size", None)
        self.strategy, self.applied = make_strategy(rank, world, settings, None, local_size), Named()
        sample = rank_part(table_batch(0, 24), self.strategy)
        self.strategy.prepare(MODELS[model](), SquaredError(), self.make_optimizer, sample)

    def make_optimizer(self, named: Any) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD([p for _, p in named], momentum=0.9)
        optimizer.register_step_pre_hook(lambda *_: self.before_step())
        return optimizer

    def before_step(self) -> None:
        for name, p in self.strategy.prepared.named:
            if p.grad is not None:
                self.applied[name] = self.applied.get(name, 0) + p.grad.detach().clone()

    def steps(self, steps: range, lr: float = 1e-2, nan_on_last: bool = False) -> list[bool]:
        """Whether each was skipped."""
        skipped = []
        for step in steps:
            batch = table_batch(step, 24)
            if nan_on_last:
                batch.weight[-2] = float("nan")
            uneven = self.strategy.local.config.pp == 1  # a micro-batch of a pipeline has rows
            self.strategy.forward_backward(rank_part(batch, self.strategy, uneven))
            skipped.append(self.strategy.step(lr).skipped)
        return skipped

    def weights(self) -> Named:
        found = model_tensors(self.strategy.prepared.module, self.strategy.aliases)
        return {plain_name(name): t.clone() for name, t in found.items()}

    def residuals(self) -> Named:
        return {name: t.clone() for name, t in self.strategy.local.data_parallel.codec_state().residuals.items()}

    def carried(self) -> Named:
        """Of all ranks together, by parameter."""
        everyone: list[Any] = [self.residuals()] * self.strategy.local.mesh.world
        if self.strategy.local.mesh.world > 1:
            dist.all_gather_object(everyone, self.residuals())
        return {name: sum(each[name] for each in everyone) for name in everyone[0]}


def still_gradients() -> Named:
    """Their sum over the steps of rate 0, by one process."""
    run = Run(0, 1, {})
    run.steps(range(STILL), lr=0.0)
    return run.applied


def fed_back(rank: int, world: int, payload: dict[str, Any]) -> dict[str, Any]:
    results = {}
    for name, case in payload["cases"].items():
        run = Run(rank, world, case)
        start = run.weights()
        run.steps(range(STILL), lr=0.0)
        found: dict[str, Any] = {"applied": dict(run.applied), "carried": run.carried()}
        before = run.residuals()
        found["skipped"] = run.steps(range(STILL, STILL + 1), nan_on_last=True)
        after = run.residuals()
        found["rolled_back"] = all(torch.equal(before[key], after[key]) for key in before)
        run.steps(range(STILL, STILL + MOVING))
        found |= {
            "weights": run.weights(),
            "moved": any(not torch.equal(start[k], v) for k, v in run.weights().items()),
        }
        results[name] = found
        run.strategy.local.data_parallel.close(failed=True)
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
    """Weights after going on, and after a resume at the same place."""
    results = {}
    for name, case in payload["cases"].items():
        run, checkpoints = Run(rank, world, case), checkpointer(f"{payload['folder']}/{name}", world)
        run.steps(range(3))
        checkpoints.save(3, run.strategy.state_dict(), {})
        found = {"carried": run.carried()}
        run.steps(range(3, 6))
        found["went_on"] = run.weights()
        checkpoints.wait()
        run.strategy.local.data_parallel.close(failed=True)
        again = Run(rank, world, case)
        load(again, checkpoints)
        again.steps(range(3, 6))
        found["resumed"] = again.weights()
        results[name] = found
        again.strategy.local.data_parallel.close(failed=True)
    dist.destroy_process_group()
    return results


def resume_elsewhere(rank: int, world: int, payload: dict[str, Any]) -> dict[str, Any]:
    """What is carried after a load, and what the first step applies, at rate 0; then what the next checkpoint has."""
    results = {}
    for name, (saved, case) in payload["cases"].items():
        run, checkpoints = Run(rank, world, case), checkpointer(f"{payload['folder']}/{saved}", world)
        load(run, checkpoints)
        found: dict[str, Any] = {"carried": run.carried(), "late": dict(run.strategy.local.residuals.late)}
        found["parts"] = sorted(run.strategy.state_dict())
        found["skipped"] = run.steps(range(3, 4), lr=0.0, nan_on_last=True)
        run.steps(range(3, 4), lr=0.0)
        found |= {
            "applied": dict(run.applied),
            "left": run.carried(),
            "late_left": sorted(run.strategy.local.residuals.late),
        }
        results[name] = found
        if world > 1:
            run.strategy.local.data_parallel.close(failed=True)
    if world > 1:
        dist.destroy_process_group()
    return results


def resume_apart(rank: int, world: int, payload: dict[str, Any]) -> dict[str, Any]:
    """Go on as replicas from a ring's checkpoint: what waits, what a first step applies, and a resume after it."""
    results = {}
    for name, (saved, case) in payload["cases"].items():
        run = Run(rank, world, case)
        load(run, checkpointer(f"{payload['folder']}/{saved}", world))
        began = {key: t.clone() for key, t in run.strategy.local.residuals.late.items()}
        run.steps(range(3, 4), lr=0.0)
        once = {"applied": dict(run.applied), "waits": dict(run.strategy.local.residuals.late)}
        run.strategy.local.data_parallel.close(failed=True)
        run = Run(rank, world, case)
        load(run, checkpointer(f"{payload['folder']}/{saved}", world))
        run.steps(range(3, 4), nan_on_last=True)  # on the last replica that has rows
        found: dict[str, Any] = {"began": began, "once": once}
        between = checkpointer(f"{payload['folder']}/{name}", world)
        between.save(4, run.strategy.state_dict(), {})
        found["waits"] = {key: t.clone() for key, t in run.strategy.local.residuals.late.items()}
        run.steps(range(4, 7))
        found["went_on"] = run.weights()
        between.wait()
        run.strategy.local.data_parallel.close(failed=True)
        again = Run(rank, world, case)
        load(again, between)
        found["waits_again"] = dict(again.strategy.local.residuals.late)
        again.steps(range(4, 7))
        results[name] = found | {"resumed": again.weights()}
        again.strategy.local.data_parallel.close(failed=True)
    dist.destroy_process_group()
    return results


def left_by_layouts(rank: int, world: int, payload: dict[str, Any]) -> dict[str, Any]:
    """Go on without a codec in other layouts: what the first step steps, and the residuals that are saved then."""
    folder = f"{payload['tmp']}/tower"
    run = Run(rank, world, {"engine": "torch", "compress": payload["compress"], "model": "tower"})
    run.steps(range(3))
    carried, checkpoints = run.carried(), checkpointer(folder, world)
    checkpoints.save(3, run.strategy.state_dict(), {})
    checkpoints.wait()
    run.strategy.local.data_parallel.close(failed=True)
    results: dict[str, Any] = {}
    for name, case in payload["cases"].items():
        run = Run(rank, world, {"engine": "torch", "model": "tower", **case})
        load(run, checkpoints)
        run.steps(range(3, 4), lr=0.0)
        stepped = sorted(plain_name(key) for key in run.applied)
        saved = sorted(run.strategy.state_dict().get("residuals", {}))
        results[name] = {"stepped": stepped, "saved": saved, "carried": sorted(carried)}
        run.strategy.local.data_parallel.close(failed=True)
    dist.destroy_process_group()
    return results
