"""Runs a generator in a thread, a few items ahead of its consumer."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Generator
from typing import Generic, TypeVar

T = TypeVar("T")


class Prefetcher(Generic[T]):
    """Iterator over `items`, produced up to `depth` ahead in one daemon thread.

    Its error is raised here, in order. `close` (or exhaustion, or the error) ends the thread, and closes the generator
    in it. The thread also drops the items that the consumer is done with: each tensor that is freed releases the
    interpreter, and among busy threads a consumer that frees some hundreds waits milliseconds to get it back.
    """

    def __init__(self, items: Generator[T, None, None], depth: int) -> None:
        self._items, self._depth = items, depth
        self._ready: deque[T] = deque()
        self._given: list[T] = []  # items handed to the consumer; only the last may still be in use
        self._changed = threading.Condition()
        self._closed = self._ended = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="sparkring-reader", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            for item in self._items:
                with self._changed:
                    self._changed.wait_for(lambda: self._closed or len(self._ready) < self._depth)
                    if self._closed:
                        return
                    self._ready.append(item)
                    self._changed.notify_all()
                    done, self._given = self._given[:-1], self._given[-1:]
                del done  # not while the consumer would wait for the lock
        except BaseException as error:  # raised again in the consumer's thread
            self._error = error
        finally:
            try:
                self._items.close()
            finally:
                with self._changed:
                    self._ended = True
                    self._changed.notify_all()

    def __iter__(self) -> Prefetcher[T]:
        return self

    def __next__(self) -> T:
        with self._changed:
            self._changed.wait_for(lambda: self._ready or self._ended)
            if self._ready:
                item = self._ready.popleft()
                self._given.append(item)
                self._changed.notify_all()
                return item
        self._thread.join()
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        raise StopIteration

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._ready.clear()
            self._changed.notify_all()
        self._thread.join()
