"""A lease: who may work on a date and publish what it makes. It is renewed by a thread, and checked by a write.

A lease ends by its holder (released), with its holder's process (on the same host), or when it is not renewed for
`duration_s`. No host's clock decides that: its age is the storage's, and before another takes it, it is watched and
must stay as it is. Taking raises `epoch`; the holder before cannot write its next renewal, so it learns that it lost.
"""

from __future__ import annotations

import json
import logging
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from typing import Annotated

from pydantic import Field

from sparkring.conf.stored import CLOSED, Count, Label, StoredError, parse
from sparkring.pipelines.run.process_id import ProcessId, is_running, this_process
from sparkring.pipelines.schedule.conditional import ConditionalFile, Found
from sparkring.pipelines.schedule.errors import DateTaken, LeaseLost

log = logging.getLogger(__name__)
RENEWALS = 3  # in the time after which a lease that is not renewed can be taken
CLOCK_STEP_S = 2.0  # by which an age may be below zero: S3 dates objects and answers by whole seconds
RACES = 3
LONGEST_S = 7 * 86400.0  # of a lease: one that is damaged, or forged, ends too


@dataclass(frozen=True, kw_only=True)
class LeaseState:
    """The content of a lease's file."""

    __pydantic_config__ = CLOSED

    nonce: Label  # of this taking of the lease
    epoch: Count  # how many times it was taken
    renewals: Count = 0
    released: bool = False
    duration_s: Annotated[float, Field(gt=0, le=LONGEST_S, allow_inf_nan=False)]
    what: Label  # the job, for people
    since: Label  # by the holder's clock, for people
    host: Label  # with pid and start_ticks: the ProcessId of the holder
    pid: Count
    start_ticks: Count

    def to_json(self) -> bytes:
        return (json.dumps(asdict(self)) + "\n").encode()

    @property
    def holder(self) -> ProcessId:
        return ProcessId(self.host, self.pid, self.start_ticks)

    def __str__(self) -> str:
        return f"{self.what}, process {self.pid} on {self.host.partition('/')[0]}, since {self.since}"


@dataclass(frozen=True)
class Clock:
    """Time of this process."""

    monotonic: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep


@dataclass(frozen=True)
class LeaseRequest:
    """Who asks for a lease: `what` it will do, for how long without renewal; `replace`: take it from its holder."""

    what: str
    duration_s: float
    replace: bool = False
    clock: Clock = field(default_factory=Clock)


def read_state(found: Found, uri: str) -> LeaseState | None:
    """Parse the lease; None if the file is damaged, or of a newer version."""
    try:
        return parse(LeaseState, found.data, uri)
    except StoredError as error:
        log.warning("%s; nobody can be asked about this lease", error)
        return None


def to_be_watched_s(state: LeaseState | None, age_s: float, duration_s: float, here: ProcessId) -> float | None:
    """Return seconds a stale lease must stay unchanged before takeover; None while it is held.

    Args:
        state: content of the lease; None if its file is damaged.
        age_s: age since it was written, by the storage's clock.
        duration_s: duration of the requested lease.
        here: identity of this process.
    """
    if state is None:
        return duration_s
    if state.released or is_running(state.holder, here) is False:
        return 0.0
    if age_s < -CLOCK_STEP_S:  # the storage's clock was set back: its age says nothing
        return state.duration_s
    return None if age_s <= state.duration_s else state.duration_s / RENEWALS


def check_free(file: ConditionalFile, request: LeaseRequest) -> None:
    """Raise DateTaken if `take` would find the lease held. Writes and waits for nothing."""
    found = file.read()
    state = read_state(found, file.uri) if found is not None else None
    if found is None or state is None or request.replace:
        return
    if to_be_watched_s(state, found.age_s, request.duration_s, this_process()) is None:
        raise _taken(file, state)


def _taken(file: ConditionalFile, state: LeaseState | None) -> DateTaken:
    return DateTaken(f"{file.uri}: {state} holds it; try again when that has ended")


def take(file: ConditionalFile, request: LeaseRequest) -> Lease:
    """Take the lease. DateTaken where another holds it."""
    here = this_process()
    new = LeaseState(
        nonce=uuid.uuid4().hex,
        epoch=1,
        duration_s=request.duration_s,
        what=request.what,
        since=datetime.now(UTC).isoformat(timespec="seconds"),
        **asdict(here),
    )
    for _ in range(RACES):
        found = file.read()
        if found is None:
            version = file.create(new.to_json())
        else:
            state = read_state(found, file.uri)
            new = replace(new, epoch=state.epoch + 1 if state else 1)
            version = _take_over(file, request, found, state, new)
        if version is not None:
            return Lease(file, new, version, request.clock)
    raise DateTaken(f"{file.uri}: several jobs try to take this lease at the same time; try again later")


