"""What is measured of machines, as a cluster's file: the arithmetic, then real ranks on a real Spark."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from sparkring.conf.clusters.catalog import cluster_text, load_cluster
from sparkring.conf.storage import open_storage
from sparkring.pipelines.cli import main
from sparkring.pipelines.launch.measure import MeasuringRank, cluster_of, exchange_groups, host_rates, ranks_at_once
from sparkring.pipelines.launch.netcheck import NetReport, Pair
from sparkring.training.worker import hardware
from sparkring.training.worker.hardware import (
    attention_rate,
    host_copy_rates,
    host_memory_rate,
    host_step_rate,
    memory_rate,
    operator_seconds,
    rate,
    storage_rates,
)

CPU = torch.device("cpu")


def cost(latency_s: float, bytes_per_s: float, busy: float = 0.25) -> dict[str, float]:
    return {"latency_s": latency_s, "bytes_per_s": bytes_per_s, "busy": busy}


def result(scale: float = 1.0, host: str = "a", **other: Any) -> dict[str, Any]:
    products = {"fp32": {128: {"per_s": 1e11 * scale, "spread": 0.1}, 1024: {"per_s": 2e11 * scale, "spread": 0.3}}}
    return {
        "type": "cpu",
        "name": "EPYC",
        "memory_bytes": 8 * 2**30,
        "processors": 1,
        "cores": 2,
        "products": products,
        "attention": {"per_s": 5e10 * scale, "spread": 0.1},
        "memory": {"per_s": 1e10, "spread": 0.05},
        "operator_s": 2e-6,
        "host_bytes": 64 * 2**30,
        "host": {"per_s": 2e10 * scale, "spread": 0.1},
        "host_step": {"per_s": 5e9 * scale, "spread": 0.1},
        "copies": {"to device": {"per_s": 2.5e10, "spread": 0.1}, "to host": {"per_s": 2e10 * scale, "spread": 0.1}},
        "links": {"host": host},
        "exchanges": {},
        "storage": (1e9, 5e8),
        "rows_per_s": 1000.0,
        "reader_threads": 2,
        **other,
    }


def test_gpus_have_the_slowest_links_and_the_median_ranks_rates(tmp_path: Path) -> None:
    pairs = (Pair(0, 1, 1e-5, 4e9), Pair(0, 2, 2e-4, 1e9), Pair(1, 2, 1e-4, 2e9))
    net = NetReport(("a", "a", "b"), "NCCL", pairs, 0.5e9, 1e9)
    cluster = cluster_of(net, [result(scale, type="cuda") for scale in (1.0, 3.0, 2.0)], "data/d")
    assert cluster.device.peak_tflops == {"fp32": 0.4} and cluster.device.memory_gib == 8
    assert (cluster.node.devices, cluster.node.link_gb_per_s, cluster.node.link_latency_us) == (2, 4.0, 10.0)
    assert (cluster.network.gbit_per_s, cluster.network.latency_us) == (8.0, 200.0)
    node = cluster.node
    assert (node.memory_gib, node.memory_gb_per_s, node.copy_gb_per_s) == (64, 80.0, 25.0), "two ranks at once"
    assert cluster.reached.host == 0.25
    assert cluster.reached.network == 0.5 and cluster.reached.launch_us == 2.0
    assert cluster.measured is not None
    assert (cluster.measured.hosts, cluster.measured.spread) == (["a", "b"], 0.3)
    assert (cluster.measured.rows_per_s, cluster.measured.reader_threads) == (3000.0, 2)
    path = tmp_path / "c.yaml"
    path.write_text(cluster_text(cluster))
    assert load_cluster(str(path)) == cluster


def test_cpus_have_the_links_that_exchanges_found_and_operations_that_are_part_of_the_work() -> None:
    found = {"link": cost(1e-4, 2e9), "turns": cost(1.8e-3, 1e9)}
    first = {**found, "network": cost(2e-4, 1e8)}
    results = [result(exchanges=first), *(result(exchanges=found) for _ in range(3))]
    cluster = cluster_of(NetReport(("a",) * 4, "TCP", (), 1.0, 1.0), results)
    assert (cluster.node.cores, cluster.node.devices, cluster.node.link_gb_per_s) == (2, 4, 2.0)
    assert (cluster.node.link_latency_us, cluster.node.turn_us) == (100.0, 600.0), "three hops of a ring"
    assert (cluster.network.gbit_per_s, cluster.network.latency_us) == (0.8, 200.0)
    reached = cluster.reached
    assert (reached.kernel_us, reached.launch_us, reached.contention, reached.depth) == (2.0, 0.0, 0.25, 128.0)
    assert (reached.attention, reached.matmul, reached.link) == (0.25, 1.0, 1.0)


def test_where_no_two_ranks_have_a_core_each_the_link_is_that_of_ranks_that_take_turns() -> None:
    results = [result(exchanges={"turns": cost(1e-3, 1e9)}, cores=1) for _ in range(2)]
    cluster = cluster_of(NetReport(("a", "a"), "TCP", (), 1.0, 1.0), results)
    assert cluster.node.link_gb_per_s == 2.0, "with a core for each"


def test_ranks_exchange_within_hosts_and_between_them_whatever_their_sizes() -> None:
    places = [MeasuringRank(0, 0, 2), MeasuringRank(0, 1, 2), MeasuringRank(0, 2, 2), MeasuringRank(1, 0, 2)]
    assert [place.turn for place in places] == [0, 0, 1, 0]
    assert exchange_groups(places) == {"link": [[0, 1], [3]], "turns": [[0, 1, 2]], "network": [[0, 3]]}
    assert exchange_groups([MeasuringRank(0, 0, 1)]) == {"link": [[0]], "turns": [], "network": [[0]]}


def test_ranks_measure_at_once_as_many_as_have_cores() -> None:
    assert ranks_at_once({"cores": 2, "processors": 1}, is_gpu=False) == 2
    assert ranks_at_once({"cores": 1, "processors": 4}, is_gpu=False) == 1
    assert ranks_at_once({"cores": 1, "processors": 108}, is_gpu=True) >= 8


def test_one_rank_has_no_links_and_a_file_all_the_same() -> None:
    cluster = cluster_of(NetReport(("a",), "TCP", (), 0.0, 0.0), [result()])
    assert cluster.node.devices == 1 and cluster.node.link_gb_per_s == 10.0 and cluster.reached.link == 1.0


def test_rates_are_of_what_was_done(tmp_path: Path) -> None:
    done: list[int] = []
    found = rate(lambda: done.append(1), 2.0, seconds=0.01)
    assert found.per_s > 0 and found.spread >= 0 and len(done) > 5
    assert memory_rate(CPU, 1.5).per_s > 1e8 and attention_rate(CPU, 2.5).per_s > 1e7
    assert 0 < operator_seconds(CPU, 100.0) < 1e-2
    read, written = storage_rates(open_storage(str(tmp_path)))
    assert min(read, written) > 0 and not list(tmp_path.iterdir()), "its file is gone"


@pytest.mark.slow  # rates and the file: beside it; ranks of a real stage: tests/pipelines/launch/test_netcheck.py
@pytest.mark.spark
@pytest.mark.ranks
def test_the_command_writes_a_file_that_the_plan_reads(
    spark: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "here.yaml"
    assert main(["plan", "measure", "flights", "--out", str(path)]) == 0
    assert f"use it with --cluster {path}" in capfd.readouterr().out
    cluster = load_cluster(str(path))
    assert cluster.node.devices == 2 and cluster.device.type == "cpu" and cluster.measured is not None
    assert cluster.measured.ranks == 2 and cluster.node.link_latency_us > 0


def test_a_hosts_memory_its_optimizers_step_and_copies_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "HOST_COPIED", 1 << 20)
    memory, step, copies = host_memory_rate(), host_step_rate(), host_copy_rates(CPU)
    assert memory.per_s > 0 < step.per_s
    assert set(copies) == {"to device", "to host"} and all(each.per_s > 0 for each in copies.values())


def test_the_slower_direction_is_what_a_device_copies_and_of_too_few_cores_not_all_ranks_measure_at_once() -> None:
    found = host_rates([result(cores=2) for _ in range(4)], hosts=1)
    assert (found.memory_per_s, found.copy_per_s, found.step_share) == (4e10, 2e10, 0.25)
    assert host_rates([result(type="cuda") for _ in range(4)], hosts=2).memory_per_s == 4e10
    assert host_rates([result(type="cuda") for _ in range(4)], hosts=1).memory_per_s == 8e10
    faster = host_rates([result(type="cuda", host_step={"per_s": 3e10, "spread": 0.1})], hosts=1)
    assert (faster.memory_per_s, faster.step_share) == (3e10, 1.0), "than a copy"
