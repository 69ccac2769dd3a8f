"""The planner against the published memory table, and against big models built for real on the meta device with a fake
process group of the whole world."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from sparkring.conf.blocks.parallel import ParallelConfig
from sparkring.conf.load import load_config
from sparkring.conf.rank_info import RankInfo
from sparkring.training.models.gpt import GPT, LanguageModelTask
from sparkring.training.models.tabular import Tabular
from sparkring.training.parallel.check import layout_problems
from sparkring.training.parallel.compose import build_strategy
from sparkring.training.parallel.dtensor import local_tensor
from sparkring.training.parallel.memory.meters import ActivationMeter
from sparkring.training.parallel.mesh import Mesh, resolve_mesh
from sparkring.training.planner import Workload, format_rows, make_plan, table_rows

META = torch.device("meta")
RECIPES = ("gpt-124m", "gpt-1b", "gpt-7b", "gpt-70b")
PIPELINES = {  # on 512 ranks in pipelines, which the recipes have none of
    "zero1": {"zero": 1, "tp": 8, "pp": 8, "micro_batches": 16, "sequence_parallel": True},
    "interleaved": {"tp": 8, "pp": 8, "micro_batches": 16, "schedule": "interleaved", "stages_per_rank": 2},
}


@pytest.fixture
def fake_world() -> Iterator[Any]:
    """start(rank, world): a process group that answers at once and moves nothing."""

    def start(rank: int, world: int) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())

    yield start
    if dist.is_initialized():
        dist.destroy_process_group()


def gpt(recipe: str) -> GPT:
    with META:
        return GPT(**load_config(recipe).config.model.args)


@pytest.mark.parametrize("recipe", [*RECIPES[:-1], pytest.param(RECIPES[-1], marks=pytest.mark.slow)])
def test_named_recipes_are_built_as_planned(fake_world: Any, recipe: str) -> None:
    config = load_config(recipe).config
    assert_built_as_planned(fake_world, recipe, config.parallel, config.launch.world, config.train.global_batch)


@pytest.mark.parametrize("recipe", ["gpt-7b", pytest.param("gpt-70b", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", list(PIPELINES))
def test_big_pipelines_are_built_as_planned(fake_world: Any, name: str, recipe: str) -> None:
    assert_built_as_planned(fake_world, recipe, ParallelConfig(engine="torch", **PIPELINES[name]), 512, 1024)


def assert_built_as_planned(
    fake_world: Any, recipe: str, settings: ParallelConfig, world: int, global_batch: int
) -> None:
    """One rank of every stage, built on the meta device as if all the others were there."""
    mesh = resolve_mesh(settings, world)
    assert layout_problems(settings, world, global_batch, model=gpt(recipe)) == []
    with META:
        tokens = torch.zeros(1, 2048, dtype=torch.int64)
    plan = make_plan(Workload(gpt(recipe), settings, mesh, "torch-gloo", (tokens,), global_batch))
    for stage in range(mesh.pp):
        rank = stage * mesh.dp * mesh.tp
        fake_world(rank, world)
        strategy = build_strategy(settings, RankInfo(rank, world), META)
        strategy.prepare(gpt(recipe), LanguageModelTask(), lambda named: torch.optim.AdamW([p for _, p in named]))
        held = sum(4 * local_tensor(p.detach()).numel() for _, p in strategy.prepared.named)
        planned = plan.stages[stage]
        assert held == pytest.approx(planned.weights, rel=0.01), f"stage {stage}"
        assert planned.gradients == pytest.approx(held, rel=0.01)
        assert planned.optimizer == pytest.approx(2 * held, rel=0.01)
    assert "parameters" in format_rows(table_rows(plan))


def test_memory_is_the_published_table() -> None:
    """zero_memory_measured.csv: bytes per parameter at the optimizer's step, fp32 AdamW, 4 ranks."""
    published = "impl,zero,bytes\nDDP,0,16\nFSDP2 reshard_after_forward=False,1,4\nFSDP2 ZeRO-3,3,4\n"
    for row in csv.DictReader(published.splitlines()):
        settings = ParallelConfig(zero=int(row["zero"]))
        model = GPT(vocab=64, width=64, layers=2, heads=4)
        tokens = torch.zeros(1, 8, dtype=torch.int64)
        plan = make_plan(Workload(model, settings, Mesh(dp=4), "torch-gloo", (tokens,), 8))
        count = sum(p.numel() for p in model.parameters())
        stage = plan.stages[0]
        at_step = stage.weights + stage.gradients + stage.optimizer
        assert at_step / count == pytest.approx(float(row["bytes"]), rel=0.001), row


