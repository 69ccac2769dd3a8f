"""Clipping by the global norm, against torch's own."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from sparkring.training.parallel.gradients import clip_factor, scale_gradients, square_sum


@pytest.mark.parametrize("limit", [0.5, 5.0, 50.0, None])
def test_gradients_are_clipped_as_torch_clips_them(limit: float | None) -> None:
    """Their norm is 13: below a limit they stay as they are, to the bit."""
    ours = [torch.tensor([3.0, 4.0]), torch.tensor([[12.0]])]
    theirs = [nn.Parameter(torch.zeros_like(gradient)) for gradient in ours]
    for parameter, gradient in zip(theirs, ours, strict=True):
        parameter.grad = gradient.clone()
    norm = float(square_sum(ours, torch.device("cpu"), holders=1).sqrt())
    assert norm == 13.0
    scale_gradients(ours, clip_factor(norm, limit))
    if limit is not None:
        torch.nn.utils.clip_grad_norm_(theirs, limit, foreach=False)
    for parameter, gradient in zip(theirs, ours, strict=True):
        torch.testing.assert_close(gradient, parameter.grad, rtol=1e-7, atol=0)
