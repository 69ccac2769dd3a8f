"""What a session cannot do is said once, and has a next best way."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from sparkring.etl.spark_platform import capabilities
from sparkring.etl.spark_platform.capabilities import EVERY, can, is_classic
from sparkring.etl.spark_platform.executors import decommissioning, executors
from sparkring.etl.spark_platform.plans import is_cheap


@pytest.fixture
def connect() -> Any:
    """A session that only says that it is one of Spark Connect."""
    return type("SparkSession", (), {"__module__": "pyspark.sql.connect.session"})()


def test_what_cannot_be_done_is_said_once(connect: Any, caplog: pytest.LogCaptureFixture) -> None:
    capabilities._say_once.cache_clear()
    with caplog.at_level(logging.INFO):
        assert not any(can(connect, each) for each in (*EVERY, *EVERY))
    assert [line.partition(":")[0] for line in caplog.messages] == [
        f"Spark Connect gives no {each.name}" for each in EVERY
    ]


def test_without_a_jvm_the_next_best_is_done(connect: Any) -> None:
    query: Any = SimpleNamespace(sparkSession=connect)
    assert not is_cheap(query)
    assert decommissioning(connect) == frozenset() and executors(connect) == {}


@pytest.mark.spark
def test_a_classic_session_can_do_all(spark: Any) -> None:
    assert is_classic(spark) and all(can(spark, each) for each in EVERY)
