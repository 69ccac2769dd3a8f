"""Operations as traced, and seconds that follow from formulas done by hand."""

from __future__ import annotations

from dataclasses import replace

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
from sparkring.training.planner.timing.sparse_tables import (
    HOST_BYTES_PER_S,
    LOOKUPS_PER_S,
    UPDATES_PER_S,
    TableWork,
    tables_s,
)
from sparkring.training.planner.timing.step_time import (
    StageSeconds,
    StepCounts,
    longer_by_s,
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
    A100,
    matmul=1.0,
    attention=1.0,
    memory=1.0,
    link=1.0,
    network=1.0,
    contention=0.0,
    kernel_us=0,
    launch_us=0,
    depth=0,
)
# Of one processor: however small a product is, no other one idles beside it
WHOLE = IDEAL.model_copy(update={"device": IDEAL.device.model_copy(update={"processors": 1})})


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
    whole, half = (step_time(counts(Mesh(tp=tp)), WHOLE).compute for tp in (1, 2))
    assert 0.45 < half / whole < 0.8  # norms and residuals are whole on every rank


def test_a_large_product_takes_its_flops_over_the_peak() -> None:
    table = OperationTable([Operation("matmul", "between", 1, 108 * 256, 8192, 128 * 64)])
    work = Roofline(IDEAL, "bf16").pass_work(table, RankShare(1))
    flops = 2 * 108 * 256 * 8192 * 128 * 64
    assert work.forward == pytest.approx(flops / 312e12)
    assert work.backward == pytest.approx(2 * flops / 312e12, rel=0.1)


def test_what_is_no_product_takes_as_long_in_another_dtype() -> None:
    """Softmax beside attention's products, and the beginning and end of a tile's loop, on a GPU of two peaks."""
    device = IDEAL.device.model_copy(update={"peak_tflops": {"bf16": 300.0, "fp32": 20.0}})
    gpu = with_reached(IDEAL, attention=0.25, depth=600).model_copy(update={"device": device})
    attention = OperationTable([Operation("attention", "inner", 64, 2048, 128, 2048)])
    product = OperationTable([Operation("matmul", "between", 1, 108 * 256, 8192, 128)])
    of_products, of_loops = 2 * 64 * 2048 * 128 * 2048, 2 * 108 * 256 * 128
    assert IDEAL.reached.matmul == 1
    for precision, peak in ("bf16", 300e12), ("fp32", 20e12):
        roofline = Roofline(gpu, precision)
        softmax = of_products * (1 / (0.25 * 300e12) - 1 / 300e12)
        assert roofline.pass_work(attention, RankShare(1)).forward == pytest.approx(of_products / peak + softmax)
        expected = of_loops * (8192 / peak + 600 / 300e12)
        assert roofline.pass_work(product, RankShare(1)).forward == pytest.approx(expected)


def test_a_cpus_parameters_are_of_fp32() -> None:
    """AMX makes products in bf16 faster than what was measured, and attention no faster than its softmax."""
    cpu = load_cluster("cpu")
    assert cpu.device.reached_flops == cpu.device.peak_flops("fp32")
    device = cpu.device.model_copy(update={"peak_tflops": {"bf16": 9.6, "fp32": 1.2}})
    attention = OperationTable([Operation("attention", "inner", 64, 2048, 128, 2048)])
    bf16, fp32 = (
        Roofline(cpu.model_copy(update={"device": device}), precision).pass_work(attention, RankShare(1)).forward
        for precision in ("bf16", "fp32")
    )
    assert fp32 / 4 < bf16 < fp32


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
    plain, again = (step_time(counts(Mesh(), activation_checkpointing=c), WHOLE) for c in (False, True))
    assert plain.recompute == 0 and 0.2 < again.recompute / plain.compute < 0.4


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


def test_hybrid_sharding_sends_weights_within_machines_and_gradients_between_them() -> None:
    slow = A100.model_copy(update={"network": load_cluster("a100-80gb-ethernet").network})
    over_all, hybrid = (counts(Mesh(dp=16), zero=3, shard=shard, accumulate=1) for shard in (0, 8))
    gradients = sum(p.numel() for p in GPT(vocab=VOCAB, width=WIDTH, layers=4, heads=4).parameters()) * 4
    sent = hybrid.stages[0].exchanged
    assert sent.between == int(2 * 1 / 2 * gradients / 8), "an all-reduce of a shard between two machines"
    time, reached = step_time(hybrid, slow), slow.reached
    network_s = sent.between / (slow.network.bytes_per_s * reached.network / 8)
    inside_s = (sum(sent) - sent.between) / (slow.node.link_bytes_per_s * reached.link)
    hops_s = 7 * slow.node.link_latency_s
    calls_s = hybrid.units * (3 * hops_s + slow.network.latency_s)
    copied_s = 2 * (sum(sent) - sent.between) * 8 / 7 / (slow.device.memory_bytes_per_s * reached.memory)
    assert time.exchange + time.hidden == pytest.approx(network_s + inside_s + calls_s + copied_s)
    assert time.exchange < step_time(over_all, slow).exchange


