"""What is known of a session's application."""

from __future__ import annotations

from typing import Any

import pytest

from sparkring.etl.spark_platform.application import default_parallelism, described, splits_of, tagged


@pytest.mark.spark
def test_a_plan_says_how_many_tasks_run_at_a_time(spark: Any, capsys: pytest.CaptureFixture[str]) -> None:
    spark.range(1).explain()
    assert splits_of(capsys.readouterr().out) == default_parallelism(spark) == 2


@pytest.mark.spark
def test_what_is_said_of_jobs_ends_with_the_block(spark: Any) -> None:
    context = spark.sparkContext
    with described(spark, "write shards"), tagged(spark, "mine"):
        assert context.getLocalProperty("spark.job.description") == "write shards"
        assert [*context.getJobTags()] == ["mine"]
    assert context.getLocalProperty("spark.job.description") is None and [*context.getJobTags()] == []
