"""The recipe `recommender` on MovieLens-100k: several seeds, one slot and two, beside simple orders of the same lists.

Everything ranks the same test rows: for each user of the test period all films of the training period that the user had
not rated before. ALS is also fitted with other settings than the recipe's, and the best of them on these very rows is
shown: an advantage that the model does not have.

    python benchmarks/recommender.py --out benchmarks/results/recommender_2core_202611.md
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from machine import measured_with, publish

from sparkring.conf.blocks.data import DataConfig
from sparkring.conf.blocks.launch import LaunchConfig
from sparkring.conf.blocks.report import AlsConfig
from sparkring.conf.blocks.spark import SparkConfig
from sparkring.conf.manifest import read_manifest
from sparkring.conf.storage import open_storage
from sparkring.etl.raw import unpack_movies
from sparkring.pipelines.context.etl_step import Dataset
from sparkring.pipelines.evaluation.baselines.als import als_predictions
from sparkring.pipelines.evaluation.evaluate import read_predictions
from sparkring.pipelines.evaluation.ranking import ALS_NAME, POPULARITY, popularity, ranking_scores
from sparkring.pipelines.evaluation.split_rows import SplitRows, split_rows
from sparkring.pipelines.run.spark import spark_session

ROOT = Path(__file__).resolve().parent.parent
K, BARE = 10, ["report.must_beat=[]", "report.baselines=false", "report.ranking.als=null"]
NDCG, RECALL = f"ndcg_at_{K}", f"recall_at_{K}"
RANKS, REGS, ALPHAS = (4, 8, 16), (0.02, 0.1), (1.0, 5.0)
Scores = dict[str, float]


def run(folder: Path, name: str, *words: str) -> tuple[Path, float]:
    """Run the recipe in `folder`; its run folder, and the seconds it took."""
    command = [sys.executable, "-m", "sparkring.pipelines.cli", "run", "recommender", f"storage.runs={name}", *words]
    began = time.monotonic()
    done = subprocess.run(
        command, cwd=folder, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: exit code {done.returncode}\n{done.stderr[-4000:]}")
    (summary,) = (folder / name).glob("recommender/*/summary.json")
    return summary.parent, time.monotonic() - began


class Lists:
    """The test rows as lists: all of them, and those of users with and without a film they liked before."""

    def __init__(self, rows: SplitRows) -> None:
        _, self.lists = np.unique(rows.column("user").to_numpy(), return_inverse=True)
        self.positive = rows.column("liked").to_numpy() > 0
        is_new = np.array(rows.column("history").to_pylist()) == "none"
        self.parts = {"all users": np.ones(len(is_new), bool), "known users": ~is_new, "new users": is_new}

    def scores(self, predictions: np.ndarray) -> list[Scores]:
        return [
            ranking_scores(self.lists[of], self.positive[of], predictions[of], [K]) for of in self.parts.values()
        ]  # fmt: skip

    def counts(self) -> list[int]:
        return [len(np.unique(self.lists[of & self.positive])) for of in self.parts.values()]


def line(name: str, scores: list[Scores]) -> str:
    shown = (f"{one[NDCG]:.4f} | {one[RECALL]:.4f}" for one in scores)
    return f"| {name} | {' | '.join(shown)} |"


def als_grid(train: SplitRows, test: SplitRows, lists: Lists) -> dict[str, list[Scores]]:
    """The scores of ALS by its settings."""
    with spark_session("als", SparkConfig(), LaunchConfig()) as spark:
        found = {}
        for rank, reg, alpha in itertools.product(RANKS, REGS, ALPHAS):
            config = AlsConfig(rank=rank, reg=reg, alpha=alpha)
            made = als_predictions(spark, config, train, test, ("user", "film", "liked"))
            found[f"rank {rank}, reg {reg:g}, alpha {alpha:g}"] = lists.scores(made)
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--folder", type=Path, help="where data and runs stay; default: a temporary one")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = arguments.folder or Path(scratch)
        unpack_movies(folder / "data/raw/movies")
        whole, seconds = run(folder, "whole")
        runs = {seed: run(folder, f"seed-{seed}", f"train.seed={seed}", *BARE)[0] for seed in arguments.seeds}
        alone, _ = run(folder, "alone", "launch.world=1", f"train.seed={arguments.seeds[0]}", *BARE)
        publish(report(folder, whole, seconds, runs, alone), arguments.out)


def report(folder: Path, whole: Path, seconds: float, runs: dict[int, Path], alone: Path) -> str:
    """The result file."""
    (manifest,) = (folder / "data/datasets").glob("recommender-*/_manifest.json")
    storage = open_storage(str(manifest.parent))
    dataset = Dataset(read_manifest(storage), storage)
    train, test = (split_rows(dataset, split, DataConfig(), []) for split in ("train", "test"))
    lists = Lists(test)

    def predicted(run_folder: Path) -> np.ndarray:
        summary: dict[str, Any] = json.loads((run_folder / "summary.json").read_text())
        return read_predictions(open_storage(str(run_folder)), summary["predictions"], test)[1]

    of_seeds = {seed: lists.scores(predicted(run_folder)) for seed, run_folder in runs.items()}
    grid = als_grid(train, test, lists)
    best = max(grid, key=lambda name: grid[name][0][NDCG])
    simple = {
        f"liked in the {days} days before": lists.scores(test.column(name).to_numpy())
        for days, name in ((7, "week"), (14, "fortnight"), (30, "month"))
    }
    ndcg = [scores[0][NDCG] for scores in of_seeds.values()]
    one, two = (predicted(run_folder) for run_folder in (alone, next(iter(runs.values()))))
    said = json.loads((whole / "summary.json").read_text())["scores"]
    heads = [
        f"{part}, {count} lists: NDCG at {K} | recall at {K}"
        for part, count in zip(lists.parts, lists.counts(), strict=True)
    ]
    lines = [
        "# Recommender: MovieLens-100k, the whole catalog ranked on held-out time\n",
        f"{measured_with('pyspark', 'torch', 'numpy')}\n",
        f"{len(lists.lists):,} test rows: each test user's films of the training period that the user had not rated "
        "before, none drawn. Known users have liked a film before 1998-02-01, the day up to which model, ALS and every "
        "count below know the ratings; the test period begins on 1998-02-15.\n",
        f"| | {' | '.join(heads)} |",
        f"|---|{'---|' * 6}",
        *(line(f"this model, seed {seed}", scores) for seed, scores in of_seeds.items()),
        line("popularity: how often a film was liked", lists.scores(popularity(train, test, "film", "liked"))),
        line(f"ALS, the best of {len(grid)} settings on these very rows: {best}", grid[best]),
        *(line(name, scores) for name, scores in simple.items()),
        "",
        f"Mean NDCG at {K} of the seeds: {statistics.mean(ndcg):.4f}, from {min(ndcg):.4f} to {max(ndcg):.4f}. The "
        f"baselines of the recipe: ALS {said[ALS_NAME][NDCG]:.4f}, popularity {said[POPULARITY][NDCG]:.4f}. The whole "
        f"of `sparkring run recommender` with nothing built before: {seconds:.0f} s.\n",
        f"One slot and two, of seed {next(iter(runs))}: predictions differ by at most {np.abs(one - two).max():.1e}, "
        f"NDCG at {K} is {lists.scores(one)[0][NDCG]:.6f} and {lists.scores(two)[0][NDCG]:.6f}.\n",
        f"| settings of ALS | NDCG at {K}, all users |",
        "|---|---|",
        *(f"| {name} | {scores[0][NDCG]:.4f} |" for name, scores in grid.items()),
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
