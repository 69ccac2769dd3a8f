"""The GPU benchmark needs nothing a GPU machine without Spark lacks: here it runs up to the point that needs CUDA."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent

WITHOUT = """
from importlib.machinery import PathFinder

ABSENT = {"pyspark", "py4j", "horovod", "mlflow", "petastorm", "pandas", "sklearn", "matplotlib"}
found = PathFinder.find_spec

def find_spec(name, path=None, target=None):
    return None if name.partition(".")[0] in ABSENT else found(name, path, target)

PathFinder.find_spec = staticmethod(find_spec)
"""
SCRIPT = """
import tempfile
from pathlib import Path

import torch

from benchmarks import gpu_single as script

with tempfile.TemporaryDirectory() as folder:
    cpu = torch.device("cpu")
    assert len(script.equality(cpu)) == 2
    manifest = script.write_tokens(Path(folder), rows=512, vocab=50)
    storage = script.open_storage(folder)
    request = script.ReadRequest(storage, manifest, "train", None, 64)
    reader = script.ParquetReader(request, script.DataRank(device=cpu), script.DataConfig(lanes=8, threads=2))
    assert next(iter(reader.batches(0))).columns["tokens"].shape == (64, script.TOKENS + 1)
    reader.close()
    assert script.GPT(**{**script.load_config("gpt-124m").config.model.args, "layers": 1}).layers == 1
script.torch.cuda.is_available = lambda: False
script.main()
"""


def test_it_runs_without_spark_horovod_and_mlflow() -> None:
    words = [sys.executable, "-c", WITHOUT + SCRIPT]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1, done.stderr
    assert done.stderr.strip().endswith("no CUDA device is visible: this benchmark needs one (it ran nothing)")
