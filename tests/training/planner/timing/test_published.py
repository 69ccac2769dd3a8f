"""Published steps that nothing was fitted on: FSDP on slower networks, and steps that ran out of memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from sparkring.conf.clusters.catalog import load_cluster
from sparkring.conf.clusters.cluster import GIB
from sparkring.training.planner.search import USABLE, traced_model
from sparkring.training.planner.timing.step_time import step_counts, step_time
from tests.helpers.published_steps import MemoryStep, ShardedStep, memory_bytes, read_measurements, read_sharded

PUBLISHED = Path(__file__).parents[4] / "benchmarks/published"
SHARDED = read_sharded(PUBLISHED / "ibm_fsdp_a100_400gbit.csv")


def test_steps_on_slower_networks_than_those_of_the_fit_are_predicted() -> None:
    errors = {step.name: step.error() for step in SHARDED}
    assert len(errors) == 5 and sum(map(abs, errors.values())) / len(errors) < 0.1, errors
    assert max(map(abs, errors.values())) < 0.15, errors


@pytest.mark.parametrize("step", SHARDED, ids=lambda step: step.name)
def test_no_step_is_faster_than_its_compute_or_its_exchange_alone(step: ShardedStep) -> None:
    traced = traced_model(step.workload)
    time = step_time(step_counts(step.workload, traced.work, traced.trace), step.cluster)
    assert time.total > time.compute + time.recompute and time.total > time.hidden


def fits(step: MemoryStep) -> bool:
    return memory_bytes(step, load_cluster("a100-80gb-infiniband")) <= step.device_gib * GIB * USABLE


def test_steps_that_ran_fit_and_most_that_ran_out_of_memory_do_not() -> None:
    """In the true bytes of a weight: half of them would let all of these fit."""
    rows = read_measurements(str(PUBLISHED / "bigscience_memory.csv"), MemoryStep)
    ran, out = ([fits(row) for row in rows if (row.step_s is None) == is_out] for is_out in (False, True))
    assert (len(ran), len(out)) == (50, 10)
    assert all(ran) and out.count(False) >= 6
