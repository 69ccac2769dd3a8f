from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sparkring.conf.storage import open_storage
from sparkring.training.checkpoint.catalog import committed, damage
from sparkring.training.checkpoint.checkpointer import Checkpointer, Retention

PROGRAM = Path(__file__).with_name("kill_program.py")
ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("kind", ["local", "bucket"])
def test_killed_at_every_write_call_the_newest_committed_one_loads(tmp_path: Path, kind: str) -> None:
    done = subprocess.run(
        [sys.executable, str(PROGRAM), kind, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
    )
    assert done.returncode == 0, done.stderr
    runs = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(runs) > 15 and not runs[-1]["killed"] and all(run["killed"] for run in runs[:-1])
    calls = {run["said"].rpartition("]")[2] for run in runs[:-1]}
    assert calls == (
        {"write", "fsync", "replace", "makedirs", "delete"} if kind == "local" else {"write", "put", "delete"}
    )
    if kind == "local":  # the probe, and in each of two checkpoints four files and the marker: content, then folder
        assert [run["said"].endswith("fsync") for run in runs].count(True) == 2 * (1 + 2 * 5)
    found = []
    for run in runs:
        checkpointer = Checkpointer(open_storage(str(tmp_path / str(run["n"]))), keep=Retention(last=1, best=0))
        info = checkpointer.latest()
        found.append(info.step if info else 0)
        returned = 2 if "[2]" in run["said"] else 1 if "[1]" in run["said"] else 0
        assert found[-1] >= returned, run  # what wait() called committed is there
        if info is None:
            continue
        assert info.skipped == (), run
        for marked in committed(checkpointer.storage)[0]:  # no marker names what is half written or half deleted
            folder = checkpointer.storage.at(f"step-{marked.step}")
            assert not [path for path, want in marked.files.items() if damage(folder, path, want)], run
        state = {"model": {"w": torch.zeros(64), "b": torch.zeros(3)}, "lr": 0.0}
        assert checkpointer.load(info, state).trainer == {"step": info.step}
        assert state["model"]["w"].eq(info.step).all() and state["model"]["b"].eq(-info.step).all()
        assert state["lr"] == 1 / info.step
        checkpointer.save(9, state, {})  # and the next save cleans up whatever the killed one left
        checkpointer.wait()
        left = tmp_path / str(run["n"])
        assert [p.name for p in left.iterdir() if p.is_dir() and any(p.iterdir())] == ["step-9"]
    assert found == sorted(found) and set(found) == {0, 1, 2}
