"""Core and GPU hours by part."""

from __future__ import annotations

from typing import Any

import pytest

from sparkring.conf.blocks.launch import LaunchConfig
from sparkring.pipelines.housekeeping.cost import job_cost, spark_cores
from tests.pipelines.results import rank_result

TIMINGS = {"spark_s": 9.0, "etl_s": 1800.0, "launch_s": 60.0, "train_s": 3540.0, "evaluate_s": 360.0, "total_s": 5769.0}


def test_hours_are_what_each_part_held_times_its_seconds() -> None:
    rank_0 = rank_result(world=4, threads_per_rank=3)
    cost = job_cost(8, TIMINGS, LaunchConfig(world=4), rank_0)
    assert cost == pytest.approx({"core_hours_etl": 4.0, "core_hours_train": 12.0, "core_hours_evaluate": 0.8})
    with_gpus = job_cost(8, TIMINGS, LaunchConfig(world=4, gpus_per_rank=2), rank_0)
    assert with_gpus["gpu_hours_train"] == pytest.approx(8.0)


def test_a_dataset_that_was_found_costs_nothing() -> None:
    found = {name: value for name, value in TIMINGS.items() if name != "etl_s"}
    assert job_cost(8, found, LaunchConfig(), rank_result())["core_hours_etl"] == 0.0


@pytest.mark.spark
def test_the_cores_of_spark_are_its_slots(spark: Any) -> None:
    assert spark_cores(spark) == 2
