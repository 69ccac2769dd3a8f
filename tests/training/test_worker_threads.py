"""Torch's threads of a rank: one where more would gain nothing, all that it is offered where they help."""

from __future__ import annotations

import pytest
from torch import nn

from sparkring.conf.load import load_config
from sparkring.conf.manifest import Column
from sparkring.training.models.initial import Unrecordable
from sparkring.training.worker.threads import pass_work, recipe_work, row_positions, useful_threads


def net(width: int) -> nn.Module:
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(3)), nn.LayerNorm(width), nn.Linear(width, 1))


# Of benchmarks/threads.py: two threads made so many times the steps of one
@pytest.mark.parametrize(
    ("width", "rows", "gain"),
    [(32, 256, 0.76), (64, 2048, 0.98), (128, 256, 1.12), (128, 2048, 1.45), (256, 256, 1.48), (1024, 2048, 1.74)],
)
def test_several_threads_are_taken_where_they_gained_a_quarter(width: int, rows: int, gain: float) -> None:
    assert useful_threads(2, pass_work(net(width), rows, 1)) == (2 if gain > 1.25 else 1)


def test_what_is_not_known_takes_what_is_offered() -> None:
    assert useful_threads(8, None) == 8 and useful_threads(1, None) == 1
    assert useful_threads(8, pass_work(net(32), 256, None)) == 8
    assert recipe_work(Unrecordable("needs values"), load_config("flights").config, None, 1) is None  # type: ignore[arg-type]


def test_weights_work_once_a_position_and_embeddings_are_looked_up() -> None:
    table = nn.Sequential(nn.Embedding(1000, 64), nn.Linear(64, 8, bias=False))
    assert pass_work(table, 10, 3) == 10 * 3 * 64 * 8


@pytest.mark.parametrize(
    ("columns", "positions"),
    [
        ([], 1),
        ([Column(name="a", dtype="float32")], 1),
        ([Column(name="a", dtype="float32", layout="vector", shape=(40,))], 1),
        ([Column(name="tokens", dtype="int64", layout="vector", shape=(129,))], 129),
        ([Column(name="pixels", dtype="int8", layout="vector", shape=(28, 28))], 784),
        ([Column(name="ids", dtype="int64", layout="ragged")], None),
        ([Column(name="photo", dtype="binary", layout="binary")], None),
    ],
)
def test_positions_are_tokens_pixels_or_not_known(columns: list[Column], positions: int | None) -> None:
    assert row_positions(columns) == positions
