"""Which logs a run's weights come from, after attempts that failed."""

from __future__ import annotations

from pathlib import Path

import pytest

from sparkring.conf.storage import Storage, open_storage
from sparkring.pipelines.audit import server_problems
from sparkring.training.servers.event_log import EVENTS, Kind, LogHeader, PushEvent, encode, file_name
from sparkring.training.servers.segments import check_all_there, read_segments


def write(run: Storage, attempt: int, begin: int, end: int, servers: int = 2, workers: int = 2, lost: int = 0) -> None:
    """Logs of every server, without the last `lost` pushes of the first."""
    for server in range(servers):
        header = LogHeader(
            attempt=attempt, server=server, servers=servers, workers=workers, begin=begin, end=end, digest="d"
        )
        events = [PushEvent(Kind.APPLIED, w, 0, clock, 0) for clock in range(begin, end) for w in range(workers)]
        kept = events[: len(events) - lost] if server == 0 else events
        run.at(EVENTS).put_atomic(file_name(attempt, begin, end, server), encode(header, kept))


@pytest.fixture
def run(tmp_path: Path) -> Storage:
    return open_storage(str(tmp_path))


def spans(run: Storage) -> list[tuple[int, int, int]]:
    return [(each.attempt, each.begin, each.end) for each in read_segments(run.at(EVENTS))]


def test_what_an_attempt_did_after_the_checkpoint_that_the_next_began_with_counts_for_nothing(run: Storage) -> None:
    for begin, end in ((0, 5), (5, 10), (10, 12)):
        write(run, 1, begin, end)
    write(run, 3, 5, 9, servers=3)
    write(run, 3, 9, 20, servers=3)
    assert spans(run) == [(1, 0, 5), (3, 5, 9), (3, 9, 20)]
    check_all_there(read_segments(run.at(EVENTS)), "here")
    assert server_problems(run) == []


def test_an_attempt_that_began_anew_leaves_nothing_of_those_before(run: Storage) -> None:
    write(run, 1, 0, 5)
    write(run, 2, 0, 7, workers=1)
    assert spans(run) == [(2, 0, 7)]


def test_logs_that_a_dying_server_did_not_write_are_no_problem_once_the_next_attempt_has_gone_on(run: Storage) -> None:
    write(run, 1, 0, 5)
    write(run, 1, 5, 10)
    run.at(EVENTS).delete(file_name(1, 5, 10, 1))
    assert len(server_problems(run)) == 1
    write(run, 2, 5, 10)
    assert spans(run) == [(1, 0, 5), (2, 5, 10)] and server_problems(run) == []


def test_steps_of_the_ring_between_two_attempts_on_servers_are_no_problem(run: Storage) -> None:
    write(run, 1, 0, 5)
    write(run, 3, 8, 9)
    assert server_problems(run, {1: {*range(5)}, 2: {5, 6, 7}, 3: {8}}) == []
    for recorded in ({2: {5, 7}}, {1: {5, 6, 7}}, {3: {5, 6, 7}}, {4: {5, 6, 7}}):
        assert len(server_problems(run, recorded)) == 1
    write(run, 3, 8, 9, lost=8)
    assert len(server_problems(run, {2: {5, 6, 7}})) == 1


def test_logs_that_are_missing_are_named(run: Storage) -> None:
    assert server_problems(run) == []
    with pytest.raises(ValueError, match=r"no event logs; only runs with parallel\.servers have them"):
        read_segments(run.at(EVENTS))
    write(run, 1, 0, 5)
    write(run, 1, 8, 9)
    with pytest.raises(ValueError, match="here: the logs of clocks 5 to 8 are missing"):
        check_all_there(read_segments(run.at(EVENTS)), "here")
    assert [p for p in server_problems(run) if "servers logged nothing of steps 5 to 8" in p]
    run.at(EVENTS).delete(file_name(1, 8, 9, 1))
    with pytest.raises(ValueError, match="attempt 1, clocks 8 to 9: not one log of each server"):
        read_segments(run.at(EVENTS))
    assert len(server_problems(run)) == 1


def test_a_push_that_a_server_lacks_is_a_problem_of_the_audit(run: Storage) -> None:
    write(run, 1, 0, 5, lost=1)
    (problem,) = server_problems(run)
    assert "attempt 1: server 0, clocks 0 to 5: 9 pushes of 10; not once: (clock, rank) [(4, 1)]" in problem
