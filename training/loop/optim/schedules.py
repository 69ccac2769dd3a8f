"""Learning rates: pure functions of the step, the share that a plateau leaves of them, and a schedule of the user's."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from sparkring.conf.blocks.optim import OptimConfig, PlateauConfig
from sparkring.conf.errors import first_line
from sparkring.conf.references import load_setting
from sparkring.conf.stored import Count

CYCLE_START = 1 / 25  # of the peak, where one_cycle begins, as torch's OneCycleLR
CYCLE_RISE = 0.3  # of all steps
TRIED_STEPS = 1000  # as many steps a schedule is tried with where the run's are not known yet


def learning_rate(optim: OptimConfig, step: int, total_steps: int, peak: float) -> float:
    """Compute the rate of 0-based `step` in a built-in schedule.

    Linear warm-up to `peak`, then constant (so plateau, except for its share), linear or cosine to peak x
    final_lr_share; one_cycle rises from peak / 25 by a cosine. The last step of the run has the final rate; it stays
    beyond.
    """
    warmup_steps, final_share = optim.warmup_steps, optim.final_lr_share
    if optim.schedule == "one_cycle":
        return peak * _one_cycle(step, total_steps, warmup_steps, final_share)
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    if optim.schedule in ("constant", "plateau"):
        return peak
    done = min(1.0, (step - warmup_steps) / max(1, total_steps - 1 - warmup_steps))
    if optim.schedule == "linear":
        return peak * (1.0 - (1.0 - final_share) * done)
    return peak * (final_share + (1.0 - final_share) * 0.5 * (1.0 + math.cos(math.pi * done)))


def _one_cycle(step: int, total_steps: int, rising_steps: int, final_share: float) -> float:
    """Compute the share of the peak (Smith and Topin 2017, https://arxiv.org/abs/1708.07120); momentum is fixed."""
    top = max(0.0, (rising_steps or CYCLE_RISE * total_steps) - 1)  # the step of the peak
    if step < top:
        return _between(CYCLE_START, 1.0, step / top)
    return _between(1.0, final_share, min(1.0, (step - top) / max(1.0, total_steps - 1 - top)))


def _between(begin: float, end: float, done: float) -> float:
    """Interpolate from `begin` to `end` by half a cosine."""
    return end + (begin - end) * 0.5 * (1.0 + math.cos(math.pi * done))


def scaled_lr(optim: OptimConfig, global_batch: int) -> float:
    """Scale lr with the batch: linear (Goyal 2017, https://arxiv.org/abs/1706.02677) or by its square root.

    For the square root see Krizhevsky 2014, arXiv 1404.5997.
    """
    ratio = global_batch / optim.reference_batch
    return optim.lr * {"none": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}[optim.scale_lr]


# --- plateau


@dataclass(frozen=True)
class PlateauState:
    """What the schedule `plateau` has seen; JSON in every checkpoint."""

    share: float = 1.0  # of the rate
    best: float | None = None
    evals_without_gain: Count = 0


def after_value(state: PlateauState, value: float, is_better: bool, rule: PlateauConfig, least: float) -> PlateauState:
    """Return the state after an evaluation.

    Args:
        state: state before the evaluation.
        value: value of the watched metric.
        is_better: whether it beats `state.best`.
        rule: when the rate is lowered, and by how much.
        least: smallest share of the rate.
    """
    if is_better:
        return replace(state, best=value, evals_without_gain=0)
    without = state.evals_without_gain + 1
    if without < rule.patience:
        return replace(state, evals_without_gain=without)
    return replace(state, share=max(least, state.share * rule.factor), evals_without_gain=0)


# --- the user's


def make_schedule(optim: OptimConfig, total_steps: int, peak: float) -> Callable[[int], float]:
    """Return step -> learning rate. The ValueError names a user's function that gives no rate, and the step."""
    if not optim.has_own_schedule:
        return lambda step: learning_rate(optim, step, total_steps, peak)
    function = load_setting(optim.schedule, "optim.schedule")
    return lambda step: peak * _own_share(function, optim, step, total_steps)


def _own_share(function: Any, optim: OptimConfig, step: int, total_steps: int) -> float:
    share = function(step, total_steps, **optim.schedule_args)
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share < math.inf:
        raise ValueError(
            f"optim.schedule = {optim.schedule!r}: gave {share!r} for step {step} of {total_steps}; it must be a "
            "number, 0 or more: the share of optim.lr"
        )
    return float(share)


def schedule_problems(optim: OptimConfig, steps: int | None) -> list[str]:
    """List why a user's schedule cannot be used. `steps`: length of the run, if known."""
    if not optim.has_own_schedule:
        return []
    key, total = f"optim.schedule = {optim.schedule!r}", steps or TRIED_STEPS
    try:
        function = load_setting(optim.schedule, "optim.schedule")
        if not callable(function):
            return [f"{key}: is {function!r}, not a function"]
        inspect.signature(function).bind(0, total, **optim.schedule_args)
    except ValueError as error:
        return [str(error)]
    except TypeError as error:
        return [f"{key}: does not take (step, total_steps, **{optim.schedule_args}): {error}"]
    except Exception as error:  # the module's own code runs
        return [f"{key}: its import fails: {type(error).__name__}: {first_line(error)}"]
    try:
        first, again = (_own_share(function, optim, 0, total) for _ in range(2))
    except ValueError as error:
        return [str(error)]
    except Exception as error:
        return [f"{key}: fails for step 0 of {total}: {type(error).__name__}: {first_line(error)}"]
    if first != again:
        return [f"{key}: gave {first} and then {again} for step 0; every rank calls it, so it must be a pure function"]
    return []
