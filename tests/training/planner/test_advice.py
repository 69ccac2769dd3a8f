"""Advice follows from the numbers that it names."""

from __future__ import annotations

import math

import pytest

from sparkring.conf.clusters.catalog import load_cluster
from sparkring.training.planner.advice import checkpoint_plan, distribute_advice, link_advice, paying_batch
from sparkring.training.planner.timing.step_time import StepTime


def test_a_ring_that_gains_less_than_a_third_is_advised_against() -> None:
    assert "do not distribute" in (distribute_advice(1.2, 1.0, 8) or "")
    assert distribute_advice(2.0, 1.0, 8) is None
    assert distribute_advice(None, 1.0, 8) is None  # does not fit on one device
    assert distribute_advice(1.0, 1.0, 1) is None


def test_a_step_that_waits_for_links_says_what_would_help() -> None:
    waits = StepTime(compute=1.0, exchange=1.0)
    found = link_advice(waits, lambda times: 1.0 + 1.0 / times, lambda times: 1.5)
    assert found is not None and "50% of a step" in found and "1.60 times" in found
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
