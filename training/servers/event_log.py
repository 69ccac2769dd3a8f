"""What a server did, in 8 bytes a push: enough to do it again.

An event is a worker's push of one step: whose, of which step and try, and its version lag, the updates that the
server made between the pull and the push. As a number of 64 bits, from the highest: kind (2 bits), worker (12), try
(6), step (24), lag (20). The version at which a gradient was computed is that before the event minus the lag.

With bound 0 the events of a step stand together, in the order of its sum, as many as `LogHeader.workers`. With backup
workers (backup.py) an event is a batch share of a step: `worker` is its stream and `clock` its step.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from sparkring.conf.plain_text import count_of
from sparkring.conf.stored import Count, Stored, parse

FORMAT = 2
EVENTS = "servers"  # folder of a run
WORKER_BITS, TRY_BITS, CLOCK_BITS, LAG_BITS = 12, 6, 24, 20
MAX_WORKERS, MAX_TRIES, MAX_CLOCK, MAX_LAG = (1 << bits for bits in (WORKER_BITS, TRY_BITS, CLOCK_BITS, LAG_BITS))


class Kind(IntEnum):
    """What became of a gradient at this server."""

    APPLIED = 0
    SKIPPED = 1  # not finite: the step is done, and nothing changed
    UNUSED = 2  # another try of the same step was applied here, or will be


@dataclass(frozen=True)
class PushEvent:
    """`attempt`: number of the worker's try at this step."""

    kind: Kind
    worker: int
    attempt: int
    clock: int
    lag: int

    def packed(self) -> int:
        """Pack the event in 64 bits. ValueError if a field does not fit."""
        limits = ((self.worker, MAX_WORKERS), (self.attempt, MAX_TRIES), (self.clock, MAX_CLOCK), (self.lag, MAX_LAG))
        if any(not 0 <= value < limit for value, limit in limits):
            raise ValueError(
                f"{self}: does not fit in the event log, which has room for {MAX_WORKERS} workers, {MAX_TRIES} tries, "
                f"{MAX_CLOCK} steps and lags below {MAX_LAG}"
            )
        head = (self.kind << WORKER_BITS | self.worker) << TRY_BITS | self.attempt
        return (head << CLOCK_BITS | self.clock) << LAG_BITS | self.lag


def unpack(number: int) -> PushEvent:
    """Read an event from 64 bits. ValueError for an unknown kind."""
    lag, number = number % MAX_LAG, number >> LAG_BITS
    clock, number = number % MAX_CLOCK, number >> CLOCK_BITS
    attempt, number = number % MAX_TRIES, number >> TRY_BITS
    worker, kind = number % MAX_WORKERS, number >> WORKER_BITS
    return PushEvent(Kind(kind), worker, attempt, clock, lag)


class LogHeader(Stored):
    """The first line of a file of events: one server's, between two coordinated stops.

    workers: shares of a global batch, which with backup workers are fewer than the workers. bound, damp: of the attempt
    (Definition). digest: sha256 of what the server held at its end.
    """

    format: Annotated[int, Field(ge=FORMAT, le=FORMAT)] = FORMAT
    attempt: Count
    server: Count
    servers: Annotated[int, Field(ge=1)]
    workers: Annotated[int, Field(ge=1)]
    begin: Count  # steps done by every worker before the first event
    end: Count  # and after the last
    bound: Count | None
    damp: bool
    digest: str


@dataclass(frozen=True)
class LogFile:
    header: LogHeader
    events: tuple[PushEvent, ...]


def file_name(attempt: int, begin: int, end: int, server: int) -> str:
    """Return the path of a file, relative to the run's folder of event logs."""
    return f"attempt-{attempt:05d}/clocks-{begin:08d}-{end:08d}/server-{server:05d}.events"


def encode(header: LogHeader, events: Iterable[PushEvent]) -> bytes:
    numbers: NDArray[Any] = np.array([event.packed() for event in events], np.uint64)
    return header.model_dump_json().encode() + b"\n" + numbers.tobytes()


def decode(data: bytes, path: str) -> LogFile:
    """Read a file of events. ValueError names `path` where it is cut or of another format."""
    line, _, body = data.partition(b"\n")
    header = parse(LogHeader, line, f"{path}, first line")
    if len(body) % 8:
        raise ValueError(
            f"{path}: {count_of(len(body), 'byte')} of events, not a multiple of 8: the file was cut or changed"
        )
    try:
        events = tuple(unpack(number) for number in np.frombuffer(body, np.uint64).tolist())
    except ValueError as error:
        raise ValueError(f"{path}: {error}: the file was changed") from None
    return LogFile(header, events)
