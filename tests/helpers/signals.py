"""Signals to this process, in which a test runs a command."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tests.waits import wait_for


@contextmanager
def stopped_when(condition: Callable[[], object], then: Callable[[], object] = lambda: None) -> Iterator[None]:
    """Send SIGTERM to this process once the condition holds, and call `then`, while the block runs."""

    def stop() -> None:
        wait_for(condition)
        os.kill(os.getpid(), signal.SIGTERM)
        then()

    thread = threading.Thread(target=stop)
    thread.start()
    try:
        yield
    finally:
        thread.join()
