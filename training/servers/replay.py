"""Do again, in one thread, what workers and servers did together: from their event logs, to the same bits.

A gradient depends on the version of each server at its pull, and a server's state on its pushes in their order. Both
are in the logs, so any order that keeps to them gives the same: one that the run itself went through exists.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from numpy.typing import NDArray

from sparkring.conf.plain_text import count_of
from sparkring.training.servers.client import Gradient, Pulled, cut_gradient, route_of
from sparkring.training.servers.event_log import Kind, LogFile, PushEvent
from sparkring.training.servers.messages import ShardStatus
from sparkring.training.servers.shard import Push, ServerShard
from sparkring.training.tables.hashing import Ids


@dataclass(frozen=True)
class Try:
    """A worker's computation of one step's gradient. `step`: sets the rate; None: `clock` does."""

    worker: int
    clock: int
    attempt: int
    step: int | None = None


@dataclass(frozen=True)
class Workers:
    """What workers do, without any.

    ids: by table the distinct ids of a worker's batch of a step. gradient: of a try, with what it pulled. factor: with
    bound 0, what a step's sum is multiplied by, from its sum of squares and whether all pushes were finite.
    """

    ids: Callable[[int, int], list[Ids]]
    gradient: Callable[[Try, Pulled], Gradient]
    factor: Callable[[float, bool], float]


@dataclass
class _Open:
    """A try that is not yet applied everywhere: what it has pulled, by server, and its pushes."""

    parts: dict[int, tuple[int, torch.Tensor, list[NDArray[Any]]]] = field(default_factory=dict)
    pushes: list[Push] | None = None
    uses: int = 0  # servers that will apply it


def replay(shards: Sequence[ServerShard], logs: Sequence[LogFile], workers: Workers) -> None:
    """Apply the logs of all servers between two coordinated stops. ValueError if they do not match.

    Args:
        shards: server shards at the first stop, changed in place.
        logs: logs of one segment, by server.
        workers: recompute the gradients.
    """
    spans = {(log.header.begin, log.header.end, log.header.workers) for log in logs}
    if len(spans) != 1 or len(logs) != len(shards):
        raise ValueError(
            f"event logs of {count_of(len(logs), 'server')} for {len(shards)}, of steps and workers {sorted(spans)}"
        )
    ((begin, end, count),) = spans
    check_whole(logs)
    if shards[0].definition.synchronous:
        _replay_sums(shards, range(begin, end), count, logs[0], workers)
        return
    _Replay(shards, logs, workers).run()
    for shard, log in zip(shards, logs, strict=True):
        if done_of(shard.take_events()) != done_of(log.events):
            raise ValueError(f"server {log.header.server}: the log of steps {begin} to {end} is not what they give")


def done_of(events: Iterable[PushEvent]) -> list[PushEvent]:
    return [event for event in events if event.kind != Kind.UNUSED]


def check_whole(logs: Sequence[LogFile]) -> None:
    """Raise ValueError unless every server did each (worker, step) of the segment exactly once."""
    for log in logs:
        head = log.header
        done = [(event.clock, event.worker) for event in done_of(log.events)]
        due = [(clock, worker) for clock in range(head.begin, head.end) for worker in range(head.workers)]
        if sorted(done) != due:
            odd = sorted(set(done) ^ set(due)) or sorted(each for each in set(done) if done.count(each) > 1)
            raise ValueError(
                f"server {head.server}, steps {head.begin} to {head.end}: {count_of(len(done), 'push')} of "
                f"{len(due)}; not once: (step, rank) {odd[:3]}"
            )


def _replay_sums(shards: Sequence[ServerShard], clocks: range, count: int, log: LogFile, workers: Workers) -> None:
    """Repeat steps of bound 0 with the gradients that one server's log names; all servers had the same.

    With backup workers these belong to several steps. ValueError if a step does not end as logged.

    Args:
        shards: server shards, one per server.
        clocks: steps to repeat.
        count: number of gradients per step.
        log: event log of one server.
        workers: recompute the gradients.
    """
    done = done_of(log.events)
    for clock in clocks:
        versions = tuple(shard.version for shard in shards)
        made = done[(clock - clocks.start) * count : (clock - clocks.start + 1) * count]
        for number, event in enumerate(made):
            ids = workers.ids(event.worker, event.clock)
            one = Try(event.worker, event.clock, event.attempt, clock)
            gradient = workers.gradient(one, pull_all(shards, ids))
            for shard, push in zip(shards, _pushes(shards, gradient, Try(number, clock, 0), versions), strict=True):
                shard.push(push)
        answers = [answer for shard in shards if (answer := shard.answer(clock)) is not None]
        factor = workers.factor(sum(squares for squares, _ in answers), all(bad is None for _, bad in answers))
        for shard in shards:
            shard.settle(clock, factor)
            kinds = [event.kind for event in done_of(shard.take_events())]
            if kinds != [event.kind for event in made]:
                raise ValueError(
                    f"step {clock}: the log says that it was {made[0].kind.name}, and it comes out otherwise"
                )


def _pushes(shards: Sequence[ServerShard], gradient: Gradient, one: Try, versions: Sequence[int]) -> list[Push]:
    return cut_gradient(gradient, shards[0].definition, one.worker, one.clock, one.attempt, versions)


def pull_all(shards: Sequence[ServerShard], ids: Sequence[Ids]) -> Pulled:
    """Pull from servers in this process, as they are now."""
    route = route_of(ids, len(shards))
    parts = [shard.look_up(route.of_server(number, route.ids)) for number, shard in enumerate(shards)]
    weights = torch.cat([shard.weights for shard in shards])
    return Pulled(tuple(shard.version for shard in shards), weights, route.restored(parts))


class _Replay:
    def __init__(self, shards: Sequence[ServerShard], logs: Sequence[LogFile], workers: Workers) -> None:
        self.shards, self.workers = shards, workers
        self.events = [log.events for log in logs]
        self.at = [0] * len(shards)  # next event, by server
        self.open: dict[Try, _Open] = {}
        self.pulls: list[dict[int, list[Try]]] = [{} for _ in shards]  # by server and version
        for events in self.events:
            for event in events:
                if event.kind == Kind.APPLIED:
                    self.open.setdefault(_try(event), _Open()).uses += 1
        for server, events in enumerate(self.events):
            version = shards[server].version
            for event in events:
                if event.kind != Kind.SKIPPED and _try(event) in self.open:
                    self.pulls[server].setdefault(version - event.lag, []).append(_try(event))
                version += event.kind == Kind.APPLIED

    def run(self) -> None:
        for server in range(len(self.shards)):
            self._pull(server)
        moved = True
        while moved:
            moved = False
            for server in range(len(self.shards)):
                while self._next(server):
                    moved = True
        for server, events in enumerate(self.events):
            if self.at[server] < len(events):
                event = events[self.at[server]]
                have = sorted(self.open[_try(event)].parts)
                raise ValueError(f"server {server}: {event} cannot be made again: its pulls are known of {have} only")

    def _next(self, server: int) -> bool:
        """Replay a server's next event, if all that it depends on is done."""
        if self.at[server] == len(self.events[server]):
            return False
        event, shard = self.events[server][self.at[server]], self.shards[server]
        if event.kind == Kind.SKIPPED:
            shard.push(_not_finite(event, shard))
        elif event.kind == Kind.APPLIED:
            state = self.open[_try(event)]
            if state.pushes is None and not self._compute(_try(event), state):
                return False
            assert state.pushes is not None
            if shard.push(state.pushes[server]) is not ShardStatus.APPLIED:
                raise ValueError(f"server {server}: {event} is not applied when it is made again")
            state.uses -= 1
            if not state.uses:
                del self.open[_try(event)]
            self._pull(server)
        self.at[server] += 1
        return True

    def _pull(self, server: int) -> None:
        """Keep what a server holds now for the tries that pulled this version."""
        shard = self.shards[server]
        for one in self.pulls[server].pop(shard.version, ()):
            if one in self.open:
                route = route_of(self.workers.ids(one.worker, one.clock), len(self.shards))
                rows = shard.look_up(route.of_server(server, route.ids))
                self.open[one].parts[server] = (shard.version, shard.weights.clone(), rows)

    def _compute(self, one: Try, state: _Open) -> bool:
        if len(state.parts) < len(self.shards):
            return False
        parts = [state.parts[server] for server in range(len(self.shards))]
        route = route_of(self.workers.ids(one.worker, one.clock), len(self.shards))
        versions = tuple(version for version, _, _ in parts)
        weights = torch.cat([weights for _, weights, _ in parts])
        gradient = self.workers.gradient(one, Pulled(versions, weights, route.restored([rows for _, _, rows in parts])))
        state.pushes = _pushes(self.shards, gradient, one, versions)
        state.parts = {}
        return True


def _try(event: PushEvent) -> Try:
    return Try(event.worker, event.clock, event.attempt)


def _not_finite(event: PushEvent, shard: ServerShard) -> Push:
    """Make a push that the server skips as it skipped the event's."""
    zeros, version = torch.zeros_like(shard.weights), shard.version - event.lag
    return Push(event.worker, event.clock, event.attempt, version, math.nan, 0.0, zeros)
