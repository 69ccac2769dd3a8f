"""How far Spark is: the line, and a real session that is asked while it works."""

from __future__ import annotations

import logging
import re

import pytest
from pyspark.sql import SparkSession

from sparkring.etl.spark_platform import executors
from sparkring.etl.spark_platform.application import described
from sparkring.etl.spark_platform.executors import lacks_slots
from sparkring.pipelines.run import spark_jobs
from sparkring.pipelines.run.spark_jobs import Stage, progress_line, spark_progress


@pytest.mark.parametrize(
    ("stages", "line"),
    [
        ([], ""),
        ([Stage("write shards", 24, 12, 160_000)], "write shards: 12 of 24 tasks, 160,000 rows, 35 s"),
        ([Stage("", 8, 0, 0)], "Spark: 0 of 8 tasks, 35 s"),
        ([Stage("a", 8, 2, 10), Stage("b", 4, 3, 70), Stage("a", 1, 0, 0)], "a, b: 5 of 13 tasks, 70 rows, 35 s"),
    ],
)
def test_a_line_of_what_runs(stages: list[Stage], line: str) -> None:
    assert progress_line(stages, 35.2) == line


@pytest.mark.spark
def test_a_wait_for_slots_is_shown_as_one(
    spark: SparkSession, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`sparkring etl` on a cluster without workers said `0 of 2 tasks` for ever."""
    monkeypatch.setattr(spark_jobs, "LINE_EVERY_S", 0.1)
    monkeypatch.setattr(spark_jobs, "ASK_EVERY_S", 0.1)
    assert not lacks_slots(spark)
    monkeypatch.setattr(executors, "task_slots", lambda _: 0)
    with caplog.at_level(logging.INFO, "spark"), spark_progress(spark, interactive=False):
        slow = spark.range(0, 2, 1, 2).selectExpr("java_method('java.lang.Thread', 'sleep', 900L) AS slept")
        slow.selectExpr("count(slept)").collect()
    assert any(
        line.endswith("s; Spark has no task slot, and waits: see whether its workers are there and free")
        for line in caplog.messages
    )


@pytest.mark.spark
def test_a_session_is_shown_while_it_works_and_no_longer(
    spark: SparkSession, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spark_jobs, "LINE_EVERY_S", 0.1)
    monkeypatch.setattr(spark_jobs, "ASK_EVERY_S", 0.1)
    slow = spark.range(0, 400, 1, 8).selectExpr("java_method('java.lang.Thread', 'sleep', 5L * (id % 2 + 1)) AS slept")
    with caplog.at_level(logging.INFO, "spark"):
        with spark_progress(spark, interactive=False), described(spark, "sleep a while"):
            slow.selectExpr("count(slept)").collect()  # of the column: one that is not read is not made
        shown = len(caplog.messages)
        spark.range(1).count()
    assert shown and len(caplog.messages) == shown
    assert any(re.fullmatch(r"sleep a while: \d of \d tasks,.* \d+ s", line) for line in caplog.messages)
    assert spark.sparkContext.getLocalProperty("spark.job.description") is None
