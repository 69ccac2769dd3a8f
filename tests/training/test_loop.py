"""The loop's decisions, as pure functions."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from training.loop import LoopSettings, TrainerState, after_evaluation, improved, total_steps

SETTINGS = LoopSettings(epochs=3, steps=None, log_every_steps=10, eval_every_steps=None, stop_metric="loss", patience=2)


@pytest.mark.parametrize(
    ("value", "best", "mode", "delta", "expected"),
    [
        (1.0, None, "min", 0.0, True),
        (math.nan, None, "min", 0.0, False),
        (0.9, 1.0, "min", 0.0, True),
        (0.9, 1.0, "min", 0.2, False),
        (1.1, 1.0, "max", 0.0, True),
        (math.inf, 1.0, "max", 0.0, False),
    ],
)
def test_improved(value: float, best: float | None, mode: str, delta: float, expected: bool) -> None:
    assert improved(value, best, mode, delta) is expected


def test_total_steps() -> None:
    assert total_steps(SETTINGS, 7) == 21
    assert total_steps(replace(SETTINGS, steps=5), 7) == 5
    with pytest.raises(ValueError, match=r"train\.global_batch: larger than the training split"):
        total_steps(SETTINGS, 0)


def test_early_stopping_waits_for_patience_and_keeps_the_best() -> None:
    state = TrainerState()
    for step, loss in enumerate([1.0, 0.5, 0.6, 0.7], start=1):
        assert not state.stopped_early
        state = after_evaluation(replace(state, step=step), {"loss": loss}, SETTINGS)
    assert state.stopped_early and state.best_value == 0.5 and state.best_step == 2


def test_a_metric_that_does_not_exist_is_named() -> None:
    with pytest.raises(ValueError, match=r"train\.best_metric = 'auc': .*\['loss'\]"):
        after_evaluation(TrainerState(), {"loss": 1.0}, replace(SETTINGS, best_metric="auc"))


def test_state_survives_json() -> None:
    state = TrainerState(step=3, cursor=99, last_valid={"loss": 0.1})
    assert TrainerState.from_json(state.to_json()) == state
