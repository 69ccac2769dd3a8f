"""A trace of two blocks of each kind says what one of all of them says."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from sparkring.conf.blocks.parallel import ParallelConfig
from sparkring.training.models.gpt import GPT
from sparkring.training.models.sharding_plan import ShardingPlan
from sparkring.training.parallel.mesh import Mesh
from sparkring.training.planner.equal_blocks import lengthened, shortened, stand_ins
from sparkring.training.planner.search import trace_of
from sparkring.training.planner.workload import RankParameters, Workload


class Layer(nn.Module):
    """x -> x + down(up(x)), or down(up(x)) of another width."""

    def __init__(self, width: int, inner: int, out: int | None = None) -> None:
        super().__init__()
        self.up, self.down, self.adds = nn.Linear(width, inner), nn.Linear(inner, out or width), out is None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.down(torch.tanh(self.up(x)))
        return x + made if self.adds else made


class Body(nn.Module):
    """Narrow and wide layers in turns."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(8, 16 if number % 2 else 24) for number in range(7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Stack(nn.Module):
    """A body, and equal heads that each return less than they take."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Body()
        self.heads = nn.ModuleList(Layer(8, 16, 4) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.body(x)
        return torch.stack([head(x) for head in self.heads]).sum(0)


PLAN = ShardingPlan(layers=("body",))


def workload_of(model: nn.Module, row: torch.Tensor) -> Workload:
    return Workload(model, ParallelConfig(), Mesh(), "none", (row,), global_batch=4)


TEXT = workload_of(GPT(vocab=32, width=16, layers=5, heads=2), torch.zeros(1, 6, dtype=torch.int64))
STACK = workload_of(Stack(), torch.zeros(1, 8))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("workload", [TEXT, STACK], ids=["text", "stack"])
def test_a_trace_of_two_blocks_of_each_kind_is_that_of_all(workload: Workload, precision: str) -> None:
    whole, absent = trace_of(workload), stand_ins(workload.model, trace_of(workload))
    short = trace_of(shortened(workload, whole), precision)
    assert absent and not {*absent} & {*short.kept}
    assert lengthened(short, absent) == trace_of(workload, precision)


def test_a_block_is_stood_for_by_the_second_of_its_kind() -> None:
    assert stand_ins(TEXT.model, trace_of(TEXT)) == dict.fromkeys(("blocks.2", "blocks.3", "blocks.4"), "blocks.1")
    # layer 0 is of no kind: its input is the batch, which is not kept
    stack = {"body.layers.5": "body.layers.3", "body.layers.6": "body.layers.4"}
    assert stand_ins(STACK.model, trace_of(STACK)) == stack


def test_a_model_is_shortened_once_whatever_its_rows() -> None:
    whole = trace_of(TEXT)
    of_many = shortened(TEXT.with_layout(TEXT.config, Mesh(), "none", global_batch=64), whole)
    assert of_many.model is shortened(TEXT, whole).model is not TEXT.model
    assert (of_many.global_batch, len(of_many.block_names)) == (64, 2)
    assert len(TEXT.block_names) == 5, "the model itself stays"
    assert RankParameters(TEXT, 0).whole > RankParameters(of_many, 0).whole, "each knows its own"
