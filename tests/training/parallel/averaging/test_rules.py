"""What the rules keep and how fast they agree, for more replicas than there are processors."""

from __future__ import annotations

import math
from typing import Any, cast

import pytest
import torch

from sparkring.conf.blocks.parallel import AveragingConfig
from sparkring.training.parallel.averaging.links import Links
from sparkring.training.parallel.averaging.rules import RULES, AveragingRule, peers_of


class Together:
    """Links of one of several replicas in this process, whose weights all stand in `everyone`."""

    def __init__(self, replica: int, everyone: list[torch.Tensor]) -> None:
        self.replica, self.replicas, self.everyone = replica, len(everyone), everyone

    def mean(self, tensors: Any) -> list[torch.Tensor]:
        return [torch.stack(self.everyone).mean(dim=0)]

    def exchange(self, tensors: Any, peers: list[int]) -> list[list[torch.Tensor]]:
        return [[self.everyone[peer]] for peer in peers]


class Replicas:
    """As many as there are rows, which no gradient moves."""

    def __init__(self, replicas: int, **settings: Any) -> None:
        make = torch.Generator().manual_seed(replicas)
        self.weights = list(torch.randn(replicas, 50, generator=make, dtype=torch.float64))
        self.rules: list[AveragingRule] = []
        config, start = AveragingConfig(**settings), [torch.zeros(50, dtype=torch.float64)]
        for number in range(replicas):
            rule = RULES[config.kind](config, cast(Links, Together(number, self.weights)))
            rule.begin(start)
            self.rules.append(rule)

    def window(self, number: int) -> None:
        before = [weight.clone() for weight in self.weights]
        for rule, weight in zip(self.rules, self.weights, strict=True):
            cast(Any, rule.links).everyone = before
            rule.end_window([weight], number)

    def spread(self) -> float:
        stacked = torch.stack(self.weights)
        return float((stacked - stacked.mean(dim=0)).norm())


@pytest.mark.parametrize("elasticity", [0.3, 0.9])
def test_an_elastic_window_keeps_the_sum_of_replicas_and_center(elasticity: float) -> None:
    replicas = Replicas(5, kind="easgd", elasticity=elasticity)
    before = sum(replicas.weights)
    for number in range(1000):
        replicas.window(number)
    centers = [rule.shared()["center"][0] for rule in replicas.rules]
    assert all(torch.equal(center, centers[0]) for center in centers)
    torch.testing.assert_close(sum(replicas.weights) + centers[0], before, rtol=0, atol=1e-12)
    assert replicas.spread() < 1e-12, "without gradients all meet"


def test_without_elasticity_replicas_are_independent_bit_for_bit() -> None:
    replicas = Replicas(3, kind="easgd", elasticity=0.0)
    before = [weight.clone() for weight in replicas.weights]
    replicas.window(1)
    assert all(torch.equal(a, b) for a, b in zip(before, replicas.weights, strict=True))
    assert not replicas.rules[0].shared()["center"][0].any()


@pytest.mark.parametrize("count", [2, 3, 8, 16])
def test_gossip_on_a_ring_agrees_at_least_as_fast_as_its_second_eigenvalue_and_keeps_the_mean(count: int) -> None:
    replicas = Replicas(count, kind="gossip")
    mean, most, start = sum(replicas.weights) / count, abs(1 + 2 * math.cos(2 * math.pi / count)) / 3, replicas.spread()
    for number in range(60):
        before = replicas.spread()
        replicas.window(number)
        if replicas.spread() > 1e-10:  # below, rounding is what is left
            assert replicas.spread() <= most * before * (1 + 1e-5)
    assert replicas.spread() < start / 10
    torch.testing.assert_close(sum(replicas.weights) / count, mean, rtol=0, atol=1e-14)


@pytest.mark.parametrize("peers", ["ring", "random"])
@pytest.mark.parametrize("count", range(1, 7))
def test_a_gossip_window_gives_the_mean_of_a_replica_and_its_distinct_peers(count: int, peers: Any) -> None:
    """On a ring of two or three that is the mean of all: they agree after one window."""
    replicas = Replicas(count, kind="gossip", peers=peers)
    before = [weight.clone() for weight in replicas.weights]
    replicas.window(1)
    for number, (weight, rule) in enumerate(zip(replicas.weights, replicas.rules, strict=True)):
        if peers == "ring":
            near = {(number - 1) % count, number, (number + 1) % count}
        else:
            near = {number, *peers_of(rule.config, 1, number, count)}
        torch.testing.assert_close(weight, sum(before[each] for each in near) / len(near), rtol=0, atol=1e-15)
    assert replicas.spread() < 1e-14 or count > (3 if peers == "ring" else 2)


@pytest.mark.parametrize("count", [2, 5, 8])
def test_random_pairs_agree_and_keep_the_mean(count: int) -> None:
    replicas = Replicas(count, kind="gossip", peers="random", seed=3)
    mean = sum(replicas.weights) / count
    for number in range(100):
        replicas.window(number)
    assert replicas.spread() < 1e-6
    torch.testing.assert_close(sum(replicas.weights) / count, mean, rtol=0, atol=1e-14)


def test_pairs_are_mutual_and_a_function_of_seed_and_window() -> None:
    config = AveragingConfig(kind="gossip", peers="random", seed=1)
    drawn = [[peers_of(config, window, replica, 5) for replica in range(5)] for window in range(20)]
    for peers in drawn:
        assert sum(not each for each in peers) == 1, "one of five has no partner"
        assert all(peers[each[0]] == [replica] for replica, each in enumerate(peers) if each)
    assert len({str(peers) for peers in drawn}) > 10
    again = AveragingConfig(kind="gossip", peers="random", seed=1)
    assert drawn == [[peers_of(again, window, replica, 5) for replica in range(5)] for window in range(20)]
    other = AveragingConfig(kind="gossip", peers="random", seed=2)
    assert drawn[0] != [peers_of(other, 0, r, 5) for r in range(5)] or drawn[1] != [
        peers_of(other, 1, r, 5) for r in range(5)
    ]


@pytest.mark.parametrize(
    ("peers", "count", "sent"), [("ring", 2, 1), ("ring", 3, 2), ("random", 4, 1), ("random", 5, 0.8)]
)
def test_gossip_sends_its_weights_to_each_peer(peers: Any, count: int, sent: float) -> None:
    config = AveragingConfig(kind="gossip", peers=peers)
    assert RULES["gossip"].sent(config, count) == sent
    assert sum(len(peers_of(config, 7, replica, count)) for replica in range(count)) == pytest.approx(sent * count)
