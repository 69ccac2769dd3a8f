"""Which SparkContext of this process counts. All else of the module is used by tests of real sessions."""

from typing import Any

import pytest

from sparkring.etl.spark_platform.jvm import active_context


def test_a_context_that_another_thread_is_just_starting_is_not_active(monkeypatch: pytest.MonkeyPatch) -> None:
    """PySpark has it in this state for some milliseconds, in which a job that validates its recipe asked its master."""
    pyspark = pytest.importorskip("pyspark")
    monkeypatch.setattr(pyspark.SparkContext, "_active_spark_context", object.__new__(pyspark.SparkContext))
    assert active_context() is None


@pytest.mark.spark
def test_a_context_that_has_started_is_active(spark: Any) -> None:
    assert active_context() is spark.sparkContext
