"""The suite's Spark session lives on when two tests have a module of one name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.helpers.modules import ship_module, write_module


@pytest.mark.spark
def test_modules_of_two_tests_have_two_names_in_the_session(spark: Any, tmp_path: Path) -> None:
    for text in ("NUMBER = 1\n", "NUMBER = 2\n"):
        ship_module(spark, write_module(tmp_path, text))
        assert spark.range(2).count() == 2


@pytest.mark.spark
def test_a_second_file_of_one_name_is_refused_before_it_fails_every_later_task(spark: Any, tmp_path: Path) -> None:
    first = write_module(tmp_path, "NUMBER = 1\n")
    ship_module(spark, first)
    ship_module(spark, first)
    (tmp_path / "other").mkdir()
    other = tmp_path / "other" / first.name
    other.write_text("NUMBER = 2\n")
    with pytest.raises(ValueError, match=r"the session has .* already"):
        ship_module(spark, other)
    assert spark.range(2).count() == 2


def test_no_test_ships_a_module_past_this_check() -> None:
    tests = Path(__file__).parents[1]
    found = [str(path) for path in tests.rglob("*.py") if ".sparkContext.addPyFile(" in path.read_text()]
    assert set(found) == {str(Path(__file__).with_name("modules.py")), __file__}
