"""The mark on functions that wait for other ranks: it is in a real stack, and on all that wait."""

from __future__ import annotations

import faulthandler
from pathlib import Path
from typing import Any

import pytest

from sparkring.training.checkpoint.checkpointer import Checkpointer
from sparkring.training.launch.health import (
    waits_in,
)
from sparkring.training.parallel.data_parallel.horovod_ring import HorovodCollectives
from sparkring.training.waiting import FRAME, waits_for_ranks


def test_a_marked_wait_is_seen_in_a_real_stack(tmp_path: Path) -> None:
    @waits_for_ranks
    def save_before_is_whole() -> None:
        with (tmp_path / "stack").open("w") as file:
            faulthandler.dump_traceback(file, all_threads=False)

    save_before_is_whole()
    assert waits_in((tmp_path / "stack").read_text()) == "save_before_is_whole"


@pytest.mark.parametrize("function", [Checkpointer.wait, HorovodCollectives.wait])
def test_what_waits_for_ranks_is_marked(function: Any) -> None:
    assert function.__code__.co_name == FRAME
