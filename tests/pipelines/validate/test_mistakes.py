"""Mistakes of configuration: each is found by `validate`, and by `run` before Spark starts or the ETL begins.

One message that names the key, the exit code of whose mistake it is, and no traceback.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from sparkring.pipelines.cli import main
from sparkring.pipelines.run.exit_codes import Exit
from sparkring.pipelines.run.spark import session_on_demand

HERE, ROWS = Path(__file__).parent, 400
RECIPE: dict[str, Any] = {
    "name": "mistakes",
    "etl": {
        "sources": {
            "points": {
                "path": "points.parquet",
                "format": "parquet",
                "columns": {"id": "bigint", "x": "double", "z": "double", "place": "string", "y": "boolean"},
            },
            "places": {"path": "places.csv", "columns": {"place": "string", "size": "int"}},
        },
        "views": {"joined": "SELECT p.*, c.size FROM points p LEFT JOIN places c ON c.place = p.place"},
        "rows": "joined",
        "key": ["id"],
        "features": {"x": {"kind": "numeric"}, "z": {"kind": "numeric"}, "place": {"kind": "categorical"}},
        "label": "y",
        "keep": ["size"],
    },
    "model": {"args": {"width": 8, "blocks": 1}},
    "train": {"global_batch": 50, "valid_split": "valid"},
    "launch": {"world": 1},
}


@dataclass(frozen=True)
class Mistake:
    """Overrides of the recipe, and the message and exit code that they get."""

    words: tuple[str, ...]
    said: str
    code: Exit = Exit.USAGE


OWN = "own_model_of_test:"
MISTAKES = [
    Mistake(tuple(entry["words"]), entry["said"], Exit[entry.get("code", "USAGE")])
    for entry in yaml.safe_load((HERE / "mistakes.yaml").read_text())
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recipe, right, and its tables."""
    path = tmp_path_factory.mktemp("mistakes")
    rng = np.random.default_rng(0)
    x, z = rng.normal(size=ROWS), rng.normal(size=ROWS)
    table = {"id": np.arange(ROWS), "x": x, "z": z, "place": [f"p{i % 3}" for i in range(ROWS)], "y": x + z > 0}
    pq.write_table(pa.table(table), path / "points.parquet")
    (path / "places.csv").write_text("place,size\np0,1\np1,2\np2,3\n")
    (path / "mine.yaml").write_text(yaml.safe_dump(RECIPE))
    return path


@pytest.fixture
def here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Work in the folder; the user's module is on the path. No Spark is there to be started, nor one that has been."""
    spec = importlib.util.spec_from_file_location("own_model_of_test", HERE / "own_model.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "own_model_of_test", module)
    spec.loader.exec_module(module)
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    (folder / "own_model_of_test.py").write_text((HERE / "own_model.py").read_text())
    monkeypatch.setattr("sparkring.pipelines.run.spark.spark_session", None)
    monkeypatch.setattr("sparkring.pipelines.run.spark.session_ahead", None)
    # Another test of this process may have a session.
    monkeypatch.setattr("sparkring.pipelines.run.spark_settings.submitted", lambda: False)
    yield folder


def test_the_recipe_without_a_mistake_is_valid(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "validate", "mine.yaml"]) == Exit.OK
    assert "mine.yaml: valid" in capsys.readouterr().out
    own = [f"model.factory={OWN}Small", "model.args={width: 8}", "model.inputs=[x, z]", f"model.task={OWN}Own"]
    assert main(["config", "validate", "mine.yaml", *own, "train.best_metric=gini", f"etl.rows={OWN}rows"]) == Exit.OK
    assert not (here / "data").exists(), "nothing is written"


def test_a_dry_run_says_what_would_be_done_and_does_nothing(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "mine.yaml", "--dry-run"]) == Exit.OK
    said = capsys.readouterr().out
    training = "Tabular as binary: 1 epoch of 50 rows a step on 1 rank,"
    tables = ("points (points.parquet): 1 file,", f"{ROWS} rows", "datasets/mistakes-", "would be built")
    for part in (*tables, training, "scored on 'test'", "model 'mistakes'"):
        assert part in said, part
    assert main(["run", "mine.yaml", "--dry-run", "--limit-rows", "100"]) == Exit.OK
    assert "model 'mistakes-trial'" in capsys.readouterr().out
    assert not (here / "data").exists()


@pytest.mark.parametrize(
    "command", [["config", "validate"], ["run"], ["run", "--dry-run"]], ids=["validate", "run", "dry-run"]
)
@pytest.mark.parametrize("mistake", MISTAKES, ids=[m.words[0][:50] for m in MISTAKES])
def test_a_mistake_is_named_once_and_spark_is_not_started(
    here: Path, capsys: pytest.CaptureFixture[str], command: list[str], mistake: Mistake
) -> None:
    assert main([*command, "mine.yaml", *mistake.words]) == mistake.code
    said = capsys.readouterr().err
    assert mistake.said in said
    assert "Traceback" not in said and said.count("sparkring: ") == 1 and said.count(mistake.said) == 1
    assert not (here / "data").exists(), "nothing was begun"


def test_a_folder_that_only_the_attempt_shows_cannot_be_made_is_one_line_of_run(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sparkring.pipelines.run.spark.session_ahead", session_on_demand)  # found while Spark starts
    assert main(["run", "mine.yaml", "storage.datasets=/proc/datasets"]) == Exit.RESOURCES
    said = capsys.readouterr().err
    assert (
        "storage.datasets = '/proc/datasets': cannot be made or written: [Errno 2]" in said and "Traceback" not in said
    )
    (here / "data/runs").rmdir()
    (here / "data/mlflow").rmdir()
    (here / "data").rmdir()
