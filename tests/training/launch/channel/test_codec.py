"""Checks are generated from the types of dataclass fields."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import pytest

from sparkring.training.launch.channel.codec import AtMost, OneLine, as_json, check_of


@dataclass(frozen=True)
class Inner:
    number: int


@dataclass(frozen=True)
class Outer:
    inner: tuple[Inner, ...]
    words: str | None = None


def test_nested_dataclasses_are_read_and_written() -> None:
    outer = Outer((Inner(1), Inner(2)), "x")
    assert check_of(Outer)({"inner": [{"number": 1}, {"number": 2}], "words": "x"}) == outer
    assert as_json(outer) == {"inner": outer.inner, "words": "x"}
    with pytest.raises(ValueError, match="inner: number: int, not str"):
        check_of(Outer)({"inner": [{"number": "1"}]})


@pytest.mark.parametrize(
    ("kind", "good", "bad"),
    [
        (int, 1, True),
        (float, 2, "2"),
        (bool, True, 1),
        (str, "", None),
        (str | None, None, 1),
        (Literal["a", "b"], "b", "c"),
        (Literal["a", "b"], "b", []),
        (tuple[int, ...], [1, 2], {"a": 1}),
        (dict[str, int], {"a": 1}, {"a": None}),
        (Annotated[str, AtMost(2)], "ab", "abc"),
        (Annotated[str, OneLine(5)], "ab", "a\nb"),
    ],
)
def test_a_value_of_another_type_is_refused(kind: Any, good: Any, bad: Any) -> None:
    check_of(kind)(good)
    with pytest.raises(ValueError, match=r"\w"):
        check_of(kind)(bad)


@pytest.mark.parametrize("kind", [set[int], list[int], complex, int | str, tuple[int, str]])
def test_a_type_that_no_message_may_have_is_a_programming_error(kind: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        check_of(kind)
