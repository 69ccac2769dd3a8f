"""What ranks on CPUs pay: shared cores, a strategy's own operations, messages of a pipeline."""

from __future__ import annotations

import pytest
import torch

from sparkring.conf.blocks.parallel import ParallelConfig
from sparkring.conf.clusters.catalog import load_cluster
from sparkring.conf.clusters.cluster import Cluster
from sparkring.training.models.gpt import GPT
from sparkring.training.parallel.engine import choose_engine
from sparkring.training.parallel.mesh import resolve_mesh
from sparkring.training.planner.search import traced_model
from sparkring.training.planner.timing.collectives import RankGroup, Topology
from sparkring.training.planner.timing.shared_cores import (
    message_waits_s,
    own_work_s,
    ranks_per_core,
    shared_pipeline_s,
)
from sparkring.training.planner.timing.step_time import StepTime, step_counts, step_time
from sparkring.training.planner.workload import Workload

A100 = load_cluster("a100-80gb-efa")


def machine(cores: int) -> Cluster:
    """One machine of four ranks with a thread each."""
    cpu = load_cluster("cpu")
    node = cpu.node.model_copy(update={"devices": 4, "cores": cores, "turn_us": 600.0})
    device = cpu.device.model_copy(update={"processors": 1})
    reached = cpu.reached.model_copy(update={"kernel_us": 5.0, "launch_us": 0.0})
    return cpu.model_copy(update={"node": node, "device": device, "reached": reached})


def seconds(cluster: Cluster, world: int, width: int = 64, **parallel: object) -> StepTime:
    config = ParallelConfig.model_validate({"engine": "torch", **parallel})
    mesh = resolve_mesh(config, world)
    with torch.device("meta"):
        model = GPT(vocab=256, width=width, layers=4, heads=4)
    row = (torch.zeros(1, 32, dtype=torch.int64, device="meta"),)
    workload = Workload(model, config, mesh, choose_engine(config, mesh, "cpu"), row, 16)
    traced = traced_model(workload)
    return step_time(step_counts(workload, traced.work, traced.trace), cluster)


def test_ranks_share_cores_only_where_these_are_too_few() -> None:
    assert [ranks_per_core(machine(2), world) for world in (1, 2, 4)] == [1, 1, 2]
    assert ranks_per_core(machine(4), 4) == 1 and ranks_per_core(A100, 512) == 1


def test_ranks_that_share_a_core_compute_half_as_fast() -> None:
    alone, shared = (seconds(machine(cores), 4).compute for cores in (4, 2))
    assert shared == pytest.approx(2 * alone)


def test_an_exchange_on_shared_cores_is_slower_and_waits_for_a_turn() -> None:
    group = RankGroup(4, 1)
    alone, shared = (Topology(machine(cores), 4) for cores in (4, 2))
    assert shared.bytes_per_s(group) == alone.bytes_per_s(group) / 2
    assert shared.latency_s(group) == pytest.approx(3 * 600e-6)


def test_a_pipeline_on_fewer_cores_is_between_grahams_bounds() -> None:
    busy, critical = [1.0, 1.0, 1.0, 1.0], 1.75
    assert shared_pipeline_s(critical, busy, 1.0) == critical
    assert shared_pipeline_s(critical, busy, 4.0) == 4.0, "one core does everything, one after the other"
    assert 2.0 < shared_pipeline_s(critical, busy, 2.0) < 2.0 + critical / 2


def test_messages_that_are_shorter_than_the_slack_are_waited_for_at_the_ends_alone() -> None:
    slack, none = [1.0, 2.0], [1.0, 1.0]
    assert message_waits_s(slack, 0.25, 8) == 2 * 0.25
    assert message_waits_s(none, 0.25, 8) == pytest.approx(2 * 0.25 + 7 * 0.25)


def test_only_cpus_wait_for_a_strategys_own_operations() -> None:
    assert own_work_s(A100, 1000, 1e9) == 0
    assert own_work_s(machine(4), 1000, 0) == pytest.approx(5e-3)


@pytest.mark.parametrize("layout", [{}, {"zero": 1}, {"zero": 3}, {"tp": 2}, {"cp": 2}, {"pp": 2, "micro_batches": 4}])
def test_causes_add_up_on_cpus_and_cores_never_make_a_step_slower(layout: dict[str, int]) -> None:
    few, many = (seconds(machine(cores), 4, **layout) for cores in (2, 4))
    assert few.total == pytest.approx(sum(few.causes.values())) and min(few.causes.values()) >= -1e-12
    assert many.total < few.total


def test_zero_hides_nothing_on_cpus_where_its_exchanges_block() -> None:
    assert seconds(machine(4), 4, width=256, zero=3).hidden == 0 < seconds(machine(4), 4, width=256).hidden


def test_a_ring_of_one_bucket_hides_nothing() -> None:
    assert seconds(machine(4), 4).hidden == 0
