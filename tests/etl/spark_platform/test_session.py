"""Which settings of Spark may change rows. The session itself: tests/spark/test_etl_build.py."""

from typing import Any

import pytest

from sparkring.etl.spark_platform import session
from sparkring.etl.spark_platform.session import FIXED, build_session, decides_rows


@pytest.mark.parametrize("key", ["spark.sql.caseSensitive", "spark.sql.legacy.timeParserPolicy", "spark.sql.new.one"])
def test_every_setting_of_spark_sql_decides_rows_unless_it_is_known_not_to(key):
    assert decides_rows(key)


OTHERS = ["spark.sql.adaptive.enabled", "spark.sql.ui.x", "spark.executor.memory", "spark.sql.catalog.prod.uri"]


@pytest.mark.parametrize("key", [*FIXED, *OTHERS])
def test_settings_of_speed_and_place_and_those_the_build_fixes_do_not(key):
    assert not decides_rows(key)


@pytest.mark.spark
def test_by_connect_a_join_is_broadcast_by_what_has_been_read_alone(spark: Any, monkeypatch: pytest.MonkeyPatch):
    """The files of a CSV source are read by our tasks, and Spark takes their rows for eight bytes each."""
    static, at_run = "spark.sql.autoBroadcastJoinThreshold", "spark.sql.adaptive.autoBroadcastJoinThreshold"
    classic = build_session(spark, {})
    assert classic.conf.get(static) != "-1"
    monkeypatch.setattr(session, "is_classic", lambda spark: False)
    by_connect = build_session(spark, {})
    assert (by_connect.conf.get(static), by_connect.conf.get(at_run)) == ("-1", "10MB")
    assert build_session(spark, {static: "1MB"}).conf.get(static) == "1MB", "the recipe decides"
