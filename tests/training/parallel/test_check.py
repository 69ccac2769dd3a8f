"""Impossible choices are refused before anything starts: every rule of the capability table, and what models forbid."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from sparkring.conf.blocks.optim import OptimConfig
from sparkring.conf.blocks.parallel import ParallelConfig
from sparkring.conf.rank_info import RankInfo
from sparkring.conf.rules.rule import find_notes
from sparkring.conf.rules.strategies import LAYOUT, Layout
from sparkring.training.loop.optim.build import build_optimizer
from sparkring.training.models.gpt import GPT
from sparkring.training.parallel.check import layout_problems
from sparkring.training.parallel.compose import build_strategy
from sparkring.training.parallel.mesh import layout_of, resolve_mesh
from sparkring.training.tasks import BinaryTask

INT8 = {"compress": {"codec": "int8"}}
SERVED = {"servers": {"per_host": 1}}
LOCAL_SGD = {"averaging": {"kind": "local_sgd"}}
# rule -> (world, settings, device, words of its line): the least that makes it apply
APPLIES: dict[str, tuple[int, dict[str, Any], str, str]] = {
    "zero3-split-backward": (4, {"pp": 2, "zero": 3, "schedule": "zero-bubble"}, "cpu", "a backward split in two"),
    "horovod-pipeline": (2, {"pp": 2, "engine": "horovod"}, "cpu", "Horovod has no send and receive between"),
    "horovod-groups": (2, {"tp": 2, "engine": "horovod"}, "cpu", "tensor and context parallelism run on"),
    "horovod-zero": (2, {"zero": 2, "engine": "horovod"}, "cpu", "Horovod's collectives carry zero 0 and 1"),
    "horovod-hybrid": (4, {"zero": 1, "shard": 2, "engine": "horovod"}, "cpu", "ZeRO-1 on Horovod shards over all"),
    "horovod-offload": (2, {"zero": 1, "offload": True, "engine": "horovod"}, "cpu", "only the shards of torch's"),
    "offload-needs-zero": (2, {"offload": True}, "cpu", "what is offloaded is the shards of"),
    "zero-needs-data": (2, {"tp": 2, "zero": 2, "offload": True, "engine": "torch"}, "cpu", "have no effect, since"),
    "shard-needs-zero": (4, {"shard": 2}, "cpu", "nothing is sharded; set parallel.zero or"),
    "shard-divides": (4, {"zero": 2, "shard": 3}, "cpu", "must divide dp(4) and needs cp(1)"),
    "sequence-needs-tensor": (2, {"sequence_parallel": True}, "cpu", "there is no tensor axis to cut the sequence"),
    "sequence-and-context": (4, {"tp": 2, "cp": 2, "sequence_parallel": True}, "cpu", "both cut the sequence; use one"),
    "stages-need-pipeline": (2, {"stages_per_rank": 2}, "cpu", "there is no pipeline; set parallel.pp"),
    "balance-needs-pipeline": (2, {"balance": "measured"}, "cpu", "there are no stages to balance; set"),
    "micro-batches-need-pipeline": (2, {"micro_batches": 2}, "cpu", "only pipelines have micro-batches; use"),
    "checkpoint-split-backward": (
        2,
        {"pp": 2, "schedule": "zero-bubble", "activation_checkpointing": True},
        "cpu",
        "a backward split",
    ),
    "compress-zero3": (2, {"zero": 3, **INT8}, "cpu", "two thirds of what it sends are gathered"),
    "compress-zero": (2, {"zero": 1, **INT8}, "cpu", "a residual is a whole gradient on every"),
    "compress-tensor": (2, {"tp": 2, **INT8}, "cpu", "a block of values would hold parts of"),
    "compress-pipeline": (2, {"pp": 2, **INT8}, "cpu", "a weight that two stages share would have"),
    "compress-needs-data": (1, INT8, "cpu", "has no effect, since there is one data rank"),
    "averaging-zero": (2, {"zero": 1, **LOCAL_SGD}, "cpu", "ranks whose weights differ have no state in"),
    "averaging-model": (2, {"tp": 2, **LOCAL_SGD}, "cpu", "a rank must have the whole model to train"),
    "horovod-hosts": (
        2,
        {"averaging": {"kind": "diloco", "groups": "host"}, "engine": "horovod"},
        "cpu",
        "Horovod's collectives are",
    ),
    "averaging-gossip-hosts": (2, {"averaging": {"kind": "gossip", "groups": "host"}}, "cpu", "its messages are"),
    "horovod-gossip": (2, {"averaging": {"kind": "gossip"}, "engine": "horovod"}, "cpu", "Horovod has no send and"),
    "averaging-inner-state": (
        2,
        {"averaging": {"kind": "easgd", "inner_state": "averaged"}},
        "cpu",
        "moments that are",
    ),
    "averaging-codec": (2, {**INT8, **LOCAL_SGD}, "cpu", "codecs make the gradients smaller that"),
    "averaging-needs-data": (1, LOCAL_SGD, "cpu", "has no effect, since there is one data rank"),
    "servers-zero": (2, {"zero": 1, **SERVED}, "cpu", "servers hold weights and optimizer state"),
    "servers-model": (2, {"tp": 2, **SERVED}, "cpu", "ranks that need not be at the same step"),
    "servers-averaging": (2, {**LOCAL_SGD, **SERVED}, "cpu", "the weights are the servers', and ranks"),
    "servers-codec": (2, {**INT8, **SERVED}, "cpu", "codecs make the gradients smaller that"),
    "servers-horovod": (2, {"engine": "horovod", **SERVED}, "cpu", "there is no ring; leave engine at auto"),
    "servers-fp16": (2, {"precision": "fp16", **SERVED}, "cpu", "ranks at other steps would scale their"),
    "servers-late": (4, {"servers": {"per_host": 1, "bound": None, "max_lag": 2}}, "cpu", "a gradient that is"),
    "servers-backup-bound": (4, {"servers": {"per_host": 1, "bound": 1, "backup": 1}}, "cpu", "ranks that may be"),
    "servers-backup-alone": (1, {"servers": {"per_host": 1, "backup": 1}}, "cpu", "has no effect, since there is no"),
    "servers-lag-bound": (4, {"servers": {"per_host": 1, "bound": 1, "max_lag": 9}}, "cpu", "has no effect, since no"),
    "nccl-pipelines-side-by-side": (4, {"pp": 2}, "cuda", "over NCCL this project has run pipelines"),
    "half-messages-on-cpu": (2, {"pp": 2, "precision": "fp16"}, "cpu", "half-precision messages are not tested"),
}
NOTED = [
    "zero-needs-data",
    "compress-needs-data",
    "averaging-needs-data",
    "servers-backup-alone",
    "servers-lag-bound",
]  # logged


def problems(world: int, settings: dict[str, Any], device: str = "cpu", **more: Any) -> str:
    return "\n".join(layout_problems(ParallelConfig(**settings), world, more.pop("batch", 64), device, **more))


def case(name: str) -> Layout:
    world, settings, device, _ = APPLIES[name]
    config = ParallelConfig(**settings)
    return layout_of(config, resolve_mesh(config, world), device, global_batch=1)


def test_every_rule_has_a_case() -> None:
    idle = [rule.keys for rule in LAYOUT if not any(rule.find(case(name)) for name in APPLIES)]
    assert idle == []


@pytest.mark.parametrize("name", list(APPLIES))
def test_a_refused_combination_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sparkring.training.parallel.engine.available", lambda device: None)
    world, settings, device, words = APPLIES[name]
    refused, noted = problems(world, settings, device), "\n".join(find_notes(LAYOUT, case(name)))
    assert words in (noted if name in NOTED else refused)
    assert "{" not in refused + noted
    assert refused == "" or name not in NOTED


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
        (4, {"dp": 1, "tp": 4}, {"heads": 6}, "6 heads and 6 key/value heads, not divisible by tp(4)"),
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
