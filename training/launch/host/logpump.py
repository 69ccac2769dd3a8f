"""Read a rank's output by line, and pass it on at a limited rate.

A progress bar rewrites its line behind a carriage return: its states are passed on as lines, one per PARTIAL_S.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable

from sparkring.conf.plain_text import count_of
from sparkring.training.launch.messages import MAX_LAST_LINES, MAX_LINE_CHARS, MAX_LOG_LINES

PARTIAL_S = 0.5  # between reports of output that ends no line


class RateLimit:
    """Token bucket over lines: `per_s` on average, five seconds' worth at once. Pure: times are given."""

    def __init__(self, per_s: float, burst_s: float = 5.0):
        self.per_s, self.capacity = per_s, per_s * burst_s
        self._tokens = self.capacity
        self._then: float | None = None

    def allow(self, lines: int, now: float) -> int:
        """Count how many of `lines` may pass at monotonic time `now`."""
        if self._then is not None:
            self._tokens = min(self.capacity, self._tokens + max(0.0, now - self._then) * self.per_s)
        self._then = now
        passed = min(lines, int(self._tokens))
        self._tokens -= passed
        return passed


class LogPump(threading.Thread):
    """Reads a pipe to its end.

    `on_lines` gets the lines that the rate allows; `last` has the newest of all lines. Without a rate `on_lines` gets
    all lines, and what the rank prints waits for as long as it takes. Output that ends no line is reported too, every
    PARTIAL_S at most: by the newest state of a progress bar, or by no lines.
    """

    def __init__(self, fd: int, lines_per_s: float | None, on_lines: Callable[[list[str]], None]):
        super().__init__(name="sparkring-log", daemon=True)
        self._fd, self._on_lines = fd, on_lines
        self._limit = RateLimit(lines_per_s) if lines_per_s is not None else None
        self._held_back = 0
        self._passed_at = -PARTIAL_S  # monotonic time of the last call of on_lines
        self.last: deque[str] = deque(maxlen=MAX_LAST_LINES)

    def run(self) -> None:
        rest = b""
        try:
            while chunk := os.read(self._fd, 1 << 18):
                *lines, rest = (rest + chunk).split(b"\n")
                state, rest = last_state(rest)
                if len(rest) > MAX_LINE_CHARS * 4:  # a line without end
                    lines, rest = [*lines, rest], b""
                self._take(lines)
                if not lines:
                    self._take_partial(state)
            self._take([rest] if rest else [])
        finally:
            os.close(self._fd)
        self._report_held_back()

    def _take(self, raw: list[bytes]) -> None:
        if not raw:
            return
        allowed = len(raw) if self._limit is None else self._limit.allow(len(raw), time.monotonic())
        newest = [_text(line) for line in raw[-MAX_LAST_LINES:]]
        self.last.extend(newest)
        if allowed and self._held_back:
            self._report_held_back()
        if allowed:
            for start in range(0, allowed, MAX_LOG_LINES):
                self._on_lines([_text(line) for line in raw[start : min(start + MAX_LOG_LINES, allowed)]])
            self._passed_at = time.monotonic()
        self._held_back += len(raw) - allowed

    def _take_partial(self, state: bytes) -> None:
        if time.monotonic() - self._passed_at < PARTIAL_S:
            return
        if state:
            self._take([state])
        else:
            self._on_lines([])
            self._passed_at = time.monotonic()

    def _report_held_back(self) -> None:
        if self._limit is not None and self._held_back:
            self._on_lines(
                [
                    f"... {count_of(self._held_back, 'line', ',')} held back (launch.log_lines_per_s = "
                    f"{self._limit.per_s:g})"
                ]
            )
        self._held_back = 0


def last_state(rest: bytes) -> tuple[bytes, bytes]:
    """Split output behind the last newline into (newest whole state of a progress bar, what follows it).

    A carriage return at the very end may be half of a line's end on Windows, so it ends no state yet.
    """
    before, found, after = rest[:-1].rpartition(b"\r")
    states = [state for state in before.split(b"\r") if state.strip()]
    return (states[-1] if states else b""), (after + rest[-1:] if found else rest)


def _text(line: bytes) -> str:
    """Decode one line: the last state of a progress bar that rewrites its line, cut to MAX_LINE_CHARS."""
    text = line.decode("utf-8", "replace").rstrip("\r").rsplit("\r", 1)[-1]
    cut = len(text) - MAX_LINE_CHARS
    return text if cut <= 0 else f"{text[:MAX_LINE_CHARS]} ... {count_of(cut, 'character', ',')} more"
