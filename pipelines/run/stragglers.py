"""`sparkring plan stragglers RUN`: what slow ranks cost a run, and whether another form of training would be faster.

The driver writes each rank's seconds per step to the run folder; training/planner/stragglers.py simulates with them.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from sparkring.conf.manifest import ManifestError
from sparkring.conf.plain_text import count_of
from sparkring.conf.storage import Storage, open_storage
from sparkring.conf.stored import CLOSED, Count, Finite, read, up_to
from sparkring.training.planner.stragglers import (
    FormRate,
    Window,
    as_fast_as_others,
    constant_stragglers,
    ring_rate,
    sampled,
    simulated_forms,
    without,
)
from sparkring.training.worker.result import TrainResult, read_result

log = logging.getLogger(__name__)
STEP_TIMES = "step_times.json"
WORTH = 1.2  # times the ring's rate: less is not worth another training
NEAR = 0.85  # of the fastest form: the first that comes so near is advised, as it is nearest to the ring's training
LEAST_WINDOWS = 3  # beside the first, in which memory is allocated
LONG_EXCHANGE = 0.3  # share of a step
WHAT_NEXT = {
    "lag": "tables.lag (docs/explanation/sparse.md)",
    "bound": "parallel.servers.bound, whose ranks train on weights that lack some gradients",
    "local": "parallel.averaging.kind: local_sgd (docs/explanation/averaging.md), which needs more steps for the same "
    "loss",
    "none": "parallel.servers.bound: null, where nothing limits how old weights are",
    "backup": "parallel.servers.backup, whose steps are the ring's, of the gradients that come first",
}
Seconds = Annotated[Finite, Field(ge=0)]


@dataclass(frozen=True, kw_only=True)
class _File:
    """Of the run's last attempt, by logging window and rank: the window's last step, and means of its steps."""

    __pydantic_config__ = CLOSED

    step: list[Count]
    rank: list[Count]
    busy_s: list[Seconds]
    wait_s: list[Seconds]
    busy_sd_s: list[Seconds]
    format: Annotated[int, up_to(1)] = 1


def save_step_times(run: Storage, columns: Mapping[str, list[Any]]) -> None:
    """Replace the run's file; `columns`: JobResult.timings. A disk that does not take it costs the advice only."""
    try:
        run.put_atomic(STEP_TIMES, json.dumps({**columns, "format": 1}).encode())
    except OSError as error:
        log.warning("%s/%s cannot be written; `plan stragglers` lacks it: %s", run.uri, STEP_TIMES, error)


def read_windows(run: Storage) -> list[Window]:
    """The windows of a run's last attempt but the first. ManifestError where there are too few."""
    file = read(_File, run, STEP_TIMES, ManifestError)
    table = np.column_stack([file.step, file.rank, file.busy_s, file.wait_s, file.busy_sd_s])
    steps = sorted(set(file.step))
    ranks = max(file.rank, default=-1) + 1
    if len(table) != len(steps) * ranks or len(steps) <= LEAST_WINDOWS:
        raise ManifestError(
            f"{run.uri}/{STEP_TIMES}: has {count_of(len(steps), 'logging window')} of {count_of(ranks, 'rank')}; it "
            f"takes {LEAST_WINDOWS + 1}: train longer, or lower train.log_every_steps"
        )
    by_window = table[np.lexsort((table[:, 1], table[:, 0]))].reshape(len(steps), ranks, 5)
    return [
        Window(after - before, each[:, 2], each[:, 4], float((each[:, 2] + each[:, 3]).mean()))
        for before, after, each in zip(steps, steps[1:], by_window[1:], strict=False)
    ]


def straggler_advice(uri: str) -> str:
    """The advice for a run folder. ManifestError where it lacks what is read, or was not a ring's."""
    run = open_storage(uri)
    result = read_result(run)
    if problem := _not_a_ring(result):
        raise ManifestError(f"{run.uri}: {problem}; the simulation starts from a ring's step times")
    trained = run if result.choice is None else run.at("trees" if result.choice.winner == "trees" else "net")
    return "\n".join(advice(read_windows(trained), bool(result.train.tables)))


