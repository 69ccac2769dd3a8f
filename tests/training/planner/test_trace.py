"""What a model takes, returns and keeps, from one forward on the meta device."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from sparkring.training.models.gpt import GPT, PLAN
from sparkring.training.planner.trace import Untraceable, trace_model


def test_kept_storages_count_once_and_weights_and_batch_do_not() -> None:
    model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 16), nn.Linear(16, 2))
    trace = trace_model(model, (torch.zeros(1, 4),), ["", "0", "1"], {})
    assert trace.kept[""] == {"between": 16 + 16} and trace.kept["1"] == {"between": 16}
    assert (trace.taken["0"], trace.returned["0"]) == (4, 16)


def test_kept_integers_and_masks_count_by_their_bytes() -> None:
    pooled = nn.Sequential(nn.Conv2d(1, 2, 1), nn.MaxPool2d(2))
    trace = trace_model(pooled, (torch.zeros(1, 1, 4, 4),), [""], {})
    assert trace.kept[""] == {"between": 2 * 16 + 2 * 2 * 4}, "an index of 8 bytes counts as two floats of 4"


def test_what_is_made_of_weights_alone_is_kept_once_for_all_rows() -> None:
    class Curves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.height = nn.Parameter(torch.zeros(500, 3))

        def forward(self, columns: dict[str, torch.Tensor]) -> torch.Tensor:
            return columns["x"].exp() @ torch.tanh(self.height).T

    given = ({"x": torch.zeros(1, 3, device="meta")},)
    trace = trace_model(Curves(), given, [""], {}, rows=10)
    assert trace.kept[""] == {"between": 3 + 500 * 3 / 10} and trace.returned[""] == 500


def test_tensors_between_cut_layers_are_counted_separately() -> None:
    model = GPT(vocab=16, width=8, layers=1, heads=2, hidden=12)
    kinds = PLAN.kinds(model)
    kept = trace_model(model, (torch.zeros(1, 5, dtype=torch.int64),), ["", *kinds], kinds).kept[""]
    assert set(kept) == {"inner", "entered", "between"} and kept["inner"] > 5 * 3 * 12
    assert not next(model.parameters()).is_meta, "a copy was traced"


def test_a_forward_that_needs_values_is_untraceable() -> None:
    class Reads(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x if (x > 0).any() else -x

    with pytest.raises(Untraceable, match="Reads's forward cannot be run on the meta device"):
        trace_model(Reads(), (torch.zeros(1),), [""], {})
