"""A driver that tracks with OpenLineage events: `lineage_program.py ROOT RESUME`; it then waits for a signal."""

from __future__ import annotations

import signal
import sys
import time
from typing import Any

from sparkring.conf.blocks.tracking import TrackingConfig
from sparkring.pipelines.tracking.tracker import Tracker


def terminated(*_: Any) -> None:
    raise SystemExit(143)


def main() -> None:
    root, resume = sys.argv[1:]
    signal.signal(signal.SIGTERM, terminated)
    settings = TrackingConfig(
        experiment="tests", root=root, flush_every_s=0.05, system_metrics=False, openlineage="nights"
    )
    with Tracker(settings, job="flights/1", name="flights", resume=resume == "resume") as tracker:
        tracker.begin_lineage("flights", None, [])
        assert tracker.flush(300)
        print("ready", tracker.run_id(), flush=True)
        time.sleep(120)


if __name__ == "__main__":
    main()
