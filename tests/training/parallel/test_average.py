"""The average of weights over steps, and that it can be put in their place and taken out."""

from __future__ import annotations

import torch
from torch import nn

from sparkring.training.parallel.average import WeightAverage


def test_the_first_steps_weights_are_the_whole_mean_and_older_ones_count_less() -> None:
    weight = nn.Parameter(torch.tensor([100.0], dtype=torch.float64))
    average = WeightAverage(0.9, [("module.w", weight)])
    assert torch.equal(average.means[0], weight), "before a step the model is what it is"
    for value in (1.0, 2.0, 4.0):
        weight.data.fill_(value)
        average.update()
    torch.testing.assert_close(
        average.means[0], torch.tensor([(0.81 * 1 + 0.9 * 2 + 4) / (0.81 + 0.9 + 1)], dtype=torch.float64)
    )
    assert average.tensors({})["w"] is average.means[0] and int(average.steps) == 3


def test_swapping_twice_restores_every_bit() -> None:
    weight = nn.Parameter(torch.randn(50))
    average = WeightAverage(0.99, [("w", weight)])
    weight.data.add_(torch.randn(50))
    average.update()
    weight.data.add_(1)
    before, mean = weight.detach().clone(), average.means[0].clone()
    average.swap()
    assert torch.equal(weight, mean) and torch.equal(average.means[0], before)
    average.swap()
    assert torch.equal(weight, before) and torch.equal(average.means[0], mean)
