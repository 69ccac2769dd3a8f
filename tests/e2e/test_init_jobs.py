"""What `sparkring init` writes goes through a trial at once: a table of each task, text, images."""

from __future__ import annotations

import csv
import os
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sparkring.conf.load import load_config
from sparkring.conf.manifest import read_manifest
from sparkring.conf.storage import open_storage
from sparkring.pipelines.cli import main
from sparkring.pipelines.evaluation.ranking import ALS_NAME, POPULARITY
from sparkring.pipelines.job.job import run_job
from sparkring.pipelines.run.exit_codes import Exit
from sparkring.pipelines.run.trial import trial_overrides
from sparkring.training.worker.result import MODEL, read_result
from tests.pipelines.init.test_init import write_images

pytestmark = [
    pytest.mark.spark,
    pytest.mark.slow,
]  # `make test` runs a regression by the tutorial of a table, in its own process
ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 500
ROWS = 600
QUICK = ["launch.world=1", "parallel.engine=torch", "tracking.system_metrics=false"]


def write_houses(path: Path) -> None:
    """As people have it: an id, nulls by a word, a date, codes with zeros, missing labels, names Spark wants quoted."""
    draw = random.Random(0)
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["id", "Größe m²", "all", "sold on", "kind", "owned", "price"])
        for i in range(ROWS):
            size, kind = draw.randint(30, 300), draw.choice(["flat", "house", "loft"])
            price = 3000 * size + 150_000 * (kind == "house") + draw.gauss(0, 20_000)
            date = f"2023-{draw.randint(1, 12):02}-{draw.randint(1, 28):02}"
            shown = "NA" if i % 50 == 0 else size
            code, owned = draw.choice(["00123", "10115"]), "yes" if size > 150 else "no"
            label = "" if i % 100 == 0 else round(price, 2)
            rows.writerow([i, shown, code, date, "" if i % 100 == 1 else kind, owned, label])


def trial(folder: Path, spark: Any) -> dict[str, dict[str, float]]:
    """Run a trial in the project's folder; its scores."""
    recipe = str(folder / "recipe.yaml")
    words = [*QUICK, *(f"storage.{name}={folder}/data/{name}" for name in ("datasets", "runs"))]
    words.append(f"tracking.root={folder}/data/mlflow")
    resolved = load_config(recipe, [*words, *trial_overrides(load_config(recipe, words), ROWS)])
    assert run_job(resolved, etl=True, session=lambda: spark) == Exit.OK
    (run,) = (path.parent for path in (folder / "data/runs").rglob("summary.json"))
    return dict(read_result(open_storage(str(run))).scores)


@pytest.mark.parametrize("label", ["kind", "price", "owned"])
def test_a_table(spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, label: str) -> None:
    write_houses(tmp_path / "houses.csv")
    monkeypatch.chdir(tmp_path)
    assert main(["init", "table", "--data", "houses.csv", "--label", label]) == Exit.OK
    scores = trial(tmp_path / "houses", spark)[MODEL]
    assert {"kind": "macro_f1", "price": "r2", "owned": "auc"}[label] in scores
    assert "prediction" in said_by_readme(tmp_path / "houses")


def said_by_readme(folder: Path) -> str:
    """Run the README's Python on the trial's model; its output."""
    (code,) = re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.S)
    words = [sys.executable, "-c", code.replace("@champion", "-trial@champion")]
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{folder}"}
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_text(spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "notes").mkdir()
    for i in range(120):
        (tmp_path / f"notes/{i}.txt").write_text(f"It is note {i}, and says nothing. " * 40)
    monkeypatch.chdir(tmp_path)
    assert main(["init", "text", "writer", "--data", "notes"]) == Exit.OK
    assert trial(tmp_path / "writer", spark)[MODEL]["loss"] > 0
    assert "text" in said_by_readme(tmp_path / "writer")


