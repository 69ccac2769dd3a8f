"""An asynchronous run, with real servers and connections, comes out the same in one thread."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sparkring.training.servers.client import Client, cut_gradient
from sparkring.training.servers.event_log import Kind, LogFile, PushEvent
from sparkring.training.servers.replay import check_whole, replay
from tests.training.servers.toy import (
    WORKERS,
    connect,
    definition,
    fresh_shards,
    gradient_of,
    ids_of,
    jittered,
    read_logs,
    run_all,
    run_clock,
    servers,
    start_weights,
)

CLOCKS = 40
RUNS: dict[str, dict[str, Any]] = {
    "0": {"bound": 0},
    "1": {"bound": 1},
    "3": {"bound": 3},
    "none": {"bound": None},
    "none, rejected": {"bound": None, "max_lag": 3},
    "3, damped": {"bound": 3, "damp": True, "rule": "adam"},
}


@pytest.mark.parametrize("name", RUNS)
def test_a_run_is_made_again_from_its_logs_bit_for_bit(name: str, tmp_path: Path) -> None:
    """Four workers, three servers, jitter, one three times as slow, a tenth of the pushes sent twice."""
    given, settings = definition(4, **RUNS[name]), RUNS[name]
    with servers(3, 4, tmp_path) as made:

        def behind_at_first(client: Client, clock: int) -> None:
            """Hold worker 3's first gradient until the others are as far ahead as they may be."""
            if (client.worker, clock) == (3, 0):
                ahead = 8 if given.bound is None else given.bound + 1
                while given.bound != 0 and min(max(server.shard.applied) for server in made) < ahead:
                    time.sleep(0.005)

        run_all(made, given, CLOCKS, jittered(0.1, straggler=3, before_push=behind_at_first))
        digests = [server.shard.digest() for server in made]
        counts = [server.shard.counts for server in made]
    logs = read_logs(tmp_path, CLOCKS, 3)
    assert [log.header.digest for log in logs] == digests
    shards = fresh_shards(given, 3)
    replay(shards, logs, WORKERS)
    assert [shard.digest() for shard in shards] == digests
    for count in counts:
        assert count.applied == 4 * CLOCKS and count.repeated > 0
        if settings["bound"] is None:
            assert max(count.gaps) >= 7, "without a bound, the fast ones run ahead"
        else:
            assert set(count.gaps) == set(range(settings["bound"] + 1))
        assert max(count.lags) <= (given.lag_limit if given.lag_limit is not None else 10**6)
    if "rejected" in name:
        assert sum(count.rejected for count in counts) > 0 and max(max(count.lags) for count in counts) <= 3


def test_pushes_that_reached_some_servers_before_their_worker_died_are_made_again_too(tmp_path: Path) -> None:
    """Each server has every clock once, of whichever try came first."""
    given, clocks = definition(3, bound=2), 30

    def work(made: Any, worker: int) -> None:
        client = connect(made, worker, given)
        clock, attempt = 0, 0
        while clock < clocks:
            if (clock * 7 + worker) % 5 == 0 and attempt < 2:
                torn(client, clock, attempt, reached=1 + (clock + attempt) % 2)
                client.close()
                client = connect(made, worker, given)
                clock, attempt, _ = client.restart()
                continue
            run_clock(client, clock, attempt)
            clock, attempt = clock + 1, 0

    with servers(3, 3, tmp_path) as made:
        first = connect(made, 0, given)
        first.load_dense(start_weights(), {})
        first.begin(0)
        threads = [threading.Thread(target=work, args=(made, worker)) for worker in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        first.write_logs(clocks)
        digests = [server.shard.digest() for server in made]
    logs = read_logs(tmp_path, clocks, 3)
    assert sum(event.kind == Kind.UNUSED for log in logs for event in log.events) > 10
    tries = [{(e.worker, e.clock): e.attempt for e in log.events if e.kind == Kind.APPLIED} for log in logs]
    assert any(tries[0][key] != tries[2][key] for key in tries[0]), "no push was torn"
    shards = fresh_shards(given, 3)
    replay(shards, logs, WORKERS)
    assert [shard.digest() for shard in shards] == digests


def torn(client: Client, clock: int, attempt: int, reached: int) -> None:
    """Push to the first servers only."""
    pulled = client.pull(clock, attempt, ids_of(client.worker, clock))
    gradient = gradient_of(client.worker, clock, pulled)
    pushes = cut_gradient(gradient, client.definition, client.worker, clock, attempt, pulled.versions)
    whole = client.connections
    client.connections = whole[:reached]
    client.push(pushes[:reached])
    client.connections = whole


def changed(log: LogFile, events: list[PushEvent]) -> LogFile:
    return replace(log, events=tuple(events))


def test_a_log_that_was_changed_is_found(tmp_path: Path) -> None:
    given = definition(3, bound=2)
    with servers(2, 3, tmp_path) as made:

        def behind_at_first(client: Client, clock: int) -> None:
            """Hold worker 2's first gradient until another was applied, so that its lag is not 0."""
            while (client.worker, clock) == (2, 0) and not all(max(server.shard.applied) for server in made):
                time.sleep(0.005)

        run_all(made, given, 10, jittered(0.0, straggler=2, before_push=behind_at_first))
    logs = read_logs(tmp_path, 10, 2)
    events = list(logs[0].events)
    with pytest.raises(ValueError, match=r"29 pushes of 30; not once"):
        replay(fresh_shards(given, 2), [changed(logs[0], events[:-1]), logs[1]], WORKERS)
    with pytest.raises(ValueError, match="not once"):
        check_whole([changed(logs[0], [*events[:-1], events[0]])])
    lag = next(n for n, event in enumerate(events) if event.lag > 0)
    other = replace(events[lag], lag=events[lag].lag - 1)
    shards = fresh_shards(given, 2)
    try:
        replay(shards, [changed(logs[0], [*events[:lag], other, *events[lag + 1 :]]), logs[1]], WORKERS)
    except ValueError:
        return
    assert shards[0].digest() != logs[0].header.digest
