"""Rank 0 adds what a gradient codec left to one step, also where another process takes its place on the way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn

from sparkring.conf.blocks.parallel import ParallelConfig
from sparkring.conf.rank_info import RankInfo
from sparkring.training.data.batch import Batch
from sparkring.training.parallel.compose import build_strategy
from sparkring.training.parallel.servers.backup import BackupStrategy
from sparkring.training.parallel.servers.link import ServersAt
from sparkring.training.parallel.servers.strategy import ServersStrategy
from sparkring.training.servers.client import Client
from sparkring.training.servers.server import Server
from tests.ranks.problem import CPU, SquaredError
from tests.training.servers.toy import SECRET, make_sgd, servers

STEPS = 5
MODES: dict[str, dict[str, Any]] = {"0": {"bound": 0}, "2": {"bound": 2}, "none": {"bound": None}}
# the last call of the process that dies, and how many of them it made; two of `keep` come before the first step
ENDS = [("pull", 1), ("keep", 3), ("push", 1), ("settle", 1), ("keep", 4), ("pull", 2), ("push", 2), ("push", 4)]


class Killed(Exception):
    pass


class Model(nn.Module):
    """`late` gets its first gradient in the second step."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.late = nn.Linear(6, 1).double(), nn.Linear(6, 1).double()
        for p in self.parameters():  # by no random numbers, which threads share
            p.data = torch.linspace(-0.5, 0.4, p.numel(), dtype=torch.float64).view(p.shape)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        x = self.first(rows)
        return (x + self.late(rows) if rows[0, 0] != 0 else x).squeeze(-1)


def batch_of(step: int, skipped: int | None) -> Batch:
    make = torch.Generator().manual_seed(step)
    rows = torch.randn(8, 6, generator=make, dtype=torch.float64)
    y = torch.full((8,), torch.nan if step == skipped else 1.0, dtype=torch.float64)
    if step < 2:
        rows[:, 0] = 0
    return Batch({"x": rows, "y": y}, 8, 8, 8 * (step + 1))


def opened(made: Sequence[Server], rank: int, world: int, settings: dict[str, Any]) -> ServersStrategy:
    """A rank that has loaded a checkpoint of two ranks with a codec."""
    parallel = ParallelConfig(engine="torch", servers={"per_host": 1, **settings})
    at = ServersAt([("127.0.0.1", server.port) for server in made], SECRET)
    strategy = build_strategy(parallel, RankInfo(rank, world, rank, world), CPU, servers=at)
    assert isinstance(strategy, ServersStrategy)
    strategy.prepare(Model(), SquaredError(), make_sgd)
    state = strategy.local.own_state()
    residuals = {name: torch.full_like(p, 5.0) for name, p in strategy.prepared.named}
    state["residuals"] = {f"rank-0000{r}/{name}": value for r in range(2) for name, value in residuals.items()}
    strategy.load_state_dict(state)
    return strategy


def ends_after(client: Client, name: str, calls: int) -> None:
    """Raise Killed when a method of the client has been called so often."""
    call: Callable[..., Any] = getattr(client, name)
    left = [calls]

    def counted(*args: Any) -> Any:
        found = call(*args)
        left[0] -= 1
        if not left[0]:
            raise Killed
        return found

    setattr(client, name, counted)


def begin(strategy: ServersStrategy) -> None:
    strategy.meeting.keep(b"state of the loop")
    strategy.begin(0)


def run(strategy: ServersStrategy, skipped: int | None) -> torch.Tensor:
    begin(strategy)
    while strategy.clock < STEPS:
        strategy.forward_backward(batch_of(strategy.clock, skipped))
        strategy.step(0.01)
    return strategy.link.client.weights()


def weights_of(settings: dict[str, Any], skipped: int | None, end: tuple[str, int] | None) -> torch.Tensor:
    with servers(2, 1, make=make_sgd) as made:
        strategy = opened(made, 0, 1, settings)
        try:
            if end is not None:
                ends_after(strategy.link.client, *end)
            return run(strategy, skipped)
        except Killed:
            strategy.close()
            again = opened(made, 0, 1, settings)
            assert again.is_replacement
            return run(again, skipped)
        finally:
            strategy.close()


