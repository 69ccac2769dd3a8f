"""Tables as a new user trains them, beside LightGBM, XGBoost, CatBoost and networks with their defaults.

    make arena [ARGS="--only adult houses --seeds 0 1 2 --peers lightgbm catboost --out benchmarks/results/arena.md"]

The recipe of each table is used as `sparkring init table` writes it. All see the same rows: a peer is fitted on the
rows of our training and validation splits (ours stops early by the second), as `model.family: trees` sees them, and
scored on the rows of the test split. Tables: tables_data.py. A seed is one of training; the splits stay.

A row or two decide the scores of small tables: name several `--seeds`, and several `--splits`, each a seed that deals
the rows into splits anew (`etl.split.seed`), for all models alike; 0 is the recipe's own. Then means are over all of
them, and the difference to the best peer has an interval. Where `init` splits by groups or by time, peers are fitted
and scored on the same files.
`--refit` names tables on which jobs of trees with `trees.refit` and without it are compared by their CPU seconds.

Every score is added to the file `--kept` as it is measured, and one that is there is not measured again, so that the
arena can be run in parts. Scores of an older state of the code must not stay in it: name another file.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from statistics import mean, stdev
from tempfile import TemporaryDirectory

import numpy as np
import yaml
from machine import ROOT, ChildrenCpu, measured_with, publish
from scipy import stats
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
OURS, DEFAULT = "sparkring, ", "sparkring, both"
SKLEARN = "gradient-boosted trees (scikit-learn)"
MOST_BEHIND, FEWEST_WINS = 2.0, 0.6  # targets: percent behind the best peer, share of tables
RESAMPLES = 10_000  # of the tables
REFIT, WITHOUT = "trees", "trees without refit"  # compared by --refit, in place of a family
MOST_REFIT = 1.3  # times the CPU seconds of the job without
TEST_TO_TRAIN = 0.1 / 0.9  # rows of the splits that `init` writes; validation rows train too


@dataclass(frozen=True)
class Score:
    """The loss of the test rows (log loss, RMSE), and CPU seconds; `split`: etl.split.seed.

    Ours are of all processes of a job that finds its dataset, a peer's of fit and predict. NaN of a baseline, which is
    a part of our job.
    """

    table: str
    model: str
    seed: int
    loss: float
    seconds: float
    split: int = 0


def trained(table: str, family: str, seed: int, folder: Path, more: list[str]) -> list[Score]:
    """Train as `init` says; our score and that of the report's trees.

    Args:
        table: by name.
        family: of models, or WITHOUT.
        seed: of the training.
        folder: of the table's file and project.
        more: settings of the job.
    """
    runs = f"runs-{family.replace(' ', '-')}-{seed}"
    of_family = ["model.family=trees", "trees.refit=false"] if family == WITHOUT else [f"model.family={family}"]
    settings = ["tracking.enabled=false", f"storage.runs={runs}", f"train.seed={seed}", *of_family]
    with ChildrenCpu() as used:
        run(folder / table, "run", "recipe.yaml", *settings, *more)
    (summary,) = (folder / table).glob(f"{runs}/*/*/summary.json")
    found = json.loads(summary.read_text())
    own = next(iter(found["scores"]))
    scores = [Score(table, OURS + family, seed, loss_of(found["scores"][own]), used.seconds)]
    if SKLEARN in found["scores"] and family == FAMILIES[0] and seed == 0:
        scores.append(Score(table, "scikit-learn's trees", seed, loss_of(found["scores"][SKLEARN]), math.nan))
    return scores


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


def measure(table: str, split: int, models: list[tuple[str, int]], folder: Path, more: list[str]) -> Iterator[Score]:
    """Measure models on one table, ours first.

    Args:
        table: by name.
        split: the seed of its split.
        models: each with a seed of training.
        folder: of files that nobody needs afterwards.
        more: settings of our jobs.
    """
    dealt = [f"etl.split.seed={split}"] * (split > 0)  # else as the recipe says: by groups or time where init chose it
    data = folder / f"{table}.csv"
    TABLES[table].rows().to_csv(data, index=False)
    run(folder, "init", "table", "--data", data.name, "--label", TABLES[table].label)
    run(folder / table, "etl", "recipe.yaml", *dealt)
    for model, seed in models:
        if model.startswith(OURS):
            found = trained(table, model.removeprefix(OURS), seed, folder, [*dealt, *more])
            yield from (replace(score, split=split) for score in found)
    peers = [(model, seed) for model, seed in models if not model.startswith(OURS)]
    if not peers:
        return
    (manifest,) = (folder / table).rglob("_manifest.json")
    task = task_kind(yaml.safe_load((folder / table / "recipe.yaml").read_text())["model"]["task"])
    labels = write_rows(manifest.parent, task, folder)
    for peer, seed in peers:
        yield replace(peer_score(table, peer, seed, folder, task, labels), split=split)


# --- what is made of the scores

Losses = dict[str, dict[str, float]]  # table -> model -> loss


def table_of(scores: list[Score], field: str) -> list[str]:
    """Means over seeds and splits, with their spread: a line for each table, a column for each model; best is bold."""
    models = list(dict.fromkeys(score.model for score in scores))
    lines = ["| table | " + " | ".join(models) + " |", "|---" * (len(models) + 1) + "|"]
    for table in dict.fromkeys(score.table for score in scores):
        found = {m: means(scores, table, m, field) for m in models}
        best = min((value for value in found.values() if not math.isnan(value)), default=math.nan)
        cells = (shown_mean([getattr(s, field) for s in scores if (s.table, s.model) == (table, m)]) for m in models)
        shown = [f"**{cell}**" if found[m] == best else cell for m, cell in zip(models, cells, strict=True)]
        lines.append(f"| {table} | " + " | ".join(shown) + " |")
    return lines


def shown_mean(values: list[float]) -> str:
    """Mean and standard deviation of what seeds and splits gave; "-" for what was not measured."""
    known = [value for value in values if not math.isnan(value)]
    if not known:
        return "-"
    return f"{mean(known):.4g}" + (f" ± {stdev(known):.2g} ({len(known)})" if len(known) > 1 else "")


def means(scores: list[Score], table: str, model: str, field: str = "loss") -> float:
    found = [getattr(s, field) for s in scores if (s.table, s.model) == (table, model)]
    return mean(found) if found else math.nan


def losses_of(scores: list[Score]) -> Losses:
    """Mean losses over seeds and splits by table and model; one that was not measured on a table is left out of it."""
    models = list(dict.fromkeys(score.model for score in scores))
    found = {t: {m: means(scores, t, m) for m in models} for t in dict.fromkeys(score.table for score in scores)}
    return {t: {m: loss for m, loss in of.items() if not math.isnan(loss)} for t, of in found.items()}


def summary(losses: Losses) -> list[str]:
    """For each model: its mean rank, and how far behind the best one it is at the most; wins of ours over each."""
    models = list(dict.fromkeys(model for found in losses.values() for model in found))
    ours = [model for model in models if model.startswith(OURS)]
    head = ["model", "mean rank, with a 95 % interval", "behind the best, median", "at most"]
    head += [f"loses to {o}, with a 95 % interval" for o in ours]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for model in models:
        known = [t for t in losses if model in losses[t]]
        ranks = [rank_of(model, losses[t]) for t in known]
        behind = [behind_best(model, losses[t], models) for t in known]
        low, high = interval_of_mean(ranks)
        cells = [model, f"{mean(ranks):.2f} ({low:.2f} to {high:.2f})"]
        cells += [f"{np.median(behind):.1f} %", f"{max(behind):.1f} %"]
        cells += ["-" if o == model else shown_wins(*wins(losses, o, model)) for o in ours]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def rank_of(model: str, losses: dict[str, float]) -> int:
    return 1 + sum(other < losses[model] for other in losses.values())


def behind_best(model: str, losses: dict[str, float], others: Iterable[str]) -> float:
    """How much larger a model's loss is than the least of the others, in percent; less than 0 where it is the best."""
    return 100 * (losses[model] / min(losses[other] for other in others if other in losses) - 1)


