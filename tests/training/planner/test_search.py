"""The search against brute force on small worlds, and what must hold of any best layout."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import nn

from sparkring.conf.blocks.parallel import ParallelConfig
from sparkring.conf.clusters.catalog import load_cluster
from sparkring.conf.clusters.cluster import GIB, Cluster, Precision
from sparkring.training.models.gpt import GPT
from sparkring.training.parallel.check import layout_problems
from sparkring.training.parallel.engine import choose_engine
from sparkring.training.parallel.mesh import Mesh
from sparkring.training.planner.memory import kept_elements
from sparkring.training.planner.search import (
    USABLE,
    USABLE_HOST,
    LayoutCosts,
    Objective,
    PlannedLayout,
    TracedModel,
    any_precision,
    meshes,
    possible_layouts,
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


def every_config(mesh: Mesh, precisions: tuple[Precision, ...]) -> Iterator[ParallelConfig]:
    """Each value of each key with each other, without the search's shortcuts."""
    flags, counts = (False, True), (1, 2, 4, 8, 16)
    sharded = [(0, 0, False), *itertools.product((1, 2, 3), (0, 2) if mesh.dp > 2 else (0,), flags)]
    schedules = (("1f1b", 1), ("zero-bubble", 1), ("interleaved", 2)) if mesh.pp > 1 else (("1f1b", 1),)
    for (zero, shard, offload), recompute, sequence, micro, accumulate, (
        schedule,
        per_rank,
    ), precision in itertools.product(sharded, flags, flags, counts, counts, schedules, precisions):
        yield BASE.model_copy(
            update={
                "dp": mesh.dp,
                "cp": mesh.cp,
                "pp": mesh.pp,
                "tp": mesh.tp,
                "zero": zero,
                "shard": shard,
                "offload": offload,
                "activation_checkpointing": recompute,
                "sequence_parallel": sequence,
                "micro_batches": micro,
                "accumulate": accumulate,
                "schedule": schedule,
                "stages_per_rank": per_rank,
                "precision": precision,
            }
        )


OBJECTIVES: dict[Objective, Callable[[float, PlannedLayout], float]] = {
    "time": lambda seconds, layout: seconds,
    "cost": lambda seconds, layout: seconds * layout.machines,
    "memory": lambda seconds, layout: layout.memory,
}


def brute_force(on: Cluster, world: int, precisions: tuple[Precision, ...] = ("bf16",)) -> dict[Objective, float]:
    """The least of all layouts of at most `world` ranks that can run and fit, each computed from the start."""
    model, best = traced(), dict.fromkeys(OBJECTIVES, float("inf"))
    costs = LayoutCosts(model, on)
    for mesh in itertools.chain(*(meshes(each) for each in range(1, world + 1))):
        for config in every_config(mesh, precisions):
            if config.accumulate > 1 if mesh.pp > 1 else config.micro_batches > 1:
                continue  # the same as so many more micro-batches, and refused
            if layout_problems(config, mesh.world, ROWS, on.device.type) or layout_problems(
                config, mesh.world, ROWS, on.device.type, model.workload.model
            ):
                continue
            layout = costs.layout(config, mesh)
            if not costs.fits(layout) or (config.offload and on.device.type == "cpu"):
                continue
            engine, inputs = choose_engine(config, mesh, on.device.type), model.workload.inputs
            workload = Workload(model.workload.model, config, mesh, engine, inputs, ROWS, device_type=on.device.type)
            seconds = step_time(step_counts(workload, model.work, model.trace), on).total
            best = {name: min(best[name], value(seconds, layout)) for name, value in OBJECTIVES.items()}
    return best


@pytest.mark.parametrize(
    ("kind", "world"), [("a100-80gb-efa", 2), pytest.param("a100-80gb-efa", 4, marks=pytest.mark.slow), ("cpu", 2)]
)
def test_the_search_finds_what_brute_force_finds(kind: str, world: int) -> None:
    on = cluster(kind, devices=1)
    found = search(LayoutCosts(traced(), on), BASE, world).best
    assert found[0].time.total == pytest.approx(brute_force(on, world)["time"], rel=1e-9)


@pytest.mark.parametrize(
    ("memory_gib", "offloads", "precisions"),
    [(0.02, True, ("bf16",)), (0.02, True, ("bf16", "fp32")), (0.1, False, ("bf16", "fp32"))],
)
def test_offload_and_precision_are_tried_where_they_can_be_best(
    memory_gib: float, offloads: bool, precisions: tuple[Precision, ...]
) -> None:
    on = cluster(memory_gib=memory_gib, devices=2)
    expected = brute_force(on, 2, precisions)
    for objective, value in OBJECTIVES.items():
        best = search(LayoutCosts(traced(), on), BASE, 2, objective, precisions).best[0]
        assert value(best.time.total, best) == pytest.approx(expected[objective], rel=1e-9), objective
        assert best.config.offload == (offloads or objective == "memory")


def test_a_layout_that_fits_is_not_offloaded_too() -> None:
    found = search(LayoutCosts(traced(), cluster(memory_gib=0.05)), BASE, 4).best
    cuts = [layout.config.model_copy(update={"offload": False}).model_dump_json() for layout in found]
    assert len(cuts) == len(set(cuts)) and any(layout.config.offload for layout in found)


@pytest.mark.parametrize(("host_gib", "offloads"), [(0.0, False), (0.01, False), (1.0, True)])
def test_nothing_is_offloaded_to_a_host_without_room_or_of_unknown_memory(host_gib: float, offloads: bool) -> None:
    on = cluster(memory_gib=0.05)
    on = on.model_copy(update={"node": on.node.model_copy(update={"memory_gib": host_gib})})
    found = search(LayoutCosts(traced(), on), BASE, 4, "memory").best
    assert any(layout.config.offload for layout in found) == offloads
    for layout in found:
        assert layout.host * layout.mesh.world <= host_gib * GIB * USABLE_HOST


