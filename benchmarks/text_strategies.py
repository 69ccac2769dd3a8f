"""One recipe, one dataset, every strategy by one override: the curves of `text` on two ranks are the same curve.

usage: python benchmarks/text_strategies.py DATASET [--steps 30]
DATASET is the folder `sparkring etl text` has made. Each strategy trains the recipe's GPT on this machine, without
Spark; losses of every step are compared with the one-process run's. Writes benchmarks/results/text_strategies_*.md.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from conf.load import load_config
from training.job import JobResult, JobSpec
from training.launch import run_local

STRATEGIES = {
    "one process": ["launch.world=1"],
    "horovod": ["parallel.engine=horovod"],
    "ddp": ["parallel.engine=torch"],
    "zero 1 on horovod": ["parallel.engine=horovod", "parallel.zero=1"],
    "zero 1": ["parallel.engine=torch", "parallel.zero=1"],
    "zero 2": ["parallel.zero=2"],
    "zero 3": ["parallel.zero=3"],
    "pipeline, 1f1b": ["parallel.pp=2", "parallel.micro_batches=4"],
    "tensor": ["parallel.tp=2"],
    "context": ["parallel.cp=2"],
}


def train(dataset: str, overrides: list[str], steps: int) -> JobResult:
    every_step = [f"train.steps={steps}", "train.log_every_steps=1", "optim.warmup_steps=5", "launch.world=2"]
    config = load_config("text", [*every_step, *overrides])
    with tempfile.TemporaryDirectory() as run:
        payload = {"config": config.as_dict(), "config_digest": config.digest, "dataset": dataset, "run": run}
        return run_local(JobSpec("training.worker:train", payload), config.config.launch.world, lambda event: None)


def losses(result: JobResult) -> list[float]:
    return [point["values"]["train/loss"] for point in result.metrics if "train/loss" in point["values"]]


def report(found: dict[str, Any], words: str) -> str:
    lines = [
        "# The recipe `text` under every strategy, two ranks\n",
        f"`python benchmarks/text_strategies.py {words}`, {time.strftime('%Y-%m-%d')}, {os.cpu_count()} cores, "
        "float32. Loss of a step in nats per token; `apart` is the most it differs from one process.\n",
        "| strategy | engine | first loss | last loss | apart | test loss |",
        "|---|---|---|---|---|---|",
    ]
    for name, row in found.items():
        lines.append(
            f"| {name} | {row['engine']} | {row['losses'][0]:.5f} | {row['losses'][-1]:.5f} | {row['apart']:.1e} | "
            f"{row['test']:.5f} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset")
    parser.add_argument("--steps", type=int, default=30)
    arguments = parser.parse_args()
    found: dict[str, Any] = {}
    for name, overrides in STRATEGIES.items():
        result = train(str(Path(arguments.dataset).resolve()), overrides, arguments.steps)
        curve = losses(result)
        if len(curve) != arguments.steps:
            raise SystemExit(f"{name}: {len(curve)} losses in {arguments.steps} steps")
        alone = found.get("one process", {"losses": curve})["losses"]
        apart = max(abs(a - b) for a, b in zip(curve, alone, strict=True))
        summary = result.result
        found[name] = {"engine": summary["engine"], "losses": curve, "apart": apart, "test": summary["test"]["loss"]}
        print(f"{name}: {curve[0]:.5f} -> {curve[-1]:.5f}, apart {apart:.1e}", summary["measured"], flush=True)
    target = Path(__file__).parent / "results" / f"text_strategies_2core_{time.strftime('%Y%m')}.md"
    target.write_text(report(found, f"DATASET --steps {arguments.steps}"))
    if wide := [name for name, row in found.items() if row["apart"] > 1e-3]:
        raise SystemExit(f"not the same curve: {wide}")


if __name__ == "__main__":
    main()
