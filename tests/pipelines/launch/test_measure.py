"""What is measured of machines, as a cluster's file: the arithmetic, then real ranks on a real Spark."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from sparkring.conf.clusters.catalog import cluster_text, load_cluster
from sparkring.conf.storage import open_storage
from sparkring.pipelines.cli import main
from sparkring.pipelines.launch.measure import cluster_of
from sparkring.pipelines.launch.netcheck import NetReport, Pair
from sparkring.training.worker.hardware import memory_rate, operator_seconds, rate, storage_rates

CPU = torch.device("cpu")


def result(scale: float = 1.0) -> dict[str, Any]:
    products = {"fp32": {512: {"per_s": 1e11 * scale, "spread": 0.1}, 1024: {"per_s": 2e11 * scale, "spread": 0.3}}}
    return {
        "type": "cpu",
        "name": "EPYC",
        "memory_bytes": 8 * 2**30,
        "processors": 4,
        "products": products,
        "memory": {"per_s": 1e10, "spread": 0.05},
        "operator_s": 2e-6,
        "storage": (1e9, 5e8),
        "rows_per_s": 1000.0,
        "reader_threads": 2,
    }


def test_a_cluster_has_the_slowest_links_and_the_median_ranks_rates(tmp_path: Path) -> None:
    pairs = (Pair(0, 1, 1e-5, 4e9), Pair(0, 2, 2e-4, 1e9), Pair(1, 2, 1e-4, 2e9))
    net = NetReport(("a", "a", "b"), "TCP", pairs, 0.5e9, 1e9)
    cluster = cluster_of(net, [result(1.0), result(3.0), result(2.0)], "data/d")
    assert cluster.device.peak_tflops == {"fp32": 0.4} and cluster.device.memory_gib == 8
    assert (cluster.node.devices, cluster.node.link_gb_per_s, cluster.node.link_latency_us) == (2, 4.0, 10.0)
    assert (cluster.network.gbit_per_s, cluster.network.latency_us) == (8.0, 200.0)
    assert cluster.reached.network == 0.5 and cluster.reached.launch_us == 2.0
    assert cluster.measured is not None
    assert (cluster.measured.hosts, cluster.measured.spread) == (["a", "b"], 0.3)
    assert (cluster.measured.rows_per_s, cluster.measured.reader_threads) == (3000.0, 2)
    path = tmp_path / "c.yaml"
    path.write_text(cluster_text(cluster))
    assert load_cluster(str(path)) == cluster


def test_one_rank_has_no_links_and_a_file_all_the_same() -> None:
    cluster = cluster_of(NetReport(("a",), "TCP", (), 0.0, 0.0), [result()])
    assert cluster.node.devices == 1 and cluster.node.link_gb_per_s == 10.0 and cluster.reached.link == 1.0


def test_rates_are_of_what_was_done(tmp_path: Path) -> None:
    done: list[int] = []
    found = rate(lambda: done.append(1), 2.0, seconds=0.01)
    assert found.per_s > 0 and found.spread >= 0 and len(done) > 5
    assert memory_rate(CPU).per_s > 1e8 and 0 < operator_seconds(CPU) < 1e-2
    read, written = storage_rates(open_storage(str(tmp_path)))
    assert min(read, written) > 0 and not list(tmp_path.iterdir()), "its file is gone"


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
