"""What `sparkring init` writes goes through a trial at once: a table of each task, text, images."""

from __future__ import annotations

import csv
import os
import random
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
    for i in range(60):
        (tmp_path / f"notes/{i}.txt").write_text(f"It is note {i}, and says nothing. " * 40)
    monkeypatch.chdir(tmp_path)
    assert main(["init", "text", "--data", "notes"]) == Exit.OK
    assert trial(tmp_path / "notes", spark)[MODEL]["loss"] > 0


def test_images(spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_images(tmp_path / "pets", ("cat", "dog", "fox"), 30)
    monkeypatch.chdir(tmp_path)
    assert main(["init", "images", "new", "--data", "pets"]) == Exit.OK
    monkeypatch.syspath_prepend(str(tmp_path / "new"))
    monkeypatch.delitem(sys.modules, "cnn", raising=False)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'new'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    assert "macro_f1" in trial(tmp_path / "new", spark)[MODEL]
    monkeypatch.delitem(sys.modules, "cnn")
