"""The search against brute force on small worlds, and what must hold of any best layout."""

from __future__ import annotations

import itertools
from functools import cache

import pytest
import torch
from torch import nn

from sparkring.conf.blocks.parallel import ParallelConfig
from sparkring.conf.clusters.catalog import load_cluster
from sparkring.conf.clusters.cluster import Cluster
from sparkring.training.models.gpt import GPT
from sparkring.training.parallel.check import layout_problems
from sparkring.training.parallel.engine import choose_engine
from sparkring.training.parallel.mesh import Mesh
from sparkring.training.planner.memory import kept_elements
from sparkring.training.planner.search import (
    USABLE,
    LayoutCosts,
    Objective,
    TracedModel,
    meshes,
    search,
    traced_model,
    worlds,
)
from sparkring.training.planner.timing.step_time import step_counts, step_time
from sparkring.training.planner.traffic import schedule_cost
from sparkring.training.planner.workload import RankParameters, Workload

TOKENS, ROWS = 256, 16
BASE = ParallelConfig(precision="bf16", engine="torch")


@cache
def traced() -> TracedModel:
    with torch.device("meta"):
        model = GPT(vocab=512, width=256, layers=4, heads=4)
    row = (torch.zeros(1, TOKENS, dtype=torch.int64, device="meta"),)
    return traced_model(Workload(model, BASE, Mesh(), "none", row, ROWS))


def cluster(kind: str = "a100-80gb-efa", memory_gib: float = 79.15, devices: int = 8) -> Cluster:
    known = load_cluster(kind)
    return known.model_copy(
        update={
            "device": known.device.model_copy(update={"memory_gib": memory_gib}),
            "node": known.node.model_copy(update={"devices": devices}),
        }
    )


def every_config(mesh: Mesh) -> list[ParallelConfig]:
    """Each value of each key with each other, without the search's shortcuts."""
    flags, counts = (False, True), (1, 2, 4, 8, 16)
    found = []
    sharded = [(0, 0), *itertools.product((1, 2, 3), (0, 2) if mesh.dp > 2 else (0,))]
    for (zero, shard), recompute, sequence, micro, accumulate in itertools.product(
        sharded, flags, flags, counts, counts
    ):
        for schedule, per_rank in (("1f1b", 1), ("zero-bubble", 1), ("interleaved", 2)):
            found.append(
                BASE.model_copy(
                    update={
                        "dp": mesh.dp,
                        "cp": mesh.cp,
                        "pp": mesh.pp,
                        "tp": mesh.tp,
                        "zero": zero,
                        "shard": shard,
                        "activation_checkpointing": recompute,
                        "sequence_parallel": sequence,
                        "micro_batches": micro,
                        "accumulate": accumulate,
                        "schedule": schedule,
                        "stages_per_rank": per_rank,
                    }
                )
            )
    return found


def brute_force(on: Cluster, world: int) -> float:
    """Least seconds of all layouts of `world` ranks that can run, each computed from the start."""
    model, best = traced(), float("inf")
    for mesh in meshes(world):
        for config in every_config(mesh):
            if mesh.pp > 1 and config.accumulate > 1:
                continue  # the same as so many more micro-batches
            if layout_problems(config, world, ROWS, on.device.type) or layout_problems(
                config, world, ROWS, on.device.type, model.workload.model
            ):
                continue
            engine = choose_engine(config, mesh, on.device.type)
            workload = Workload(model.workload.model, config, mesh, engine, model.workload.inputs, ROWS)
            best = min(best, step_time(step_counts(workload, model.work, model.trace), on).total)
    return best


@pytest.mark.parametrize(("kind", "world"), [("a100-80gb-efa", 2), ("a100-80gb-efa", 4), ("cpu", 2)])
def test_the_search_finds_what_brute_force_finds(kind: str, world: int) -> None:
    on = cluster(kind, devices=1)
    found = search(LayoutCosts(traced(), on), BASE, world).best
    expected = min(brute_force(on, each) for each in range(1, world + 1))
    assert found[0].time.total == pytest.approx(expected, rel=1e-9)


class Bumps(nn.Module):
    """A column through bumps whose places and heights are made of weights alone, as splines and embeddings are."""

    def __init__(self) -> None:
        super().__init__()
        self.places, self.heights = nn.Parameter(torch.zeros(3000)), nn.Parameter(torch.zeros(3000))

    def forward(self, x_B1: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x_B1 * self.places.exp().sum()) * self.heights.exp().sum()


