"""A process's random state comes back, as plain data, and a damaged one is refused before it is used."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from sparkring.training.checkpoint.format import decode_value, encode_value
from sparkring.training.checkpoint.rng import capture_rng, checked_rng, restore_rng


def drawn() -> tuple[list[float], float, float]:
    return torch.rand(2).tolist(), float(np.random.rand()), random.random()


def test_the_next_numbers_are_the_same_after_a_round_through_json() -> None:
    state = encode_value(capture_rng(), "rng")
    expected = drawn()
    assert drawn() != expected
    restore_rng(checked_rng(decode_value(state)))
    assert drawn() == expected


@pytest.mark.parametrize(
    "damaged",
    [
        {},
        {"torch": np.zeros(3, np.uint8)},
        {"python": (3, (1, 2), None)},
        {"numpy": ("MT19937", np.zeros(624, np.uint32), 625, 0, 0.0)},
        {"numpy": ("MT19937", np.zeros(3, np.uint32), 1, 0, 0.0)},
    ],
)
def test_a_damaged_state_is_refused_and_changes_nothing(damaged: dict[str, Any]) -> None:
    before = capture_rng()
    with pytest.raises(ValueError, match=r"random state|outside its 624 words|wrong size|must be"):
        checked_rng((before | damaged) if damaged else {})
    assert torch.equal(torch.from_numpy(before["torch"]), torch.get_rng_state())
