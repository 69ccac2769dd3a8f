from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from sparkring.conf.schedule.block import ScheduleConfig, seconds


@pytest.mark.parametrize(("text", "found"), [("90s", 90), ("30m", 1800), ("2h", 7200), ("1d", 86400), ("0s", 0)])
def test_a_duration_has_a_unit(text: str, found: int) -> None:
    assert seconds(text) == found


@pytest.mark.parametrize("text", ["2", "2 h", "h", "-1h", "1.5h", "2w", ""])
def test_a_duration_without_one_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="a whole number and a unit"):
        seconds(text)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"interval": "week", "begin": "2024-01-02"}, "the first week, such as 2026-01-05, a Monday"),
        ({"interval": "month", "begin": "2024-01-08"}, "the first month, such as 2026-01-01"),
        ({"interval": "year"}, "interval"),
        ({"interval": "hour", "begin": "2024-01-01T00", "timezone": "Europe/Berlin"}, "hours are of UTC"),
        ({"interval": "hour"}, "begin = '2024-01-01': the first hour, such as 2026-01-01T00"),
        ({"begin": "2024-1-1"}, "begin = '2024-1-1': the first day"),
        ({"begin": "2024-01-01T00"}, "the first day"),
        ({"timezone": "Mars/Olympus"}, "is no time zone"),
        ({"wait_timeout": "soon"}, "a duration is"),
        ({"lease": "1s"}, "at least 2s"),
        ({"wait_for": ["nope://x"]}, "no filesystem for scheme"),
    ],
)
def test_a_schedule_that_cannot_be_kept_is_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        ScheduleConfig.model_validate({"begin": "2024-01-01"} | changed)
