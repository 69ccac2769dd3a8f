"""Which logs a run's weights come from, after attempts that failed."""

from __future__ import annotations

from pathlib import Path

import pytest

from sparkring.conf.storage import Storage, open_storage
from sparkring.pipelines.cli.audit import server_problems
from sparkring.training.servers.event_log import EVENTS, Kind, LogHeader, PushEvent, encode, file_name
from sparkring.training.servers.segments import check_all_there, read_segments


def write(run: Storage, attempt: int, begin: int, end: int, servers: int = 2, workers: int = 2, lost: int = 0) -> None:
    """Logs of every server, without the last `lost` pushes of the first."""
    for server in range(servers):
        header = LogHeader(
            attempt=attempt,
            server=server,
            servers=servers,
            workers=workers,
            begin=begin,
            end=end,
            bound=0,
            damp=False,
            digest="d",
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
    check_all_there(read_segments(run.at(EVENTS)), 20, "here")
    with pytest.raises(ValueError, match="here: there are no logs of steps 20 to 25: they are missing, or that part"):
        check_all_there(read_segments(run.at(EVENTS)), 25, "here")
    assert server_problems(run, range(20)) == []


def test_an_attempt_that_began_anew_leaves_nothing_of_those_before(run: Storage) -> None:
    write(run, 1, 0, 5)
    write(run, 2, 0, 7, workers=1)
    assert spans(run) == [(2, 0, 7)]


def test_logs_that_a_dying_server_did_not_write_are_no_problem_once_the_next_attempt_has_gone_on(run: Storage) -> None:
    write(run, 1, 0, 5)
    write(run, 1, 5, 10)
    run.at(EVENTS).delete(file_name(1, 5, 10, 1))
    assert len(server_problems(run, range(10))) == 1
    write(run, 2, 5, 10)
    assert spans(run) == [(1, 0, 5), (2, 5, 10)] and server_problems(run, range(10)) == []


def test_logs_that_are_missing_are_named(run: Storage) -> None:
    assert server_problems(run, []) == []
    (problem,) = server_problems(run, range(3))
    assert problem.endswith("servers logged nothing of 3 steps, such as [0, 1, 2]")
    with pytest.raises(ValueError, match=r"no event logs; only runs with parallel\.servers have them"):
        read_segments(run.at(EVENTS))
    write(run, 1, 0, 5)
    write(run, 1, 8, 9)
    with pytest.raises(ValueError, match="here: there are no logs of steps 5 to 8: they are missing, or"):
        check_all_there(read_segments(run.at(EVENTS)), 9, "here")
    (problem,) = server_problems(run, range(10))
    assert problem.endswith("servers logged nothing of 4 steps, such as [5, 6, 7, 9]")
    assert server_problems(run, [*range(5), 8]) == [], "the others were not on servers"
    run.at(EVENTS).delete(file_name(1, 8, 9, 1))
    with pytest.raises(ValueError, match="attempt 1, steps 8 to 9: not one log of each server"):
        read_segments(run.at(EVENTS))
    assert len(server_problems(run, range(5))) == 1


def test_a_push_that_a_server_lacks_is_a_problem_of_the_audit(run: Storage) -> None:
    write(run, 1, 0, 5, lost=1)
    (problem,) = server_problems(run, range(5))
    assert "attempt 1: server 0, steps 0 to 5: 9 pushes of 10; not once: (step, rank) [(4, 1)]" in problem
