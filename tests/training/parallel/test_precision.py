"""Autocast and the loss scale."""

from __future__ import annotations

import pytest
import torch

from sparkring.training.parallel.precision import autocast, loss_scale


@pytest.mark.parametrize(("precision", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_matrices_are_multiplied_in_the_precision(precision: str, dtype: torch.dtype) -> None:
    with autocast(precision, torch.device("cpu")):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == dtype


def test_the_loss_scale_halves_on_a_skip_and_recovers() -> None:
    scale = loss_scale("fp16")
    before = scale.scale
    scale.update(skipped=True)
    assert scale.scale == before / 2
    for _ in range(scale.patience):
        scale.update(skipped=False)
    assert scale.scale == before
    fixed = loss_scale("bf16")
    fixed.update(skipped=True)
    assert fixed.scale == 1.0


def test_the_loss_scale_goes_on_where_a_checkpoint_left_it_also_from_another_precision() -> None:
    scale, resumed, fresh = loss_scale("fp16"), loss_scale("fp16"), loss_scale("fp16")
    for skipped in (True, False, False):
        scale.update(skipped)
    resumed.load(scale.state())
    assert (resumed.scale, resumed.good_steps) == (2.0**15, 2) == (scale.scale, scale.good_steps)
    fixed = loss_scale("bf16")
    fixed.load(scale.state())
    assert fixed.scale == 1.0
    resumed.load(fixed.state())
    fresh.load(fixed.state())
    assert resumed.scale == 2.0**15 and fresh.scale == 2.0**16
