"""A step's peak memory against published formulas, and what cannot be traced. Measured ones are in tests/ranks."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from sparkring.conf.blocks.parallel import ParallelConfig
from sparkring.training.models.gpt import GPT, LanguageModelTask
from sparkring.training.models.task import Task
from sparkring.training.parallel.mesh import Mesh
from sparkring.training.planner import CostPlan, Workload, make_plan, table_rows
from sparkring.training.planner.peak_memory.timeline import Pass, trace_pass

# Fig. 1 of arXiv 1910.02054: 7.5e9 parameters, 64 ranks, GB a rank. It counts K = 12 bytes of optimizer state beside 2
# of weights and 2 of gradients; here are 4 of weights, 4 of gradients and 8 of moments: 16 together too.
ZERO_PUBLISHED = {0: 120.0, 1: 31.4, 2: 16.6, 3: 1.9}


def plan_of(model: nn.Module, length: int = 32, rows: int = 64, mesh: Mesh | None = None, **settings: Any) -> CostPlan:
    task = LanguageModelTask()
    columns = {"tokens": torch.zeros(1, length + 1, dtype=torch.int64, device="meta")}
    config = ParallelConfig(**settings)
    inputs = task.inputs(columns)
    return make_plan(
        Workload(model, config, mesh or Mesh(), "torch-gloo", inputs, rows, task=task, columns=columns), peaks=True
    )


@pytest.mark.parametrize(("zero", "published"), [(0, ZERO_PUBLISHED[0]), (3, ZERO_PUBLISHED[3])])
def test_memory_that_stays_is_the_published_table(zero: int, published: float) -> None:
    """torch's ZeRO-1 and 2 shard weights between steps too: 16/w, as its ZeRO-3."""
    with torch.device("meta"):
        model = GPT(vocab=51200, width=4096, layers=36, heads=32, hidden=11008)
    count = sum(p.numel() for p in model.parameters())
    stage = plan_of(model, rows=64, mesh=Mesh(dp=64), zero=zero).stages[0]
    held = stage.weights + stage.gradients + stage.optimizer
    assert held / count * 7.5 == pytest.approx(published, rel=0.03)
    assert stage.peak is not None and stage.peak > held


# Bytes that tests/ranks/test_peak.py has measured on the largest rank of torch 2.13 (cases_peak.WEIGHTS)
WEIGHTS = [
    (Mesh(dp=2, cp=2), {}, 63_881_180),  # a shared weight's two gradients are whole on context ranks
    (Mesh(tp=4), {}, 17_477_060),  # and cut on tensor ranks
    (Mesh(tp=2), {"sequence_parallel": True}, 31_757_756),  # the embedding's is whole until it is cut
    (Mesh(pp=2, tp=2), {"micro_batches": 2}, 18_799_980),  # where sums are not made in place
    (Mesh(pp=2, tp=2), {"micro_batches": 2, "schedule": "zero-bubble"}, 20_612_976),  # sums that half a backward keeps
    (Mesh(dp=4), {"zero": 2, "shard": 2}, 46_009_604),  # the last gradient of a reduction is freed late
    (Mesh(dp=2, pp=2), {"zero": 2, "micro_batches": 2}, 30_886_380),
    (Mesh(dp=2, pp=2), {"zero": 3, "micro_batches": 2, "schedule": "interleaved", "stages_per_rank": 2}, 26_069_488),
    (Mesh(dp=2, pp=2), {"zero": 3, "micro_batches": 2}, 30_694_384),  # a pass copies out before it frees
    (Mesh(dp=2, pp=2), {"zero": 1, "micro_batches": 2, "schedule": "zero-bubble"}, 31_356_400),
    (Mesh(pp=2), {"micro_batches": 2, "schedule": "zero-bubble"}, 39_096_168),
]


@pytest.mark.parametrize(("mesh", "settings", "measured"), WEIGHTS)
def test_a_peak_of_weights_is_that_of_the_ranks(mesh: Mesh, settings: dict[str, Any], measured: int) -> None:
    model = GPT(vocab=1024, width=256, layers=4, heads=4, hidden=768)
    plan = plan_of(model, length=4, rows=32, mesh=mesh, **settings)
    peak = max(stage.peak or 0 for stage in plan.stages)
    assert peak == pytest.approx(measured, rel=0.006)