def _take_over(
    file: ConditionalFile, request: LeaseRequest, found: Found, state: LeaseState | None, new: LeaseState
) -> str | None:
    """Write `new` over a lease that ended, or is to be replaced; None if another was first.

    Args:
        file: file of the lease.
        request: request, as for `take`.
        found: file content as read.
        state: parsed lease; None if it is damaged.
        new: lease to write.
    """
    wait_s = to_be_watched_s(state, found.age_s, request.duration_s, this_process())
    if wait_s is None and state is not None and request.replace:
        version = file.replace(new.to_json(), found.version)
        if version is not None:
            log.warning("%s: taken from %s, which ends; waiting for that", file.uri, state)
            _wait_for_end(state, request.clock)
        return version
    if wait_s is None:
        raise _taken(file, state)
    if wait_s:
        log.warning("%s: not renewed for %.0f s; watched for %.0f s, then taken", file.uri, found.age_s, wait_s)
        request.clock.sleep(wait_s)
        now = file.read()
        if now is not None and now.version != found.version:
            raise DateTaken(
                f"{file.uri}: {read_state(now, file.uri) or 'another job'} holds it, and renewed it just now"
            )
    return file.replace(new.to_json(), found.version)


def _wait_for_end(state: LeaseState, clock: Clock) -> None:
    """Wait until the former holder has ended, at most as long as it may take to find out that it lost its lease."""
    until, here = clock.monotonic() + state.duration_s, this_process()
    while clock.monotonic() < until and is_running(state.holder, here) is not False:
        clock.sleep(0.2)


class Lease:
    """A lease that this process took."""

    def __init__(self, file: ConditionalFile, state: LeaseState, version: str, clock: Clock) -> None:
        self._file, self._state, self._version, self._clock = file, state, version, clock
        self._renewed_at, self._lost = clock.monotonic(), ""
        self._lock = threading.Lock()

    @property
    def epoch(self) -> int:
        return self._state.epoch

    def check(self, what: str) -> None:
        """Check, by renewing it, that the lease is held. Raises as `renew`; `what`: is to be published."""
        try:
            self.renew()
        except LeaseLost as error:
            raise LeaseLost(f"{error}; {what} is not published") from None

    def renew(self) -> None:
        """Renew the lease. LeaseLost if another took it; OSError if the storage does not answer."""
        with self._lock:
            if not self._lost:
                self._write(replace(self._state, renewals=self._state.renewals + 1))
            if self._lost:
                raise LeaseLost(self._lost)

    def _write(self, state: LeaseState) -> None:
        version = self._file.replace(state.to_json(), self._version)
        if version is None:
            found = self._file.read()
            other = read_state(found, self._file.uri) if found is not None else None
            if found is not None and other is not None and other.nonce == state.nonce:
                # A write of our own, given up for lost, that arrived after we had looked for it.
                version = self._file.replace(state.to_json(), found.version)
        if version is None:
            self._lost = f"{self._file.uri}: this job lost its lease to {other or 'a writer of something else'}"
            return
        self._state, self._version, self._renewed_at = state, version, self._clock.monotonic()

    def release(self) -> None:
        """Release it for others at once. Errors are only logged: the lease ends by itself."""
        try:
            with self._lock:
                if not self._lost:
                    self._write(replace(self._state, released=True))
                    self._lost = self._lost or f"{self._file.uri}: this job released its lease"
        except OSError as error:
            log.warning("%s: not released: %s", self._file.uri, error)

    def renew_until(self, stop: threading.Event, on_lost: Callable[[str], None]) -> None:
        """Renew the lease again and again; `on_lost(why)` is called once where that is not possible any more."""
        while not stop.wait(self._state.duration_s / RENEWALS):
            try:
                self.renew()
            except LeaseLost as error:
                return on_lost(str(error))
            except OSError as error:
                silent_s = self._clock.monotonic() - self._renewed_at
                if silent_s > self._state.duration_s:
                    return on_lost(f"{self._file.uri}: could not be renewed for {silent_s:.0f} s: {error}")
                log.warning("%s: not renewed, will be tried again: %s", self._file.uri, error)


@contextmanager
def held(file: ConditionalFile, request: LeaseRequest, on_lost: Callable[[str], None]) -> Iterator[Lease]:
    """Take a lease, renew it during the block, and release it. DateTaken where another holds it."""
    lease, stop = take(file, request), threading.Event()
    thread = threading.Thread(target=lease.renew_until, args=(stop, on_lost), name="lease", daemon=True)
    thread.start()
    try:
        yield lease
    finally:
        stop.set()
        thread.join()
        lease.release()
