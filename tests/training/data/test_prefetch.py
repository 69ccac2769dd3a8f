"""The thread that produces ahead: what it is given back, and how it ends."""

from __future__ import annotations

import threading
from collections.abc import Generator

import pytest

from training.data.batch import Batch
from training.data.prefetch import Prefetcher
from training.data.transfer import staged


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


def test_batches_are_sent_ahead_by_a_thread_of_their_own() -> None:
    """What pins and copies for a GPU, with a plain function in place of the copy."""
    sent_by, left = [], []

    def batches() -> Generator[Batch, None, None]:
        try:
            for number in range(6):
                yield Batch({}, 0, 1, number)
        finally:
            left.append(threading.current_thread().name)

    def send(batch: Batch) -> int:
        sent_by.append(threading.current_thread().name)
        return batch.cursor

    assert list(staged(batches(), send)) == [0, 1, 2, 3, 4, 5]
    some = staged(batches(), send)
    assert next(some) == 0
    some.close()
    assert set(sent_by) == {"sparkring-reader"} and left == ["sparkring-reader"] * 2
