"""Choices of the flights recipe, made on months before its validation and test months.

For each month of `--months`: the flights before it, the month before as the validation split, the month itself held
out. Each candidate is the recipe with other settings; the one with the lowest mean log loss of the held-out months is
chosen. No flight from the recipe's own validation split on is read, so the choice is made without them.

    python benchmarks/recipe_choice.py --out benchmarks/results/recipe_choice_2core_202611.md
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from machine import measured_with, publish

from sparkring.etl.raw import unpack_flights
from sparkring.pipelines.evaluation.baselines.linear import LOGISTIC

ROOT = Path(__file__).resolve().parent.parent
LAST_MONTH = 10  # the recipe's validation split begins on 2013-11-04
CANDIDATES = ["train.export=best", "train.export=last"]


def before(raw: Path, target: Path, month: int) -> None:
    """The raw tables with the flights up to and with `month` only."""
    (target / "flights").mkdir(parents=True)
    for item in raw.iterdir():
        if item.name != "flights":
            (target / item.name).symlink_to(item.resolve())
    for text in sorted((raw / "flights").glob("*.csv"))[:month]:
        (target / "flights" / text.name).symlink_to(text.resolve())


def held_out(folder: Path, month: int, settings: str, number: int) -> dict[str, dict[str, float]]:
    """Scores of `month`: this model's and, beside the first candidate, those of the baselines."""
    words = [
        f'etl.split.boundaries={{valid: "2013-{month - 1:02d}-01", test: "2013-{month:02d}-01"}}',
        f"storage.runs=runs-{number}",
        f"report={{must_beat: [], baselines: {str(number == 0).lower()}}}",
        "tracking.enabled=false",
        *settings.split(),
    ]
    command = [sys.executable, "-m", "sparkring.pipelines.cli", "run", "flights", *words]
    done = subprocess.run(
        command, cwd=folder, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: exit code {done.returncode}\n{done.stderr[-4000:]}")
    (summary,) = (folder / f"runs-{number}").glob("flights/*/summary.json")
    scores: dict[str, dict[str, float]] = json.loads(summary.read_text())["scores"]
    return scores


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--months", type=int, nargs="+", default=[4, 5, 6, 7, 8, 9, 10])
    parser.add_argument("--candidates", nargs="+", default=CANDIDATES, help="settings, each candidate's in one word")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if not all(3 <= month <= LAST_MONTH for month in arguments.months):
        parser.error(f"--months are from 3 to {LAST_MONTH}: later ones are the recipe's validation and test")
    losses: dict[str, list[float]] = {settings: [] for settings in arguments.candidates}
    aucs: dict[str, list[float]] = {settings: [] for settings in arguments.candidates}
    logistic = []
    with tempfile.TemporaryDirectory() as scratch:
        raw = unpack_flights(Path(scratch) / "raw")
        for month in arguments.months:
            folder = Path(scratch) / f"{month}"
            before(raw, folder / "data/raw/flights", month)
            for number, settings in enumerate(arguments.candidates):
                scores = held_out(folder, month, settings, number)
                logistic += [scores[LOGISTIC]["loss"]] if number == 0 else []
                losses[settings].append(scores["this model"]["loss"])
                aucs[settings].append(scores["this model"]["auc"])
                print(f"2013-{month:02d} {settings}: {losses[settings][-1]:.4f}", flush=True)
    means = {settings: statistics.mean(values) for settings, values in losses.items()}
    chosen = min(means, key=lambda settings: means[settings])
    months = " | ".join(f"2013-{month:02d}" for month in arguments.months)
    lines = [
        "# Flights: settings of the recipe, on months before its validation month",
        "",
        f"{measured_with('pyspark', 'torch')}.",
        "",
        f"Log loss of each held-out month. Chosen by its mean: `{chosen}`.",
        "",
        f"| settings | {months} | mean | AUC, mean |",
        "|---|" + "---|" * (len(arguments.months) + 2),
    ]
    for settings, values in losses.items():
        shown = " | ".join(f"{value:.4f}" for value in values)
        lines.append(f"| `{settings}` | {shown} | {means[settings]:.4f} | {statistics.mean(aucs[settings]):.4f} |")
    shown = " | ".join(f"{value:.4f}" for value in logistic)
    lines.append(f"| {LOGISTIC} | {shown} | {statistics.mean(logistic):.4f} | |")
    publish("\n".join(lines) + "\n", arguments.out)


if __name__ == "__main__":
    main()
