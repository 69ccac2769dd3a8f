"""Benchmarks, in small: the data set of the readers' is what the product writes and reads; those of servers run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WRITE = "import sys, pathlib, data_readers as d; d.write(pathlib.Path(sys.argv[1]), 'values', 40_000)"
SERVERS = """
import servers as s
s.PULLS_S, s.ROWS, s.PULLS, s.DENSE, s.WARM_S, s.WINDOW_S = 0.05, 1000, (64, 0), 1000, 0.1, 0.2
assert len(s.rates_of(s.our_rates)) == 2
for case in (s.Case(-1), s.Case(0), s.Case(0, backup=1, slow=True), s.Case(None)):
    assert s.samples_per_second(case) > 0, case
"""


@pytest.mark.parametrize("case", ["sparkring", "decode + transforms + numpy gather"])
def test_a_case_of_the_readers_benchmark_reads_what_its_own_writer_wrote(tmp_path: Path, case: str) -> None:
    scripts = ROOT / "benchmarks"
    subprocess.run([sys.executable, "-c", WRITE, tmp_path], cwd=scripts, check=True)
    command = [sys.executable, "data_cases.py", case, tmp_path, "4096", "60"]
    done = subprocess.run(command, cwd=scripts, check=True, capture_output=True, text=True)
    assert json.loads(done.stdout)["rows"] >= 9 * 4096


def test_the_benchmark_of_servers_runs_on_todays_servers() -> None:
    subprocess.run([sys.executable, "-c", SERVERS], cwd=ROOT / "benchmarks", check=True, timeout=120)
