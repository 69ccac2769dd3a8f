"""A million rows through executors of 512 MiB: no stage may need more than it can spill."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.spark
def test_shards_are_written_with_512_mib_executors(tmp_path):
    command = [sys.executable, "benchmarks/etl_write.py", "--rows", "1000000", "--rounds", "1", "--memory", "512m"]
    command += ["--master", "local-cluster[2,1,512]", "--folder", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "1000000 rows, ours" in done.stderr
