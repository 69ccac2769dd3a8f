"""The study in its sqlite file: what a process that was killed leaves, and what the next one makes of it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from sparkring.pipelines.sweep.space import SweepSpec
from sparkring.pipelines.sweep.study import Ended, Study

SPACE: dict[str, Any] = {
    "optim.lr": {"low": 1e-3, "high": 0.1, "log": True},
    "model.args.width": {"low": 8, "high": 30, "step": 8},
    "optim.name": {"choices": ["adamw", None]},
}


def spec(**more: Any) -> SweepSpec:
    return SweepSpec.model_validate({"space": SPACE, "pruner": "none"} | more)


def test_trials_are_kept_with_their_ends_and_the_best_follows_the_direction(tmp_path: Path) -> None:
    study = Study(tmp_path, spec(), "max")
    for value in (0.5, 0.75, 0.75):
        study.next().complete(value)
    study.next().fail("the batch is too large")
    behind = study.next()
    behind.falls_behind(10, 0.99)
    behind.prune()
    ended = Study(tmp_path, spec(), "max").ended()
    assert [(t.number, t.state, t.value) for t in ended] == [
        (0, "complete", 0.5), (1, "complete", 0.75), (2, "complete", 0.75), (3, "failed", None), (4, "pruned", 0.99),
    ]  # fmt: skip
    assert ended[3].why == "the batch is too large"
    best = Study(tmp_path, spec(), "max").best()
    assert isinstance(best, Ended) and best.number == 1 and best.values == ended[1].values
    for trial in ended:
        lr, width, name = (trial.values[key] for key in SPACE)
        assert isinstance(lr, float) and 1e-3 <= lr <= 0.1 and width in (8, 16, 24) and name in ("adamw", None)


def test_less_is_better_where_the_metric_says_so(tmp_path: Path) -> None:
    study = Study(tmp_path, spec(), "min")
    assert study.best() is None
    for value in (0.5, 0.25, 0.75):
        study.next().complete(value)
    best = study.best()
    assert best is not None and best.value == 0.25


def test_a_half_done_trial_is_continued_first_by_its_own_values_and_counts_once(tmp_path: Path) -> None:
    study = Study(tmp_path, spec(), "max")
    study.next().complete(0.5)
    left = study.next()
    left.falls_behind(10, 0.3)
    left.falls_behind(20, 0.4)
    for number in (2, 3):  # killed, and killed again
        again = Study(tmp_path, spec(), "max")
        assert [trial.number for trial in again.ended()] == [0]
        trial = again.next()
        assert (trial.number, trial.continues, trial.values) == (number, number - 1, left.values)
    trial.falls_behind(20, 0.4)  # again, behind the checkpoint
    trial.falls_behind(30, 0.6)
    trial.complete(0.6)
    assert [t.number for t in again.ended()] == [0, 3]
    assert again._study.trials[3].intermediate_values == {2: 0.4, 3: 0.6}, "evaluations keep their numbers"
    fresh = again.next()
    assert fresh.continues is None and fresh.values != left.values


def test_a_study_that_is_opened_again_draws_other_values(tmp_path: Path) -> None:
    drawn = []
    for _ in range(4):
        trial = Study(tmp_path, spec(sampler="random"), "max").next()
        trial.complete(0.5)
        drawn.append(trial.values["optim.lr"])
    assert len(set(drawn)) == 4
    (tmp_path / "same").mkdir()
    assert Study(tmp_path / "same", spec(sampler="random"), "max").next().values["optim.lr"] == drawn[0]


@pytest.mark.parametrize(("mode", "worse"), [("max", 0.1), ("min", 0.9)])
def test_a_trial_below_the_median_at_as_many_evaluations_falls_behind(tmp_path: Path, mode: Any, worse: float) -> None:
    study = Study(tmp_path, spec(pruner="median"), mode)
    for number in range(5):
        trial = study.next()
        # batches differ, so the same evaluation is at other steps
        assert not [trial.falls_behind(step * (number + 1), 0.5) for step in (10, 20)].count(True)
        trial.complete(0.5)
    trial = study.next()
    assert not trial.falls_behind(7, math.nan)
    assert trial.falls_behind(14, worse)
    assert not study.next().falls_behind(14, 0.5)