def test_fp16_is_a_choice_only_where_its_peak_is_higher() -> None:
    on = cluster()
    assert any_precision(on) == ("bf16", "fp32")
    peaks = {"fp16": 400.0, "bf16": 312.0, "fp32": 19.5}
    faster = on.model_copy(update={"device": on.device.model_copy(update={"peak_tflops": peaks})})
    assert any_precision(faster) == ("fp16", "bf16", "fp32")


def test_a_precision_that_is_not_asked_for_is_not_searched() -> None:
    found = search(LayoutCosts(traced(), cluster(memory_gib=0.02)), BASE, 8)
    assert {layout.config.precision for layout in found.best} == {"bf16"}


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
    costs, model = LayoutCosts(traced(), cluster(memory_gib=0.05)), traced()
    for layout in search(costs, BASE, 8, "memory", ("bf16", "fp32")).best[::50]:
        workload = replace(costs.traced.workload, config=layout.config, mesh=layout.mesh, engine="torch", known={})
        workload = workload.on_device("cuda")
        alone = step_counts(workload, model.work, model.trace)
        assert step_time(alone, costs.cluster).total == pytest.approx(layout.time.total, rel=1e-6)
        ranks = [RankParameters(workload, rank) for rank in range(layout.mesh.pp)]
        kept = [kept_elements(workload, model.trace, rank.names).of_passes(1) for rank in ranks]
        rows = workload.rows_per_pass / layout.mesh.cp / layout.config.stages_per_rank
        assert layout.memory > max(kept) * rows * workload.compute_bytes
        assert len(schedule_cost(workload).peak_alive) == layout.mesh.pp


def test_memory_is_that_of_the_layout_and_not_of_one_that_was_computed_before() -> None:
    costs = LayoutCosts(traced(), cluster(memory_gib=0.05))
    found = search(costs, BASE, 4, "memory", ("bf16", "fp32")).best[::7]
    assert {layout.config.precision for layout in found} == {"bf16", "fp32"}
    for layout in found:
        assert layout == LayoutCosts(traced(), costs.cluster).layout(layout.config, layout.mesh)


@pytest.mark.parametrize("kind", ["a100-80gb-efa", "a100-80gb-ethernet", "h100-80gb-infiniband"])
@pytest.mark.parametrize("memory_gib", [0.02, 79.15])
def test_more_devices_never_make_the_best_plan_slower(kind: str, memory_gib: float) -> None:
    costs = LayoutCosts(traced(), cluster(kind, memory_gib))
    found = [search(costs, BASE, devices, precisions=any_precision(costs.cluster)).best for devices in (1, 2, 4, 8, 16)]
    seconds = [best[0].time.total if best else float("inf") for best in found]
    assert seconds == sorted(seconds, reverse=True) and seconds[-1] < float("inf")


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


@pytest.mark.parametrize("precisions", [(), ("bf16", "fp32")])
def test_more_memory_never_makes_the_best_plan_slower(precisions: tuple[Precision, ...]) -> None:
    seconds, offloads = [], []
    for memory_gib in (0.004, 0.008, 0.016, 0.05, 0.1, 0.2, 1.0, 80.0):
        found = search(LayoutCosts(traced(), cluster(memory_gib=memory_gib)), BASE, 8, precisions=precisions).best
        seconds.append(found[0].time.total if found else float("inf"))
        offloads.append(bool(found) and found[0].config.offload)
    assert seconds == sorted(seconds, reverse=True) and seconds[-1] < float("inf")
    assert offloads[0] and not offloads[-1]


@pytest.mark.parametrize(("key", "values"), [("memory_gib", (0.01, 0.02, 1152)), ("copy_gb_per_s", (1, 12, 60))])
def test_a_larger_or_faster_host_never_makes_the_best_plan_slower(key: str, values: tuple[float, ...]) -> None:
    on, seconds = cluster(memory_gib=0.012), []
    for value in values:
        node = on.node.model_copy(update={key: value})
        found = search(LayoutCosts(traced(), on.model_copy(update={"node": node})), BASE, 8).best
        seconds.append(found[0].time.total if found else float("inf"))
    assert seconds == sorted(seconds, reverse=True) and seconds[0] > seconds[-1]


@pytest.mark.parametrize("objective", ["time", "cost", "memory"])
def test_what_is_ranked_fits_and_is_in_order(objective: Objective) -> None:
    on = cluster(memory_gib=0.2)
    result = search(LayoutCosts(traced(), on), BASE, 8, objective)
    assert result.best and len(result.best) < result.tried
    assert max(layout.memory for layout in result.best) <= on.device.memory_bytes * USABLE
    values = [OBJECTIVES[objective](layout.time.total, layout) for layout in result.best]
    assert values == sorted(values)


def test_nothing_fits_and_the_smallest_layout_is_known() -> None:
    result = search(LayoutCosts(traced(), cluster(memory_gib=0.0025)), BASE, 8)
    assert result.best == () and result.smallest is not None


def test_what_a_host_has_no_room_for_is_no_layout() -> None:
    """Nothing fits in 10 MiB of a device, nor, offloaded, in 10 MiB of a machine."""
    small = cluster(memory_gib=0.01)
    small = small.model_copy(update={"node": small.node.model_copy(update={"memory_gib": 0.01})})
    every, none = (LayoutCosts(traced(), each) for each in (cluster(memory_gib=0.01), small))
    assert any(each.host for each in possible_layouts(every, BASE, 2))
    assert not any(each.host for each in possible_layouts(none, BASE, 2))
