"""Which parts make which steps, for workers of any speed: simulated by events, without processes."""

from __future__ import annotations

import heapq
import random
from collections import Counter
from dataclasses import dataclass, field

import pytest

from sparkring.training.data.batch import BatchShare
from sparkring.training.parallel.servers.backup import BackupStrategy
from sparkring.training.servers.backup import AHEAD, PATIENCE, Backup, StepOutcome

STEPS = 120


@dataclass
class Simulated:
    """Workers that take, compute and give as BackupStrategy does. Times are in a part's usual seconds."""

    workers: int
    backup: int
    meetings: list[int]  # sorted; the last is the end
    slow: dict[int, float] = field(default_factory=dict)  # worker -> times slower
    jitter: float = 0.0
    deaths: float = 0.0  # share of parts whose worker dies, before or after all servers had its gradient
    seed: int = 0

    def run(self) -> Simulated:
        draw = random.Random(self.seed)
        self.made = Backup(self.workers, self.backup, 0)
        self.steps: dict[int, list[tuple[int, BatchShare]]] = {}
        self.heard: list[list[StepOutcome]] = [[] for _ in range(self.workers)]
        self.now_s, self.made_at = 0.0, dict[int, float]()
        self.computed: Counter[int] = Counter()  # by worker
        at = [0] * self.workers  # step of each worker
        waiting: set[int] = set()
        asking: set[int] = set()
        events: list[tuple[float, int, int]] = []  # (when, worker, step of the gradient that is done; -1: none)
        for worker in range(self.workers):
            heapq.heappush(events, (0.0, worker, -1))
        while events:
            self.now_s, worker, step = heapq.heappop(events)
            if step >= 0:
                dies = draw.random() < self.deaths
                if not (dies and draw.random() < 0.5):
                    self.made.ready(worker, step)
                if dies:
                    at[worker] = self.made.restart(worker)
                    self.heard[worker] += [StepOutcome(0, None, frozenset())] * (at[worker] - len(self.heard[worker]))
                    heapq.heappush(events, (self.now_s + 1, worker, -1))
                else:
                    waiting.add(worker)
            elif at[worker] < self.meetings[-1]:
                asking.add(worker)
            for each in sorted(asking):
                limit = next(meeting for meeting in self.meetings if meeting > at[each])
                if not self.made.may_take(each, at[each], limit):
                    continue
                asking.remove(each)
                part = self.made.take(each, at[each], limit)
                if part is None:
                    waiting.add(each)
                else:
                    assert part.clock < min(at[each] + AHEAD, limit)
                    self.computed[each] += 1
                    took = self.slow.get(each, 1.0) * draw.lognormvariate(0, self.jitter)
                    heapq.heappush(events, (self.now_s + took, each, at[each]))
            chosen = self.made.chosen(self.made.step)
            if chosen is not None:
                self.steps[self.made.step] = chosen
                self.made_at[self.made.step] = self.now_s
                self.made.made(self.made.step, 1.0, None)
                if self.made.step in self.meetings:
                    self.made.cut(self.made.step)
                for each in sorted(asking):  # they hear of it
                    heapq.heappush(events, (self.now_s, each, -1))
            for each in sorted(waiting):
                if self.made.step > at[each]:
                    outcome = self.made.outcome(each, at[each])
                    assert outcome is not None
                    self.heard[each].append(outcome)
                    at[each] += 1
                    waiting.remove(each)
                    heapq.heappush(events, (self.now_s, each, -1))
        return self


def check_whole(found: Simulated) -> None:
    """Each step has n different parts, every part is in one step, and nothing is beyond a meeting before it."""
    parts = found.workers - found.backup
    assert sorted(found.steps) == list(range(STEPS))
    every = [part for chosen in found.steps.values() for _, part in chosen]
    assert Counter(every) == Counter(BatchShare(clock, stream) for clock in range(STEPS) for stream in range(parts))
    for step, chosen in found.steps.items():
        assert len({worker for worker, _ in chosen}) == parts and chosen == sorted(chosen, key=lambda each: each[1])
        meeting = next(meeting for meeting in found.meetings if meeting > step)
        before = max((meeting for meeting in found.meetings if meeting <= step), default=0)
        assert all(before <= part.clock < min(meeting, step + AHEAD) for _, part in chosen)


