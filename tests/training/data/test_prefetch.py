"""The thread that produces ahead: what it is given back, and how it ends."""

from __future__ import annotations

import threading
from collections.abc import Generator

import pytest

from sparkring.training.data.prefetch import Prefetcher


class Item:
    """Says which thread dropped it."""

    def __init__(self, number: int, dropped: dict[int, str]) -> None:
        self.number, self.dropped = number, dropped

    def __del__(self) -> None:
        self.dropped[self.number] = threading.current_thread().name


def test_what_was_consumed_is_dropped_by_the_thread_that_made_it() -> None:
    dropped: dict[int, str] = {}
    items = Prefetcher((Item(number, dropped) for number in range(6)), depth=1)
    for number in range(6):
        item = next(items)
        assert item.number == number
        del item
    assert next(items, None) is None
    assert {number: dropped[number] for number in range(4)} == dict.fromkeys(range(4), "sparkring-reader")


def test_it_ends_with_its_consumer_and_carries_its_error() -> None:
    closed_in = []

    def numbers(until: int) -> Generator[int, None, None]:
        try:
            yield from range(until)
            raise ValueError("no more")
        finally:
            closed_in.append(threading.current_thread().name)

    left = Prefetcher(numbers(1000), depth=2)
    assert next(left) == 0
    left.close()
    failing = Prefetcher(numbers(2), depth=1)
    assert [next(failing), next(failing)] == [0, 1]
    with pytest.raises(ValueError, match="no more"):
        next(failing)
    assert closed_in == ["sparkring-reader"] * 2
    assert not [t for t in threading.enumerate() if t.name == "sparkring-reader"]
