"""A chain that is not the model's forward is found before training, whatever the difference; the model stays as it was.

The forms over ranks, and learned positions under context parallelism, are in tests/ranks/test_odd.py."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from sparkring.training.data.batch import Batch
from sparkring.training.models.gpt import GPT, LanguageModelTask
from sparkring.training.parallel import equivalence
from sparkring.training.parallel.equivalence import close, few_rows, partition_problem

NAMES = ["embed", "body", "head"]


class Model(nn.Module):
    """Its forward is its chain; subclasses do more."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(11, 8), nn.Linear(8, 11, bias=False)
        self.body = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Tanh())
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.embed(x)))


class Scaled(Model):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.embed(x) * math.sqrt(8)))


class Drops(Model):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(functional.dropout(self.embed(x), 0.2, self.training)))


class Skips(Model):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        return self.head(x + self.body(x))


class Offset(Model):
    """By a buffer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("offset", torch.full((11,), 3.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.offset


class Reshaped(Model):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).flatten()


class Tuple(Model):
    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x), x


class Split(Model):
    """Its chain cannot be called as one."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.embed(x).flatten(1)[:, :8]))


X = torch.tensor([3, 7, 0, 9])
DIFFERENT = (Scaled, Drops, Skips, Offset, Reshaped, Tuple)


def made(cls: type[Model], how: str) -> Model:
    torch.manual_seed(5)
    if how == "meta":
        with torch.device("meta"):
            return cls()
    return cls().to(getattr(torch, how))


@pytest.mark.parametrize("how", ["float32", "float64", "bfloat16", "meta"])
def test_a_forward_that_does_more_than_its_chain_is_refused(how: str) -> None:
    assert partition_problem(made(Model, how), NAMES, X) is None
    for cls in DIFFERENT:
        problem = partition_problem(made(cls, how), NAMES, X)
        assert problem is not None and f"{cls.__name__}'s forward is not the composition" in problem, cls


def test_a_model_too_large_to_try_is_compared_by_its_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(equivalence, "MAX_ELEMENTS", 10)
    assert partition_problem(made(Model, "float32"), NAMES, X) is None
    for cls in (Scaled, Drops, Skips, Offset, Reshaped):
        assert partition_problem(made(cls, "meta"), NAMES, X) is not None, cls


def test_a_chain_that_fails_says_how() -> None:
    problem = partition_problem(made(Split, "float32"), NAMES, torch.tensor([[3, 1], [7, 2]]))
    assert problem is not None and "the layers fail" in problem


def test_nothing_is_changed_by_comparing() -> None:
    model = made(Model, "float32")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    random = torch.random.get_rng_state()
    partition_problem(model, NAMES, X)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(torch.random.get_rng_state(), random)
    assert model.training and all(p.grad is None for p in model.parameters())


def test_sequences_are_tried_as_short_as_the_ranks_can_cut_them() -> None:
    task = LanguageModelTask()
    for tokens, ranks, expected in ((1024, 2, 8), (48, 4, 16), (25, 1, 25), (7, 2, 7)):
        batch = Batch({"tokens": torch.arange(5 * (tokens + 1)).view(5, -1) % 9}, 5, 5, 5)
        few = few_rows(batch, task, ranks)
        assert few.rows == 4 and few.columns["tokens"].shape == (4, expected + 1), (tokens, ranks)


def test_the_shipped_model_is_its_chain() -> None:
    with torch.device("meta"):
        gpt = GPT(32, width=32, layers=2, heads=4)
    names = ["embed", "blocks.0", "blocks.1", "norm", "head"]
    assert partition_problem(gpt, names, torch.zeros(2, 6, dtype=torch.int64)) is None
    assert (
        partition_problem(gpt, ["embed", "blocks.0", "norm", "head"], torch.zeros(2, 6, dtype=torch.int64)) is not None
    )


def test_half_of_the_digits_is_close() -> None:
    a = torch.tensor([1.0, math.nan])
    assert close(a, a * (1 + 1e-5)) and not close(a, a * 1.001)
    assert not close(a, a.double()) and not close(a, a[:1]) and not close(a, (a,))
