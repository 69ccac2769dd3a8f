"""Seconds of a step of the whole loop, where a step is so small that the loop is most of it; and what was computed.

usage: python benchmarks/loop_overhead.py [--steps 3000]

Trains a small table model on ranks of this machine by the entry of every job, and prints a line of JSON by layout:
milliseconds of a step, and digests of the weights and of the logged losses, which two commits must share.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from sparkring.conf.load import load_config
from sparkring.conf.manifest import (
    MANIFEST_NAME,
    ROW_NUMBER,
    Accounting,
    Column,
    DataFile,
    DatasetManifest,
    Lineage,
    SplitInfo,
)
from sparkring.training.launch.group import WorkerGroup
from sparkring.training.launch.job import PRELOAD, JobSpec
from sparkring.training.launch.local import local_group
from sparkring.training.launch.messages import Event, RankMetrics

LAYOUTS = {
    "one rank": (1, []),
    "ring of Horovod": (2, ["parallel.engine=horovod"]),
    "ring of torch": (2, ["parallel.engine=torch"]),
    "ZeRO-2": (2, ["parallel.engine=torch", "parallel.zero=2"]),
}
RECIPE = """
name: overhead
dataset: {dataset}
model: {{factory: sparkring.training.models.tabular:Tabular, args: {{width: 16, blocks: 2, bumps: 4, dropout: 0.0}}}}
optim: {{lr: 1e-3, warmup_steps: 5}}
train: {{epochs: null, steps: {steps}, global_batch: 64, log_every_steps: 10, eval_every_steps: 1000000, dtype: float64,
         seed: 3, threads_per_rank: 1, device: cpu}}
checkpoint: {{every_s: null}}
tracking: {{enabled: false}}
"""


def write_table(folder: Path, rows: dict[str, int]) -> None:
    files = []
    for number, (split, count) in enumerate(rows.items()):
        random = np.random.default_rng(number)
        code, x = random.integers(0, 7, count), random.normal(size=count)
        late = random.random(count) < 1 / (1 + np.exp(-(x + 0.5 * code - 2)))
        columns = {"code": code.astype(np.int32), "x": x.astype(np.float32), "late": late, ROW_NUMBER: np.arange(count)}
        path = folder / f"data/{split}-00000.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table(columns), path, row_group_size=1000)
        groups = tuple(min(1000, count - first) for first in range(0, count, 1000))
        data = path.read_bytes()
        sha = hashlib.sha256(data).hexdigest()
        files.append(
            DataFile(path=f"data/{path.name}", split=split, rows=count, bytes=len(data), sha256=sha, row_groups=groups)
        )
    manifest = DatasetManifest(
        name="overhead",
        fingerprint="0" * 64,
        created_at="",
        columns=(
            Column(name="code", dtype="int32", cardinality=7),
            Column(name="x", dtype="float32"),
            Column(name="late", dtype="bool", role="label"),
        ),
        features={},
        files=tuple(files),
        splits={split: SplitInfo(rows=count, files=1) for split, count in rows.items()},
        accounting=Accounting(rows_in=sum(rows.values()), rows_out=sum(rows.values())),
        lineage=Lineage(sources={}),
    )
    (folder / MANIFEST_NAME).write_text(manifest.to_json())


def measure(group: WorkerGroup, folder: Path, number: int, world: int, words: list[str]) -> dict[str, Any]:
    """Train once; `number`: of the attempt."""
    losses: dict[int, float] = {}

    def on_event(event: Event) -> None:
        if isinstance(event, RankMetrics) and event.rank == 0 and "train/loss" in event.values:
            losses[event.step] = event.values["train/loss"]

    run = folder / f"run{number}"
    config = load_config(str(folder / "recipe.yaml"), words).as_dict()
    payload = {"config": config, "dataset": str(folder / "table"), "run": str(run)}
    job = JobSpec("sparkring.training.worker.train:train", payload, preload=PRELOAD)
    result = group.run(job, world, on_event, number).result
    weights = hashlib.sha256()
    for file in sorted((run / "model").iterdir()):
        weights.update(file.read_bytes())
    return {
        "step_ms": 1e3 * result["train_s"] / result["steps"],
        "weights": weights.hexdigest()[:16],
        "losses": hashlib.sha256(repr(sorted(losses.items())).encode()).hexdigest()[:16],
        "logged": len(losses),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=3000, help="of each training")
    steps = parser.parse_args().steps
    with tempfile.TemporaryDirectory() as scratch, local_group(2, PRELOAD) as group:
        folder = Path(scratch)
        write_table(folder / "table", {"train": 64_000, "valid": 200, "test": 200})
        (folder / "recipe.yaml").write_text(RECIPE.format(dataset=folder / "table", steps=steps))
        for number, (name, (world, words)) in enumerate(LAYOUTS.items(), start=1):
            print(json.dumps({"layout": name} | measure(group, folder, number, world, words)), flush=True)


if __name__ == "__main__":
    main()
