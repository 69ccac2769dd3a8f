"""Layouts that are planned where ranks are launched (parallel.layout: auto, launch.cluster)."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from sparkring.conf.clusters.catalog import cluster_names, load_cluster
from sparkring.conf.config import RunConfig
from sparkring.conf.load import load_config
from sparkring.conf.storage import open_storage
from sparkring.pipelines.job.job import check_without_spark, run_on_platform
from sparkring.pipelines.launch import recover
from sparkring.pipelines.launch.recover import Platform
from sparkring.pipelines.model import launch_plan
from sparkring.pipelines.model.launch_plan import LaunchPlan, planning
from sparkring.pipelines.model.layouts import layout_text
from sparkring.pipelines.model.machine import (
    SHOWN,
    RankCluster,
    cluster_of_recipe,
    cpu_machine,
    gpu_cluster,
    with_host_memory,
)
from sparkring.pipelines.model.plan import layout_problems_of, on_world
from sparkring.pipelines.validate.recipe import block_problems, recipe_problems
from sparkring.training.launch.group import WorkerGroup
from sparkring.training.launch.host.processes import usable_memory
from sparkring.training.launch.local import local_group
from sparkring.training.model.folder import weights_sha256
from sparkring.training.planner.search import order, possible_layouts
from sparkring.training.worker.result import TrainResult, read_result
from tests.helpers.modules import write_module
from tests.pipelines.promotion.nights import write_dataset

SMALL = ("model.args.layers=2", "model.args.vocab=1024", "etl.text.seq_len=129", "train.global_batch=16")
ON_A100 = RankCluster.fixed("a100-80gb-efa", load_cluster("a100-80gb-efa"))


def small(*words: str) -> RunConfig:
    return load_config("gpt-124m", [*SMALL, "launch.world=4", "launch.min_world=1", *words]).config


def plan_of(config: RunConfig, cluster: RankCluster = ON_A100) -> LaunchPlan:
    return LaunchPlan(config, None, block_problems, cluster)


class Normalized(nn.Module):
    """A model for one column of numbers, with statistics of the rows of a pass."""

    def __init__(self, vocab: int = 0) -> None:
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(vocab, 8), nn.BatchNorm1d(8), nn.Linear(8, vocab)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.norm(self.embed(tokens).transpose(1, 2)).transpose(1, 2))
        return found


class Untraced(nn.Module):
    """A model whose forward looks at values."""

    def __init__(self, vocab: int = 0) -> None:
        super().__init__()
        self.embed, self.inner = nn.Embedding(vocab, 8), Picky()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.inner(self.embed(tokens))
        return found


class Picky(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if bool((x > 0).any()) else -x


def test_the_layout_of_a_job_is_the_fastest_that_fits() -> None:
    plan = plan_of(small("parallel=auto"))
    found = plan.at(4)
    assert found is not None
    every = sorted(possible_layouts(plan._ranked(4)[0], plan.base, 4), key=order("time"))
    assert found.used.config == every[0].config and found.used.mesh.world == 4
    resolved = plan.resolved_at(load_config("gpt-124m", [*SMALL, "parallel=auto"]), 4)
    block = resolved.config.parallel
    assert block.layout == "given" and block.dp == -1 and block.precision == "bf16"
    assert block.zero == every[0].config.zero and resolved.origins["parallel.zero"] == "planned for a100-80gb-efa"
    assert not layout_problems_of(on_world(resolved.config, 4))
    assert resolved.config.train == small().train, "the batch is the recipe's"


def test_what_was_chosen_is_one_line_with_the_next_best_and_why_it_loses() -> None:
    first, basis, *advice = plan_of(small("parallel=auto")).lines_at(4)
    assert basis.startswith("seconds are fitted on 61 steps") and basis.endswith("within 15% of them")
    assert first.startswith("layout on 4 ranks: dp(") and "a step, planned for a100-80gb-efa; next dp(" in first
    assert "than the best" in first or "as fast as the best" in first
    assert plan_of(small()).lines_at(4) == [], "nothing was chosen"
    slow = load_cluster("a100-80gb-ethernet").model_copy(deep=True)
    slow = slow.model_copy(update={"node": slow.node.model_copy(update={"link_gb_per_s": 0.001})})
    _, _, *advice = plan_of(small("parallel=auto"), RankCluster.fixed("slow", slow)).lines_at(4)
    assert advice[0].startswith("do not distribute: one device takes ") and "launch included" in advice[0]


def test_layouts_of_fewer_ranks_are_ready_before_they_are_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    config = small("parallel=auto")
    monkeypatch.setattr(launch_plan, "cluster_of_recipe", lambda _: ON_A100)
    with planning(config, None, block_problems) as plan:  # type: ignore[arg-type]
        assert plan is not None and plan.at(4) is not None
    plan = plan_of(config)
    plan.plan_ahead(launch_plan.threading.Event())
    assert sorted(plan._found) == [1, 2, 3, 4] and None not in plan._found.values()


def test_without_a_cluster_or_auto_the_recipes_layout_alone_is_predicted_for_the_machine() -> None:
    with planning(small("train.device=cpu"), None, block_problems) as plan:  # type: ignore[arg-type]
        assert plan is not None and plan.lines_at(4) == []
        found, record = plan.at(4), plan.record_at(4)
    assert found is not None and record is not None and found.alone is None
    assert (record.others, record.tried) == ([], []) and record.cluster == SHOWN
    assert record.used.step_s == found.used.time.total > 0 and list(plan._found) == [4]


def test_no_gpu_is_looked_at_for_a_prediction_alone_until_ranks_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[int] = []
    monkeypatch.setattr(launch_plan, "cluster_of_recipe", lambda _: looked.append(1) or ON_A100)
    with planning(small("train.device=cuda"), None, block_problems) as plan:  # type: ignore[arg-type]
        pass
    assert plan is not None and not looked
    assert plan.record_at(4) is not None and looked


def test_parameter_servers_are_not_predicted_unless_their_cluster_is_named() -> None:
    words = ("parallel.servers.per_host=1", "launch.min_world=null")
    with planning(small(*words), None, block_problems) as plan:  # type: ignore[arg-type]
        assert plan is None
    with planning(small(*words, "launch.cluster=a100-80gb-efa"), None, block_problems) as plan:  # type: ignore[arg-type]
        assert plan is not None


def test_a_named_cluster_predicts_the_recipes_own_layout() -> None:
    resolved = load_config("gpt-124m", [*SMALL, "parallel.zero=3", "launch.cluster=a100-80gb-efa"])
    plan = plan_of(resolved.config)
    found, record = plan.at(4), plan.record_at(4)
    assert found is not None and record is not None
    assert found.used.config.zero == 3 and plan.resolved_at(resolved, 4) is resolved
    assert record.used.layout == layout_text(found.used) and record.used.step_s == found.used.time.total
    assert record.others and record.used.layout not in [each.layout for each in record.others]


def test_a_model_with_batch_normalization_keeps_its_passes() -> None:
    words = (f"model.factory={__name__}:Normalized", "model.args={vocab: 64}", "parallel={layout: auto, accumulate: 2}")
    config = load_config("gpt-124m", ["etl.text.seq_len=9", "launch.world=2", "launch.min_world=null", *words]).config
    found = plan_of(config).at(2)
    assert found is not None
    assert {(each.config.accumulate, each.config.pp) for each in (found.used, *found.best)} == {(2, 1)}


def test_a_model_that_cannot_be_traced_trains_in_a_ring_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    words = (f"model.factory={__name__}:Untraced", "model.args={vocab: 64}", "parallel=auto")
    resolved = load_config("gpt-124m", ["etl.text.seq_len=9", "launch.world=2", "launch.min_world=1", *words])
    plan = plan_of(resolved.config)
    blocks = [plan.resolved_at(resolved, world).config.parallel for world in (2, 1, 2)]
    assert {(block.layout, block.dp, block.zero) for block in blocks} == {("given", -1, 0)}
    (line,) = [each.message for each in caplog.records if "cannot be run on the meta device" in each.message]
    assert line.startswith("ranks train in a ring (parallel.layout = auto)") and "at module 'inner'" in line


def test_a_layout_that_the_recipes_rules_refuse_is_not_chosen() -> None:
    config = small("parallel=auto")

    def refuses(asked: RunConfig) -> list[str]:
        return ["no"] if asked.parallel.zero or asked.parallel.tp > 1 else []

    found = LaunchPlan(config, None, refuses, ON_A100).at(4)
    assert found is not None and {(each.config.zero, each.config.tp) for each in found.best} == {(0, 1)}


def test_where_nothing_fits_the_smallest_is_taken_and_it_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    tiny = load_cluster("a100-80gb-efa")
    tiny = tiny.model_copy(update={"device": tiny.device.model_copy(update={"memory_gib": 0.01})})
    plan = plan_of(small("parallel=auto"), RankCluster.fixed("tiny", tiny))
    found = plan.at(4)
    assert found is not None and found.best == ()
    every = possible_layouts(plan._ranked(4)[0], plan.base, 4)
    assert found.used.memory == min(each.memory for each in every)
    assert "no layout fits on 4 ranks" in caplog.text


def test_a_job_is_offloaded_where_it_fits_in_no_other_way() -> None:
    known = load_cluster("a100-80gb-efa")
    tight = known.model_copy(update={"device": known.device.model_copy(update={"memory_gib": 0.06})})
    resolved = load_config("gpt-124m", [*SMALL, "launch.world=4", "launch.min_world=1", "parallel=auto"])
    block = plan_of(resolved.config, RankCluster.fixed("tight", tight)).resolved_at(resolved, 4).config.parallel
    assert block.offload and block.zero and block.precision == "bf16"
    unknown = with_host_memory(tight, 0)
    block = plan_of(resolved.config, RankCluster.fixed("tight", unknown)).resolved_at(resolved, 4).config.parallel
    assert not block.offload


def test_a_gpu_of_no_named_cluster_has_the_memory_of_this_host_and_none_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "sparkring.pipelines.run.spark_settings.active_context", lambda: None
    )  # other tests leave a session
    words = [*SMALL, "train.device=cuda", "launch.world=1", "launch.min_world=null"]
    here, away = (load_config("gpt-124m", [*words, f"spark.master={m}"]).config for m in ("local[2]", "spark://h:7077"))
    assert cluster_of_recipe(here).of_ranks(1).node.memory_bytes == pytest.approx(usable_memory())
    assert cluster_of_recipe(away).of_ranks(1).node.memory_bytes == 0
    found = cluster_of_recipe(away)
    assert found.name == "a100-80gb-ethernet, assumed", "no GPU is seen here"
    assert found.of_ranks(1).machines != load_cluster("a100-80gb-ethernet").machines, "calibration takes it for no A100"


def test_this_machine_is_shared_by_its_ranks() -> None:
    usual = load_cluster("cpu")
    one, four = cpu_machine(usual, 1), cpu_machine(usual, 4)
    assert four.node.devices == 4 and one.device.memory_gib == pytest.approx(4 * four.device.memory_gib)
    assert one.device.peak_flops("fp32") >= four.device.peak_flops("fp32") > 0
    found = cluster_of_recipe(load_config("text").config)
    assert found.name == "this machine, estimated" and found.of_ranks(2).device.type == "cpu"


def test_hosts_are_machines_like_this_one_and_those_of_a_cluster_are_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "h0"}.items():
        monkeypatch.setenv(name, value)
    words = ["dataset=d", "launch.on=hosts", "launch.world=4", "launch.min_world=1"]
    hosts = cluster_of_recipe(load_config("text", words).config)
    assert hosts.name == SHOWN and [hosts.of_ranks(world).node.devices for world in (4, 2, 1)] == [2, 2, 1]
    wide = cluster_of_recipe(load_config("text", [*words, "launch.ranks_per_host=3"]).config)
    assert wide.of_ranks(4).node.devices == 3
    monkeypatch.setattr(
        "sparkring.pipelines.run.spark_settings.active_context", lambda: None
    )  # other tests leave a session
    for word in ("spark.master=spark://h:7077", "launch.on=ray"):
        away = cluster_of_recipe(load_config("text", ["dataset=d", word]).config)
        assert away.name == "cpu, assumed" and away.of_ranks(2).machines != load_cluster("cpu").machines
        for estimated in (away, hosts):
            assert "seconds are estimates" in estimated.of_ranks(2).basis and "2.7 times" in estimated.of_ranks(2).basis


@pytest.mark.parametrize(
    ("name", "gib", "expected"),
    [
        ("NVIDIA A100-SXM4-40GB", 39.4, "a100-40gb"),
        ("NVIDIA A100-SXM4-80GB", 79.1, "a100-80gb"),
        ("NVIDIA H100 80GB HBM3", 79.2, "h100-80gb"),
        ("NVIDIA H200", 139.8, "h200-141gb"),
        ("Tesla T4", 14.6, "a100-80gb-ethernet"),
    ],
)
def test_a_gpu_is_found_among_the_clusters(name: str, gib: float, expected: str) -> None:
    found = gpu_cluster(name, gib * 2**30)
    assert found in cluster_names() and found.startswith(expected)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["launch.cluster=a100-80gb-efs"], "launch.cluster = 'a100-80gb-efs': no such cluster; did you mean"),
        (["launch.cluster=a100-80gb-efa", "train.device=cpu"], "its devices are cuda, and ranks would be on cpu"),
    ],
)
def test_a_cluster_that_cannot_be_is_one_clear_error(words: list[str], expected: str) -> None:
    (found,) = recipe_problems(load_config("text", words).config).recipe
    assert expected in found


RECIPE = """
name: planned
etl:
  sources: {t: {path: nowhere.csv, format: csv, columns: {x: double, late: boolean}}}
  rows: t
  features: {x: {kind: numeric}}
  label: late
