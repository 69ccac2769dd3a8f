from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from sparkring.conf.storage import Storage
from sparkring.pipelines.run.process_id import ProcessId, start_ticks, this_process
from sparkring.pipelines.schedule.conditional import ConditionalFile, Found, conditional_file
from sparkring.pipelines.schedule.errors import DateTaken, LeaseLost
from sparkring.pipelines.schedule.lease import (
    Clock,
    Lease,
    LeaseRequest,
    LeaseState,
    check_free,
    held,
    read_state,
    take,
    to_be_watched_s,
)
from tests.waits import wait_for

DURATION_S = 60.0
HERE = this_process()


class FakeClock:
    """A clock that is moved by those who wait; `while_asleep` happens meanwhile."""

    def __init__(self, while_asleep: Callable[[], None] = lambda: None) -> None:
        self.now, self.slept, self.while_asleep = 0.0, list[float](), while_asleep

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds
        self.while_asleep()

    @property
    def clock(self) -> Clock:
        return Clock(lambda: self.now, self.sleep)


def request(fake: FakeClock | None = None, **changed: object) -> LeaseRequest:
    return replace(LeaseRequest("2024-03-05", DURATION_S, clock=(fake or FakeClock()).clock), **changed)  # type: ignore[arg-type]


def state(host: str = "elsewhere", pid: int = 7, **changed: object) -> LeaseState:
    holder = asdict(ProcessId(host, pid, 1))
    made = LeaseState(nonce="n", epoch=4, duration_s=DURATION_S, what="2024-03-05", since="now", **holder)
    return replace(made, **changed)  # type: ignore[arg-type]


def found_in(file: ConditionalFile) -> Found:
    found = file.read()
    assert found is not None
    return found


def dead_process() -> ProcessId:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    ticks = start_ticks(child.pid)
    assert ticks is not None
    child.communicate()
    return ProcessId(HERE.host, child.pid, ticks)


@pytest.mark.parametrize(
    ("found", "age_s", "watched_s"),
    [
        (state(), 59, None),
        (state(), 61, 20.0),
        (state(), -1, None),
        (state(), -3600, 60.0),  # the storage's clock was set back
        (state(), 3660, 20.0),  # or on: the holder has time to renew it
        (state(released=True), 0, 0.0),
        (state(**asdict(HERE)), 59, None),
        (state(**asdict(HERE)), 61, 20.0),  # it runs, but does not renew: stopped
        (state(**asdict(replace(HERE, start_ticks=1))), 0, 0.0),  # another process of that pid
        (None, 0, 60.0),
        (None, 3660, 60.0),
    ],
)
def test_a_lease_is_taken_when_its_holder_has_ended_or_is_silent(
    found: LeaseState | None, age_s: float, watched_s: float | None
) -> None:
    assert to_be_watched_s(found, age_s, DURATION_S, HERE) == watched_s


def test_a_lease_is_held_by_one_until_it_is_released(folder: Storage) -> None:
    file = conditional_file(folder, "lease.json")
    first = take(file, request())
    assert first.epoch == 1
    with pytest.raises(DateTaken, match=f"2024-03-05, process {os.getpid()} on .* holds it; try again when"):
        take(file, request())
    first.check("the model")
    first.renew()
    first.release()
    assert take(file, request()).epoch == 2
    with pytest.raises(LeaseLost, match="this job released its lease; the model is not published"):
        first.check("the model")


def test_a_lease_is_looked_at_without_being_taken(folder: Storage) -> None:
    file, fake = conditional_file(folder, "dates/lease.json"), FakeClock()
    check_free(file, request(fake))
    assert file.read() is None and not folder.exists("dates")
    with held(file, request(), lambda why: None) as lease:
        before = found_in(file).version
        with pytest.raises(DateTaken, match=f"2024-03-05, process {os.getpid()} on .* holds it; try again when"):
            check_free(file, request(fake))
        check_free(file, request(fake, replace=True))
        assert found_in(file).version == before
        lease.check("the model")
    check_free(file, request(fake))
    damaged = file.replace(b"{", found_in(file).version)
    check_free(file, request(fake))  # taking it would watch it first
    dead = replace(state(), **asdict(dead_process()))
    assert damaged is not None and file.replace(dead.to_json(), damaged)
    check_free(file, request(fake))
    assert fake.slept == []


