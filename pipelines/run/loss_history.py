"""Losses and validation metrics of a run so far, in its folder, for the command that continues it.

The driver writes them whole with each checkpoint and at its end, since object stores do not append. Of a driver that is
killed between a checkpoint and its note, the points of that one interval are missing.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from typing import Annotated

from sparkring.conf.storage import Storage
from sparkring.conf.stored import CLOSED, StoredError, read, up_to
from sparkring.training.worker.result import History

log = logging.getLogger(__name__)
HISTORY = "history.json"
Points = dict[str, dict[int, float]]  # name -> step -> value


@dataclass(frozen=True, kw_only=True)
class _File:
    __pydantic_config__ = CLOSED

    history: History
    format: Annotated[int, up_to(1)] = 1


def as_history(points: Points) -> History:
    """Return the points of each name, by step."""
    return {name: sorted(values.items()) for name, values in points.items()}


def save_history(run: Storage, points: Points) -> None:
    """Replace the run's file. A disk that does not take it costs the next command's curves, not this one's training."""
    if not points:  # what an earlier command has left stays
        return
    try:
        run.put_atomic(HISTORY, json.dumps({"history": as_history(points), "format": 1}).encode())
    except OSError as error:
        log.warning("%s/%s cannot be written; a command that continues this run lacks it: %s", run.uri, HISTORY, error)


def history_up_to(run: Storage, step: int) -> Points:
    """Read what earlier commands recorded up to the checkpoint's `step`; {} without a readable file."""
    if not run.exists(HISTORY):
        return {}
    try:
        found = read(_File, run, HISTORY).history
    except (StoredError, OSError) as error:
        log.warning("%s; curves begin at step %d", error, step)
        return {}
    kept = {name: {at: value for at, value in points if at <= step} for name, points in found.items()}
    return {name: points for name, points in kept.items() if points}
