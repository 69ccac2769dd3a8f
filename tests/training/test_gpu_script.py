"""The GPU benchmark needs nothing a GPU machine without Spark lacks: here it runs up to the point that needs CUDA."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent

WITHOUT = """
from importlib.machinery import PathFinder

ABSENT = {"pyspark", "py4j", "horovod", "mlflow", "petastorm", "pandas", "sklearn", "matplotlib"}
found = PathFinder.find_spec

def find_spec(name, path=None, target=None):
    return None if name.partition(".")[0] in ABSENT else found(name, path, target)

PathFinder.find_spec = staticmethod(find_spec)
"""
PARTS = """
import tempfile
from pathlib import Path

import torch

from benchmarks import gpu_session as script

cpu = torch.device("cpu")
torch.set_num_threads(1)
for part, (run, _) in script.PARTS.items():
    if part not in ("tests", "ranks"):
        lines = run(cpu)
        assert lines and all(line.good is not False for line in lines), lines
        print(script.table(part, lines))
with tempfile.TemporaryDirectory() as folder:
    manifest = script.write_tokens(Path(folder), rows=512, vocab=50)
    storage = script.open_storage(folder)
    request = script.ReadRequest(storage, manifest, "train", None, 64)
    reader = script.ParquetReader(request, script.DataRank(device=cpu), script.DataConfig(lanes=8, threads=2))
    assert next(iter(reader.batches(0))).columns["tokens"].shape == (64, script.TOKENS + 1)
    reader.close()
    assert script.GPT(**{**script.load_config("gpt-124m").config.model.args, "layers": 1}).layers == 1
"""
ENDS = """
import sys

from benchmarks import gpu_session as script

sys.argv = ["gpu_session.py", "imports", "--here"]
script.torch.cuda.is_available = lambda: False
script.main()
"""


def test_it_starts_without_spark_horovod_and_mlflow() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT + ENDS], cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.stderr.strip().endswith("no CUDA device is visible: this benchmark needs one (it ran nothing)")


@pytest.mark.slow
def test_every_part_runs_without_spark_horovod_and_mlflow() -> None:
    """On the CPU, as far as a part has anything to do there."""
    words = [sys.executable, "-c", WITHOUT + PARTS + ENDS]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 1, done.stderr
    assert done.stderr.strip().endswith("no CUDA device is visible: this benchmark needs one (it ran nothing)")
    assert "| alone | {'zero': 3} over" in done.stdout and "Horovod | - | skipped: not installed" in done.stdout


def test_a_part_that_fails_is_a_line_and_the_next_one_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """One has no time at all, and one no meaning."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    script = importlib.import_module("gpu_session")
    monkeypatch.setattr(script, "PARTS", {"imports": (None, 0.0), "nonsense": (None, 300.0)})
    rows, good = script.run_parts(["imports", "nonsense"], "cpu", 1.0)
    assert not good
    assert rows.startswith("| imports | the whole part | at most 0 s | no end | **NOT AS EXPECTED** |\n")
    assert "| nonsense | the whole part | an end | " in rows and "invalid choice: 'nonsense'" in rows