def test_the_lease_of_a_process_that_was_killed_is_taken_at_once(folder: Storage) -> None:
    file, fake = conditional_file(folder, "lease.json"), FakeClock()
    file.create(state(**asdict(dead_process())).to_json())
    assert take(file, request(fake)).epoch == 5
    assert fake.slept == []


def test_the_lease_of_another_host_is_left_while_it_is_fresh(folder: Storage) -> None:
    file = conditional_file(folder, "lease.json")
    file.create(state().to_json())
    with pytest.raises(DateTaken, match="2024-03-05, process 7 on elsewhere, since now holds it"):
        take(file, request())


def test_who_is_silent_for_too_long_publishes_nothing_more(folder: Storage) -> None:
    """The holder is stopped past its lease; another takes it; the first goes on."""
    file, fake = conditional_file(folder, "lease.json"), FakeClock()
    stopped = take(file, replace(request(), duration_s=0.5))
    time.sleep(0.7 if folder.is_local else 2.2)  # S3 dates by whole seconds
    taker = take(file, request(fake))
    assert (taker.epoch, fake.slept) == (2, [pytest.approx(0.5 / 3)])
    for _ in range(2):
        with pytest.raises(LeaseLost, match=r"lost its lease to 2024-03-05, process .*; the model is not published"):
            stopped.check("the model")
    stopped.release()
    taker.check("the model")


def test_a_lease_that_is_renewed_while_it_is_watched_is_left(tmp_path: Path) -> None:
    """A clock that was set on by an hour makes every lease look old."""
    file = local(tmp_path)
    holder = take(file, request())
    os.utime(tmp_path / "lease.json", (0, 0))
    with pytest.raises(DateTaken, match="and renewed it"):
        take(file, request(FakeClock(holder.renew)))
    holder.check("the model")


