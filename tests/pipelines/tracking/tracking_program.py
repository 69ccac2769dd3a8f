"""Drivers that track at the same time: `tracking_program.py ROOT HOW ...`; each ends as its HOW says.

HOW: ok, raise, or wait-... for a signal. They are forked after the imports, which take seconds. Prints a line for each:
`ready HOW PID RUN TRAIN`, and later `ended HOW CODE`.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import mlflow.store.tracking.sqlalchemy_store  # noqa: F401  # before the forks

from sparkring.conf.blocks.tracking import TrackingConfig
from sparkring.pipelines.tracking.tracker import Tracker


def terminated(*_: Any) -> None:
    raise SystemExit(143)


def drive(root: str, how: str) -> None:
    signal.signal(signal.SIGTERM, terminated)
    settings = TrackingConfig(experiment="exits", root=root, flush_every_s=0.1, system_metrics_every_s=0.2)
    with Tracker(settings, job=f"job-{how}", name=how) as tracker:
        tracker.params("job", {"optim": {"lr": 0.1}})
        with tracker.part("train"):
            for step in range(1, 6):
                tracker.metrics("train", step, {"loss": 1.0 / step})
            assert tracker.flush(300)
            time.sleep(0.5)
            print("ready", how, os.getpid(), tracker.run_id(), tracker.run_id("train"), flush=True)
            if how == "raise":
                raise RuntimeError("the model exploded")
            while how.startswith("wait"):
                time.sleep(0.1)


def in_child(drive: Callable[[], None]) -> int:
    """Fork a driver, which ends with the code that Python would end with; its process id."""
    if pid := os.fork():
        return pid
    code = 1
    try:
        drive()
        code = 0
    except SystemExit as ended:
        code = int(str(ended.code))
    except KeyboardInterrupt:
        code = 130
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def run_all(drives: Mapping[str, Callable[[], None]]) -> None:
    """Run drivers by name, each in a process of its own; a line says how each has ended."""
    drivers = {in_child(drive): name for name, drive in drives.items()}
    while drivers:
        pid, status = os.wait()
        print("ended", drivers.pop(pid), os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    root, *hows = sys.argv[1:]
    run_all({how: partial(drive, root, how) for how in hows})
