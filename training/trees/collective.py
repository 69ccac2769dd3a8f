"""XGBoost's own collective between the ranks of an attempt."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout

import numpy as np
import torch
import xgboost.collective as xgb_collective
from xgboost.tracker import RabitTracker

from sparkring.conf.rank_info import RankInfo
from sparkring.training.parallel.meeting import Gather, Meeting
from sparkring.training.waiting import waits_for_ranks


@contextmanager
def connected(info: RankInfo, gather: Gather, timeout_s: float) -> Iterator[None]:
    """Connect the ranks for the block. Collective.

    Rank 0 runs the tracker, on the interface of the ring, and its address goes to the others through `gather`. After an
    error nothing is closed, as that would wait for ranks that may be dead: the processes end.

    Args:
        info: this process among all.
        gather: all-gather of bytes between all ranks.
        timeout_s: of the start and of each collective.
    """
    if info.world_size == 1:
        yield
        return
    seconds, tracker = max(1, round(timeout_s)), None
    if info.rank == 0:
        tracker = RabitTracker(
            n_workers=info.world_size, host_ip=os.environ["MASTER_ADDR"], sortby="task", timeout=seconds
        )
        tracker.start()
    address = json.loads(gather(json.dumps(tracker.worker_args() if tracker else None).encode())[0])
    # Ranks are sorted by their task's name, so that theirs are ours: sums are made in the same order in each attempt.
    with redirect_stdout(io.StringIO()):  # it prints which task is which rank
        xgb_collective.init(**address, dmlc_task_id=f"{info.rank:08d}", dmlc_timeout=seconds, dmlc_retry=3)
    try:
        yield
    except BaseException:
        if tracker is not None:
            del tracker.handle  # which it would free, with an error of its own
        raise
    xgb_collective.finalize()
    if tracker is not None:
        tracker.wait_for(seconds)


class TreesMeeting(Meeting):
    """Over XGBoost's collective."""

    def __init__(self, info: RankInfo) -> None:
        self.rank, self.world = info.rank, info.world_size

    @waits_for_ranks
    def sum_over_data(self, values: torch.Tensor) -> torch.Tensor:
        if not xgb_collective.is_distributed():
            return values
        total = xgb_collective.allreduce(values.numpy(), xgb_collective.Op.SUM)
        return torch.from_numpy(np.asarray(total).reshape(values.shape))

    def combine(self, mine: dict[str, float]) -> dict[str, float]:
        return mine  # nothing is planned of trees, so nothing is measured

    def close(self, failed: bool) -> None:
        """Do nothing: `connected` closes."""
