"""Chaos on a standalone cluster in network namespaces: three faults on two workers, all of them on three (slow)."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # this folder is no package: benchmarks/soak.py shares its modules
import checks
import cluster as clusters
import inject

pytestmark = [
    pytest.mark.spark,
    pytest.mark.skipif(not clusters.possible(), reason="needs root, ip, tc, ss and network namespaces"),
]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Of two workers."""
    with clusters.running(tmp_path_factory.mktemp("cluster"), 2) as running:
        yield running


def survive(cluster: Any, logs: Path, steps: int, faults: list[str]) -> inject.Run:
    """Every fault in turn on one run with a rank on each worker, which must end as if none had been."""
    undisturbed = checks.undisturbed_run(steps, cluster.workers)
    run = inject.Run(cluster, logs, steps, cluster.workers)
    run.start()
    try:
        run.await_step(5)
        for name in faults:
            inject.strike(run, name, random.Random(name), undisturbed)
        run.end()
    finally:
        run.kill()
    checks.verdict(run, undisturbed)
    return run


def test_a_killed_rank_a_killed_helper_and_a_full_disk_change_nothing(cluster: Any, tmp_path: Path) -> None:
    run = survive(cluster, tmp_path, 110, ["SIGKILL of a rank", "full disk under checkpoints", "SIGKILL of a helper"])
    causes = {e["cause"] for e in run.events if e["kind"] == "AttemptEnded"}
    assert {"signal", "disk", "lost"} <= causes


@pytest.mark.slow
def test_every_fault_once_in_one_run_and_nothing_lost(tmp_path: Path) -> None:
    (tmp_path / "cluster").mkdir()
    with clusters.running(tmp_path / "cluster", subnet="10.79.0", prefix="se") as cluster:
        run = survive(cluster, tmp_path, 1200, list(inject.FAULTS))
    causes = {e["cause"] for e in run.events if e["kind"] == "AttemptEnded"}
    assert {"signal", "hang", "lost", "disk", "decommission"} <= causes


@pytest.mark.slow
def test_a_host_that_vanishes_costs_one_attempt_under_the_default_timeouts(tmp_path: Path) -> None:
    """Spark's and ours. It cost two attempts and 200 s: Spark counts the slots of such a host for one minute or two."""
    (tmp_path / "cluster").mkdir()
    with clusters.running(tmp_path / "cluster", subnet="10.78.0", prefix="sv", worker_timeout_s=60) as cluster:
        variables = {"VICTIM_DEFAULT_TIMEOUTS": "1", "VICTIM_SLEEP_S": "0.2"}
        run = inject.Run(cluster, tmp_path, 500, 3, variables=variables)
        run.start()
        try:
            run.await_step(25)
            node = inject.busy_node(run, random.Random(0))
            cluster.link(node, up=False)
            (ended,) = [run.await_event(lambda e: e["kind"] == "AttemptEnded")]
            recovered = run.await_event(lambda e: e["kind"] == "Recovered")
            print(f"named after {ended['at'] - recovered['at'] + recovered['recover_s']:.1f} s: {ended['words']}")
            print(f"training stood still for {recovered['recover_s']:.1f} s")
            assert (ended["cause"], ended["decision"], ended["next_world"]) == ("lost", "shrink", 2)
            assert cluster.address(node) in ended["words"]
            assert recovered["attempt"] == ended["attempt"] + 1
            run.end()
        finally:
            run.kill()
        checks.verdict(run, checks.undisturbed_run(500, 3))  # reads the disk, which goes with the cluster
    assert [e["cause"] for e in run.events if e["kind"] == "AttemptEnded"] == ["lost"]


def test_a_port_left_open_is_noticed(cluster: Any, tmp_path: Path) -> None:
    """The check itself: a stranger that listens in a worker's namespace is something left behind."""
    listen = "import socket, time; s = socket.create_server(('0.0.0.0', 0)); print(flush=True); time.sleep(60)"
    command = ["ip", "netns", "exec", cluster.namespace(1), sys.executable, "-c", listen]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as stranger:
        assert stranger.stdout is not None
        stranger.stdout.readline()
        found = checks.leftovers(inject.Run(cluster, tmp_path, 1, 3, driver=stranger))
        stranger.kill()
    assert [words for words in found if f"{{{stranger.pid}}}" in words], found
