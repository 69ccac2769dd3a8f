"""Chaos on a real standalone cluster of three workers in network namespaces. Minutes long: `make test-slow`."""

from __future__ import annotations

import importlib.util
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent


def load(name: str) -> Any:
    """A module of this folder, which is no package."""
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, HERE / f"{name}.py")
        assert spec is not None and spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


clusters = load("cluster")
victim, inject = load("victim"), load("inject")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.spark,
    pytest.mark.skipif(not clusters.possible(), reason="needs root and network namespaces"),
]
STEPS = 1200


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with clusters.running(tmp_path_factory.mktemp("cluster")) as running:
        yield running


def test_every_fault_once_in_one_run_and_nothing_lost(cluster: Any, tmp_path: Path) -> None:
    run = inject.Run(cluster, tmp_path, STEPS, 3)
    run.start()
    try:
        run.await_step(5, 240)
        for name in inject.FAULTS:
            inject.strike(run, name, random.Random(name))
            run.await_step(run.step + 1, 240)
        assert run.driver.wait(timeout=600) == 0, run.tail()
    finally:
        if run.driver.poll() is None:
            inject.kill_group(run.driver)
    run.read()
    result = next(e for e in reversed(run.events) if e["kind"] == "result")
    wanted = inject.expected(STEPS, 3)
    assert result["rows"] == wanted["rows"] == STEPS * victim.ROWS
    assert max(abs(a - b) for a, b in zip(result["w"], wanted["w"], strict=True)) < 1e-12
    if {e["world"] for e in run.events if e["kind"] == "started"} == {3}:
        assert result["digest"] == wanted["digest"]
    causes = {e["cause"] for e in run.events if e["kind"] == "attempt_ended"}
    assert {"signal", "hang", "lost"} <= causes
    assert not [pid for pids in run.pids.values() for pid in pids if inject.alive(pid)]


def test_ranks_killed_one_after_another_leave_the_same_bits(cluster: Any, tmp_path: Path) -> None:
    run = inject.Run(cluster, tmp_path, 400, 3)
    run.start()
    try:
        run.await_step(5, 240)
        for seed in range(8):
            inject.strike(run, "SIGKILL of a rank", random.Random(seed))
        assert run.driver.wait(timeout=600) == 0, run.tail()
    finally:
        if run.driver.poll() is None:
            inject.kill_group(run.driver)
    run.read()
    result = next(e for e in reversed(run.events) if e["kind"] == "result")
    assert {e["world"] for e in run.events if e["kind"] == "started"} == {3}
    assert result["digest"] == inject.expected(400, 3)["digest"]
