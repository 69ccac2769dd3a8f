"""`sparkring report`: a run's report drawn again is of the run, whatever has become of its recipe."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from conf.load import Resolved, load_config
from conf.manifest import Accounting, Column, DatasetManifest, Lineage, ManifestError, SplitInfo
from conf.storage import open_storage
from pipelines.etl_step import Dataset
from pipelines.evaluate import Evaluation
from pipelines.report.inputs import as_run, redraw, write_report
from pipelines.runs import Runs
from pipelines.train_step import Trained

RECIPE = """
name: again
dataset: {folder}/dataset
storage: {{runs: {folder}/runs}}
launch: {{world: 4}}
optim: {{lr: 0.01}}
"""
URL = "http://tracking.example:5000/#/experiments/1/runs/2"


def recipe(folder: Path, *words: str) -> Resolved:
    path = folder / "again.yaml"
    path.write_text(RECIPE.format(folder=folder))
    return load_config(str(path), words)


def finished_run(folder: Path, made_with: Resolved, **changes: Any) -> Path:
    """The folder of a run that has ended, as the job leaves it."""
    (folder / "dataset").mkdir()
    (folder / "dataset/_manifest.json").write_text(manifest().to_json())
    runs = Runs(f"{folder}/runs", "again")
    with runs.begin(made_with.config, manifest().fingerprint) as (record, _):
        runs.update(record.folder, status="finished")
    train = {
        "engine": "torch-gloo",
        "world": 3,
        "steps": 10,
        "samples": 100,
        "best_step": 10,
        "rows_per_s": 1.0,
        "plan": "bubble share",
    }
    summary = {
        "dataset": f"{folder}/dataset", "scores": {"this model": {"loss": 0.5}}, "predictions": [], "sample": "",
        "missing": {"logistic regression": "ValueError: no"}, "timings": {"launch_s": 1.0}, "attempts": 2,
        "failed_attempts": [], "history": {}, "train": train,
        "per_step_s": {"decode_s": 0.002}, "once_s": {"first_batch_s": 0.75},
    } | asdict(as_run(made_with, URL, "c0ffee")) | changes  # fmt: skip
    runs.at(record).put_atomic("summary.json", json.dumps(summary).encode())
    return Path(runs.at(record).uri.removeprefix("file://"))


class Told:
    """What is said to a tracker."""

    def __init__(self) -> None:
        self.given: dict[str, str] = {}

    def tags(self, key: str, tags: dict[str, str]) -> None:
        self.given |= tags


def test_a_report_that_cannot_be_drawn_fails_nothing_and_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    told, nothing = Told(), Trained({}, [], 0.0, 1, {})
    run = as_run(recipe(tmp_path), None)
    dataset = Dataset(manifest(), open_storage(str(tmp_path)))
    write_report(told, run, dataset, open_storage(str(tmp_path)), nothing, Evaluation({}), {})  # type: ignore[arg-type]
    assert told.given == {"sparkring.report": "not drawn: KeyError: 'engine'"}
    assert "`sparkring report` draws it" in caplog.text and not (tmp_path / "report.html").exists()


def manifest() -> DatasetManifest:
    return DatasetManifest(
        name="again", fingerprint="a" * 64, created_at="", columns=(Column(name="y", dtype="int8", role="label"),),
        files=(), splits={"train": SplitInfo(rows=0, files=0)}, accounting=Accounting(rows_in=0, rows_out=0),
        lineage=Lineage(sources={}),
    )  # fmt: skip


def test_the_report_drawn_again_shows_what_was_run(tmp_path: Path) -> None:
    made_with = recipe(tmp_path, "optim.lr=0.1")
    folder = finished_run(tmp_path, made_with)
    now = recipe(tmp_path)
    assert redraw(now).endswith("report.html")
    html = (folder / "report.html").read_text()
    assert "c0ffee" in html and "the model is step 10" in html and "bubble share" in html
    assert made_with.digest in html and now.digest not in html
    assert "<code>0.1</code>" in html and "command line" in html and URL in html
    assert "first batch" in html and "0.75 s" in html and "decode, a step" in html and "2.0 ms" in html
    assert "torch-gloo, 3 ranks" in html, "the world it ended on, not the one it was asked for"
    assert "logistic regression (ValueError: no)" in html


def test_a_configuration_of_another_version_is_said_to_be_one(tmp_path: Path) -> None:
    now = recipe(tmp_path)
    finished_run(tmp_path, now, config=now.as_dict() | {"gone": 1})
    with pytest.raises(ManifestError, match=r"summary.json: the run's configuration: gone = 1: extra inputs"):
        redraw(now)
