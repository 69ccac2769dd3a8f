"""The launch block's own rules."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from conf.schema_launch import LaunchConfig


def test_defaults_are_a_ring_of_two_that_never_shrinks() -> None:
    launch = LaunchConfig()
    assert (launch.world, launch.min_world, launch.max_attempts) == (2, None, 3)


@pytest.mark.parametrize(
    ("values", "match"),
    [
        ({"world": 2, "min_world": 3}, r"min_world = 3: must not be above world = 2"),
        ({"world": 0}, "greater than 0"),
        ({"backoff_s": -1.0}, "greater than or equal to 0"),
        ({"max_attempts": 0}, "greater than 0"),
        ({"silence_timeout_s": 0}, "greater than 0"),
        ({"gpus_per_rank": -1}, "greater than or equal to 0"),
        ({"wrld": 2}, "Extra inputs"),
    ],
)
def test_values_that_cannot_be(values: dict[str, object], match: str) -> None:
    with pytest.raises(ValidationError, match=match):
        LaunchConfig(**values)  # type: ignore[arg-type]


def test_no_hang_limit_is_allowed() -> None:
    assert LaunchConfig(hang_timeout_s=None).hang_timeout_s is None