def test_what_is_made_of_weights_alone_is_held_once_whatever_the_rows() -> None:
    with torch.device("meta"):
        model = Bumps()
    row = (torch.zeros(1, 1, device="meta"),)
    config = ParallelConfig(engine="torch")
    traced = traced_model(Workload(model, config, Mesh(), "none", row, 512))
    layout = LayoutCosts(traced, cluster()).layout(config, Mesh())
    state, of_weights = 4 * 6000 * 4, 2 * 3000 * 4  # weights, gradients, two moments; both exponentials
    assert state + of_weights < layout.memory < state + of_weights + 512 * 40


def test_a_layout_costs_the_same_with_and_without_what_was_kept() -> None:
    costs, model = LayoutCosts(traced(), cluster()), traced()
    for layout in search(costs, BASE, 8).best[::25]:
        workload = Workload(model.workload.model, layout.config, layout.mesh, "torch", model.workload.inputs, ROWS)
        alone = step_counts(workload, model.work, model.trace)
        assert step_time(alone, costs.cluster).total == pytest.approx(layout.time.total, rel=1e-6)
        ranks = [RankParameters(workload, rank) for rank in range(layout.mesh.pp)]
        kept = [kept_elements(workload, model.trace, rank.names).of_passes(1) for rank in ranks]
        assert layout.memory > max(kept) * workload.rows_per_pass * 2 / layout.mesh.cp / layout.config.stages_per_rank
        assert len(schedule_cost(workload).peak_alive) == layout.mesh.pp


@pytest.mark.parametrize("kind", ["a100-80gb-efa", "a100-80gb-ethernet", "h100-80gb-infiniband"])
def test_more_devices_never_make_the_best_plan_slower(kind: str) -> None:
    costs = LayoutCosts(traced(), cluster(kind))
    seconds = [search(costs, BASE, devices).best[0].time.total for devices in (1, 2, 4, 8, 16)]
    assert seconds == sorted(seconds, reverse=True)


@pytest.mark.parametrize("per_machine", [1, 3])
def test_more_odd_machines_never_make_the_best_plan_slower(per_machine: int) -> None:
    costs = LayoutCosts(traced(), cluster("a100-80gb-ethernet", devices=per_machine))
    seconds = [search(costs, BASE, machines * per_machine).best[0].time.total for machines in (1, 2, 3, 4)]
    assert seconds == sorted(seconds, reverse=True)


def test_all_small_numbers_of_whole_machines_are_tried_and_powers_of_two_beyond() -> None:
    assert worlds(cluster(devices=8), 80) == [80, 64, 32, 16, *range(8, 0, -1)]
    assert worlds(cluster(devices=3), 60) == [60, 48, 24, 15, 12, 9, 6, 3, 2, 1]


def test_a_mistyped_number_of_devices_is_refused() -> None:
    with pytest.raises(ValueError, match="3000000000 devices are more than the 131072 that a search takes"):
        worlds(cluster(devices=8), 3_000_000_000)


def test_more_memory_never_makes_the_best_plan_slower() -> None:
    seconds = []
    for memory_gib in (0.05, 0.1, 0.2, 1.0, 80.0):
        found = search(LayoutCosts(traced(), cluster(memory_gib=memory_gib)), BASE, 8).best
        seconds.append(found[0].time.total if found else float("inf"))
    assert seconds == sorted(seconds, reverse=True) and seconds[-1] < float("inf")


@pytest.mark.parametrize("objective", ["time", "cost", "memory"])
def test_what_is_ranked_fits_and_is_in_order(objective: Objective) -> None:
    on = cluster(memory_gib=0.2)
    result = search(LayoutCosts(traced(), on), BASE, 8, objective)
    assert result.best and len(result.best) < result.tried
    assert max(layout.memory for layout in result.best) <= on.device.memory_bytes * USABLE
    value = {
        "time": lambda layout: layout.time.total,
        "cost": lambda layout: layout.machine_seconds,
        "memory": lambda layout: layout.memory,
    }[objective]
    values = [value(layout) for layout in result.best]
    assert values == sorted(values)


def test_nothing_fits_and_the_smallest_layout_is_known() -> None:
    result = search(LayoutCosts(traced(), cluster(memory_gib=0.008)), BASE, 8)
    assert result.best == () and result.smallest is not None
