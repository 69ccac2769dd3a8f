"""Whether a recipe fits in a rank's memory, and the smallest change that makes it fit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from sparkring.conf.clusters.catalog import load_cluster
from sparkring.conf.clusters.cluster import GIB, Cluster
from sparkring.conf.config import RunConfig
from sparkring.conf.load import load_config
from sparkring.pipelines.model.fits import Room, fits_text, held_bytes, rank_room, show_plan, smaller, with_keys
from sparkring.pipelines.model.plan import cost_plan, own_workload
from sparkring.training.launch.host.processes import usable_memory
from sparkring.training.planner import table_rows
from sparkring.training.planner.memory import offloaded_bytes, tables_bytes
from sparkring.training.planner.workload import RankParameters, SparseTable
from sparkring.training.tables.size import table_bytes

SMALL = ["model.args={vocab: 64, width: 32, layers: 4, heads: 2}", "parallel.precision=fp32"]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        "sparkring.pipelines.run.spark_settings.submitted", lambda: False
    )  # another test's session may be open


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


def test_on_cpus_the_readers_rows_and_sparse_tables_are_in_the_ranks_memory_and_on_gpus_beside_it() -> None:
    config = small()
    plan = replace(cost_plan(config, None), reader=2 * GIB, tables=3 * GIB)
    alone, whole = held_bytes(plan), held_bytes(plan, is_host=True)
    assert alone is not None and whole == alone + 5 * GIB
    room = Room(4 * GIB, "a device")
    text = fits_text(config, None, plan, room)
    assert text.startswith("fits: ") and text.endswith(
        "the host holds 2.00 GiB of the reader and 3.00 GiB of sparse tables a rank beside it"
    )
    host = fits_text(config, None, plan, replace(room, is_host=True))
    assert host.startswith("does not fit: ") and "with 2.00 GiB of the reader and 3.00 GiB of sparse tables" in host
    quantities = {row["quantity"]: row["predicted"] for row in table_rows(plan)}
    assert quantities["reader_bytes"] == 2 * GIB and quantities["tables_bytes"] == 3 * GIB


def test_what_is_offloaded_is_on_the_host_and_must_fit_there() -> None:
    config = small("train.device=cuda", "parallel.zero=3", "launch.world=8", "parallel.engine=torch")
    plain, offloaded = (cost_plan(with_keys(config, {"parallel.offload": each}), None) for each in (False, True))
    (stage,), (less,) = plain.stages, offloaded.stages
    assert stage.peak is not None and less.peak is not None
    kept = stage.weights + stage.gradients + stage.optimizer
    assert 0.5 * kept < stage.peak - less.peak <= kept, "shards come to the device for a moment"
    assert less.offloaded >= kept and stage.offloaded == 0
    assert less.start < stage.start
    room = Room(2 * less.peak, "a device", host=2.0 * less.offloaded)
    text = fits_text(config, None, offloaded, room)
    assert text.startswith("fits: ") and " of offloaded shards a rank beside it, of " in text
    assert fits_text(config, None, offloaded, replace(room, host=0.5 * less.offloaded)).startswith("does not fit: ")
    quantities = {row["quantity"]: row["predicted"] for row in table_rows(offloaded)}
    assert quantities["offloaded_bytes"] == less.offloaded and quantities["weights_bytes"] == stage.weights


def test_pinned_memory_is_allocated_in_powers_of_two() -> None:
    config = small(
        "train.device=cuda", "parallel.zero=3", "parallel.offload=true", "parallel.engine=torch", "model.args.width=48"
    )
    rank = RankParameters(own_workload(config, None), 0)
    sizes = [-(-numel // rank.shard) * 4 for numel in rank.local.values()]
    pinned = sum(next(1 << n for n in range(40) if 1 << n >= size) for size in sizes)
    assert offloaded_bytes(rank) == 2 * pinned + 2 * sum(sizes) > 4 * sum(sizes)


def test_where_nothing_else_fits_offload_is_what_would_make_it_fit() -> None:
    config = small("train.device=cuda", "launch.world=8", "train.global_batch=8")
    tried = [words for words, _ in smaller(config)]
    assert tried[-1].endswith("parallel.offload=true") and not any("offload" in words for words in tried[:-1])
    on_cpus = [words for words, _ in smaller(small("train.device=cpu"))]
    assert on_cpus and not any("offload" in words for words in on_cpus), "their memory is the host's"


def test_a_named_cluster_says_what_its_hosts_have() -> None:
    room = rank_room(small("launch.world=4"), load_cluster("a100-80gb-efa"))
    assert room is not None and room.host == 1152 * GIB / 4
    room = rank_room(small("launch.world=4"), with_memory(8))
    assert room is not None and room.host is None


def test_sparse_tables_are_spread_over_the_data_ranks_unless_each_has_them_all() -> None:
    workload = own_workload(small("launch.world=4", "parallel.dp=4", "train.global_batch=64"), None)
    table = SparseTable("t", lambda rows: rows, 64, 192, most_rows=1_000_000)
    spread, everywhere = (
        tables_bytes(replace(workload, tables=(replace(table, replicated=replicated),))) for replicated in (False, True)
    )
    assert everywhere == table_bytes(1_000_000, 192) and spread == table_bytes(250_000, 192)
    assert tables_bytes(replace(workload, tables=(replace(table, most_rows=0),))) == 0, "not known"


def test_what_does_not_fit_in_evaluation_alone_is_named_with_its_key() -> None:
    config = small("train.eval_batch=4096", "train.global_batch=64", "parallel.activation_checkpointing=true")
    plan = cost_plan(config, None)
    stage = plan.stages[0]
    assert stage.peak is not None and stage.evaluation is not None and stage.evaluation > 2 * stage.peak
    assert held_bytes(plan) == stage.evaluation
    text = fits_text(config, None, plan, Room(1.5 * stage.peak, "a device"))
    assert text.startswith("does not fit: ") and "; with train.eval_batch=null it needs " in text
