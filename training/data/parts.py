"""Read the batch shares that a rank is given (training/servers/backup.py), mostly of its own stream.

The rows of data rank `stream` of n do not depend on the process that reads them, so another rank reads the same ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from sparkring.training.data.batch import Batch, BatchShare, Reader

KEPT = 8  # batches of a stream that may be asked for again, or after a later one
FAR = 64  # batches to read past at most; to go further, a stream is started again
OPEN = 2  # streams of others


class PartsReader:
    """See Reader. `batches` yields one batch a step, without rows where this rank computes none."""

    def __init__(
        self, own: Reader, stream: int, open_stream: Callable[[int], Reader], take: Callable[[int], BatchShare | None]
    ):
        """Create a reader of batch shares.

        Args:
            own: reader of the stream `stream`.
            stream: stream of this rank; without an own stream, the one it was opened with.
            open_stream: opens the reader of another stream.
            take: step -> batch share that this rank computes, or None.
        """
        self.steps_per_epoch, self.epochs, self.meter = own.steps_per_epoch, own.epochs, own.meter
        self._own, self._stream, self._open_stream, self._take = own, stream, open_stream, take
        self._streams = {stream: _Stream(own)}
        self._end = 0  # step that `batches` goes to

    def verify(self) -> None:
        self._own.verify()

    def order_state(self) -> dict[str, Any]:
        return self._own.order_state()

    def batches(self, consumed_samples: int = 0, steps: int | None = None) -> Iterator[Batch]:
        """See Reader.batches."""
        consumed, ranges = consumed_samples, list(self.epochs.ranges(consumed_samples, steps))
        self._end = max((epoch * self.steps_per_epoch + stop for epoch, _, stop in ranges), default=0)
        for epoch, first, stop in ranges:
            for step in range(first, stop):
                before, consumed = consumed, self.epochs.consumed_after(epoch, step)
                part = self._take(epoch * self.steps_per_epoch + step)
                rows = consumed - before
                read = Batch({}, 0, rows, consumed) if part is None else self.read(part)
                yield replace(read, consumed_samples=consumed, part=part, step_rows=rows)

    def read(self, part: BatchShare) -> Batch:
        """Read the rows of a part."""
        if part.stream not in self._streams:
            others = [stream for stream in self._streams if stream != self._stream]
            for stream in others[: len(others) - OPEN + 1]:
                self._streams.pop(stream).close()
            self._streams[part.stream] = _Stream(self._open_stream(part.stream))
        return self._streams[part.stream].at(part.clock, self._end)

    def close(self) -> None:
        for stream in self._streams.values():
            stream.close()


class _Stream:
    """The batches of one data rank, by step; the last ones are kept."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._batches: Iterator[Batch] = iter(())
        self._next = 0
        self._end = 0  # step that they go to
        self._kept: dict[int, Batch] = {}

    def at(self, clock: int, end: int) -> Batch:
        """Return the batch of step `clock`; `end`: first step that will not be requested."""
        if clock not in self._kept:
            if not self._next <= clock < min(self._next + FAR, self._end):
                self._stop()
                self._next, self._end, self._kept = clock, max(end, clock + 1), {}
                self._batches = self._reader.batches(self._reader.epochs.consumed_at(clock), self._end - clock)
            while self._next <= clock:
                self._kept[self._next] = next(self._batches)
                self._kept.pop(self._next - KEPT, None)
                self._next += 1
        return self._kept[clock]

    def _stop(self) -> None:
        close = getattr(self._batches, "close", None)
        if close is not None:
            close()

    def close(self) -> None:
        self._stop()
        self._reader.close()
