"""Drivers that track with OpenLineage events: `lineage_program.py ROOT ...`; each then waits for a signal.

Prints a line for each: `ready ROOT PID RUN`, and later `ended ROOT CODE`.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from functools import partial

from sparkring.conf.blocks.tracking import TrackingConfig
from sparkring.pipelines.tracking.tracker import Tracker
from tests.pipelines.tracking.tracking_program import run_all, terminated


def drive(root: str) -> None:
    signal.signal(signal.SIGTERM, terminated)
    settings = TrackingConfig(
        experiment="tests", root=root, flush_every_s=0.05, system_metrics=False, openlineage="nights"
    )
    with Tracker(settings, job="flights/1", name="flights") as tracker:
        tracker.begin_lineage("flights", None, [])
        assert tracker.flush(300)
        print("ready", root, os.getpid(), tracker.run_id(), flush=True)
        time.sleep(120)


if __name__ == "__main__":
    run_all({root: partial(drive, root) for root in sys.argv[1:]})
