"""The simulator of slow ranks against closed forms and published figures, and what it is fed with."""

from __future__ import annotations

import numpy as np
import pytest

from sparkring.training.planner.stragglers import (
    StepTimes,
    Window,
    as_fast_as_others,
    backup_rate,
    bounded_rate,
    constant_stragglers,
    lag_rate,
    local_rate,
    ring_rate,
    sampled,
    simulated_forms,
    without,
)

BOUNDS = (0, 1, 3, 10, None)


def equal(ranks: int, seconds: float = 0.5, steps: int = 200, exchange_s: float = 0.0) -> StepTimes:
    return StepTimes(np.full((steps, ranks), seconds), exchange_s)


def one_slow(factor: float = 3.0, ranks: int = 8, steps: int = 3000, exchange_s: float = 0.0) -> StepTimes:
    busy_s = np.ones((steps, ranks))
    busy_s[:, 2] = factor
    return StepTimes(busy_s, exchange_s)


def jitter(ranks: int = 8, steps: int = 4000) -> StepTimes:
    return StepTimes(np.random.default_rng(0).lognormal(0.0, 0.5, (steps, ranks)))


def test_one_rank_is_as_fast_in_every_form() -> None:
    times = StepTimes(np.random.default_rng(0).lognormal(0.0, 0.5, (500, 1)))
    plain = pytest.approx(500 / times.busy_s.sum(), rel=1e-12)
    assert [bounded_rate(times, bound) for bound in BOUNDS] == [plain] * 5
    assert [ring_rate(times), local_rate(times, 10), backup_rate(times, 0), lag_rate(times)] == [plain] * 4


def test_equal_ranks_pay_for_the_exchange_alone() -> None:
    times = equal(4, 0.5, exchange_s=0.3)
    assert ring_rate(times) == pytest.approx(4 / 0.8, rel=1e-12)
    assert [bounded_rate(times, bound) for bound in BOUNDS] == [pytest.approx(4 / 0.8, rel=1e-9)] * 5
    assert local_rate(times, 10) == pytest.approx(4 / 0.53, rel=1e-12)
    assert backup_rate(times, 1) == pytest.approx(3 / 0.8, rel=0.01)
    assert lag_rate(times) == pytest.approx(4 / 0.5, rel=1e-12)
    assert lag_rate(equal(4, 0.5, exchange_s=0.7)) == pytest.approx(4 / 0.7, rel=1e-12)


def test_a_rank_that_is_always_slow_sets_the_pace_whatever_the_bound() -> None:
    """8 ranks, one 3 times slower, of the ideal 8 steps a second: 0.33 for every bound, backup 0.88, no bound 0.92."""
    times = one_slow()
    shares = [bounded_rate(times, bound) / 8 for bound in BOUNDS]
    assert shares == pytest.approx([1 / 3, 1 / 3, 1 / 3, 1 / 3, (7 + 1 / 3) / 8], abs=0.01)
    assert backup_rate(times, 1) / 8 == pytest.approx(7 / 8, rel=1e-3)
    assert ring_rate(times) / 8 == pytest.approx(1 / 3) and local_rate(times, 50) / 8 == pytest.approx(1 / 3)
    costly = one_slow(exchange_s=2.0)
    assert ring_rate(costly) == pytest.approx(8 / 5) and local_rate(costly, 10) == pytest.approx(8 / 3.2)


def test_a_bound_cures_jitter() -> None:
    """Lognormal (0, 0.5), 8 ranks, of the rate without waits: 0.52, 0.78, 0.90, 0.98 for bounds 0, 1, 3, 10."""
    times = jitter()
    ideal = 8 / times.busy_s.mean()
    shares = [bounded_rate(times, bound) / ideal for bound in BOUNDS]
    assert shares == pytest.approx([0.52, 0.78, 0.90, 0.98, 1.0], abs=0.025)
    assert bounded_rate(times, 0) == pytest.approx(ring_rate(times), rel=1e-12)
    assert shares == sorted(shares)


def test_a_late_rank_joins_the_step_that_is_open_when_its_gradient_is_done() -> None:
    """By hand, 3 ranks and 1 backup: the third is late in step 1, joins step 3 too late, and counts in step 4."""
    busy_s = np.array([[1.0, 1.0, 2.5], [1.0, 1.0, 1.0], [1.0, 1.0, 1.0], [9.0, 1.0, 1.0]])
    # steps end at 1, 2, 3 (its gradient from 2.5 would end at 3.5), and 4.5: then the second and the third are done
    assert backup_rate(StepTimes(busy_s), 1) == pytest.approx(4 * 2 / 4.5)


def test_a_runs_steps_are_drawn_with_its_means_and_spreads_and_the_exchange_is_what_is_left() -> None:
    fast, slow = np.array([0.1, 0.1, 0.2]), np.array([0.4, 0.1, 0.2])
    spread = np.array([0.0, 0.05, 0.1])
    times = sampled([Window(1500, fast, spread, 0.35), Window(1500, slow, spread, 0.55)])
    first, second = times.busy_s[:1500], times.busy_s[1500:]
    assert first.mean(axis=0) == pytest.approx(fast, rel=0.05) and second.mean(axis=0) == pytest.approx(slow, rel=0.05)
    assert first.std(axis=0) == pytest.approx(spread, abs=0.005) and (first[:, 0] == pytest.approx(0.1))
    assert times.ranks / ring_rate(times) == pytest.approx(0.45, rel=1e-9), "as long as the run's steps"
    assert (sampled([Window(10, fast, spread, 0.3)]).busy_s == sampled([Window(10, fast, spread, 0.3)]).busy_s).all()
    long = sampled([Window(10**6, fast, spread, 0.3), Window(10**6, slow, spread, 0.3)])
    assert long.steps == 4000 and long.exchange_s == 0.0


def test_ranks_slow_in_most_windows_are_constant_stragglers() -> None:
    def window(*busy_s: float) -> Window:
        return Window(10, np.array(busy_s), np.zeros(len(busy_s)), 1.0)

    often = [window(1, 1, 3)] * 8 + [window(1, 1, 1)] * 2
    assert constant_stragglers(often) == {2: pytest.approx(2.6)}
    assert constant_stragglers([window(1, 1, 3), window(3, 1, 1), window(1, 3, 1)]) == {}
    assert constant_stragglers([window(1, 2)]) == {1: 2.0}


def test_what_a_repair_or_a_smaller_world_would_give() -> None:
    times = one_slow()
    assert ring_rate(as_fast_as_others(times, [2])) == 8.0 and ring_rate(without(times, [2])) == 7.0


def test_forms_are_compared_with_the_ring() -> None:
    forms = {form.setting: form.rate for form in simulated_forms(one_slow(), has_tables=False)}
    assert list(forms) == [
        "servers, 1 backup", "servers, 2 backup", "servers, bound 1", "servers, bound 3", "servers, bound 10",
        "local SGD, every 10", "local SGD, every 50", "servers, no bound",
    ]  # fmt: skip
    backups = [forms[f"servers, {spare} backup"] for spare in (1, 2)]
    assert backups == pytest.approx([21 / 8, 18 / 8], rel=1e-3)
    assert simulated_forms(one_slow(), has_tables=True)[0].rate == pytest.approx(1.0)
    assert {form.family for form in simulated_forms(equal(1), False)} == {"bound", "local", "none"}