model: {args: {width: 4, blocks: 1, bumps: 2}}
train: {epochs: 4, global_batch: 20, dtype: float64, log_every_steps: 1}
optim: {lr: 0.01}
parallel: auto
launch: {world: 2, min_world: 1, backoff_s: 0}
checkpoint: {every_steps: 3}
report: {baselines: false, importance: false, must_beat_guess: false}
tracking: {enabled: false}
"""
KILLED = """
import os
import signal
from pathlib import Path

from sparkring.training.hooks import Hook

MARK = Path({mark!r})


class Dies(Hook):
    def on_step(self, seen):
        if seen.step == 8 and not MARK.exists():
            MARK.touch()
            os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with a recipe and its dataset, which user modules are imported from too."""
    write_dataset(tmp_path / "dataset", ["a", "b", "c"], 5.0)
    (tmp_path / "recipe.yaml").write_text(RECIPE + f"storage: {{runs: {tmp_path}/runs}}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    yield tmp_path


def run_here(folder: Path, slots: Any, *words: str) -> TrainResult:
    """Train on this machine's processes, without Spark; `slots`: room for so many ranks."""

    def open_group(world: int, preload: tuple[str, ...]) -> AbstractContextManager[WorkerGroup]:
        return local_group(world, preload)

    resolved = load_config(str(folder / "recipe.yaml"), [f"dataset={folder}/dataset", *words])
    found = check_without_spark(resolved.config)
    assert run_on_platform(resolved, found, Platform(slots=slots, open_group=open_group)) == 0
    (newest,) = sorted((folder / "runs/planned").glob("*/summary.json"))[-1:]
    return read_result(open_storage(str(newest.parent)))


