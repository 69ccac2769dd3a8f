from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkring.pipelines.run.process_id import this_process
from sparkring.pipelines.tracking.rules import (
    HEARTBEAT,
    PROCESS,
    end_status,
    flat_params,
    is_abandoned,
    new_points,
    open_runs,
    process_tags,
    split_finite,
)


def test_params_are_flat_text() -> None:
    values = {"optim": {"lr": 0.1, "betas": [0.9, 0.99]}, "name": "run", "none": None, "empty": {}, "on": True}
    assert flat_params(values) == {
        "optim.lr": "0.1",
        "optim.betas": "[0.9, 0.99]",
        "name": "run",
        "none": "null",
        "empty": "{}",
        "on": "true",
    }
    long = flat_params({"k" * 300: "v" * 9000})
    assert [(len(k), len(v)) for k, v in long.items()] == [(250, 6000)]


def test_only_finite_values_are_points() -> None:
    assert split_finite({"a": 1, "b": math.nan, "c": math.inf, "d": -math.inf}) == ({"a": 1.0}, ["b", "c", "d"])


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 9))))
def test_replayed_steps_leave_no_duplicates(steps: list[tuple[str, int]]) -> None:
    last: dict[str, int] = {}
    kept = [(name, step) for point in steps for name, _, step, _ in new_points([(point[0], 0.5, point[1], 7)], last)]
    assert len(kept) == len(set(kept))
    for name in "ab":
        mine = [step for n, step in kept if n == name]
        assert mine == sorted(mine)
        assert last.get(name) == max((s for n, s in steps if n == name), default=None)


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (None, "FINISHED"),
        (SystemExit(0), "FINISHED"),
        (SystemExit(None), "FINISHED"),
        (SystemExit(3), "FAILED"),
        (SystemExit("no"), "FAILED"),
        (SystemExit(143), "KILLED"),
        (SystemExit(130), "KILLED"),
        (KeyboardInterrupt(), "KILLED"),
        (ValueError("x"), "FAILED"),
        (MemoryError(), "FAILED"),
    ],
)
def test_end_status(error: BaseException | None, status: str) -> None:
    assert end_status(error) == status


@pytest.mark.parametrize(
    ("ended", "left"),
    [([], ["1", "2", "3"]), (["etl"], ["1", "3"]), (["etl", "train", "job"], []), (["other"], ["1", "2", "3"])],
)
def test_every_run_without_an_end_is_open(ended: list[str], left: list[str]) -> None:
    assert open_runs({"job": "1", "etl": "2", "train": "3"}, ended) == left


HERE = this_process()
GONE = replace(HERE, pid=2**22 + 1)


@pytest.mark.parametrize(
    ("tags", "gone"),
    [
        ({}, False),
        ({"mlflow.user": "x"}, False),
        (process_tags(HERE, 0), False),  # alive, however old its heartbeat
        (process_tags(replace(HERE, start_ticks=HERE.start_ticks - 1), 1e9), True),  # another process has its pid now
        (process_tags(GONE, 1000), True),
        (process_tags(GONE, 1000) | {PROCESS: "there 5'; drop"}, False),  # somebody's hand has been at it
        (process_tags(GONE, 1000) | {PROCESS: "there 5 6 7"}, False),
        ({PROCESS: process_tags(GONE, 0)[PROCESS]}, False),
        (
            {
                "sparkring.host": GONE.host,
                "sparkring.pid": str(GONE.pid),
                "sparkring.start_ticks": "1",
                HEARTBEAT: "1000",
            },
            True,
        ),  # an older sparkring's
        (process_tags(replace(GONE, host="there/1/1"), 900), False),  # elsewhere: by heartbeat
        (process_tags(replace(GONE, host="there/1/1"), 300), True),
        (process_tags(replace(GONE, host=HERE.host + "0"), 999), False),  # a container of this host's name
    ],
)
def test_whose_process_is_gone(tags: dict[str, str], gone: bool) -> None:
    assert is_abandoned(tags, now=1000.0, here=HERE) is gone