def _not_a_ring(result: TrainResult) -> str | None:
    parallel = result.run_config().parallel
    if parallel.servers.per_host:
        return "was trained on parameter servers (parallel.servers)"
    if parallel.averaging.kind != "none":
        return f"was trained with parallel.averaging.kind={parallel.averaging.kind}"
    if max(parallel.pp, parallel.tp, parallel.cp) > 1:
        axes = f"pp({parallel.pp}), tp({parallel.tp}), cp({parallel.cp})"
        return f"was trained with {axes}, whose ranks make one step together"
    if result.train.world == 1:
        return "was trained by one rank, which waits for nobody"
    return None


def advice(windows: Sequence[Window], has_tables: bool) -> list[str]:
    """What the windows say, what each form would give, and what to do. `has_tables`: the model has sparse tables."""
    times, slow = sampled(windows), constant_stragglers(windows)
    forms, ring = simulated_forms(times, has_tables), ring_rate(times)
    step_s, own_s = times.ranks / ring, float(times.busy_s.mean())
    lines = [
        f"{count_of(times.ranks, 'rank')}, {count_of(sum(window.steps for window in windows), 'step')}: a step takes "
        f"{_ms(step_s)}, of which a rank works {_ms(own_s)}, waits {_ms(step_s - own_s - times.exchange_s)} for slower "
        f"ones, and {_ms(times.exchange_s)} are left for the exchange.",
        *(
            f"Rank {rank} takes {factor:.1f} times the median rank's time, all the time."
            for rank, factor in slow.items()
        ),
        "",
        "Gradients per second, simulated, over the ring's:",
        *(f"  {form.rate:5.2f}  {form.setting}" for form in forms),
        "",
    ]
    repaired = 1.0  # times the ring's rate
    if slow and len(slow) < times.ranks:
        repaired, less = ring_rate(as_fast_as_others(times, [*slow])) / ring, ring_rate(without(times, [*slow])) / ring
        which = f"rank {', '.join(map(str, slow))}"
        lines.append(
            "A bound does not cure a rank that is always slow, whatever it is: after it all go at that rank's pace. "
            f"Look at the host of {which} first: the ring is {repaired:.2f} times as fast with it repaired, and "
            f"{less:.2f} times without it (launch.world)."
        )
    return [*lines, *_verdict(forms, times.exchange_s / step_s, repaired)]


def _verdict(forms: Sequence[FormRate], exchange: float, repaired: float) -> list[str]:
    """What to do.

    Args:
        forms: simulated.
        exchange: its share of a step.
        repaired: rate of the ring over its own, were no rank slow all the time.
    """
    best = max(forms, key=lambda form: form.rate)
    good = [form for form in forms if form.rate >= WORTH and form.rate >= NEAR * best.rate]
    codec = (
        [
            f"The exchange is {exchange:.0%} of a step: `parallel.compress` makes it smaller first "
            "(docs/explanation/compression.md)."
        ]
        if exchange >= LONG_EXCHANGE
        else []
    )
    if not good:
        return [
            *codec,
            f"Stay on the ring: nothing is {WORTH} times as fast (the most is {best.rate:.2f}, {best.setting}).",
        ]
    if repaired >= WORTH and repaired >= NEAR * best.rate:
        return [
            *codec,
            f"Stay on the ring, and have its slow host repaired: no form gives much more ({best.rate:.2f}).",
        ]
    first = good[0]
    return [
        *codec,
        f"{first.setting} would give {first.rate:.2f} times the gradients per second: {WHAT_NEXT[first.family]}. "
        "Gradients are not progress: compare the loss over seconds before you leave the ring.",
    ]


def _ms(seconds_s: float) -> str:
    return f"{1000 * max(0.0, seconds_s):,.1f} ms"
