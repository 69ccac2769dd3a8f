"""When the log warns of equal rows."""

import logging

import pytest

from sparkring.conf.blocks.etl import SplitConfig
from sparkring.etl.shards.duplicates import remark_duplicates

BY_TIME = SplitConfig(kind="time", column="at", boundaries={"valid": "2024-01-01", "test": "2024-02-01"})


@pytest.mark.parametrize(
    ("duplicates", "split", "levels"),
    [
        (0, SplitConfig(), []),
        (10, SplitConfig(), [logging.INFO]),
        (11, SplitConfig(), [logging.WARNING]),
        (11, SplitConfig(key=["person"]), []),
        (11, BY_TIME, []),
    ],
    ids=["none", "few", "many", "kept together", "by time"],
)
def test_the_log_says_how_many_rows_are_duplicates(caplog, duplicates, split, levels):
    with caplog.at_level(logging.INFO):
        remark_duplicates(duplicates, 1000, split)
    assert [r.levelno for r in caplog.records] == levels
    assert all(f"{duplicates} duplicate rows among 1,000 rows" in r.getMessage() for r in caplog.records)
