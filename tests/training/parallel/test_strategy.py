"""The interface of a strategy is complete: what the loop calls, every strategy has."""

from __future__ import annotations

import pytest

from sparkring.training.parallel.local import StepInfo
from sparkring.training.parallel.step import MeshStrategy
from sparkring.training.parallel.strategy import Strategy


def test_a_strategy_must_have_every_method_the_loop_calls() -> None:
    with pytest.raises(TypeError, match=r"forward_backward.*step"):
        Strategy()  # type: ignore[abstract]
    assert not MeshStrategy.__abstractmethods__


def test_a_step_is_made_unless_it_says_otherwise() -> None:
    assert StepInfo(1.5) == StepInfo(grad_norm=1.5, skipped=False, first_bad_rank=None)
