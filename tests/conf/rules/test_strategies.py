"""Refusals and notes about the parallel block; every rule is tried in tests/training/parallel/test_check.py."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sparkring.conf.blocks.parallel import ParallelConfig
from sparkring.conf.rules.rule import find_notes, find_problems
from sparkring.conf.rules.strategies import HOROVOD_LIMITS, LAYOUT, Layout


def test_a_legal_combination_has_neither_problems_nor_notes() -> None:
    layout = Layout(ParallelConfig(zero=2), dp=4)
    assert find_problems(LAYOUT, layout) == find_notes(LAYOUT, layout) == []


def test_every_limit_of_horovod_is_a_refusal_only_if_horovod_is_configured() -> None:
    limit = "tp(2) * cp(1): tensor and context parallelism run on torch's process groups"
    for engine in ("auto", "torch", "horovod"):
        layout = Layout(ParallelConfig(engine=engine, tp=2), dp=2, tp=2)  # type: ignore[arg-type]
        assert find_problems(HOROVOD_LIMITS, layout) == [limit]
        refused = f"parallel.engine=horovod with {limit}; use parallel.engine=torch"
        assert find_problems(LAYOUT, layout) == ([refused] if engine == "horovod" else [])


@pytest.mark.parametrize(
    ("pp", "global_batch", "problem"),
    [
        (1, 8, None),
        (1, 7, "train.global_batch = 7 is less than dp(4) * accumulate(2) = 8"),
        (2, 24, "train.global_batch = 24 is not divisible by dp(4) * accumulate(2) * micro_batches(2) = 16"),
    ],
)
def test_a_batch_must_fill_every_part_and_a_pipelines_parts_equally(pp: int, global_batch: int, problem: str) -> None:
    layout = Layout(ParallelConfig(pp=pp, micro_batches=2 if pp > 1 else 1, accumulate=2), 4, pp=pp)
    assert find_problems(LAYOUT, layout) == []
    found = find_problems(LAYOUT, replace(layout, global_batch=global_batch))
    assert found == [] if problem is None else [line.startswith(problem) for line in found] == [True]
