"""Schedules for all p <= 8, m <= 32, v <= 4: every micro-batch goes through every stage once each way, no deadlock, the
bubble is the formula's, and 1f1b keeps at most p - rank micro-batches alive."""

from __future__ import annotations

import csv
from itertools import pairwise, product

import pytest

from sparkring.training.parallel.model_parallel.schedules import (
    SCHEDULES,
    Action,
    Deadlock,
    balance,
    schedule_problem,
    schedule_table,
    simulate,
)

PUBLISHED = """schedule,p,m,v,bubble
gpipe,4,8,1,0.375
1f1b,4,8,1,0.375
interleaved,4,8,2,0.1875
gpipe,4,8,2,0.1875
zero-bubble,4,8,2,0.0625
gpipe,8,32,1,0.2188
interleaved,8,32,2,0.1094
zero-bubble,8,32,2,0.0365
"""  # makespans of torch 2.13's own tables, measured before this project began (F = 1, B = 2)


def bubble_formula(name: str, ranks: int, micro_batches: int, stages_per_rank: int = 1) -> float:
    """Idle over ideal time, for micro_batches >= ranks (one stage per rank and whole backward: any)."""
    if name in ("gpipe", "1f1b"):
        return (ranks - 1) / (micro_batches * stages_per_rank)
    return (ranks - 1) / ((3 if name == "zero-bubble" else 1) * stages_per_rank * micro_batches)


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_size(name: str) -> None:
    tried = 0
    for ranks, micro, per_rank in product(range(1, 9), range(1, 33), range(1, 5)):
        if schedule_problem(name, ranks, micro, per_rank):
            continue
        tried += 1
        table = schedule_table(name, ranks, micro, per_rank)
        kinds = "FIW" if name == "zero-bubble" else "FB"
        for rank, actions in enumerate(table):
            stages = range(rank, ranks * per_rank, ranks)
            assert sorted(actions) == sorted(Action(*a) for a in product(kinds, stages, range(micro)))
        outcome = simulate(table, ranks * per_rank)
        formula = bubble_formula(name, ranks, micro, per_rank)
        if micro >= ranks:
            assert outcome.bubble == pytest.approx(formula, abs=1e-12), (ranks, micro, per_rank)
        if name == "1f1b":
            assert outcome.peak_alive == [min(micro, ranks - rank) for rank in range(ranks)]
    assert tried >= 256


def test_the_bubbles_are_the_published_ones() -> None:
    for row in csv.DictReader(PUBLISHED.splitlines()):
        p, m, v = int(row["p"]), int(row["m"]), int(row["v"])
        bubble = simulate(schedule_table(row["schedule"], p, m, v), p * v).bubble
        assert bubble == pytest.approx(float(row["bubble"]), abs=1e-4), row


def test_as_many_micro_batches_go_ahead_as_in_the_paper() -> None:
    """Interleaved: 2 (p - r - 1) + (v - 1) p before the first backward (Narayanan et al., arXiv:2104.04473, and
    Megatron-LM): twice the hops, so that a message has a step's time to arrive. The bubble alone does not show it."""
    for ranks, per_rank, rounds in product(range(2, 6), range(2, 4), range(1, 4)):
        table = schedule_table("interleaved", ranks, ranks * rounds, per_rank)
        ahead = [[a.kind for a in actions].index("B") for actions in table]
        most = ranks * rounds * per_rank
        paper = [min(2 * (ranks - rank - 1) + (per_rank - 1) * ranks, most) for rank in range(ranks)]
        assert ahead == [min(each + 1, most) for each in paper], "one forward more is the steady state's own"


def test_a_wrong_table_is_seen_to_deadlock() -> None:
    table = schedule_table("1f1b", 2, 2)
    table[0].reverse()
    with pytest.raises(Deadlock, match="rank 0 at"):
        simulate(table, 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("1f1bb", 2, 2, 1), "nearest is '1f1b'"),
        (("1f1b", 2, 2, 2), "use interleaved"),
        (("interleaved", 2, 2, 1), "stages_per_rank >= 2"),
        (("interleaved", 4, 10 + 1, 2), "take a multiple of 4"),
    ],
)
def test_a_schedule_that_cannot_run_is_refused(arguments: tuple[str, int, int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        schedule_table(*arguments)


def test_balance_finds_the_least_largest_run() -> None:
    assert balance([1, 1, 1, 1], 2) == [2, 4]
    assert balance([0, 1, 1, 1, 1, 4], 2) == [5, 6]
    costs = [3.0, 1.0, 4.0, 1.0, 5.0, 9.0, 2.0, 6.0]
    ends = [0, *balance(costs, 3)]
    assert max(sum(costs[a:b]) for a, b in pairwise(ends)) == 14.0
    with pytest.raises(ValueError, match="2 layers are fewer than 3 stages"):
        balance([1.0, 1.0], 3)
