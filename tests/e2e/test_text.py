"""Real text through the whole line: the standard library's sources -> packed tokens -> a GPT on two ranks -> report."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sparkring.etl.raw import unpack_python

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.mark.slow
@pytest.mark.spark
def test_the_recipe_text_learns_to_write_python(tmp_path: Path) -> None:
    unpack_python(tmp_path / "data/raw/python")
    done = subprocess.run(
        [sys.executable, "-m", "sparkring.pipelines.cli", "run", "text"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert done.returncode == 0, done.stderr
    (run,) = (tmp_path / "data/runs/text").glob("*/summary.json")
    summary = json.loads(run.read_text())
    model, unigrams = summary["scores"]["this model"], summary["scores"]["unigram frequencies"]
    assert model["loss"] < unigrams["loss"] - 1.0, "nats per token, on held-out files"
    assert summary["train"]["measured"]["sent_bytes dp x cp"] > 0
    report = (run.parent / "report.html").read_text()
    assert "perplexity" in report and len(summary["sample"]) > 100
