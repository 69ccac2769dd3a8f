"""No test asserts how long something takes: on a busy machine it fails for a reason that has nothing to do with it.

A test waits for a condition with a long limit, and asserts the condition. Speed is measured in benchmarks/.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

TESTS = Path(__file__).parents[1]
CLOCKS = {"monotonic", "perf_counter", "process_time", "time", "monotonic_ns", "perf_counter_ns"}
MEASURED = {"took_s", "start_s", "recover_s", "run_s", "train_s", "elapsed", "elapsed_s", "took", "seconds"}


def asserted_durations(tree: ast.AST) -> Iterator[int]:
    """Yield the lines of asserts that compare a difference of clock times, or a measured duration with a number."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert):
            for part in ast.walk(node.test):
                if isinstance(part, ast.BinOp) and isinstance(part.op, ast.Sub) and _reads_clock(part):
                    yield node.lineno
                if isinstance(part, ast.Compare) and _compares_duration(part):
                    yield node.lineno


def _reads_clock(node: ast.AST) -> bool:
    calls = [n for n in ast.walk(node) if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute)]
    return any(call.func.attr in CLOCKS and ast.unparse(call.func.value) == "time" for call in calls)  # type: ignore[attr-defined]


def _compares_duration(node: ast.Compare) -> bool:
    sides = [node.left, *node.comparators]
    names = {side.attr if isinstance(side, ast.Attribute) else getattr(side, "id", "") for side in sides}
    numbers = [side.value for side in sides if isinstance(side, ast.Constant) and isinstance(side.value, int | float)]
    ordered = any(isinstance(op, ast.Lt | ast.LtE | ast.Gt | ast.GtE) for op in node.ops)
    return ordered and bool(names & MEASURED) and any(number > 0 for number in numbers)


def test_hypothesis_asserts_no_duration() -> None:
    assert settings().deadline is None and HealthCheck.too_slow in settings().suppress_health_check


def test_no_test_asserts_a_duration() -> None:
    found = [
        f"{path.relative_to(TESTS)}:{line}"
        for path in sorted(TESTS.rglob("*.py"))
        for line in asserted_durations(ast.parse(path.read_text()))
    ]
    assert not found, f"wait for a condition with a long limit instead: {found}"


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("assert time.monotonic() - began < 4", 1),
        ("assert done and abs(time.time() - at) < 2, 'late'", 1),
        ("assert event.took_s < 2.0", 1),
        ("assert 0 < seconds < 5", 1),
        ("assert time.monotonic() < deadline", 0),  # a limit on waiting
        ("assert event.recover_s > 0", 0),  # it was measured
        ("while time.monotonic() - began < 4: pass", 0),
    ],
)
def test_the_check_knows_a_duration_from_a_limit(text: str, count: int) -> None:
    assert len(list(asserted_durations(ast.parse(text)))) == count