@pytest.mark.parametrize("hours", [-1, 1])
def test_a_host_whose_clock_is_an_hour_off_neither_takes_nor_loses_a_lease(
    tmp_path: Path, hours: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, now = local(tmp_path), time.time() + hours * 3600
    with monkeypatch.context() as patch:
        patch.setattr(time, "time", lambda: now)
        holder = take(file, request())
    with pytest.raises(DateTaken):
        take(file, request())
    with monkeypatch.context() as patch:
        patch.setattr(time, "time", lambda: now)
        holder.check("the model")
        with pytest.raises(DateTaken):
            take(file, request())


def test_a_file_dated_in_the_future_is_watched_for_a_whole_lease(tmp_path: Path) -> None:
    file, fake = local(tmp_path), FakeClock()
    file.create(state().to_json())
    os.utime(tmp_path / "lease.json", (time.time() + 3600,) * 2)
    assert take(file, request(fake)).epoch == 5
    assert fake.slept == [60.0]


@pytest.mark.parametrize("garbage", [b"", b"{", b"\xff\x00", b'{"nonce": 1}', b"[]", b"null"])
def test_garbage_is_watched_and_then_replaced(folder: Storage, garbage: bytes) -> None:
    file, fake = conditional_file(folder, "lease.json"), FakeClock()
    file.create(garbage)
    assert take(file, request(fake)).epoch == 1
    assert fake.slept == [60.0]


def test_what_we_cannot_read_but_somebody_renews_is_left(tmp_path: Path) -> None:
    file = local(tmp_path)
    file.create(b'{"format": 2}')
    with pytest.raises(DateTaken, match="another job holds it"):
        take(file, request(FakeClock(lambda: (tmp_path / "lease.json").write_bytes(b'{"format": 2 }') and None)))


def test_a_lease_may_be_taken_from_one_that_holds_it(folder: Storage) -> None:
    file, fake = conditional_file(folder, "lease.json"), FakeClock()
    before = take(file, request())
    after = take(file, request(fake, replace=True))
    assert after.epoch == 2
    assert sum(fake.slept) == pytest.approx(DURATION_S, abs=1), "it begins when the other has surely ended"
    with pytest.raises(LeaseLost):
        before.renew()


def test_of_many_that_start_at_once_one_gets_the_lease(folder: Storage) -> None:
    taken, refused, barrier = list[Lease](), list[DateTaken](), threading.Barrier(8)

    def start() -> None:
        file = conditional_file(folder, "lease.json")
        barrier.wait()
        try:
            taken.append(take(file, request()))
        except DateTaken as error:
            refused.append(error)

    threads = [threading.Thread(target=start) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(taken), len(refused)) == (1, 7)


def test_a_thread_renews_the_lease_and_says_when_it_is_lost(tmp_path: Path) -> None:
    file, lost = local(tmp_path), list[str]()
    with held(file, replace(request(), duration_s=3.0), lost.append):
        wait_for(lambda: current(file).renewals >= 2)
        assert not lost
        wait_for(lambda: file.replace(state(epoch=1).to_json(), read(file).version) is not None)  # between two renewals
        wait_for(lambda: bool(lost))
    assert len(lost) == 1 and "lost its lease to 2024-03-05, process 7 on elsewhere" in lost[0]
    assert current(file) == state(epoch=1), "what another holds is not released"


def test_a_renewal_that_arrives_late_is_our_own(tmp_path: Path) -> None:
    file = local(tmp_path)
    lease = take(file, request())
    assert file.replace(replace(lease._state, renewals=1).to_json(), lease._version) is not None
    lease.check("the model")
    assert current(file).renewals == 1 and current(file).nonce == lease._state.nonce
    lease.check("the model")
    assert current(file).renewals == 2


def test_a_block_that_fails_releases_the_lease(tmp_path: Path) -> None:
    file = local(tmp_path)
    with pytest.raises(KeyError), held(file, request(), lambda why: None):
        raise KeyError("x")
    assert current(file).released


def test_storage_that_does_not_answer_loses_the_lease_when_it_ends(tmp_path: Path) -> None:
    lost, fake = list[str](), FakeClock()
    lease = take(local(tmp_path), replace(request(fake), duration_s=0.03))

    def away(*_: object) -> None:
        fake.now += 0.01
        raise OSError("no route")

    lease._file.replace = away  # type: ignore[method-assign, assignment]
    with pytest.raises(OSError, match="no route"):
        lease.check("the model")
    lease.renew_until(threading.Event(), lost.append)
    assert len(lost) == 1 and "could not be renewed for" in lost[0]
    assert fake.now >= 0.04


def local(folder: Path) -> ConditionalFile:
    from sparkring.conf.storage import open_storage

    return conditional_file(open_storage(str(folder)), "lease.json")


def read(file: ConditionalFile) -> Found:
    found = file.read()
    assert found is not None
    return found


def current(file: ConditionalFile) -> LeaseState:
    state = read_state(read(file), file.uri)
    assert state is not None
    return state


@pytest.mark.parametrize("duration_s", ["NaN", "Infinity", "-Infinity", "-1", "0", "1e300", "null", '"60"'])
def test_a_lease_of_no_possible_duration_is_damaged(duration_s: str) -> None:
    state = LeaseState(nonce="a", epoch=1, duration_s=60.0, what="w", since="s", host="h", pid=1, start_ticks=2)
    data = state.to_json()
    assert read_state(Found(data, "v", 0.0), "here") == state
    assert read_state(Found(data.replace(b"60.0", duration_s.encode()), "v", 0.0), "here") is None
