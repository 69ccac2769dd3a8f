"""Impossible choices are refused before anything starts: every rule of the capability table, and what models forbid."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest
import torch
from torch import nn

from conf.capabilities import RULES, strategy_notes
from training.models.gpt import GPT
from training.models.plan import plan_of
from training.optim import build_optimizer
from training.parallel import ParallelSettings, RankInfo, build_strategy
from training.parallel.check import layout_problems
from training.parallel.compose import choose_engine
from training.parallel.data_parallel.horovod_ring import available
from training.parallel.model_parallel.pipeline import chain_names, cut_chain, measured_costs
from training.parallel.precision import loss_scale
from training.parallel.world import Mesh, resolve_mesh
from training.tasks import BinaryTask

# rule -> (world, settings, device): the least that makes it bite
BITES: dict[str, tuple[int, dict[str, Any], str]] = {
    "zero3-split-backward": (4, {"pp": 2, "zero": 3, "schedule": "zero-bubble"}, "cpu"),
    "pipeline-needs-send": (2, {"pp": 2, "engine": "horovod"}, "cpu"),
    "horovod-groups": (2, {"tp": 2, "engine": "horovod"}, "cpu"),
    "horovod-zero": (2, {"zero": 2, "engine": "horovod"}, "cpu"),
    "horovod-hybrid": (4, {"zero": 1, "shard": 2, "engine": "horovod"}, "cpu"),
    "offload-needs-zero": (2, {"offload": True}, "cpu"),
    "zero-needs-data": (2, {"tp": 2, "zero": 2, "offload": True, "engine": "torch"}, "cpu"),
    "shard-needs-zero": (4, {"shard": 2}, "cpu"),
    "shard-divides": (4, {"zero": 2, "shard": 3}, "cpu"),
    "sequence-needs-tensor": (2, {"sequence_parallel": True}, "cpu"),
    "sequence-and-context": (4, {"tp": 2, "cp": 2, "sequence_parallel": True}, "cpu"),
    "stages-need-pipeline": (2, {"stages_per_rank": 2}, "cpu"),
    "balance-needs-pipeline": (2, {"balance": "measured"}, "cpu"),
    "micro-batches-need-pipeline": (2, {"micro_batches": 2}, "cpu"),
    "checkpoint-split-backward": (2, {"pp": 2, "schedule": "zero-bubble", "activation_checkpointing": True}, "cpu"),
    "half-messages-on-cpu": (2, {"pp": 2, "precision": "fp16"}, "cpu"),
    "nccl-two-way-link": (2, {"pp": 2}, "cuda"),
}


def problems(world: int, settings: dict[str, Any], device: str = "cpu", **more: Any) -> str:
    return "\n".join(layout_problems(ParallelSettings(**settings), world, more.pop("batch", 64), device, **more))


def test_every_rule_has_a_case() -> None:
    assert {rule.name for rule in RULES} == set(BITES)


@pytest.mark.parametrize("name", list(BITES))
def test_a_refused_combination_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("training.parallel.compose.available", lambda: None)
    world, settings, device = BITES[name]
    rule = next(rule for rule in RULES if rule.name == name)
    said = problems(world, settings, device)
    if not rule.refused:
        mesh = resolve_mesh(world, **{axis: settings.get(axis, 1) for axis in ("cp", "pp", "tp")}, dp=-1)
        assert said == ""
        said = "".join(strategy_notes(asdict(ParallelSettings(**settings)), asdict(mesh), "torch", device))
    assert rule.why.split("{")[0] in said
    assert "{" not in said


def test_what_has_no_effect_is_said_when_the_strategy_is_built(caplog: pytest.LogCaptureFixture) -> None:
    build_strategy(ParallelSettings(zero=1, engine="torch"), RankInfo(), torch.device("cpu"))
    assert "parallel.zero=1" in caplog.text and "have no effect" in caplog.text


def test_building_refuses_it_too() -> None:
    settings = ParallelSettings(dp=1, micro_batches=2, engine="torch")
    with pytest.raises(ValueError, match="micro_batches=2 with pp"):
        build_strategy(settings, RankInfo(), torch.device("cpu"))


def test_legal_combinations_are_not_refused() -> None:
    for world, settings in [
        (2, {}),
        (8, {"pp": 2, "tp": 2, "zero": 2, "micro_batches": 2}),
        (4, {"zero": 3, "shard": 2}),
    ]:
        assert problems(world, {"engine": "torch", **settings}) == ""


@pytest.mark.parametrize(
    ("world", "settings", "more", "said"),
    [
        (8, {"dp": 2, "pp": 2}, {}, "dp(2) * pp(2) * tp(1) != world(8)"),
        (2, {"pp": 2, "schedule": "1f1bb"}, {}, "nearest is '1f1b'"),
        (
            4,
            {"pp": 2, "micro_batches": 4},
            {"batch": 20},
            "20 is not divisible by dp(2) * accumulate(1) * micro_batches(4) = 8",
        ),
        (4, {"accumulate": 4}, {"batch": 8}, "8 is less than dp(4) * accumulate(4) = 16"),
        (4, {"dp": 1, "tp": 4}, {"heads": 6}, "6 heads and 6 key/value heads, not divisible by tp(4) * cp(1)"),
        (3, {"dp": 1, "tp": 3}, {"batch": 63, "heads": 3}, "blocks.0.mlp.gate has 128 outputs, not divisible by tp(3)"),
        (8, {"pp": 8}, {"layers": 2}, "5 layers are fewer than 8 stages"),
        (2, {"pp": 2, "engine": "horovod"}, {}, "Horovod has no send and receive"),
    ],
)
def test_bad_input_says_what_and_why(world: int, settings: dict[str, Any], more: dict[str, Any], said: str) -> None:
    more = dict(more)
    with torch.device("meta"):
        model = GPT(vocab=32, width=48, layers=more.pop("layers", 4), heads=more.pop("heads", 4))
    assert said in problems(world, settings, model=model, **more)


def test_a_model_that_cannot_be_trained_is_refused_in_its_own_words() -> None:
    for model, said in (
        (nn.Linear(2, 2).requires_grad_(False), "no trainable parameters"),
        (nn.Sequential(nn.Embedding(4, 2, sparse=True)), r"'0' is Embedding\(sparse=True\).*make it with sparse=False"),
    ):
        strategy = build_strategy(ParallelSettings(), RankInfo(), torch.device("cpu"))
        with pytest.raises(ValueError, match=said):
            strategy.prepare(model, BinaryTask(["x"], "y", None), lambda named: build_optimizer(named))


def test_a_model_without_a_plan_is_told_what_to_write() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    assert "define PLAN = ShardingPlan" in problems(2, {"pp": 2}, model=model)
    assert "define PLAN = ShardingPlan" in problems(2, {"tp": 2}, model=model)
    assert problems(2, {"zero": 3, "engine": "torch"}, model=model) == ""


def test_auto_says_why_it_took_torch(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    with caplog.at_level("INFO"):
        assert choose_engine(ParallelSettings(tp=2), Mesh(tp=2)) == "torch"
    assert "no groups for dp(1) * pp(1) * tp(2)" in caplog.text
    monkeypatch.setattr("training.parallel.compose.available", lambda: "horovod cannot be imported (test)")
    with caplog.at_level("INFO"):
        assert choose_engine(ParallelSettings(), Mesh(dp=2)) == "torch"
    assert "cannot be imported (test)" in caplog.text
    with pytest.raises(ValueError, match="engine=horovod: horovod cannot be imported"):
        choose_engine(ParallelSettings(engine="horovod"), Mesh(dp=2))


@pytest.mark.skipif(available() is not None, reason="Horovod is not installed")
@pytest.mark.horovod
def test_auto_takes_horovod_where_it_can() -> None:
    assert choose_engine(ParallelSettings(), Mesh(dp=2)) == "horovod"
    assert choose_engine(ParallelSettings(), Mesh()) == "none"


def test_measured_costs_cut_where_time_is_spent(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block ten times as slow as the others is left alone in its stage."""
    clock = [0.0]
    monkeypatch.setattr("training.parallel.model_parallel.pipeline.time.perf_counter", lambda: clock[0])

    def takes(seconds: float) -> Any:
        def hook(*_: Any) -> None:
            clock[0] += seconds

        return hook

    model = GPT(vocab=32, width=32, layers=4, heads=4)
    names = chain_names(model, plan_of(model))
    for name in names:
        model.get_submodule(name).register_forward_hook(takes(10.0 if name == "blocks.1" else 1.0))
    before = torch.random.get_rng_state()
    costs = measured_costs(model, names, torch.zeros(2, 16, dtype=torch.int64))
    assert costs == [10.0 if name == "blocks.1" else 1.0 for name in names]
    assert cut_chain(names, costs, 3)[1] == ["blocks.1"]
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(torch.random.get_rng_state(), before)


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
