"""A slice of `make fuzz`: other inputs every time, named by their seed."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("inputs", [("2000",), ("500", "--kind", "trees.ubj", "--kind", "model folder")])
def test_damaged_input_ends_in_documented_errors_within_bounds(inputs: tuple[str, ...]) -> None:
    seed = str(random.randrange(1 << 30))
    command = [sys.executable, "-m", "tests.fuzz.run", "--seed", seed, "--count", *inputs]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, f"seed {seed}:\n{done.stdout}\n{done.stderr[-3000:]}"
