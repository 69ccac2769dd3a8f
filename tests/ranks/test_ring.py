"""Data-parallel rings equal one process: rows, not ranks, are what is averaged over."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

from cases_ring import one_process
from problem import worst_difference

pytestmark = pytest.mark.ranks


@pytest.mark.parametrize(("engine", "zero"), [("horovod", 1), ("torch", 1), ("torch", 2), ("torch", 3)])
def test_a_users_module_trains_under_zero_unchanged(launch, engine: str, zero: int) -> None:
    """Biases, uneven rows, and a 0-dim parameter that cannot be cut."""
    settings = {"engine": engine, "zero": zero, "accumulate": 2, "bucket_bytes": 3000}
    for result in launch(3, "cases_ring:ring", {"settings": settings, "uneven": True}, engine=engine):
        assert worst_difference(result, one_process()) < 1e-12


@pytest.mark.parametrize(("engine", "world"), [("horovod", 2), ("torch", 2), ("horovod", 3), ("torch", 3)])
@pytest.mark.parametrize("uneven", [False, True])
def test_ring_equals_one_process(launch, engine: str, world: int, uneven: bool) -> None:
    settings = {"engine": engine, "accumulate": 2, "bucket_bytes": 3000}
    results = launch(world, "cases_ring:ring", {"settings": settings, "uneven": uneven}, engine=engine)
    expected = one_process()
    assert expected["losses"][-1] < expected["losses"][0]
    for result in results:
        assert worst_difference(result, expected) < 1e-12
    assert results[0]["engine"] == {"horovod": "horovod", "torch": "torch-gloo"}[engine]


@pytest.mark.parametrize(("local_size", "axis"), [(2, "TorchRing"), (1, "TorchDDP"), (3, "TorchDDP")])
def test_ranks_that_share_hosts_sum_in_two_levels(launch, local_size: int, axis: str) -> None:
    payload = {"settings": {"engine": "torch", "accumulate": 2, "bucket_bytes": 3000}, "local_size": local_size}
    for result in launch(4, "cases_ring:ring", {**payload, "uneven": True}):
        assert result["axis"] == axis
        assert worst_difference(result, one_process()) < 1e-12
