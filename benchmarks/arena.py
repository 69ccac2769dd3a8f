"""Tables as a new user trains them, beside LightGBM, XGBoost, CatBoost and networks with their defaults.

    make arena [ARGS="--only adult houses --seeds 0 1 2 --peers lightgbm catboost --out benchmarks/results/arena.md"]

The recipe of each table is used as `sparkring init table` writes it. All see the same rows: a peer is fitted on the
rows of our training and validation splits (ours stops early by the second), as `model.family: trees` sees them, and
scored on the rows of the test split. Tables: tables_data.py. A seed is one of training; the splits stay.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory

import numpy as np
from machine import ROOT, measured_with, publish
from tables import run
from tables_data import TABLES

from sparkring.conf.blocks.data import DataConfig
from sparkring.conf.blocks.model import ModelConfig
from sparkring.conf.manifest import Column, read_manifest
from sparkring.conf.storage import open_storage
from sparkring.conf.tasks import LabelForm, TaskKind, task_kind
from sparkring.pipelines.context.etl_step import Dataset
from sparkring.pipelines.evaluation.split_rows import split_rows
from sparkring.training.metrics import task_scores
from sparkring.training.model.recipe_model import pick_columns
from sparkring.training.trees.columns import TreeColumns, is_category, seen_by

PYTHON = ROOT / "build/arena/bin/python"
PEERS = ("lightgbm", "xgboost", "catboost")
FAMILIES = ("both", "net", "trees")
SKLEARN = "gradient-boosted trees (scikit-learn)"


@dataclass(frozen=True)
class Score:
    """The loss of the test rows (log loss, RMSE), and seconds: ours of the whole job, a peer's of fit and predict.

    Seconds are NaN of a baseline, which is a part of our job.
    """

    table: str
    model: str
    seed: int
    loss: float
    seconds: float


def trained(table: str, family: str, seed: int, folder: Path) -> tuple[list[Score], Path, str]:
    """Train as `init` says; our score and that of the report's trees, the dataset's folder, and the task."""
    runs = f"runs-{family}-{seed}"
    began = time.monotonic()
    settings = ["tracking.enabled=false", f"storage.runs={runs}", f"model.family={family}", f"train.seed={seed}"]
    run(folder / table, "run", "recipe.yaml", *settings)
    seconds = time.monotonic() - began
    (summary,) = (folder / table).glob(f"{runs}/*/*/summary.json")
    found = json.loads(summary.read_text())
    own = next(iter(found["scores"]))
    scores = [Score(table, f"sparkring, {family}", seed, loss_of(found["scores"][own]), seconds)]
    if SKLEARN in found["scores"] and family == FAMILIES[0] and seed == 0:
        scores.append(Score(table, "scikit-learn's trees", seed, loss_of(found["scores"][SKLEARN]), math.nan))
    return scores, folder / table / found["dataset"], found["config"]["model"]["task"]


def loss_of(scores: dict[str, float]) -> float:
    return scores.get("rmse", scores["loss"])


def write_rows(dataset: Path, task: TaskKind, folder: Path) -> np.ndarray:
    """Write what the peers read (arena_peer.py); the labels of the test rows."""
    storage = open_storage(str(dataset))
    model = ModelConfig(family="trees", task=task.name)
    manifest = seen_by(model, read_manifest(storage))
    picked = pick_columns(manifest, model)
    columns = TreeColumns.of(manifest, picked.features)
    (label,) = picked.labels
    parts = {}
    for split in ("train", "valid", "test"):
        rows = split_rows(Dataset(manifest, storage), split, DataConfig(), ())
        batches = list(rows.doubles([*(column.name for column in columns.tensors), label]))
        names = batches[0].schema.names
        values = {name: np.concatenate([batch[name].to_numpy() for batch in batches]) for name in names}
        parts[split] = np.column_stack([shown(column, values) for column in columns.tensors]), values[label]
    np.savez(
        folder / "rows.npz",
        train=np.concatenate([parts["train"][0], parts["valid"][0]]),
        labels=np.concatenate([parts["train"][1], parts["valid"][1]]),
        test=parts["test"][0],
        coded=np.array([is_category(column) for column in columns.tensors]),
        task="value" if task.form is LabelForm.NUMBER else "class",
    )
    return parts["test"][1]


def shown(column: Column, values: dict[str, np.ndarray]) -> np.ndarray:
    """A column of the matrix, (rows,) float32, in which a missing value is NaN."""
    found = values[column.name].astype(np.float32)
    if column.cardinality is not None:
        found[found < 0] = np.nan
    if column.mask is not None:
        found[values[column.mask] == 0] = np.nan
    return found


def peer_score(table: str, peer: str, seed: int, folder: Path, task: TaskKind, labels: np.ndarray) -> Score:
    command = [str(PYTHON), str(ROOT / "benchmarks/arena_peer.py"), peer, str(folder), str(seed)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{peer} on {table}: {done.stderr[-2000:]}")
    found = np.load(folder / f"{peer}.npz")
    predictions = found["predictions"]
    predictions = predictions[:, 1] if task.form is LabelForm.FLAG else predictions
    return Score(table, peer, seed, loss_of(task_scores(task, labels, predictions)), float(found["seconds"]))


def measure(table: str, families: list[str], peers: list[str], seeds: list[int], folder: Path) -> list[Score]:
    data = folder / f"{table}.csv"
    TABLES[table].rows().to_csv(data, index=False)
    run(folder, "init", "table", "--data", data.name, "--label", TABLES[table].label)
    scores: list[Score] = []
    for seed in seeds:
        for family in families:
            found, dataset, name = trained(table, family, seed, folder)
            scores += found
    task = task_kind(name)
    labels = write_rows(dataset, task, folder)
    return scores + [peer_score(table, peer, seed, folder, task, labels) for peer in peers for seed in seeds]


# --- what is made of the scores


def table_of(scores: list[Score], field: str) -> list[str]:
    """Means over the seeds: a line for each table, a column for each model; the best is bold."""
    models = list(dict.fromkeys(score.model for score in scores))
    lines = ["| table | " + " | ".join(models) + " |", "|---" * (len(models) + 1) + "|"]
    for table in dict.fromkeys(score.table for score in scores):
        found = {m: means(scores, table, m, field) for m in models}
        best = min((value for value in found.values() if not math.isnan(value)), default=math.nan)
        shown = [("**{:.4g}**" if value == best else "{:.4g}").format(value) for value in found.values()]
        lines.append(f"| {table} | " + " | ".join(shown).replace("nan", "-") + " |")
    return lines


def means(scores: list[Score], table: str, model: str, field: str = "loss") -> float:
    found = [getattr(s, field) for s in scores if (s.table, s.model) == (table, model)]
    return mean(found) if found else math.nan


def summary(scores: list[Score]) -> list[str]:
    """For each model: its mean rank, and how far behind the best one it is at the most; wins of ours over each."""
    tables = list(dict.fromkeys(score.table for score in scores))
    models = list(dict.fromkeys(score.model for score in scores))
    losses = {t: {m: means(scores, t, m) for m in models} for t in tables}
    ours = [model for model in models if model.startswith("sparkring")]
    lines = ["| model | mean rank | behind the best, median | at most | " + " | ".join(f"loses to {o}" for o in ours)]
    lines = [lines[0] + " |", "|---" * (4 + len(ours)) + "|"]
    for model in models:
        known = [t for t in tables if not math.isnan(losses[t][model])]
        ranks = [1 + sum(other < losses[t][model] for other in losses[t].values()) for t in known]
        behind = sorted(100 * (losses[t][model] / np.nanmin([*losses[t].values()]) - 1) for t in known)
        lost = [beaten(losses, known, o, model) if o != model else "-" for o in ours]
        worst = f"{behind[-1]:.1f} %"
        lines.append(f"| {model} | {mean(ranks):.2f} | {np.median(behind):.1f} % | {worst} | {' | '.join(lost)} |")
    return lines


def beaten(losses: dict[str, dict[str, float]], tables: list[str], ours: str, model: str) -> str:
    return f"{sum(losses[t][ours] < losses[t][model] for t in tables)} of {len(tables)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=TABLES, default=[*TABLES])
    parser.add_argument("--families", nargs="*", default=[*FAMILIES])
    parser.add_argument("--peers", nargs="*", default=[*PEERS], help="tabm and realmlp too, which take long")
    parser.add_argument("--seeds", nargs="*", type=int, default=[0])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    scores: list[Score] = []
    for table in args.only:
        with TemporaryDirectory(dir=ROOT / "build") as folder:
            scores += measure(table, args.families, args.peers, args.seeds, Path(folder))
        text = ["# Arena", "", measured_with("torch", "xgboost-cpu"), "", "Log loss or RMSE on test rows:", ""]
        text += [*table_of(scores, "loss"), "", *summary(scores), ""]
        text += ["Seconds, ours of the whole job:", "", *table_of(scores, "seconds"), ""]
        publish("\n".join(text), args.out)  # after each table: it takes hours


if __name__ == "__main__":
    main()