def write_interactions(path: Path) -> None:
    """Forty users who watch the films whose numbers are near their own, in order of time."""
    draw = np.random.default_rng(0)
    users = draw.integers(0, 40, 3000)
    films = (users + draw.integers(0, 40, 3000)) % 90
    pq.write_table(pa.table({"user": users, "film": [f"film {n}" for n in films], "at": np.arange(3000)}), path)


def expected_ranking(folder: Path, k: int) -> dict[str, float]:
    """Recall and NDCG of the stored predictions, in any order of rows, by pandas."""
    (run,) = (path.parent for path in (folder / "data/runs").rglob("summary.json"))
    result = read_result(open_storage(str(run)))
    assert len(result.predictions) == 2, "each rank has a file"
    predicted = pd.concat(pd.read_parquet(run / name) for name in result.predictions).set_index("id").sort_index()
    dataset = open_storage(result.dataset)
    files = read_manifest(dataset).files_of("test")
    stored = pd.concat([pd.read_parquet(f"{dataset.root}/{file.path}") for file in files], ignore_index=True)
    rows = predicted.assign(user=stored["user"].to_numpy())
    recalls, gains = [], []
    for _, listed in rows.sample(frac=1, random_state=0).groupby("user"):
        ordered = listed.sort_values("prediction", ascending=False)["label"].to_numpy()
        assert listed["prediction"].is_unique
        if ordered.sum():
            discount = 1 / np.log2(2 + np.arange(len(ordered)))
            recalls.append(ordered[:k].sum() / ordered.sum())
            gains.append((ordered * discount)[:k].sum() / discount[: min(k, int(ordered.sum()))].sum())
    assert result.ranking is not None and result.ranking.counted == len(recalls)
    return {f"recall_at_{k}": float(np.mean(recalls)), f"ndcg_at_{k}": float(np.mean(gains))}


def command_trial(folder: Path, rows: int, *words: str) -> str:
    """Run a trial as the last lines of `init` say, since ranks must find the module that it has written; its output."""
    command = [sys.executable, "-m", "sparkring.pipelines.cli", "run", "recipe.yaml", "--limit-rows", str(rows)]
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{folder}"}
    done = subprocess.run(
        [*command, *QUICK, *words], cwd=folder, env=environment, capture_output=True, text=True, timeout=LIMIT_S
    )
    assert done.returncode == Exit.OK, done.stderr[-3000:]
    return done.stdout + done.stderr


def test_a_recommender(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two ranks, with the ranking scores that pandas makes of their predictions."""
    write_interactions(tmp_path / "seen.parquet")
    monkeypatch.chdir(tmp_path)
    words = ["--data", "seen.parquet", "--user", "user", "--item", "film", "--time", "at"]
    assert main(["init", "recommender", *words]) == Exit.OK
    ranking = ["report.ranking.k=[5]", "report.ranking.als={rank: 4, iterations: 2}"]
    command_trial(tmp_path / "seen", 6000, "launch.world=2", "train.steps=60", *ranking)
    (run,) = (path.parent for path in (tmp_path / "seen/data/runs").rglob("summary.json"))
    scores, expected = read_result(open_storage(str(run))).scores, expected_ranking(tmp_path / "seen", 5)
    assert {name: scores[MODEL][name] for name in expected} == pytest.approx(expected, abs=1e-12)
    for name in (POPULARITY, ALS_NAME):
        assert set(scores[name]) == set(expected) and all(0 < value < 1 for value in scores[name].values())
    better = {name: scores[MODEL][name] / scores[POPULARITY][name] for name in expected}
    assert all(ratio > 1.2 for ratio in better.values()), "films are near a user's number, and equally popular"


def test_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_images(tmp_path / "pets", ("cat", "dog", "fox"), 30)
    monkeypatch.chdir(tmp_path)
    assert main(["init", "images", "new", "--data", "pets"]) == Exit.OK
    assert "macro_f1" in command_trial(tmp_path / "new", 90)
