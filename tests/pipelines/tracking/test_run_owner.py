"""Whose run it is, and how its job ended."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sparkring.pipelines.run.process_id import this_process
from sparkring.pipelines.tracking.run_owner import end_status, is_abandoned, open_runs, process_tags
from sparkring.pipelines.tracking.tags import HEARTBEAT, PROCESS


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
