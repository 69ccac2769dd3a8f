"""Refusals and notes about the parallel block; every rule is tried in tests/training/parallel/test_check.py."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from sparkring.conf.blocks.parallel import ParallelConfig
from sparkring.conf.rules.strategies import (
    HOROVOD_LIMITS,
    RULES,
    batch_problem,
    horovod_limits,
    strategy_notes,
    strategy_problems,
)
from sparkring.training.parallel.mesh import Mesh


def test_a_legal_combination_has_neither_problems_nor_notes() -> None:
    config, mesh = ParallelConfig(zero=2).model_dump(), asdict(Mesh(dp=4))
    assert strategy_problems(config, mesh) == strategy_notes(config, mesh) == []


def test_every_limit_of_horovod_is_a_refusal_only_if_horovod_is_configured() -> None:
    mesh = asdict(Mesh(dp=2, tp=2))
    assert {limit.name for limit in HOROVOD_LIMITS} <= {rule.name for rule in RULES}
    for engine in ("auto", "torch", "horovod"):
        config = ParallelConfig(engine=engine, tp=2).model_dump()  # type: ignore[arg-type]
        assert horovod_limits(config, mesh) == [
            "tp(2) * cp(1): tensor and context parallelism run on torch's process groups"
        ]
        assert bool(strategy_problems(config, mesh)) == (engine == "horovod")


@pytest.mark.parametrize(
    ("pp", "global_batch", "problem"),
    [
        (1, 8, None),
        (1, 7, "train.global_batch = 7 is less than dp(4) * accumulate(2) = 8"),
        (2, 24, "train.global_batch = 24 is not divisible by dp(4) * accumulate(2) * micro_batches(2) = 16"),
    ],
)
def test_a_batch_must_fill_every_part_and_a_pipelines_parts_equally(pp: int, global_batch: int, problem: str) -> None:
    found = batch_problem(global_batch, dp=4, pp=pp, micro_batches=2, accumulate=2)
    assert found is None if problem is None else found is not None and found.startswith(problem)