@pytest.mark.parametrize("skipped", [None, 0, 1])
@pytest.mark.parametrize("end", ENDS, ids=lambda end: f"{end[0]}{end[1]}")
@pytest.mark.parametrize("mode", MODES)
def test_a_rank_0_that_takes_anothers_place_adds_late_residuals_once(
    mode: str, end: tuple[str, int], skipped: int | None
) -> None:
    alone = weights_of(MODES[mode], skipped, None)
    assert torch.equal(weights_of(MODES[mode], skipped, end), alone)
    without = Model().double()
    assert not torch.equal(alone, nn.utils.parameters_to_vector(without.parameters()))


BACKUP_ENDS = [("take", 1), ("push", 1), ("choose", 1), ("settle", 1), ("made", 1), ("choose", 2)]
BACKUP_ENDS += [("keep", 3), ("keep", 4)]


@pytest.mark.parametrize("end", [None, *BACKUP_ENDS], ids=str)
def test_a_backup_rank_0_that_takes_anothers_place_adds_late_residuals_once(end: tuple[str, int] | None) -> None:
    """One part a step, which rank 0 always computes: rank 1 only begins."""
    settings = {"bound": 0, "backup": 1}

    def parts(strategy: ServersStrategy) -> torch.Tensor:
        assert isinstance(strategy, BackupStrategy)
        while strategy.clock < STEPS:
            part = strategy.take(STEPS)
            batch = Batch({}, 0, 8, 0) if part is None else batch_of(part.clock, None)
            strategy.forward_backward(Batch(batch.columns, batch.rows, 8, batch.consumed_samples, part=part))
            strategy.step(0.01)
        return strategy.link.client.weights()

    with servers(2, 2, make=make_sgd) as made, ThreadPoolExecutor(2) as threads:
        ranks = list(threads.map(lambda rank: opened(made, rank, 2, settings), range(2)))
        list(threads.map(begin, ranks))
        assert not ranks[1].local.residuals.late, "rank 0 adds all of them"
        try:
            if end is not None:
                ends_after(ranks[0].link.client, *end)
            found = parts(ranks[0])
        except Killed:
            ranks[0].close()
            ranks[0] = opened(made, 0, 2, settings)
            begin(ranks[0])
            found = parts(ranks[0])
        for rank in ranks:
            rank.close()
    torch.testing.assert_close(found, weights_of({"bound": 0}, None, None), rtol=0, atol=0)


@pytest.mark.parametrize("bound", [0, None])
def test_residuals_wait_on_where_the_others_steps_went_on_or_skipped_without_them(bound: int | None) -> None:
    """Bound 0: rank 1's rows skip the step of both. None: rank 1 makes a step while rank 0 dies before its push."""
    settings = {"bound": bound}

    def step_of(strategy: ServersStrategy, skipped: int | None) -> None:
        strategy.forward_backward(batch_of(strategy.clock, skipped))
        strategy.step(0.01)

    with servers(2, 2, make=make_sgd) as made, ThreadPoolExecutor(2) as threads:
        ranks = list(threads.map(lambda rank: opened(made, rank, 2, settings), range(2)))
        list(threads.map(begin, ranks))
        due = set(ranks[0].local.residuals.late)
        ends_after(ranks[0].link.client, *(("settle", 1) if bound == 0 else ("keep", 1)))
        first = threads.submit(step_of, ranks[0], None)
        if bound is None:
            assert isinstance(first.exception(60), Killed)
        step_of(ranks[1], 0 if bound == 0 else None)
        assert isinstance(first.exception(60), Killed)
        ranks[0].close()
        ranks[0] = opened(made, 0, 2, settings)
        begin(ranks[0])
        assert ranks[0].clock == (1 if bound == 0 else 0)
        assert set(ranks[0].local.residuals.late) == due, "no step has them"
        for rank in ranks:
            rank.close()