def test_what_a_split_backward_leaves_is_reduced_with_the_parameters_of_no_unit_first() -> None:
    settings = {"zero": 2, "micro_batches": 2, "schedule": "zero-bubble", "stages_per_rank": 2}
    model = GPT(vocab=1024, width=256, layers=4, heads=4, hidden=768)
    first = plan_of(model, length=4, rows=32, mesh=Mesh(dp=2, pp=2), **settings).stages[0]
    assert first.peak == pytest.approx(29_378_028, rel=0.006)  # measured, as above


def dropout(x: torch.Tensor) -> torch.Tensor:
    """As on GPUs, with a mask of one byte; on the CPU torch's has the dtype of `x`."""
    return torch.native_dropout(x, 0.1, True)[0]


class PublishedLayer(nn.Module):
    """A transformer layer as arXiv 2205.05198 counts it: dropout, GELU, whole scores."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm1(x)
        q, k, v = (layer(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        scores = functional.softmax(q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]), dim=-1)
        seen = (dropout(scores) @ v).transpose(1, 2).flatten(-2)
        x = x + dropout(self.out(seen))
        return x + dropout(self.down(functional.gelu(self.up(self.norm2(x)))))


@pytest.mark.parametrize(("tokens", "width", "heads"), [(512, 512, 8), (1024, 512, 8), (256, 1024, 16)])
def test_activations_of_a_layer_are_the_published_formula(tokens: int, width: int, heads: int) -> None:
    """s b h (34 + 5 a s / h) bytes, equation 1."""
    rows, layers = 4, 4
    with torch.device("meta"):
        model = nn.Sequential(*(PublishedLayer(width, heads) for _ in range(layers)))
        x = torch.zeros(rows, tokens, width, dtype=torch.bfloat16)
    work = Pass(model, {"x": x}, lambda columns: (columns["x"],), None, {}, {""}, weights=torch.bfloat16)
    held = 0
    for event in trace_pass(work)[0].part("F"):
        held += {"hold": event.size, "free": -event.size}.get(event.kind, 0)
    published = tokens * rows * width * (34 + 5 * heads * tokens / width)
    assert held / layers == pytest.approx(published, rel=0.03)


def test_recomputation_keeps_a_layers_input() -> None:
    """2 s b h bytes a layer in 16 bit, section 5 of arXiv 2205.05198; the rest is of one layer."""
    model = GPT(vocab=64, width=64, layers=12, heads=4)
    whole, recomputed = (
        plan_of(model, length=256, activation_checkpointing=each).stages[0].peak for each in (False, True)
    )
    assert whole is not None and recomputed is not None and recomputed < whole / 4


def test_the_loss_is_in_the_peak() -> None:
    """Logits of a large vocabulary, their log-softmax and two gradients: the most that a small model holds."""
    model = GPT(vocab=4096, width=16, layers=1, heads=2)
    plan = plan_of(model, length=16, rows=32)
    logits = 4 * 32 * 16 * 4096
    assert plan.stages[0].peak == pytest.approx(4 * logits, rel=0.1)
    row = next(row for row in table_rows(plan, {"peak_bytes": 5.0}) if row["quantity"] == "peak_bytes")
    assert row["predicted"] == plan.stages[0].peak and row["measured"] == 5.0
    assert row["unit"].startswith("per rank, largest: activations 9")


class Reads(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if float(x.detach().sum()) > 0 else -x


class Doubting(Task):
    """Its loss needs values."""

    def inputs(self, columns: dict[str, Any]) -> tuple[Any, ...]:
        return (columns["x"],)

    def loss(self, outputs: torch.Tensor, columns: dict[str, Any]) -> torch.Tensor:
        return outputs.sum(1) * float(outputs.detach().sum())


def table_plan(model: nn.Module) -> CostPlan:
    x = torch.zeros(1, 4, device="meta")
    return make_plan(
        Workload(model, ParallelConfig(), Mesh(), "none", (x,), 8, task=Doubting(), columns={"x": x}), peaks=True
    )


def test_a_model_that_cannot_be_traced_is_planned_in_part_and_its_module_is_named() -> None:
    plan = table_plan(nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), Reads())))
    assert "cannot be run on the meta device at module '1.1'" in plan.untraced
    stage = plan.stages[0]
    assert (stage.weights, stage.peak, stage.activations) == (160, None, None)


def test_a_loss_that_needs_values_leaves_the_peak_out() -> None:
    plan = table_plan(nn.Sequential(nn.Linear(4, 4), nn.Tanh()))
    assert plan.stages[0].peak is None and plan.stages[0].activations == 4 * 8 * 4
    assert "shapes and no values" in plan.untraced
