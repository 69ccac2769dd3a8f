"""Run functions one after the other in one thread, so that their collectives have one order on every rank."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class OrderedCalls:
    """One daemon thread, which runs functions in the order they are given.

    After an error it runs nothing more: each later call has that error as its result.
    """

    def __init__(self, name: str) -> None:
        self._waiting: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, function: Callable[[], T]) -> Future[T]:
        result: Future[T] = Future()
        self._waiting.put((function, result))
        return result

    def close(self, wait: bool) -> None:
        """End the thread once what was given is done. `wait`: return after that; not where ranks may be dead."""
        self._waiting.put(None)
        if wait:
            self._thread.join()

    def _run(self) -> None:
        while (given := self._waiting.get()) is not None:
            function, result = given
            if self._error is None:
                try:
                    result.set_result(function())
                    continue
                except BaseException as error:  # raised again in the thread that waits for the result
                    self._error = error
            result.set_exception(self._error)
