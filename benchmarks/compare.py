"""`make compare`: forms of training beside the ring on the recipe `fashion`, with one slow rank and without.

    python benchmarks/compare.py [--steps 900] [--picture docs/pictures/compare.png] [--out FILE]

Every form makes the same steps on the same batches from the same weights, at the recipe's rate, over torch's Gloo on
loopback. The slow rank sleeps in each forward pass for twice a rank's own seconds per step. Losses are of the
validation split: of the weights, or of the mean or center that a form evaluates. Seconds are those of steps, waits
included, on the rank that took longest; evaluations and checkpoints are not in them. One seed, one run of each.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import matplotlib
from pydantic import TypeAdapter

from benchmarks.machine import ROOT, measured_with, publish
from sparkring.conf.load import load_config
from sparkring.etl.raw import unpack_fashion
from sparkring.training.launch.group import WorkerGroup
from sparkring.training.launch.job import JobSpec
from sparkring.training.launch.local import local_group
from sparkring.training.launch.messages import Event, RankMetrics
from sparkring.training.worker.result import WorkerResult

matplotlib.use("Agg")
from matplotlib import pyplot as plt

WORLD, SLOW_RANK, EVERY, LOGGED = 4, 1, 50, 25
ENTRY, SERVER_ENTRY = "sparkring.training.worker.train:train", "sparkring.training.worker.server:serve"
PRELOAD = ("torch", "sparkring.training.worker.train", "sparkring.training.worker.server")
FORMS: dict[str, list[str]] = {
    "ring": [],
    "local SGD, every 10": ["parallel.averaging={kind: local_sgd, every: 10}"],
    "DiLoCo, every 50": ["parallel.averaging={kind: diloco, every: 50}"],
    "EASGD, every 10": ["parallel.averaging={kind: easgd, every: 10}"],
    "gossip, every 10": ["parallel.averaging={kind: gossip, every: 10}"],
    "server, bound 0": ["parallel.servers={per_host: 1, bound: 0}"],
    "server, 1 backup": ["parallel.servers={per_host: 1, backup: 1}"],
    "server, bound 1": ["parallel.servers={per_host: 1, bound: 1}"],
    "server, bound 4": ["parallel.servers={per_host: 1, bound: 4}"],
    "server, no bound": ["parallel.servers={per_host: 1, bound: null}"],
}


@dataclass
class Curve:
    """What one training gave. losses: (step, seconds, validation loss)."""

    losses: list[tuple[int, float, float]] = field(default_factory=list)
    accuracy: float = 0.0  # of the test split
    timings: dict[str, list[Any]] = field(default_factory=dict)
    gaps: dict[int, int] = field(default_factory=dict)  # steps ahead of the slowest rank -> how often
    lags: dict[int, int] = field(default_factory=dict)  # updates that a gradient's weights lack -> how often

    def seconds_to(self, loss: float) -> float | None:
        return next((seconds_s for _, seconds_s, value in self.losses if value <= loss), None)


def dataset_of(folder: Path) -> str:
    """Build the recipe's dataset in `folder`, or find it there; its URI."""
    unpack_fashion(folder / "data/raw/fashion")
    words = [sys.executable, "-m", "sparkring.pipelines.cli", "etl", "fashion"]
    subprocess.run(words, cwd=folder, env=os.environ | {"PYTHONPATH": str(ROOT)}, check=True)
    (manifest,) = folder.glob("data/datasets/fashion-*/_manifest.json")
    return str(manifest.parent)


def trained(group: WorkerGroup, dataset: str, words: list[str], steps: int, slow_s: float) -> Curve:
    """Train once. `slow_s`: seconds that the slow rank sleeps per step."""
    fixed = [
        f"dataset={dataset}", "etl=null", "model.factory=benchmarks.slowed:SlowedCnn", "parallel.engine=torch",
        f"launch.world={WORLD}", "train.epochs=null", f"train.steps={steps}", f"train.eval_every_steps={EVERY}",
        f"train.log_every_steps={LOGGED}", "train.threads_per_rank=1", "train.device=cpu",
        "checkpoint.every_steps=null", "checkpoint.every_s=null", "tracking.enabled=false",
    ]  # fmt: skip
    resolved = load_config("fashion", [*fixed, *words])
    spent: dict[int, float] = {}  # by rank
    curve, at = Curve(), dict[int, float]()

    def on_event(event: Event) -> None:
        if not isinstance(event, RankMetrics):
            return
        if event.timing is not None:
            per_step_s = event.timing.step_s + event.timing.data_stall_s
            spent[event.rank] = spent.get(event.rank, 0.0) + LOGGED * per_step_s
            at[event.step] = max(spent.values())
        if event.rank == 0 and "valid/loss" in event.values:
            curve.losses.append((event.step, 0.0, event.values["valid/loss"]))

    with tempfile.TemporaryDirectory() as run:
        payload = {"config": resolved.as_dict(), "dataset": dataset, "run": run}
        env = {"PYTHONPATH": str(ROOT), "SLOW_S": str(slow_s), "SLOW_RANK": str(SLOW_RANK if slow_s else "none")}
        servers = resolved.config.parallel.servers.per_host
        job = JobSpec(ENTRY, payload, preload=PRELOAD, env=env, servers_per_host=servers, server_entry=SERVER_ENTRY)
        done = group.run(job, WORLD, on_event)
    curve.losses = [(step, at[step], loss) for step, _, loss in curve.losses]
    result = TypeAdapter(WorkerResult).validate_python(done.result)
    curve.accuracy, curve.timings = result.test["accuracy"], done.timings
    if result.servers is not None:
        curve.gaps, curve.lags = dict(result.servers.gaps), dict(result.servers.lags)
    return curve


