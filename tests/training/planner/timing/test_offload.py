"""What offload copies and costs, by hand."""

from __future__ import annotations

import pytest
import torch

from sparkring.conf.blocks.parallel import ParallelConfig
from sparkring.conf.clusters.catalog import load_cluster
from sparkring.training.models.gpt import GPT
from sparkring.training.parallel.mesh import Mesh
from sparkring.training.planner.search import traced_model
from sparkring.training.planner.timing.offload import copy_seconds, host_bytes_per_s, shard_copies
from sparkring.training.planner.timing.step_time import step_counts, step_time
from sparkring.training.planner.workload import RankParameters, Workload

A100 = load_cluster("a100-80gb-efa")
ROWS, TOKENS = 16, 128


def workload(device_type: str = "cuda", **parallel: object) -> Workload:
    with torch.device("meta"):
        model = GPT(vocab=512, width=256, layers=4, heads=4)
    config = ParallelConfig.model_validate({"precision": "bf16", "engine": "torch", "dp": 8, **parallel})
    row = (torch.zeros(1, TOKENS, dtype=torch.int64, device="meta"),)
    return Workload(model, config, Mesh(dp=8), "torch", row, ROWS, device_type=device_type)


def parts(**parallel: object) -> tuple[float, float, int]:
    """(bytes beside compute, bytes that the host adds, bytes of all weights) of a step with offload."""
    rank = RankParameters(workload(offload=True, **parallel), 0)
    copies = shard_copies(rank)
    assert copies is not None
    return copies.forward + copies.backward, copies.added, rank.whole * 4


@pytest.mark.parametrize("zero", [1, 2])
def test_zero_1_and_2_copy_a_shard_to_the_device_and_its_gradient_back(zero: int) -> None:
    beside, added, whole = parts(zero=zero)
    assert beside == pytest.approx(2 * whole / 8, rel=1e-3) and added == 0


def test_zero_3_copies_blocks_twice_in_every_pass() -> None:
    beside, added, whole = parts(zero=3, accumulate=2)
    model = workload().model
    blocks = 4 * sum(p.numel() for name, p in model.named_parameters() if name.startswith("blocks."))
    assert beside == pytest.approx((2 * (whole + blocks) + whole) / 8, rel=1e-3)
    assert added == pytest.approx(whole / 8, rel=1e-3), "the second pass's gradient"


def test_zero_1_reduces_once_and_adds_nothing_on_the_host() -> None:
    assert parts(zero=1, accumulate=2)[1] == 0 < parts(zero=2, accumulate=2)[1]


def test_nothing_is_copied_without_offload_or_on_cpus() -> None:
    assert shard_copies(RankParameters(workload(zero=3), 0)) is None
    assert shard_copies(RankParameters(workload(zero=3, offload=True, device_type="cpu"), 0)) is None


def test_the_devices_of_a_machine_share_its_hosts_memory() -> None:
    assert host_bytes_per_s(A100, 8) == pytest.approx(281e9 * A100.reached.host / 8)
    assert host_bytes_per_s(A100, 2) == pytest.approx(281e9 * A100.reached.host / 2)
    assert host_bytes_per_s(A100, 64) == host_bytes_per_s(A100, 8)


def test_adam_of_the_paper_takes_what_it_measured() -> None:
    """arXiv 2101.06840, table 4: 2.57 s for 10^10 parameters, on one machine of 256 GB/s; 28 bytes each."""
    machine = A100.node.model_copy(update={"memory_gb_per_s": 256.0})
    assert 28e10 / host_bytes_per_s(A100.model_copy(update={"node": machine}), 1) == pytest.approx(2.57, rel=0.02)


def test_what_the_host_adds_is_waited_for() -> None:
    copies = shard_copies(RankParameters(workload(offload=True, zero=2, accumulate=2), 0))
    assert copies is not None
    found = copy_seconds(copies, A100, 8)
    assert found[:2] == pytest.approx((copies.forward / 12.4e9, copies.backward / 12.4e9))
    assert found.waited == pytest.approx(copies.added / 12.4e9 + 3 * copies.added / host_bytes_per_s(A100, 8))


@pytest.mark.parametrize("parallel", [{"zero": 1}, {"zero": 2, "accumulate": 2}, {"zero": 3}])
def test_offload_adds_copies_and_a_slower_step_of_the_optimizer_and_nothing_else(parallel: dict[str, object]) -> None:
    plain, offloaded = (workload(offload=offload, **parallel) for offload in (False, True))
    traced = traced_model(plain)
    without, time = (step_time(step_counts(each, traced.work, traced.trace), A100) for each in (plain, offloaded))
    changed = {name for name, seconds in time.causes.items() if seconds != without.causes[name]}
    assert changed == {"offload", "optimizer"} and without.offload == 0 < time.offload
    owned = RankParameters(offloaded, 0).owned
    assert time.optimizer == pytest.approx(11 * 4 * owned / host_bytes_per_s(A100, 8)) and time.total > without.total
    copies = shard_copies(RankParameters(offloaded, 0))
    assert copies is not None and time.hidden == without.hidden
    assert copy_seconds(copies, A100, 8).waited <= time.offload <= sum(copy_seconds(copies, A100, 8))


def test_copies_hide_beside_what_compute_is_left_by_the_exchange() -> None:
    slow = A100.model_copy(update={"node": A100.node.model_copy(update={"link_gb_per_s": 0.001})})
    plain, offloaded = (workload(offload=offload, zero=2) for offload in (False, True))
    traced = traced_model(plain)
    without, time = (step_time(step_counts(each, traced.work, traced.trace), slow) for each in (plain, offloaded))
    assert time.hidden == without.hidden and time.exchange == without.exchange
