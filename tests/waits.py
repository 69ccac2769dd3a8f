"""Wait for a condition, with a limit that only a failure reaches."""

from __future__ import annotations

import time
from collections.abc import Callable

LIMIT_S = 300.0


def wait_for(condition: Callable[[], object]) -> None:
    give_up = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < give_up, f"it did not come about within {LIMIT_S:g} s"
        time.sleep(0.01)