def weights_of(result: TrainResult) -> str:
    assert result.train.weights is not None
    return weights_sha256(open_storage(result.run).at(result.train.weights))


@pytest.mark.ranks
def test_a_planned_job_survives_a_kill_on_fewer_ranks_and_is_made_again_from_its_record(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(recover, "SLOTS_WAIT_S", 0.5)  # the slot does not come back
    caplog.set_level(logging.INFO, "sparkring")
    whole = run_here(folder, lambda: 2)
    block = whole.config["parallel"]
    assert block["layout"] == "given" and whole.origins["parallel.zero"] == "planned for this machine, estimated"
    assert "layout on 2 ranks: dp(2)" in caplog.text
    planned = whole.planned
    assert planned is not None and planned.measured_step_s is not None and planned.world == 2
    metrics = planned.metrics()
    assert metrics["plan/predicted_step_s"] > 0 and metrics["plan/measured_step_s"] == planned.measured_step_s
    error = metrics["plan/predicted_step_s"] / metrics["plan/measured_step_s"] - 1
    assert metrics["plan/step_error"] == pytest.approx(error) and metrics["plan/measured_peak_bytes"] > 0

    written = f"parallel={json.dumps(block)}"
    again = run_here(folder, lambda: 2, written, "checkpoint.resume=false")
    assert again.run != whole.run and weights_of(again) == weights_of(whole), "the recorded block is what was trained"
    assert again.config["parallel"] == block and again.planned is not None and again.planned.others == []

    mark = folder / "killed"
    module = write_module(folder, KILLED.format(mark=str(mark)))
    hooks = f"train.hooks=[{module.stem}:Dies]"
    shrunk = run_here(folder, lambda: 1 if mark.exists() else 2, hooks, "checkpoint.resume=false")
    (failed,) = shrunk.failed_attempts
    assert (failed.decision, shrunk.train.world, shrunk.train.steps) == ("shrink", 1, whole.train.steps)
    assert "layout on 1 rank: dp(1)" in caplog.text
    assert shrunk.planned is not None and shrunk.planned.world == 1
    assert shrunk.config["parallel"]["zero"] == 0, "the layout of the ranks that ended it"
    assert shrunk.train.valid["loss"] == pytest.approx(whole.train.valid["loss"], rel=1e-9)


def test_a_record_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    record = plan_of(small()).record_at(4)
    assert record is not None
    from pydantic import TypeAdapter

    adapter = TypeAdapter(type(record))
    assert adapter.validate_json(adapter.dump_json(record)) == record
    assert replace(record, measured_step_s=2 * record.used.step_s).metrics()["plan/step_error"] == pytest.approx(-0.5)
