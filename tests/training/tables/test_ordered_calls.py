import threading
import time

import pytest

from sparkring.training.tables.ordered_calls import OrderedCalls


def test_functions_run_in_their_order_in_one_thread() -> None:
    calls, seen = OrderedCalls("calls"), list[tuple[int, int]]()

    def note(number: int) -> int:
        time.sleep(0.01 if number == 0 else 0)
        seen.append((number, threading.get_ident()))
        return number * 2

    results = [calls.submit(lambda number=number: note(number)) for number in range(20)]
    assert [result.result() for result in results] == list(range(0, 40, 2))
    assert [number for number, _ in seen] == list(range(20))
    assert {thread for _, thread in seen} != {threading.get_ident()} and len({thread for _, thread in seen}) == 1
    calls.close(wait=True)
    assert "calls" not in {thread.name for thread in threading.enumerate()}


def test_after_an_error_nothing_runs_and_every_later_result_is_it() -> None:
    """Else this rank would skip a collective that the others make."""
    calls, ran = OrderedCalls("calls"), list[str]()

    def fail() -> None:
        raise ValueError("column 'user' is float32")

    failed = calls.submit(fail)
    later = calls.submit(lambda: ran.append("later"))
    for result in (failed, later):
        with pytest.raises(ValueError, match="'user' is float32"):
            result.result()
    calls.close(wait=True)
    assert ran == []
