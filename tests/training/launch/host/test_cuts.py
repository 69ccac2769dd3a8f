"""A rank's side of a cut: what it offers, where it waits, and after which steps it acts."""

from __future__ import annotations

import threading

import pytest

from sparkring.training.launch.health import waits_in
from sparkring.training.launch.host import cuts
from sparkring.training.launch.host.cuts import RankCuts, steps_ahead
from sparkring.training.launch.messages import CutAt, OfferCut


@pytest.mark.parametrize(
    ("step_s", "ahead"),
    [(None, 2), (0.0001, 5001), (0.01, 51), (0.25, 3), (0.5, 2), (0.6, 1), (60.0, 1), (0.0, 500_001)],
)
def test_an_offer_is_half_a_second_ahead_and_no_further_than_the_running_step_where_steps_are_long_or_few(
    step_s: float | None, ahead: int
) -> None:
    assert steps_ahead(step_s, left=1_000_000) == ahead == steps_ahead(step_s, left=ahead + 1)
    assert [steps_ahead(step_s, left) for left in (ahead, 1, 0)] == [1, 1, 1], "a stop is heard near the end, too"


@pytest.mark.parametrize(
    ("step_s", "left", "ahead"), [(60.0, 9, 2), (60.0, 2, 2), (60.0, 1, 1), (0.1, 9, 6), (0.1, 3, 2)]
)
def test_where_steps_have_rows_of_later_ones_a_cut_is_beyond_them(step_s: float, left: int, ahead: int) -> None:
    assert steps_ahead(step_s, left, least=2) == ahead


def test_the_next_cut_is_what_is_announced_or_offered() -> None:
    rank = Rank()
    rank.cuts.begin(10, 100, least=2)
    assert rank.cuts.next() is None
    rank.step(11, 60.0)
    rank.cuts.request(OfferCut(1))
    assert rank.offers == [(1, 13)] and rank.cuts.next() == 13
    rank.cuts.request(CutAt(1, 15, stop=False, checkpoint=True))
    assert rank.cuts.next() == 15
    assert rank.step(15, 60.0) == (False, True) and rank.cuts.next() is None


def test_a_rank_that_takes_anothers_place_sees_the_cuts_before_it_begins_and_then_those_alone_that_are_ahead() -> None:
    rank = Rank()
    for number, step in enumerate((7, 12), 1):
        rank.cuts.request(CutAt(number, step, stop=False, checkpoint=True))
    assert rank.cuts.next(7) == 7, "where it is asked whether its process has come there"
    assert rank.cuts.next(12) == 12, "a rank that died twice hears of cuts long made"
    rank.cuts.begin(7, 100)
    assert rank.cuts.next() == 12


class Rank:
    """A rank whose steps take what the test says; its offers."""

    def __init__(self) -> None:
        self.now, self.offers = 0.0, list[tuple[int, int]]()
        self.cuts = RankCuts(lambda *offer: self.offers.append(offer), lambda: self.now)

    def step(self, number: int, seconds: float) -> tuple[bool, bool]:
        self.now += seconds
        return self.cuts.after(number)


def test_an_offer_counts_from_the_steps_made_and_by_the_shortest_of_the_last_ones() -> None:
    rank = Rank()
    rank.cuts.begin(100, 1000)
    rank.step(101, 0.1)
    rank.step(102, 30.0)  # an evaluation was in it
    rank.cuts.request(OfferCut(1))
    assert rank.offers == [(1, 102 + 6)]
    rank.cuts.request(OfferCut(1))
    assert rank.offers == [(1, 108)] * 2, "a question that is repeated has the same answer"


def test_a_rank_that_makes_no_steps_yet_offers_when_it_begins() -> None:
    rank = Rank()
    rank.cuts.request(OfferCut(3))
    assert rank.offers == []
    rank.cuts.begin(7, 1000)
    assert rank.offers == [(3, 9)]


def test_a_rank_acts_after_each_announced_step_once_and_two_cuts_at_one_step_are_one() -> None:
    rank = Rank()
    rank.cuts.begin(0, 1000)
    for number, step, stop in ((1, 3, False), (2, 2, False), (3, 3, True)):
        rank.cuts.request(OfferCut(number))
        rank.cuts.request(CutAt(number, step, stop, not stop))
    offers = len(rank.offers)
    rank.cuts.request(CutAt(3, 3, True, False))  # both sent again
    rank.cuts.request(OfferCut(3))
    assert len(rank.offers) == offers, "it would wait for an announcement that it has had"
    assert [rank.step(step, 1.0) for step in range(1, 5)] == [
        (False, False), (False, True), (True, True), (False, False),
    ]  # fmt: skip


def test_a_rank_that_reaches_its_offer_waits_for_the_announcement_and_repeats_the_offer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cuts, "REPEAT_S", 0.01)
    offers, again = list[tuple[int, int]](), threading.Event()

    def offer(number: int, step: int) -> None:
        offers.append((number, step))
        if len(offers) == 3:
            again.set()

    waiting = RankCuts(offer)
    waiting.begin(0, 1000)
    waiting.request(OfferCut(1))
    assert waiting.after(1) == (False, False)
    found = list[tuple[bool, bool]]()
    steps = threading.Thread(target=lambda: [found.append(waiting.after(step)) for step in (2, 3)], daemon=True)
    steps.start()
    assert again.wait(60) and not found and offers == [(1, 2)] * len(offers)
    waiting.request(CutAt(1, 3, True, False))
    steps.join(60)
    assert found == [(False, False), (True, False)], "another rank's offer was one step further"


def test_the_hang_detector_knows_where_a_rank_waits_for_a_cut() -> None:
    frames = ['  File "host/cuts.py", line 1 in _wait', '  File "training/waiting.py", line 22 in waiting_for_ranks']
    stack = "\n".join(["Current thread 0x01 (most recent call first):", *frames])
    assert waits_in(stack) == "_wait"
