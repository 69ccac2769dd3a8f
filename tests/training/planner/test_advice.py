"""Advice follows from the numbers that it names."""

from __future__ import annotations

import math

import pytest

from sparkring.conf.clusters.catalog import load_cluster
from sparkring.training.planner.advice import (
    Distribution,
    checkpoint_plan,
    distribute_advice,
    link_advice,
    paying_batch,
)
from sparkring.training.planner.timing.step_time import StepTime


def advised(alone_s: float, together_s: float, devices: int, steps: int | None = None) -> str:
    return distribute_advice(Distribution(alone_s, together_s, devices, steps), "{:.4g} s".format) or ""


@pytest.mark.parametrize(
    ("alone_s", "together_s", "devices", "is_worth_it"),
    [(1.2, 1.0, 8, False), (2.0, 1.0, 8, False), (5.0, 1.0, 8, True), (1.3, 1.0, 2, True), (1.1, 1.0, 2, False)],
)
def test_devices_that_lose_much_of_their_rate_are_advised_against(
    alone_s: float, together_s: float, devices: int, is_worth_it: bool
) -> None:
    """Twice the rate is much of two devices, and little of 512."""
    assert (advised(alone_s, together_s, devices) == "") == is_worth_it
    assert advised(1.0, 1.0, 1) == ""


def test_a_run_that_ends_before_its_ranks_have_started_is_not_worth_them() -> None:
    found = advised(0.01, 0.002, 8, steps=100)
    assert "do not distribute" in found and "the whole run takes 1 s in place of 3.2 s, launch included" in found
    assert advised(0.01, 0.002, 8, steps=100_000) == ""


def test_a_step_that_waits_for_links_says_what_would_help() -> None:
    waits = StepTime(compute=1.0, exchange=1.0)
    found = link_advice(waits, lambda times: 1.0 + 1.0 / times, lambda times: 1.5)
    assert found is not None and "50% of a step" in found and "1.60 times" in found and "codec" not in found
    found = link_advice(waits, lambda times: 1.0 + 1.0 / times, lambda times: 1.5, lambda: 1.6)
    assert found is not None and "gradients in bf16 (parallel.compress.codec) 1.25 times" in found
    assert link_advice(StepTime(compute=1.0, exchange=0.1), lambda _: 1.0, lambda _: 1.0) is None


def test_checkpoints_are_as_often_as_young_says() -> None:
    cluster = load_cluster("a100-80gb-efa")  # a node fails every 800 days and writes 2 GB/s
    found = checkpoint_plan(2e9 * 60, cluster, 8)
    assert found.write_s == 60
    assert found.interval_s == pytest.approx(math.sqrt(2 * 60 * 800 * 86400))
    assert 0.99 < found.goodput < 1
    assert checkpoint_plan(2e9 * 60, cluster, 512).goodput < found.goodput


def test_the_batch_stops_growing_where_doubling_gains_little() -> None:
    assert paying_batch(8, lambda rows: rows / (1 + rows / 64)) == 1024
    assert paying_batch(8, lambda rows: 1.0) == 8
