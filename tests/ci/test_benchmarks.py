"""The data set of the readers' benchmark is what the product writes and reads."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WRITE = "import sys, pathlib, data_readers as d; d.write(pathlib.Path(sys.argv[1]), 'values', 40_000)"


@pytest.mark.parametrize("case", ["sparkring", "decode + transforms + numpy gather"])
def test_a_case_of_the_readers_benchmark_reads_what_its_own_writer_wrote(tmp_path: Path, case: str) -> None:
    scripts = ROOT / "benchmarks"
    subprocess.run([sys.executable, "-c", WRITE, tmp_path], cwd=scripts, check=True)
    command = [sys.executable, "data_cases.py", case, tmp_path, "4096", "60"]
    done = subprocess.run(command, cwd=scripts, check=True, capture_output=True, text=True)
    assert json.loads(done.stdout)["rows"] >= 9 * 4096
