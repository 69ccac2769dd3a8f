"""The examples that are programs, run as their first lines say."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from pyspark.sql import SparkSession

ROOT = Path(__file__).parents[2]


@pytest.mark.spark
@pytest.mark.slow  # a rank that is killed is replaced from a checkpoint in tests/pipelines/launch/test_recover.py, too
def test_the_elastic_example_goes_on_from_its_checkpoint_after_a_rank_was_killed(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "examples/elastic/train.py"), str(tmp_path), "local[4]"]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(
            command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)}, stdout=log, stderr=log
        )
    try:
        while not (tmp_path / "checkpoint.pt").exists():
            assert process.poll() is None, (tmp_path / "log").read_text()[-3000:]
            time.sleep(0.05)
        helpers = [p for p in psutil.Process(process.pid).children(recursive=True) if is_helper(p)]
        helpers[-1].children()[0].kill()
        assert process.wait(timeout=200) == 0, (tmp_path / "log").read_text()[-3000:]
    finally:
        process.kill()
        process.wait()
    said = (tmp_path / "log").read_text()
    assert "killed by SIGKILL" in said and "from the checkpoint of step" in said, said[-3000:]
    assert "on 4 ranks, weight [[" in said


def is_helper(process: psutil.Process) -> bool:
    try:
        return any("sparkring.training.launch.host.fork_server" in word for word in process.cmdline()) and bool(
            process.children()
        )
    except psutil.NoSuchProcess:
        return False


@pytest.mark.spark
def test_the_petastorm_example_trains_on_a_data_frame_and_removes_its_files(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cache = tmp_path / "cache"
    monkeypatch.setattr(SparkSession, "stop", lambda session: None)  # the suite's
    monkeypatch.setattr(sys, "argv", ["train.py", str(cache)])
    runpy.run_path(str(ROOT / "examples/petastorm/train.py"), run_name="__main__")
    losses = [float(line.split()[-1]) for line in capsys.readouterr().out.splitlines() if line.startswith("epoch")]
    assert len(losses) == 3 and losses[-1] < 0.1 * losses[0]
    assert list(cache.iterdir()) == []
