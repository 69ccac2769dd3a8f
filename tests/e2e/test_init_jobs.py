"""What `sparkring init` writes goes through a trial at once: a table of each task, text, images."""

from __future__ import annotations

import csv
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sparkring.conf.load import load_config
from sparkring.conf.storage import open_storage
from sparkring.pipelines.cli import main
from sparkring.pipelines.exit_codes import Exit
from sparkring.pipelines.job import run_job
from sparkring.pipelines.validate.trial import trial_overrides
from sparkring.training.result import MODEL, read_result
from tests.pipelines.init.test_init import write_images

pytestmark = [pytest.mark.spark, pytest.mark.slow]  # `make test` runs a regression by the tutorial of a table
ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 500
ROWS = 600
QUICK = ["launch.world=1", "parallel.engine=torch", "tracking.system_metrics=false"]


def write_houses(path: Path) -> None:
    """As people have it: an id, nulls by a word, a date, codes with zeros, labels that are missing."""
    draw = random.Random(0)
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["id", "Size m2", "zip", "sold on", "kind", "owned", "price"])
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


def test_text(spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "notes").mkdir()
    for i in range(120):
        (tmp_path / f"notes/{i}.txt").write_text(f"It is note {i}, and says nothing. " * 40)
    monkeypatch.chdir(tmp_path)
    assert main(["init", "text", "writer", "--data", "notes"]) == Exit.OK
    assert trial(tmp_path / "writer", spark)[MODEL]["loss"] > 0


def test_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the last lines of `init` say, since ranks must find the module that it has written."""
    write_images(tmp_path / "pets", ("cat", "dog", "fox"), 30)
    monkeypatch.chdir(tmp_path)
    assert main(["init", "images", "new", "--data", "pets"]) == Exit.OK
    command = [sys.executable, "-m", "sparkring.pipelines.cli", "run", "recipe.yaml", "--limit-rows", "90", *QUICK]
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path / 'new'}"}
    done = subprocess.run(
        command, cwd=tmp_path / "new", env=environment, capture_output=True, text=True, timeout=LIMIT_S
    )
    assert done.returncode == Exit.OK, done.stderr[-3000:]
    assert "macro_f1" in done.stdout + done.stderr
