"""The same code on CUDA. Skipped without a GPU, and the skip says so."""

from __future__ import annotations

import importlib.util
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from sparkring.conf.blocks.optim import OptimConfig
from sparkring.conf.blocks.parallel import ParallelConfig
from sparkring.conf.rank_info import RankInfo
from sparkring.training.data.batch import Batch
from sparkring.training.loop.optim.build import build_optimizer
from sparkring.training.models.gpt import GPT, LanguageModelTask
from sparkring.training.parallel.compose import build_strategy

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: nothing was checked on a GPU"),
]
ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture(autouse=True)
def compiles_alone() -> Iterator[None]:
    """torch.compile starts a pool of processes that would live on after a test."""
    from torch._inductor import config

    with config.patch(compile_threads=1):
        yield


def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_session", ROOT / "benchmarks" / "gpu_session.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look there for their annotations
    spec.loader.exec_module(module)
    return module


def test_float64_and_float32_equal_the_cpu() -> None:
    assert all(line.good for line in script().equality(torch.device("cuda")))


def run(precision: str, compiled: bool, steps: int = 30, poison: int | None = None) -> tuple[list[float], list[bool]]:
    torch.manual_seed(0)
    model = GPT(vocab=64, width=64, layers=2, heads=4)
    device = torch.device("cuda")
    strategy = build_strategy(ParallelConfig(precision=precision), RankInfo(), device, clip_norm=1.0)  # type: ignore[arg-type]
    strategy.prepare(model, LanguageModelTask(), lambda named: build_optimizer(named, OptimConfig()), compiled=compiled)
    tokens = torch.randint(0, 64, (16, 33), device=device)
    losses, skipped = [], []
    for step in range(steps):
        weight = torch.full((16,), math.inf) if step == poison else None
        losses.append(float(strategy.forward_backward(Batch({"tokens": tokens}, 16, 16, 16, weight))) / 16)
        skipped.append(strategy.step(1e-3).skipped)
    return losses, skipped


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("compiled", [False, True])
def test_half_precision_follows_float32(precision: str, compiled: bool) -> None:
    expected, _ = run("fp32", compiled=False)
    got, skipped = run(precision, compiled)
    assert got[-1] == pytest.approx(expected[-1], rel=0.03) and got[-1] < got[0]
    assert sum(skipped) <= 4


def test_an_infinite_loss_skips_the_step_and_lowers_the_scale() -> None:
    losses, skipped = run("fp16", compiled=False, poison=20)
    assert skipped[20] and math.isfinite(losses[-1])