def wins(losses: Losses, ours: str, model: str) -> tuple[int, int]:
    """On how many tables our model has the smaller loss, of how many that both were measured on."""
    both = [found for found in losses.values() if ours in found and model in found]
    return sum(found[ours] < found[model] for found in both), len(both)


def shown_wins(won: int, tables: int) -> str:
    low, high = interval_of_share(won, tables)
    return f"{won} of {tables} ({low:.0%} to {high:.0%})"


def interval_of_share(won: int, tables: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a share (https://doi.org/10.1080/01621459.1927.10502953)."""
    z = 1.96
    share, wider = won / tables, 1 + z * z / tables
    half = z * math.sqrt(share * (1 - share) / tables + z * z / (4 * tables**2))
    return (share + z * z / (2 * tables) - half) / wider, (share + z * z / (2 * tables) + half) / wider


def interval_of_mean(values: list[int]) -> tuple[float, float]:
    """The 95 % interval of a mean over tables, by resampling them."""
    drawn = np.random.default_rng(0).choice(values, (RESAMPLES, len(values))).mean(axis=1)
    low, high = np.quantile(drawn, (0.025, 0.975))
    return float(low), float(high)


def targets(losses: Losses) -> list[str]:
    """A line for each target of the default recipe, with what was measured."""
    losses = {t: found for t, found in losses.items() if {DEFAULT, *PEERS} <= {*found}}
    if not losses:
        return []
    lines = []
    ours, catboost = (mean(rank_of(m, found) for found in losses.values()) for m in (DEFAULT, "catboost"))
    lines.append(f"mean rank {ours:.2f}, better than CatBoost's {catboost:.2f}: {reached(ours < catboost)}")
    for peer in ("lightgbm", "xgboost"):
        won, of = wins(losses, DEFAULT, peer)
        lines.append(
            f"at least {FEWEST_WINS:.0%} wins over {peer}: {shown_wins(won, of)}: {reached(won / of >= FEWEST_WINS)}"
        )
    behind = {t: behind_best(DEFAULT, found, PEERS) for t, found in losses.items()}
    over = [
        f"{t} {value:.1f} %" for t, value in sorted(behind.items(), key=lambda each: -each[1]) if value > MOST_BEHIND
    ]
    lines.append(
        f"never more than {MOST_BEHIND:.0f} % behind the best of {', '.join(PEERS)}: {reached(not over)}"
        + (f" on {', '.join(over)}" if over else "")
    )
    return [f"- {line}" for line in lines]


def differences(scores: list[Score]) -> list[str]:
    """A line for each table of several splits: by how much the default recipe's loss differs from the best peer's."""
    lines = []
    for table in dict.fromkeys(score.table for score in scores):
        of = [score for score in scores if score.table == table]
        by_split = {split: losses_of([s for s in of if s.split == split])[table] for split in {s.split for s in of}}
        paired = [found for found in by_split.values() if {DEFAULT, *PEERS} <= {*found}]
        if len(paired) > 1:
            best = min(PEERS, key=lambda peer: sum(found[peer] for found in paired))
            behind, half = mean_difference([found[DEFAULT] for found in paired], [found[best] for found in paired])
            lines.append(f"| {table} | {len(paired)} | {best} | {behind:+.1f} % ± {half:.1f} |")
    return ["| table | splits | best peer | ours minus it, 95 % interval |", "|---" * 4 + "|", *lines] if lines else []


def mean_difference(ours: list[float], theirs: list[float]) -> tuple[float, float]:
    """The mean of the differences of two models' losses by split, and half its 95 % interval, in percent of theirs.

    Splits share most training rows, so that their differences vary less than those of tables drawn anew: the variance
    of the mean is not a k-th of theirs, but greater by the share of test to training rows (Nadeau and Bengio 2003,
    https://doi.org/10.1023/A:1024068626366).
    """
    found, scale = np.subtract(ours, theirs), 100 / mean(theirs)
    error = float(found.std(ddof=1)) * math.sqrt(1 / len(found) + TEST_TO_TRAIN)
    return float(found.mean()) * scale, float(stats.t.ppf(0.975, len(found) - 1)) * error * scale


def refit_costs(scores: list[Score]) -> list[str]:
    """A line for each table on which jobs of trees were measured with a refit and without."""
    lines = []
    for table in dict.fromkeys(score.table for score in scores):
        (before, after), losses = (
            [means(scores, table, OURS + each, field) for each in (WITHOUT, REFIT)] for field in ("seconds", "loss")
        )
        if not math.isnan(before + after):
            cost = f"{after / before:.2f} ({reached(after / before <= MOST_REFIT)})"
            lines.append(f"| {table} | {before:.1f} | {after:.1f} | {cost} | {losses[0]:.4g} | {losses[1]:.4g} |")
    head = "| table | CPU s without | with | times | loss without | with |"
    return [head, "|---" * 6 + "|", *lines] if lines else []


def reached(is_so: bool) -> str:
    return "reached" if is_so else "not reached"


def read_kept(file: Path) -> list[Score]:
    return [Score(**json.loads(line)) for line in file.read_text().splitlines()] if file.exists() else []


def report(scores: list[Score], refits: list[Score]) -> str:
    losses = losses_of(scores)
    lines = ["# Arena", "", measured_with("torch", "xgboost-cpu"), ""]
    if scores:
        lines += ["Log loss or RMSE on test rows:", "", *table_of(scores, "loss"), "", *summary(losses), ""]
        lines += ["Targets of the default recipe:", "", *targets(losses), ""]
        if paired := differences(scores):
            lines += ["Against the best peer, split by split:", "", *paired, ""]
        lines += ["CPU seconds, ours of the whole job but its dataset:", "", *table_of(scores, "seconds"), ""]
    if costs := refit_costs(refits):
        limit = f"at most {MOST_REFIT} times the job without"
        lines += [f"Jobs of trees without `trees.refit` and with it ({limit}):", "", *costs, ""]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=TABLES, default=[*TABLES])
    parser.add_argument("--families", nargs="*", default=[*FAMILIES])
    parser.add_argument("--peers", nargs="*", default=[*PEERS], help="tabm and realmlp too, which take long")
    parser.add_argument("--seeds", nargs="*", type=int, default=[0])
    parser.add_argument("--splits", nargs="*", type=int, default=[0], help="each a seed of the split")
    parser.add_argument(
        "--refit", nargs="*", choices=TABLES, default=[], help="tables of which jobs of trees are compared"
    )
    parser.add_argument("--settings", nargs="*", default=[], help="of our jobs, such as report.baselines=false")
    parser.add_argument("--kept", type=Path, default=ROOT / "build/arena.jsonl", help="file of scores")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    (ROOT / "build").mkdir(exist_ok=True)
    wanted = [(model, seed) for model in [*(OURS + f for f in args.families), *args.peers] for seed in args.seeds]
    for table, split in product(dict.fromkeys([*args.only, *args.refit]), args.splits):
        known = {(s.model, s.seed) for s in read_kept(args.kept) if (s.table, s.split) == (table, split)}
        asked = wanted * (table in args.only)
        asked += [
            (OURS + each, 0) for each in (WITHOUT, REFIT) if table in args.refit and (OURS + each, 0) not in asked
        ]
        if missing := [each for each in asked if each not in known]:
            with TemporaryDirectory(dir=ROOT / "build") as folder, args.kept.open("a") as kept:
                for score in measure(table, split, missing, Path(folder), args.settings):
                    print(json.dumps(asdict(score)), file=kept, flush=True)
    order = {table: number for number, table in enumerate(args.only)}
    models = [*(OURS + family for family in args.families), "scikit-learn's trees", *args.peers]
    measured = [s for s in read_kept(args.kept) if s.seed in args.seeds and s.split in args.splits]
    shown = [s for s in measured if s.table in order and s.model in models]
    shown.sort(key=lambda score: (order[score.table], models.index(score.model), score.split, score.seed))
    refits = [s for s in read_kept(args.kept) if s.table in args.refit and s.seed == 0 and s.split in args.splits]
    publish(report(shown, refits), args.out)


if __name__ == "__main__":
    main()