def test_a_start_and_an_export_hold_a_ranks_part_and_one_parameter() -> None:
    """70B on 512 ranks: 0.5 GiB of weights each where the whole model has 257 GiB, and 4 GiB of an embedding."""
    model, tokens = gpt("gpt-70b"), torch.zeros(1, 8, dtype=torch.int64)
    whole = 4 * sum(p.numel() for p in model.parameters())
    largest = 4 * max(p.numel() for p in model.parameters())
    plan = make_plan(Workload(model, ParallelConfig(zero=3), Mesh(dp=512), "torch-gloo", (tokens,), 512))
    assert plan.export == largest and plan.stages[0].start == pytest.approx(whole / 512 + largest, rel=0.01)
    rows = {row["quantity"]: row["predicted"] for row in table_rows(plan)}
    assert rows["start_bytes"] == plan.stages[0].start < whole / 50 and rows["export_bytes"] == largest


def test_volume_is_the_published_one() -> None:
    """wire_volume_measured.csv, 4 ranks, in 4 bytes x parameters: DDP 1.5, ZeRO-1 and 2 1.5, ZeRO-3 2.25, hybrid 2."""
    expected = {(0, 0): 1.5, (1, 0): 1.5, (2, 0): 1.5, (3, 0): 2.25, (3, 2): 2.0}
    model = torch.nn.Sequential(
        *(torch.nn.Sequential(torch.nn.Linear(64, 64, bias=False), torch.nn.Tanh()) for _ in range(8))
    )
    count = sum(p.numel() for p in model.parameters())
    for (zero, shard), volume in expected.items():
        settings = ParallelConfig(zero=zero, shard=shard)
        plan = make_plan(Workload(model, settings, Mesh(dp=4), "torch-gloo", (torch.zeros(1, 64),), 8))
        flags = 1.5 * 8 * (1 if zero else 4)  # one per parameter, in the ring's buckets or one all-reduce of bytes
        assert sum(plan.sent_bytes.values()) == pytest.approx(4 * count * volume + flags, abs=1), (zero, shard)


def test_the_plan_shows_the_schedules_bubble_and_fewer_activations_with_checkpointing() -> None:
    model, tokens = GPT(vocab=64, width=64, layers=6, heads=4), torch.zeros(1, 32, dtype=torch.int64)
    plans = {
        checkpointing: make_plan(
            Workload(
                model,
                ParallelConfig(pp=2, micro_batches=4, activation_checkpointing=checkpointing),
                Mesh(dp=2, pp=2),
                "torch-gloo",
                (tokens,),
                32,
            )
        )
        for checkpointing in (False, True)
    }
    assert plans[False].bubble == pytest.approx(1 / 4)
    assert plans[True].stages[0].activations < 0.5 * plans[False].stages[0].activations
    rows = table_rows(plans[False], {"weights_bytes": 5.0})
    assert next(row for row in rows if row["quantity"] == "weights_bytes")["measured"] == 5.0
    assert {row["quantity"] for row in rows} >= {"mesh", "sent_bytes pp", "sent_bytes dp x cp", "bubble_share"}


def test_a_block_that_is_computed_again_is_held_once_however_many_passes_are_alive() -> None:
    model, tokens = GPT(vocab=64, width=64, layers=2, heads=4), torch.zeros(1, 32, dtype=torch.int64)

    def activations(alive: int, checkpointing: bool) -> int:
        config = ParallelConfig(pp=2, micro_batches=alive, activation_checkpointing=checkpointing)
        plan = make_plan(Workload(model, config, Mesh(pp=2), "torch-gloo", (tokens,), 4 * alive))
        return plan.stages[0].activations or 0

    assert activations(2, checkpointing=False) == 2 * activations(1, checkpointing=False)
    inputs = 4 * 32 * 64 * 4  # rows x tokens x width, in fp32
    assert activations(2, checkpointing=True) - activations(1, checkpointing=True) < 3 * inputs
    assert activations(1, checkpointing=True) > 6 * inputs, "all of a block"


def test_activations_of_many_classes_are_as_measured() -> None:
    """The tabular model keeps a copy of its curves' heights, by class and not by row, for backward."""
    model, rows = Tabular({}, ["price", "size"], width=8, outputs=1000), 64
    of_rows = [{"price": torch.zeros(n), "size": torch.zeros(n)} for n in (1, rows)]
    inputs, batch = ({name: value.to("meta") for name, value in of_rows[0].items()},), (of_rows[1],)
    plan = make_plan(Workload(model, ParallelConfig(), Mesh(dp=2), "torch-gloo", inputs, 2 * rows))
    meter = ActivationMeter()
    with meter.measuring(model, batch):
        model(*batch)
    assert plan.stages[0].activations == pytest.approx(meter.peak, rel=0.02)
