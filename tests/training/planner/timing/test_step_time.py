"""Operations as traced, and seconds that follow from formulas done by hand."""

from __future__ import annotations

import pytest
import torch

from sparkring.conf.blocks.parallel import ParallelConfig
from sparkring.conf.clusters.catalog import load_cluster
from sparkring.conf.clusters.cluster import Cluster
from sparkring.training.models.gpt import GPT
from sparkring.training.parallel.mesh import Mesh
from sparkring.training.planner.search import traced_model
from sparkring.training.planner.timing.collectives import RankGroup, Topology
from sparkring.training.planner.timing.operations import Operation
from sparkring.training.planner.timing.roofline import OperationTable, RankShare, Roofline
from sparkring.training.planner.timing.step_time import (
    StageSeconds,
    StepCounts,
    pipeline_seconds,
    step_counts,
    step_time,
)
from sparkring.training.planner.workload import Workload

TOKENS, WIDTH, VOCAB, ROWS = 128, 256, 512, 16
A100 = load_cluster("a100-80gb-efa")


def with_reached(cluster: Cluster, **values: float) -> Cluster:
    return cluster.model_copy(update={"reached": cluster.reached.model_copy(update=values)})


IDEAL = with_reached(
    A100, matmul=1.0, attention=1.0, memory=1.0, link=1.0, network=1.0, overlap=1.0, kernel_us=0, launch_us=0, depth=0
)


def counts(mesh: Mesh, **parallel: object) -> StepCounts:
    with torch.device("meta"):
        model = GPT(vocab=VOCAB, width=WIDTH, layers=4, heads=4)
    config = ParallelConfig.model_validate(
        {"dp": mesh.dp, "cp": mesh.cp, "pp": mesh.pp, "tp": mesh.tp, "precision": "bf16", "engine": "torch", **parallel}
    )
    row = (torch.zeros(1, TOKENS, dtype=torch.int64, device="meta"),)
    workload = Workload(model, config, mesh, "torch", row, ROWS)
    traced = traced_model(workload)
    return step_counts(workload, traced.work, traced.trace)


def test_operations_of_a_gpt_have_the_flops_of_its_formula() -> None:
    weights = 4 * (4 * WIDTH**2 + 3 * WIDTH * 704) + VOCAB * WIDTH
    attention = 4 * 2 * TOKENS**2 * WIDTH  # causal: half of two products
    assert counts(Mesh()).flops == 3 * ROWS * (2 * TOKENS * weights + attention)


def test_tensor_ranks_compute_a_share_of_the_products() -> None:
    whole, half = (step_time(counts(Mesh(tp=tp)), with_reached(IDEAL, depth=0)).compute for tp in (1, 2))
    assert 0.45 < half / whole < 0.8  # norms and residuals are whole on every rank


def test_a_large_product_takes_its_flops_over_the_peak() -> None:
    table = OperationTable([Operation("matmul", "between", 1, 108 * 256, 8192, 128 * 64)])
    work = Roofline(IDEAL, "bf16").pass_work(table, RankShare(1))
    flops = 2 * 108 * 256 * 8192 * 128 * 64
    assert work.forward == pytest.approx(flops / 312e12)
    assert work.backward == pytest.approx(2 * flops / 312e12, rel=0.1)


def test_a_small_product_is_bound_by_memory_and_launches() -> None:
    table = OperationTable([Operation("matmul", "between", 1, 1, 4096, 4096, 8192)])
    work = Roofline(IDEAL, "bf16").pass_work(table, RankShare(1))
    assert work.forward >= 4096 * 4096 * 2 / 2039e9
    slow = with_reached(IDEAL, launch_us=1000)
    times = step_time(counts(Mesh()), slow)
    assert times.host > 0.9 * times.total


def test_a_ring_over_nodes_shares_the_network_with_the_other_groups_of_a_node() -> None:
    topology = Topology(IDEAL, 16)
    assert topology.bytes_per_s(RankGroup(8, 1)) == 300e9  # within a node
    assert topology.bytes_per_s(RankGroup(16, 1)) == 50e9  # one ring over both nodes
    assert topology.bytes_per_s(RankGroup(2, 8)) == 50e9 / 8  # eight pairs at a time


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_a_pipeline_takes_what_its_schedule_says(schedule: str) -> None:
    found = counts(Mesh(pp=4), micro_batches=8, schedule=schedule)
    stages = [StageSeconds(1.0, 2.0, 0.0)] * 4
    assert pipeline_seconds(found, stages) == 8 * 3 + 3 * 3  # (m - 1 + p) (f + b)
    simulated = counts(Mesh(pp=4), micro_batches=8, schedule="zero-bubble")
    assert 8 * 3 < pipeline_seconds(simulated, stages) < 8 * 3 + 3 * 3


def test_recomputing_costs_a_forward_of_the_blocks() -> None:
    plain, again = (step_time(counts(Mesh(), activation_checkpointing=c), IDEAL) for c in (False, True))
    assert plain.recompute == 0 and 0.2 < again.recompute / plain.compute < 0.34


def test_a_faster_network_never_makes_a_step_slower() -> None:
    found = counts(Mesh(dp=16), zero=3)
    faster = [
        step_time(found, A100.model_copy(update={"network": A100.network.model_copy(update={"gbit_per_s": g})})).total
        for g in (10, 100, 400, 3200)
    ]
    assert faster == sorted(faster, reverse=True) and faster[0] > faster[-1]


def test_causes_add_up_to_the_step() -> None:
    times = step_time(counts(Mesh(dp=2, tp=2), zero=1), A100)
    assert sum(times.causes.values()) == times.total and "hidden" not in times.causes
