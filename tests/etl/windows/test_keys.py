"""Which keys may be in two parts, and what that adds to a check. Keys of real rows: tests/spark/test_etl_keys.py."""

from sparkring.etl.windows.keys import across_parts, keys_across_parts
from tests.etl.windows.test_parts import BLOCK, config

UNIQUE = {"kind": "unique", "level": "dataset"}


def test_keys_that_hold_the_interval_are_in_one_part():
    checks = [{"name": "day", "columns": ["x", "day"]} | UNIQUE, {"name": "x", "columns": ["x"]} | UNIQUE]
    assert keys_across_parts(config(checks=[*BLOCK["checks"], *checks])) == {"x": ["x"]}


def test_every_row_but_the_first_of_a_key_fails():
    # Parts with the keys a a b and b c c c: one and two rows fail within parts, and one for b.
    assert across_parts({"x": 3, "low": 5}, {"x": 4}, {"x": 3}) == {"x": 4, "low": 5}