@pytest.mark.parametrize("contention", [0.0, 0.2, 1.0])
def test_an_exchange_takes_from_compute_and_only_what_is_longer_than_compute_is_waited_for(contention: float) -> None:
    assert longer_by_s(10.0, 4.0, contention) == 4.0 * contention
    assert longer_by_s(1.0, 4.0, 0.2) == 3.0
    both = [longer_by_s(each, 4.0, contention) + each for each in (0.0, 1.0, 4.0, 10.0)]
    assert both == sorted(both) and all(each >= 4.0 for each in both)


def test_an_exchange_that_takes_all_of_a_device_hides_nothing() -> None:
    assert step_time(counts(Mesh(dp=16)), with_reached(A100, contention=1.0)).hidden == pytest.approx(0)


def test_of_a_pass_the_first_gather_and_the_last_reduction_are_waited_for() -> None:
    """However long compute is, and however little of it an exchange takes."""
    free = with_reached(A100, contention=0.0)
    endless = free.model_copy(update={"device": free.device.model_copy(update={"peak_tflops": {"bf16": 0.01}})})
    plain = counts(Mesh(dp=8), zero=3)
    time = step_time(plain, endless)
    sent = plain.stages[0].exchanged
    topology, group = Topology(endless, 8), RankGroup(8, 1)
    ends = sum(topology.sent_s(each, group, plain.units, is_ring=True) for each in (sent.gathered, sent.reduced))
    copied = 2 * sum(sent) * 8 / 7 / (endless.device.memory_bytes_per_s * endless.reached.memory)
    assert time.exchange == pytest.approx(ends / plain.units + copied)


def test_backward_repeats_a_block_up_to_its_last_product() -> None:
    again = counts(Mesh(), activation_checkpointing=True).stages[0].recomputed
    products = [op for op, count in zip(again.operations, again.count, strict=True) for _ in range(int(count))]
    assert sum(op.kind == "matmul" for op in products) == 4 * 6, "of seven products of a block the last one not"


def test_a_ring_of_gathers_passes_every_rank_and_an_all_reduce_a_tree_of_nodes() -> None:
    topology, everyone = Topology(A100, 64), RankGroup(64, 1)
    link, network = A100.node.link_latency_s, A100.network.latency_s
    assert topology.latency_s(everyone, is_ring=True) == pytest.approx(56 * link + 7 * network)
    assert topology.latency_s(everyone) == pytest.approx(7 * link + 3 * network)


@pytest.mark.parametrize(("sharded", "lagged"), [(True, False), (False, False), (True, True)])
def test_sparse_tables_take_lookups_updates_and_what_travels(sharded: bool, lagged: bool) -> None:
    ids, sent = 1_000_000, 128e6
    tables = (TableWork(ids, sent, replicated=not sharded, lagged=lagged),)
    slow = load_cluster("a100-80gb-ethernet")
    topology, group = Topology(slow, 16), RankGroup(16, 1)
    work = ids / LOOKUPS_PER_S + ids * (1 if sharded else 16) / UPDATES_PER_S
    # 8 of the 15 others are on the other machine, whose network 8 ranks share
    away = sent * 8 / 15 / (slow.network.bytes_per_s * slow.reached.network / 8)
    near = sent * 7 / 15 / HOST_BYTES_PER_S
    travels = 0.0 if lagged else away + near + 4 * topology.latency_s(group)
    assert tables_s(tables, topology, group) == pytest.approx(work + travels)


def test_tables_of_one_rank_send_nothing() -> None:
    assert tables_s((TableWork(9_000_000, 1e9),), Topology(A100, 1), RankGroup(1, 1)) == pytest.approx(
        9_000_000 / LOOKUPS_PER_S + 1.0
    )


def test_a_step_waits_for_its_tables() -> None:
    known = counts(Mesh(dp=2))
    tables = (TableWork(100_000, 0.0),)
    without, time = (step_time(replace(known, tables=each), A100) for each in ((), tables))
    assert time.total - without.total == pytest.approx(time.tables) and time.tables > 0
