"""A slice of `make fuzz`: other inputs every time, named by their seed."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_damaged_input_ends_in_documented_errors_within_bounds() -> None:
    seed = str(random.randrange(1 << 30))
    command = [sys.executable, "-m", "tests.fuzz.run", "--count", "2000", "--seed", seed]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, f"seed {seed}:\n{done.stdout}\n{done.stderr[-3000:]}"
