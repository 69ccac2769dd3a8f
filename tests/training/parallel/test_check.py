"""Impossible choices are refused before anything starts: every rule of the capability table, and what models forbid."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest
import torch
from torch import nn

from sparkring.conf.blocks.optim import OptimConfig
from sparkring.conf.blocks.parallel import ParallelConfig
from sparkring.conf.rank_info import RankInfo
from sparkring.conf.rules.strategies import RULES, strategy_notes
from sparkring.training.models.gpt import GPT
from sparkring.training.optim.build import build_optimizer
from sparkring.training.parallel.check import layout_problems
from sparkring.training.parallel.compose import build_strategy
from sparkring.training.parallel.mesh import resolve_mesh
from sparkring.training.tasks import BinaryTask

INT8 = {"compress": {"codec": "int8"}}
SERVED = {"servers": {"per_host": 1}}
LOCAL_SGD = {"averaging": {"kind": "local_sgd"}}
# rule -> (world, settings, device): the least that makes it apply
APPLIES: dict[str, tuple[int, dict[str, Any], str]] = {
    "zero3-split-backward": (4, {"pp": 2, "zero": 3, "schedule": "zero-bubble"}, "cpu"),
    "horovod-pipeline": (2, {"pp": 2, "engine": "horovod"}, "cpu"),
    "horovod-groups": (2, {"tp": 2, "engine": "horovod"}, "cpu"),
    "horovod-zero": (2, {"zero": 2, "engine": "horovod"}, "cpu"),
    "horovod-hybrid": (4, {"zero": 1, "shard": 2, "engine": "horovod"}, "cpu"),
    "horovod-offload": (2, {"zero": 1, "offload": True, "engine": "horovod"}, "cpu"),
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
    "compress-zero3": (2, {"zero": 3, **INT8}, "cpu"),
    "compress-zero": (2, {"zero": 1, **INT8}, "cpu"),
    "compress-tensor": (2, {"tp": 2, **INT8}, "cpu"),
    "compress-pipeline": (2, {"pp": 2, **INT8}, "cpu"),
    "compress-needs-data": (1, INT8, "cpu"),
    "averaging-zero": (2, {"zero": 1, **LOCAL_SGD}, "cpu"),
    "averaging-model": (2, {"tp": 2, **LOCAL_SGD}, "cpu"),
    "horovod-hosts": (2, {"averaging": {"kind": "diloco", "groups": "host"}, "engine": "horovod"}, "cpu"),
    "averaging-gossip-hosts": (2, {"averaging": {"kind": "gossip", "groups": "host"}}, "cpu"),
    "horovod-gossip": (2, {"averaging": {"kind": "gossip"}, "engine": "horovod"}, "cpu"),
    "averaging-inner-state": (2, {"averaging": {"kind": "easgd", "inner_state": "averaged"}}, "cpu"),
    "averaging-codec": (2, {**INT8, **LOCAL_SGD}, "cpu"),
    "averaging-needs-data": (1, LOCAL_SGD, "cpu"),
    "servers-zero": (2, {"zero": 1, **SERVED}, "cpu"),
    "servers-model": (2, {"tp": 2, **SERVED}, "cpu"),
    "servers-averaging": (2, {**LOCAL_SGD, **SERVED}, "cpu"),
    "servers-codec": (2, {**INT8, **SERVED}, "cpu"),
    "servers-horovod": (2, {"engine": "horovod", **SERVED}, "cpu"),
    "servers-fp16": (2, {"precision": "fp16", **SERVED}, "cpu"),
    "servers-late": (4, {"servers": {"per_host": 1, "bound": None, "max_lag": 2}}, "cpu"),
    "servers-backup-bound": (4, {"servers": {"per_host": 1, "bound": 1, "backup": 1}}, "cpu"),
    "servers-backup-alone": (1, {"servers": {"per_host": 1, "backup": 1}}, "cpu"),
    "servers-lag-bound": (4, {"servers": {"per_host": 1, "bound": 1, "max_lag": 9}}, "cpu"),
    "nccl-pipelines-side-by-side": (4, {"pp": 2}, "cuda"),
    "half-messages-on-cpu": (2, {"pp": 2, "precision": "fp16"}, "cpu"),
}


def problems(world: int, settings: dict[str, Any], device: str = "cpu", **more: Any) -> str:
    return "\n".join(layout_problems(ParallelConfig(**settings), world, more.pop("batch", 64), device, **more))


def test_every_rule_has_a_case() -> None:
    assert {rule.name for rule in RULES} == set(APPLIES)


@pytest.mark.parametrize("name", list(APPLIES))
def test_a_refused_combination_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sparkring.training.parallel.engine.available", lambda: None)
    world, settings, device = APPLIES[name]
    rule = next(rule for rule in RULES if rule.name == name)
    said = problems(world, settings, device)
    if not rule.refused:
        mesh = resolve_mesh(ParallelConfig(**settings), world)
        assert said == ""
        said = "".join(strategy_notes(ParallelConfig(**settings).model_dump(), asdict(mesh), device))
    assert rule.why.split("{")[0] in said
    assert "{" not in said


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
def test_problems_name_value_and_rule(world: int, settings: dict[str, Any], more: dict[str, Any], said: str) -> None:
    more = dict(more)
    with torch.device("meta"):
        model = GPT(vocab=32, width=48, layers=more.pop("layers", 4), heads=more.pop("heads", 4))
    assert said in problems(world, settings, model=model, **more)


def test_a_model_that_cannot_be_trained_is_refused_in_its_own_words() -> None:
    for model, said in (
        (nn.Linear(2, 2).requires_grad_(False), "no trainable parameters"),
        (nn.Sequential(nn.Embedding(4, 2, sparse=True)), r"'0' is Embedding\(sparse=True\).*make it with sparse=False"),
    ):
        strategy = build_strategy(ParallelConfig(), RankInfo(), torch.device("cpu"))
        with pytest.raises(ValueError, match=said):
            strategy.prepare(model, BinaryTask(["x"], "y", None), lambda named: build_optimizer(named, OptimConfig()))


def test_a_model_without_a_plan_gets_an_error_that_says_how_to_write_one() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    assert "define PLAN = ShardingPlan" in problems(2, {"pp": 2}, model=model)
    assert "define PLAN = ShardingPlan" in problems(2, {"tp": 2}, model=model)
    assert problems(2, {"zero": 3, "engine": "torch"}, model=model) == ""
