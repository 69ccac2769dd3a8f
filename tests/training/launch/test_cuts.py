"""Cuts as the driver sees them: what it sends, given what has come."""

from __future__ import annotations

import random

import pytest

from sparkring.training.launch.cuts import NEVER, Cuts, Orders
from sparkring.training.launch.host.cuts import RankCuts
from sparkring.training.launch.messages import CutAt, OfferCut


def to_all(message: OfferCut | CutAt, *ranks: int) -> Orders:
    return [(rank, message) for rank in ranks]


def test_the_largest_offer_is_announced_once_every_rank_has_made_one() -> None:
    cuts = Cuts(range(3))
    assert cuts.ask(stop=True, checkpoint=False) == to_all(OfferCut(1), 0, 1, 2)
    assert cuts.offered(2, 1, 17) == [] == cuts.offered(0, 1, 900)
    assert cuts.offered(1, 1, 3) == to_all(CutAt(1, 900, True, False), 0, 1, 2)


def test_requests_while_a_cut_is_agreed_join_it_and_later_ones_make_another() -> None:
    cuts = Cuts([0])
    cuts.ask(stop=False, checkpoint=True)
    assert cuts.ask(stop=True, checkpoint=False) == [] == cuts.ask(stop=False, checkpoint=True)
    assert cuts.offered(0, 1, 5) == [(0, CutAt(1, 5, True, True))]
    assert cuts.ask(stop=False, checkpoint=True) == [(0, OfferCut(2))]
    assert cuts.offered(0, 2, 4) == [(0, CutAt(2, 4, False, True))], "what was announced is not wanted again"


def test_where_a_rank_has_returned_the_others_make_all_steps_too() -> None:
    """It is not waited for, and it cannot act at a step that it has passed."""
    cuts = Cuts(range(3))
    cuts.ask(stop=True, checkpoint=False)
    assert cuts.offered(1, 1, 8) == [] == cuts.returned(0)
    assert cuts.returned(2) == [(1, CutAt(1, NEVER, True, False))]
    assert cuts.ask(stop=True, checkpoint=False) == [(1, OfferCut(2))]
    assert cuts.offered(1, 2, 8) == [(1, CutAt(2, NEVER, True, False))], "asked for after it has returned"
    assert cuts.returned(1) == [] == cuts.ask(stop=True, checkpoint=False)


def test_what_was_lost_with_a_connection_is_sent_again_to_who_repeats_its_offer() -> None:
    cuts = Cuts(range(3))
    cuts.ask(stop=False, checkpoint=True)
    cuts.offered(0, 1, 5)
    assert cuts.offered(0, 1, 5) == to_all(OfferCut(1), 1, 2), "ranks whose request was lost"
    cuts.offered(1, 1, 6)
    assert cuts.offered(0, 1, 5) == [(2, OfferCut(1))]
    announced = CutAt(1, 6, False, True)
    assert cuts.offered(2, 1, 4) == to_all(announced, 0, 1, 2)
    assert cuts.offered(2, 1, 4) == [(2, announced)], "its announcement was lost"
    cuts.ask(stop=False, checkpoint=True)
    assert cuts.offered(2, 1, 4) == [(2, announced)] and cuts.offered(2, 7, 4) == []


def test_a_replaced_rank_offers_anew_and_hears_what_was_announced_for_steps_it_has_not_made() -> None:
    cuts = Cuts(range(2))
    for step in (5, 50):
        cuts.ask(stop=False, checkpoint=True)
        number = 1 if step == 5 else 2
        cuts.offered(0, number, step)
        cuts.offered(1, number, step)
    assert cuts.replaced(1, 20) == [(1, CutAt(2, 50, False, True))]
    assert cuts.replaced(1, 50) == [(1, CutAt(2, 50, False, True))], "it may have died before it acted there"
    cuts.ask(stop=True, checkpoint=False)
    assert cuts.offered(1, 3, 1000) == []
    assert cuts.replaced(1, 20) == [(1, CutAt(2, 50, False, True)), (1, OfferCut(3))], "its offer of 1000 is void"
    assert cuts.offered(0, 3, 70) == []
    assert cuts.offered(1, 3, 22) == to_all(CutAt(3, 70, True, False), 0, 1)


@pytest.mark.parametrize("seed", range(30))
def test_ranks_that_go_on_at_any_pace_act_after_the_same_steps_though_messages_are_late_or_lost(seed: int) -> None:
    """The two sides together, on one thread: each turn a rank steps, a message arrives, or a request comes."""
    draw = random.Random(seed)
    world, last = draw.randint(1, 4), 60
    driver, acted = Cuts(range(world)), [dict[int, tuple[bool, bool]]() for _ in range(world)]
    to_rank: list[list[OfferCut | CutAt]] = [[] for _ in range(world)]
    to_driver: list[tuple[int, int, int]] = []
    now, asked = [0.0], 0

    def send(orders: Orders) -> None:
        for rank, message in orders:
            if draw.random() > 0.2:  # else it is lost
                to_rank[rank].append(message)

    ranks = [RankCuts(lambda n, s, r=rank: to_driver.append((r, n, s)), lambda: now[0]) for rank in range(world)]
    steps = [0] * world
    for one in ranks:
        one.begin(0, last)
    while min(steps) < last:
        now[0] += 0.1
        rank = draw.randrange(world)
        what = draw.random()
        if what < 0.4 and to_rank[rank]:
            ranks[rank].request(to_rank[rank].pop(0))
        elif what < 0.7 and to_driver:
            send(driver.offered(*to_driver.pop(0)))
        elif what < 0.75 and asked < 6:
            asked += 1
            send(driver.ask(stop=draw.random() < 0.3, checkpoint=True))
        elif steps[rank] < last:
            offer = ranks[rank]._offer
            if offer is not None and offer[1] <= steps[rank] + 1:
                to_driver.append((rank, *offer))  # it would wait, and repeat its offer
                continue
            steps[rank] += 1
            if any(done := ranks[rank].after(steps[rank])):
                acted[rank][steps[rank]] = done
            if steps[rank] == last and draw.random() < 0.5:  # else it still writes its last checkpoint
                send(driver.returned(rank))
    assert all(one == acted[0] for one in acted)
