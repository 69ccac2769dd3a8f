"""Which settings of Spark may change rows. The session itself: tests/spark/test_etl_build.py."""

import pytest

from sparkring.etl.spark_platform.session import FIXED, decides_rows


@pytest.mark.parametrize("key", ["spark.sql.caseSensitive", "spark.sql.legacy.timeParserPolicy", "spark.sql.new.one"])
def test_every_setting_of_spark_sql_decides_rows_unless_it_is_known_not_to(key):
    assert decides_rows(key)


OTHERS = ["spark.sql.adaptive.enabled", "spark.sql.ui.x", "spark.executor.memory", "spark.sql.catalog.prod.uri"]


@pytest.mark.parametrize("key", [*FIXED, *OTHERS])
def test_settings_of_speed_and_place_and_those_the_build_fixes_do_not(key):
    assert not decides_rows(key)
