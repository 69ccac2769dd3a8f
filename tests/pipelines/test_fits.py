"""Whether a recipe fits in a rank's memory, and the smallest change that makes it fit."""

from __future__ import annotations

from pathlib import Path

import pytest

from sparkring.conf.clusters.catalog import load_cluster
from sparkring.conf.clusters.cluster import GIB, Cluster
from sparkring.conf.config import RunConfig
from sparkring.conf.load import load_config
from sparkring.pipelines.model.fits import Room, fits_text, held_bytes, rank_room
from sparkring.pipelines.model.plan import cost_plan, show_plan
from sparkring.training.launch.host.processes import usable_memory

SMALL = ["model.args={vocab: 64, width: 32, layers: 4, heads: 2}", "parallel.precision=fp32"]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sparkring.pipelines.run.spark.submitted", lambda: False)  # another test's session may be open


def small(*words: str) -> RunConfig:
    return load_config("gpt-124m", [*SMALL, *words]).config


def with_memory(gib: float) -> Cluster:
    cluster = load_cluster("cpu")
    return cluster.model_copy(update={"device": cluster.device.model_copy(update={"memory_gib": gib})})


def test_the_plan_says_that_a_recipe_fits_on_a_named_cluster() -> None:
    line = next(each for each in show_plan(small(), with_memory(40)).splitlines() if each.startswith("fits"))
    assert "a rank of 40.00 GiB (one Xeon-8-cores)" in line


def test_what_does_not_fit_has_the_smallest_change_that_does() -> None:
    config = small()
    plan = cost_plan(config, None)
    needed = held_bytes(plan)
    assert needed is not None
    text = fits_text(config, None, plan, Room(needed * 0.9, "a device"))
    assert text.startswith("does not fit: ") and "; with parallel.activation_checkpointing=true it needs " in text
    nothing = fits_text(config, None, plan, Room(1e4, "a device"))
    assert "nor does the smallest of what was tried, parallel.zero=3 parallel.activation_checkpointing=true" in nothing


def test_on_this_machine_ranks_share_its_memory_and_elsewhere_it_is_not_known() -> None:
    config = small("train.device=cpu", "spark.master=local[8]")
    room = rank_room(config, None)
    assert room is not None and room.size == usable_memory() / config.launch.world
    away = small("spark.master=spark://host:7077")
    assert rank_room(away, None) is None and fits_text(away, None, cost_plan(away, None), None) == ""


def test_a_limit_of_the_cgroup_is_the_machines_memory(tmp_path: Path) -> None:
    (tmp_path / "jobs" / "one").mkdir(parents=True)
    (tmp_path / "jobs" / "memory.max").write_text(f"{GIB}\n")
    (tmp_path / "jobs" / "one" / "memory.max").write_text("max\n")
    assert usable_memory("0::/jobs/one\n", tmp_path) == GIB
    assert usable_memory("0::/\n", tmp_path) > GIB
