"""A driver that tracks: `tracking_program.py ROOT HOW`, which then ends as HOW says (ok, raise, wait)."""

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
    root, how = sys.argv[1:]
    signal.signal(signal.SIGTERM, terminated)
    settings = TrackingConfig(experiment="exits", root=root, flush_every_s=0.1, system_metrics_every_s=0.2)
    with Tracker(settings, job=f"job-{how}", name=how) as tracker:
        tracker.params("job", {"optim": {"lr": 0.1}})
        with tracker.part("train"):
            for step in range(1, 6):
                tracker.metrics("train", step, {"loss": 1.0 / step})
            assert tracker.flush(300)
            time.sleep(0.5)
            print("ready", tracker.run_id(), tracker.run_id("train"), flush=True)
            if how == "raise":
                raise RuntimeError("the model exploded")
            while how.startswith("wait"):
                time.sleep(0.1)


if __name__ == "__main__":
    main()
