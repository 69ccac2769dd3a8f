"""The recovery policy as a table."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkring.training.launch.restart import (
    AttemptOutcome,
    RestartPolicy,
    backoff,
    best_world,
    cool_until,
    decide,
    steps_lost,
)

FIXED = RestartPolicy(world=3)
ELASTIC = RestartPolicy(world=3, min_world=1, max_attempts=5)


def ended(
    attempt: int, cause: str, step: int | None = None, world: int = 3, start: int = 0, **more: object
) -> AttemptOutcome:
    return AttemptOutcome(attempt, world, cause, start, step, **more)  # type: ignore[arg-type]


def value_error(attempt: int, step: int | None, start: int = 0, message: str = "bad") -> AttemptOutcome:
    return ended(attempt, "exception", step, start=start, error_type="ValueError", message=message, is_value_error=True)


def runtime_error(attempt: int, step: int | None, message: str = "odd", start: int = 0) -> AttemptOutcome:
    return ended(attempt, "exception", step, start=start, error_type="RuntimeError", message=message)


TABLE = [
    # history, slots, policy, action, world
    ([ended(1, "signal", 5)], 3, FIXED, "retry", 3),
    ([ended(1, "signal", 5)], 2, FIXED, "stop", 0),
    ([ended(1, "lost", 5)], 2, ELASTIC, "shrink", 2),
    ([ended(1, "lost", 5)], 9, ELASTIC, "retry", 3),
    ([ended(1, "lost", 5)], 0, ELASTIC, "stop", 0),
    ([ended(1, "lost", 5), ended(2, "lost", 9, world=1)], 2, ELASTIC, "grow", 2),
    ([ended(1, "hang", 5), ended(2, "hang", 5)], 3, FIXED, "retry", 3),  # the machine's, even at one step twice
    ([ended(1, "hang", 5), ended(2, "hang", 5), ended(3, "memory", 5)], 3, FIXED, "stop", 0),  # max_attempts
    ([ended(1, "disk", 5), ended(2, "disk", 5)], 3, FIXED, "retry", 3),  # as is a full one
    ([ended(1, "grow", 5, world=2)], 3, FIXED, "grow", 3),
    ([ended(n, "decommission", 5) for n in range(1, 9)], 3, FIXED, "retry", 3),  # planned ends are nobody's failure
    ([ended(1, "cancelled")], 3, FIXED, "stop", 0),
    ([ended(1, "preflight")], 3, FIXED, "stop", 0),
    ([value_error(1, None)], 3, FIXED, "stop", 0),  # at the start
    ([value_error(1, 10, start=10)], 3, FIXED, "stop", 0),  # at the start, resumed
    ([value_error(1, 7)], 3, FIXED, "retry", 3),
    ([value_error(1, 7), value_error(2, 7)], 3, FIXED, "stop", 0),  # the same at the same step twice
    ([value_error(1, 7), value_error(2, 8)], 3, FIXED, "retry", 3),
    ([runtime_error(1, 7), runtime_error(2, 7, "other")], 3, FIXED, "retry", 3),
    ([runtime_error(1, None)], 3, FIXED, "retry", 3),  # may be the machine's
    ([runtime_error(1, 7), ended(2, "grow", 7), runtime_error(3, 7)], 3, ELASTIC, "stop", 0),
    (
        [ended(1, "exit", 4, message="exited with code 7"), ended(2, "exit", 4, message="exited with code 7")],
        3,
        FIXED,
        "stop",
        0,
    ),
    (
        [ended(n, "gpu memory", 4, error_type="torch.OutOfMemoryError", message="CUDA out of memory") for n in (1, 2)],
        3,
        FIXED,
        "stop",
        0,
    ),
    ([ended(1, "gpu memory", 4), ended(2, "gpu memory", 5)], 3, FIXED, "retry", 3),
    ([ended(1, "exception", None, error_type="ModuleNotFoundError")], 3, FIXED, "stop", 0),
    ([ended(1, "start")], 3, FIXED, "retry", 3),
    ([ended(1, "lost", 5, world=4)], 3, RestartPolicy(4, 2, multiple_of=2), "shrink", 2),
    ([ended(1, "lost", 5, world=4)], 3, RestartPolicy(4, 1, fits=lambda world: world % 2 == 0), "shrink", 2),  # shard=2
    ([ended(1, "lost", 5, world=4)], 3, RestartPolicy(4, 1, fits=lambda world: False), "stop", 0),  # dp=4
    ([ended(1, "lost", 5, world=4)], 4, RestartPolicy(4, 1, fits=lambda world: False), "retry", 4),
]


@pytest.mark.parametrize(("history", "slots", "policy", "action", "world"), TABLE)
def test_the_table(history: list[AttemptOutcome], slots: int, policy: RestartPolicy, action: str, world: int) -> None:
    decision = decide(history, slots, policy)
    assert (decision.action, decision.world) == (action, world), decision.why
    assert decision.why


@pytest.mark.parametrize(("policy", "key"), [(FIXED, "3 (launch.world)"), (ELASTIC, "1 (launch.min_world)")])
def test_too_few_slots_are_said_with_the_key_that_asks_for_them(policy: RestartPolicy, key: str) -> None:
    assert f"no world of at least {key}" in decide([ended(1, "lost", 5)], 0, policy).why


@pytest.mark.parametrize(
    ("starts", "expected"),
    [([0], 1.0), ([0, 0], 2.0), ([0, 0, 0], 4.0), ([0, 0, 50], 1.0), ([0, 50, 50], 2.0), ([0] * 20, 60.0)],
)
def test_the_wait_doubles_until_training_gets_further(starts: list[int], expected: float) -> None:
    history = [ended(i + 1, "signal", 99, start=start) for i, start in enumerate(starts)]
    assert backoff(history, RestartPolicy(3, max_attempts=99)) == expected


def test_failures_with_a_checkpoint_between_them_do_not_use_up_the_attempts() -> None:
    apart = [ended(n, "signal", 10 * n + 5, start=10 * n) for n in range(20)]
    assert decide(apart, 3, FIXED).action == "retry"
    in_a_row = [*apart, *(ended(n, "signal", 199, start=190) for n in (20, 21))]
    assert decide(in_a_row, 3, FIXED).action == "stop"
    planned_between = [*apart, ended(20, "grow", 199, start=190), ended(21, "signal", 199, start=190)]
    assert decide(planned_between, 3, FIXED).action == "retry"


def test_the_world_does_not_grow_before_a_lost_host_has_cooled_down() -> None:
    def lost(at: float, *hosts: str) -> AttemptOutcome:
        return ended(1, "lost", 5, lost_hosts=frozenset(hosts), at=at)

    assert cool_until([ended(1, "signal", 5, at=100.0)], ELASTIC) == 0.0
    assert cool_until([lost(100.0, "a")], ELASTIC) == 160.0
    assert cool_until([lost(100.0, "a"), lost(200.0, "b")], ELASTIC) == 260.0
    assert cool_until([lost(100.0, "a"), lost(200.0, "a"), ended(3, "signal", 5, at=300.0)], ELASTIC) == 320.0
    assert cool_until([lost(100.0, "a")] * 99, ELASTIC) == 100.0 + 60.0 * 2**6


def test_a_planned_end_does_not_wait() -> None:
    assert decide([ended(1, "grow", 5, world=2)], 3, ELASTIC).wait_s == 0


@given(st.integers(0, 64), st.integers(1, 64), st.integers(1, 64), st.integers(1, 4))
def test_a_world_is_within_its_bounds(slots: int, world: int, least: int, multiple: int) -> None:
    if least > world or world % multiple:
        return
    policy = RestartPolicy(world, least, multiple_of=multiple)
    found = best_world(slots, policy)
    assert found == 0 or (least <= found <= min(slots, world) and found % multiple == 0)
    if slots >= world:
        assert found == world


@pytest.mark.parametrize("key", ["world", "min_world"])
def test_a_world_below_one_is_refused_by_its_key(key: str) -> None:
    with pytest.raises(ValueError, match=rf"launch\.{key} = 0: a whole number of ranks, at least 1"):
        RestartPolicy(**({"world": 2} | {key: 0}))


def test_min_world_above_world_is_refused_by_its_key() -> None:
    with pytest.raises(ValueError, match=r"launch\.min_world = 4"):
        RestartPolicy(world=3, min_world=4)
    with pytest.raises(ValueError, match="multiple of 2"):
        RestartPolicy(world=3, multiple_of=2)


def test_steps_lost() -> None:
    assert (steps_lost(9, 5), steps_lost(None, 5), steps_lost(3, 5)) == (4, 0, 0)
