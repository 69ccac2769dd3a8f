"""What a rank on servers computes: the random numbers of its steps."""

from __future__ import annotations

import torch

from sparkring.training.data.batch import Batch
from sparkring.training.parallel.servers.strategy import ServersStrategy
from tests.training.parallel.servers.test_late_residuals import Model, batch_of, begin, opened
from tests.training.servers.toy import make_sgd, servers


def drawn_by(strategy: ServersStrategy, batch: Batch) -> list[float]:
    """What dropout would draw in the step that the strategy is at, which is computed and not made."""
    found: list[float] = []
    (model,) = [module for module in strategy.prepared.module.modules() if isinstance(module, Model)]
    hook = model.register_forward_pre_hook(lambda *_: found.extend(torch.rand(4).tolist()))
    strategy.forward_backward(batch)
    strategy.prepared.optimizer.zero_grad(set_to_none=True)
    strategy.awaits_step = False
    hook.remove()
    return found


def test_each_rank_and_step_draws_its_own_random_numbers_and_draws_them_again() -> None:
    draws: dict[tuple[int, int], list[float]] = {}
    with servers(1, 1, make=make_sgd) as made:
        strategy = opened(made, 0, 1, {"bound": None})
        begin(strategy)
        for step in range(3):
            for rank in range(3):
                strategy.rank = rank  # a replay computes all ranks' steps by one strategy
                draws[rank, step] = drawn_by(strategy, batch_of(step, None))
                torch.rand(7)
                assert drawn_by(strategy, batch_of(step, None)) == draws[rank, step]
            strategy.rank = 0
            strategy.forward_backward(batch_of(step, None))
            strategy.step(0.01)
        strategy.close()
    assert len({tuple(each) for each in draws.values()}) == 9
