"""Hooks see plain values on rank 0, leave no trace in training, and name themselves where they fail."""

from __future__ import annotations

import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from sparkring.training.hooks import CheckpointSeen, EvaluationSeen, HookFailed, Hooks, StepSeen, hook_problems
from sparkring.training.parallel.averaging.strategy import AveragedStrategy
from sparkring.training.parallel.step import MeshStrategy
from sparkring.training.worker.train import loss_seen

OWN = "tests.training.own_hooks"
STEP = StepSeen(5, 0.5, 500, 0.25, 1e-3, 2.0, False, 2)


def drawn() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))


@pytest.fixture
def seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OWN_HOOKS_FILE", str(tmp_path / "seen"))
    return tmp_path / "seen"


def test_a_hook_sees_values_and_the_next_random_numbers_are_those_without_it(seen: Path) -> None:
    hooks = Hooks([f"{OWN}:Notes"], is_rank_0=True)
    assert hooks.sees_steps
    for generator in (random.seed, np.random.seed, torch.manual_seed):
        generator(3)
    expected = drawn()
    for generator in (random.seed, np.random.seed, torch.manual_seed):
        generator(3)
    metrics = {"loss": 1.0}
    hooks.stepped(STEP)
    hooks.evaluated(EvaluationSeen(5, dict(metrics), 5, 1.0))
    hooks.committed(CheckpointSeen(5, "/run/checkpoints/step-5", 100))
    assert len(seen.read_text().splitlines()) == 2, "checkpoints are shown between two steps"
    hooks.deliver()
    hooks.deliver()
    assert drawn() == expected and torch.is_grad_enabled() and metrics == {"loss": 1.0}
    lines = [json.loads(line) for line in seen.read_text().splitlines()]
    assert [line["kind"] for line in lines] == ["StepSeen", "EvaluationSeen", "CheckpointSeen"]
    assert (lines[0]["loss"], lines[1]["metrics"], lines[2]["uri"]) == (0.25, metrics, "/run/checkpoints/step-5")


def test_other_ranks_have_no_hook_but_know_whether_steps_are_seen(seen: Path) -> None:
    hooks = Hooks([f"{OWN}:Notes"], is_rank_0=False)
    hooks.stepped(STEP)
    assert hooks.sees_steps and not seen.exists()
    assert not Hooks([f"{OWN}:Ends"], is_rank_0=False).sees_steps


def test_a_hook_that_fails_is_named_with_its_line() -> None:
    hooks = Hooks([f"{OWN}:Ends"], is_rank_0=True)
    with pytest.raises(HookFailed) as error:
        hooks.evaluated(EvaluationSeen(7, {}, None, None))
    said = str(error.value)
    assert said.startswith(f"train.hooks: {OWN}:Ends.on_evaluation failed at step 7: ZeroDivisionError: ")
    assert "own_hooks.py:" in said and said.endswith("in on_evaluation)")
    with pytest.raises(HookFailed, match=r"Refuses cannot be made: OSError: no such channel \(.*own_hooks\.py:\d+"):
        Hooks([f"{OWN}:Refuses"], is_rank_0=True)


@pytest.mark.parametrize(
    ("reference", "why"),
    [
        (f"{OWN}:WithArguments", "is made without arguments: missing a required argument: 'path'"),
        ("torch.nn:Linear", "not a class derived from sparkring.training.hooks.Hook"),
        (f"{OWN}:Gone", "has no 'Gone'"),
        ("no_such_module:Hook", "cannot be imported"),
    ],
)
def test_what_is_no_hook_is_named_without_making_it(reference: str, why: str) -> None:
    (problem,) = hook_problems([f"{OWN}:Refuses", reference])
    assert why in problem and problem.startswith("train.hooks = ")


def test_the_loss_a_hook_sees_is_summed_over_ranks_only_where_they_meet_in_each_step() -> None:
    def strategy(kind: type[MeshStrategy], **parts: Any) -> Any:
        return SimpleNamespace(meets_each_step=kind.meets_each_step, parts=4, **parts)

    assert (
        loss_seen(strategy(MeshStrategy, meeting=SimpleNamespace(sum_over_data=lambda values: 3 * values)), 2.0) == 6.0
    )
    assert loss_seen(strategy(AveragedStrategy), 2.0) == 8.0, "four ranks with rank 0's rows"
