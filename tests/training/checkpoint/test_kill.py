from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from sparkring.conf.storage import open_storage
from sparkring.training.checkpoint.catalog import committed, damage
from sparkring.training.checkpoint.checkpointer import Checkpointer, Retention
from sparkring.training.tables.files import newest, stored_dumps
from sparkring.training.tables.hashing import BUCKETS
from tests.training.checkpoint.kill_program import table_of

PROGRAM = Path(__file__).with_name("kill_program.py")
ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("every", [7, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["local", "bucket"])
def test_killed_at_every_write_call_the_newest_committed_one_loads(tmp_path: Path, kind: str, every: int) -> None:
    done = subprocess.run(
        [sys.executable, str(PROGRAM), kind, str(tmp_path), str(every)],
        capture_output=True,
        text=True,
        timeout=600,
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
    )
    assert done.returncode == 0, done.stderr
    runs = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(runs) > 15 // every and not runs[-1]["killed"] and all(run["killed"] for run in runs[:-1])
    calls = {run["said"].rpartition("]")[2] for run in runs[:-1]}
    every_call = {"write", "fsync", "replace", "makedirs", "delete"} if kind == "local" else {"write", "put", "delete"}
    assert calls == every_call if every == 1 else {"write"} <= calls <= every_call
    if (
        kind == "local" and every == 1
    ):  # the probe, and in each of three checkpoints five files and the marker: content, then folder
        assert [run["said"].endswith("fsync") for run in runs].count(True) == 2 * (1 + 3 * 6)
    found = []
    for run in runs:
        checkpointer = Checkpointer(open_storage(str(tmp_path / str(run["n"]))), keep=Retention(last=1, best=0))
        info = checkpointer.latest()
        found.append(info.step if info else 0)
        returned = max((step for step in (1, 2, 3) if f"[{step}]" in run["said"]), default=0)
        assert found[-1] >= returned, run  # what wait() called committed is there
        if info is None:
            continue
        assert info.skipped == (), run
        for marked in committed(checkpointer.storage)[0]:  # no marker names what is half written or half deleted
            folder = checkpointer.storage.at(f"step-{marked.step}")
            assert not [path for path, want in marked.files.items() if damage(folder, path, want)], run
            assert not [path for path, want in marked.needs.items() if damage(checkpointer.storage, path, want)], run
            assert len(marked.needs) == (marked.step == 2)
        state = {"model": {"w": torch.zeros(64), "b": torch.zeros(3)}, "lr": 0.0}
        assert checkpointer.load(info, state).trainer == {"step": info.step}
        assert state["model"]["w"].eq(info.step).all() and state["model"]["b"].eq(-info.step).all()
        assert state["lr"] == 1 / info.step
        dumps = [*stored_dumps("users", checkpointer.tables(info)["users"], np.arange(BUCKETS))]
        assert (newest(np.arange(BUCKETS), dumps).rows == table_of(info.step).dump(np.arange(BUCKETS)).rows).all()
        checkpointer.save(9, state, {})  # and the next save cleans up whatever the killed one left
        checkpointer.wait()
        left = tmp_path / str(run["n"])
        assert {path.relative_to(left).parts[0] for path in left.rglob("*/*") if path.is_file()} == {"step-9"}
    assert found == sorted(found) and set(found) == {0, 1, 2, 3}
