from __future__ import annotations

import math
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from training.tracking_rules import (
    Owner,
    SystemSampler,
    end_status,
    flat_params,
    is_abandoned,
    live_processes,
    new_points,
    open_runs,
    split_finite,
    this_process,
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


HERE = Owner("here/1", 10, 5.0)


@pytest.mark.parametrize(
    ("tags", "gone"),
    [
        ({}, False),
        ({"mlflow.user": "x"}, False),
        (Owner("here/1", 20, 100.0).tags(0), False),  # alive, however old its heartbeat
        (Owner("here/1", 20, 90.0).tags(1e9), True),  # another process has its pid now
        (Owner("here/1", 21, 100.0).tags(1000.0), True),
        (Owner("there/1", 21, 100.0).tags(900.0), False),  # elsewhere: by heartbeat
        (Owner("there/1", 21, 100.0).tags(300.0), True),
        (Owner("here/2", 20, 100.0).tags(999.0), False),  # this host before a reboot, or a container of its name
    ],
)
def test_whose_process_is_gone(tags: dict[str, str], gone: bool) -> None:
    assert is_abandoned(tags, now=1000.0, here=HERE, alive={20: 100.0}) is gone


def test_this_process_is_alive() -> None:
    me = this_process()
    assert me.pid == os.getpid()
    assert not is_abandoned(me.tags(0), 1e12, this_process(), live_processes())


def test_system_metrics_have_units_and_values() -> None:
    values = SystemSampler().sample()
    assert 0 < values["system/system_memory_usage_percentage"] <= 100
    assert values["system/driver_memory_usage_megabytes"] > 10
    assert all(name.startswith("system/") and math.isfinite(value) for name, value in values.items())