def measured(dataset: str, steps: int, kept: Path) -> tuple[dict[str, dict[str, Curve]], float]:
    """Condition -> form -> curve; and the seconds that the slow rank sleeps. `kept`: a file of curves, so far."""
    stored = json.loads(kept.read_text()) if kept.exists() else {"no slow rank": {}, "one slow rank": {}}
    read = TypeAdapter(dict[str, dict[str, Curve]]).validate_python
    found, slow_s = read(stored), 0.0
    with local_group(WORLD, PRELOAD) as group:
        for form, words in FORMS.items():
            for condition, curves in found.items():
                if form not in curves:
                    slept_s = slow_s if condition == "one slow rank" else 0.0
                    curves[form] = curve = trained(group, dataset, words, steps, slept_s)
                    print(condition, form, curve.losses[-1], curve.accuracy, curve.gaps, flush=True)
                    everything = {
                        name: {form: asdict(one) for form, one in part.items()} for name, part in found.items()
                    }
                    kept.write_text(json.dumps(everything))
                slow_s = slow_s or 2 * statistics.median(curves[form].timings["busy_s"])
    return found, slow_s


def draw(found: dict[str, dict[str, Curve]], picture: Path) -> None:
    """Validation loss over steps, and over seconds, and how far ranks on servers are apart; a row per condition."""
    figure, axes = plt.subplots(2, 3, figsize=(14, 7), constrained_layout=True)
    for row, (condition, curves) in zip(axes, found.items(), strict=True):
        served = {form: curve for form, curve in curves.items() if curve.gaps}
        for number, (form, curve) in enumerate(served.items()):
            total, most = sum(curve.gaps.values()), 10
            shares = [sum(n for gap, n in curve.gaps.items() if min(gap, most) == at) / total for at in range(most + 1)]
            places = [at + 0.2 * number for at in range(most + 1)]
            row[2].bar(places, shares, width=0.2, label=form)
        row[2].set(xlabel=f"steps ahead of the slowest rank ({most}: or more)", ylabel="share of steps")
        row[2].legend(fontsize=8)
        for form, curve in curves.items():
            steps, seconds, losses = zip(*curve.losses, strict=True)
            row[0].plot(steps, losses, label=form)
            row[1].plot(seconds, losses)
        row[0].set(ylabel=f"validation loss, {condition}", xlabel="steps")
        row[1].set(xlabel="seconds of steps")
        row[0].set_yscale("log")
        row[1].set_yscale("log")
    axes[0][0].legend(fontsize=8)
    figure.savefig(picture, dpi=80)
    plt.close(figure)


def table_of(curves: dict[str, Curve]) -> list[str]:
    wanted = 1.01 * curves["ring"].losses[-1][2]
    lines = [
        "| form | s for all steps | validation loss at the end | test accuracy | s to within 1 % of the ring's loss | "
        "steps ahead, mean and most | updates lacked, mean and most |",
        "|---|---|---|---|---|---|---|",
    ]
    for form, curve in curves.items():
        _, seconds_s, loss = curve.losses[-1]
        reached = curve.seconds_to(wanted)
        to = "not reached" if reached is None else f"{reached:.0f}"
        gaps, lags = mean_and_most(curve.gaps), mean_and_most(curve.lags)
        lines.append(f"| {form} | {seconds_s:.0f} | {loss:.4f} | {curve.accuracy:.4f} | {to} | {gaps} | {lags} |")
    return lines


def mean_and_most(counts: dict[int, int]) -> str:
    if not counts:
        return "-"
    mean = sum(value * times for value, times in counts.items()) / sum(counts.values())
    return f"{mean:.1f}, {max(counts)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=900, help=f"a multiple of {EVERY}")
    parser.add_argument("--folder", type=Path, default=ROOT, help="where data/ is, or is made")
    parser.add_argument("--kept", type=Path, help="a file of curves, so that a run that was cut off goes on")
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    os.environ["PYTHONPATH"] = str(ROOT)
    with tempfile.TemporaryDirectory() as folder:
        kept = given.kept or Path(folder) / "curves.json"
        found, slow_s = measured(dataset_of(given.folder.resolve()), given.steps, kept)
    if given.picture:
        draw(found, given.picture)
    parts = ["# Forms of training beside the ring: Fashion-MNIST", measured_with("torch", "numpy")]
    parts.append(
        f"{WORLD} ranks on 2 cores, {given.steps} steps of 128 photos, the recipe's rate. The slow rank sleeps "
        f"{1000 * slow_s:.0f} ms in each step."
    )
    for condition, curves in found.items():
        parts += [f"## {condition.capitalize()}", "\n".join(table_of(curves))]
    publish("\n\n".join(parts) + "\n", given.out)


if __name__ == "__main__":
    main()