@pytest.mark.parametrize("seed", range(40))
def test_every_part_makes_one_step_whatever_the_workers_do(seed: int) -> None:
    draw = random.Random(seed)
    workers = draw.randint(2, 9)
    found = Simulated(
        workers,
        draw.randint(1, workers // 2),
        sorted({STEPS, *(draw.randint(1, STEPS) for _ in range(draw.choice([0, 1, 5, 30])))}),
        {0: draw.choice([1.0, 3.0, 50.0])},
        draw.choice([0.0, 0.5, 2.0]),
        draw.choice([0.0, 0.1]),
        seed,
    ).run()
    check_whole(found)
    assert all(len(heard) == STEPS for heard in found.heard), "every worker hears of every step"
    assert not found.made._outcomes, "what all have heard of is dropped"  # else it grows by 100 bytes a step for ever


def test_a_worker_that_is_always_slow_costs_nothing() -> None:
    found = Simulated(4, 1, [STEPS], {1: 3.0}).run()
    check_whole(found)
    assert found.made_at[STEPS - 1] < 1.1 * STEPS and found.made.late[1] >= STEPS / 3 - 5
    alone = Simulated(4, 1, [*range(10, STEPS + 1, 10)], {1: 3.0}).run()
    assert found.made_at[STEPS - 1] <= alone.made_at[STEPS - 1] < 1.4 * STEPS, (
        "before a meeting too few parts are left to choose from"
    )


def test_who_jitters_is_waited_for_less() -> None:
    """The mean of the largest of five and of the second largest of six lognormal times (sigma 0.5)."""
    found, rest = Simulated(6, 1, [STEPS], jitter=0.5).run(), Simulated(6, 2, [STEPS], jitter=0.5).run()
    check_whole(found)
    assert (
        1.3 * STEPS < found.made_at[STEPS - 1] < 1.75 * STEPS
        and rest.made_at[STEPS - 1] < 0.85 * found.made_at[STEPS - 1]
    )


def test_without_slow_workers_each_keeps_to_its_own_stream() -> None:
    found = Simulated(5, 1, [STEPS], jitter=0.05).run()
    foreign = [part for chosen in found.steps.values() for worker, part in chosen if part.stream != worker < 4]
    assert len(foreign) < 0.15 * 4 * STEPS, "else every rank would read what all of them do"


def test_a_late_part_goes_to_another_worker_after_a_while() -> None:
    made = Backup(3, 1, 0)  # two streams
    assert [made.take(worker, 0, 9) for worker in range(3)] == [BatchShare(0, 0), BatchShare(0, 1), BatchShare(1, 0)]
    for step in range(PATIENCE):
        made.ready(0, step)
        made.ready(2, step)
        assert made.chosen(step) is not None
        made.made(step, 0.0, None)
        made.take(0, step + 1, 9)
        made.take(2, step + 1, 9)
    assert BatchShare(0, 1) in [*made._taken.values(), *(part for _, part in made._counted)], (
        "worker 1 still computes it"
    )
    made.ready(1, 0)
    assert made.chosen(0) is None and made.outcome(1, 0) == StepOutcome(0.0, None, frozenset({0, 2}))


def test_no_part_stays_late_where_more_workers_are_slow_than_there_are_backups() -> None:
    found = Simulated(5, 1, [STEPS], {0: 3.0, 1: 3.0}).run()
    check_whole(found)
    assert max(step - part.clock for step, chosen in found.steps.items() for _, part in chosen) == PATIENCE


def test_a_step_takes_parts_as_far_ahead_as_the_strategy_says() -> None:
    """A cut at a nearer step would lie behind a part that has made a step."""
    made = Backup(6, 3, 5)
    parts = [part for worker in range(6) if (part := made.take(worker, 5, 99))]
    assert max(part.clock for part in parts) == 5 + BackupStrategy.lookahead - 1


def test_a_worker_without_a_part_of_its_own_doubles_one() -> None:
    """When it is clear which one is missing: not one that comes anyway, while the worker of another is stopped."""
    made = Backup(4, 1, 0)
    assert [made.take(worker, 0, 1) for worker in (3, 1, 2)] == [BatchShare(0, 0), BatchShare(0, 1), BatchShare(0, 2)]
    assert not made.may_take(0, 0, 1) and made.may_take(0, 0, 2)
    made.ready(3, 0)
    assert not made.may_take(0, 0, 1)
    made.ready(2, 0)
    assert made.may_take(0, 0, 1) and made.take(0, 0, 1) == BatchShare(0, 1)
    made.ready(0, 0)
    assert made.chosen(0) == [(3, BatchShare(0, 0)), (0, BatchShare(0, 1)), (2, BatchShare(0, 2))]
    made.ready(1, 0)
    assert len(made.chosen(0) or ()) == 3, "the same part twice is one gradient"


def test_workers_without_parts_of_their_own_double_different_ones() -> None:
    made = Backup(6, 2, 0)
    for worker in range(4):
        made.take(worker, 0, 1)
    assert not made.may_take(4, 0, 1)
    made.ready(0, 0)
    made.ready(2, 0)
    assert [made.take(worker, 0, 1) for worker in (4, 5)] == [BatchShare(0, 1), BatchShare(0, 3)]


@pytest.mark.parametrize(("workers", "backup"), [(2, 1), (3, 1), (6, 2), (9, 4)])
def test_stopped_workers_hold_up_no_step_also_right_before_meetings(workers: int, backup: int) -> None:
    never = 1e9
    stopped = dict.fromkeys(range(1, 2 * backup, 2), never)
    found = Simulated(workers, backup, [*range(3, STEPS, 3), STEPS], stopped, jitter=0.3).run()
    check_whole(found)
    assert max(found.made_at.values()) < 4 * STEPS


def test_a_process_that_takes_the_place_of_a_dead_one_gives_its_part_back_or_keeps_its_gradient() -> None:
    made = Backup(3, 1, 5)
    first = made.take(0, 5, 9)
    assert made.restart(0) == 5 and made.take(0, 5, 9) == first
    made.ready(0, 5)
    assert made.restart(0) == 5 and made.take(0, 5, 9) is None, "all servers have its gradient"
    assert made.counted_parts(0) == [first], "the next process records the rows, though the step is not made yet"
    made.take(1, 5, 9)
    made.ready(1, 5)
    made.made(5, 2.0, 1)
    assert made.counted_parts(0) == [first] and made.late == Counter()
    made.cut(6)
    assert made.counted_parts(0) == [], "recorded before the cut"


def test_a_process_that_takes_the_place_of_a_dead_one_goes_through_the_steps_that_were_made_without_it() -> None:
    """So it comes to the step where the others meet, and wait for it."""
    made = Backup(3, 1, 5)
    for step in (5, 6, 7):
        for worker in (1, 2):
            made.take(worker, step, 8)
            made.ready(worker, step)
        made.made(step, 1.0, None)
        assert made.outcome(1, step) and made.outcome(2, step)
        if step == 5:
            assert made.outcome(0, 5)
    assert made.step == 8 and made.restart(0) == 6
    for step in (6, 7):
        assert made.take(0, step, 8) is None and made.outcome(0, step) == StepOutcome(1.0, None, frozenset({1, 2}))
    assert made.restart(0) == 8


def test_what_cannot_be_is_refused() -> None:
    made = Backup(3, 1, 5)
    with pytest.raises(ValueError, match="rank 0 takes a part of step 6, and step 5 is being made"):
        made.take(0, 6, 9)
    for worker in range(3):
        made.take(worker, 5, 9)
    made.ready(0, 5)
    made.ready(2, 5)
    made.made(5, 0.0, None)
    with pytest.raises(ValueError, match=r"stop at step 6, during step 6, where streams have done \[7, 5\]"):
        made.cut(6)
