"""A recipe's datasets, runs and MLflow store, made small by the code that makes them in a job."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sparkring.conf.load import load_config
from sparkring.conf.storage import Storage
from sparkring.etl.build import BuildRequest, build_dataset
from sparkring.etl.windows.window import pin_window
from sparkring.pipelines.run.runs import Runs
from sparkring.pipelines.tracking.ops import ModelInfo
from sparkring.pipelines.tracking.tracker import Tracker
from sparkring.training.checkpoint.catalog import CheckpointInfo
from sparkring.training.checkpoint.checkpointer import Checkpointer
from sparkring.training.checkpoint.policy import Retention
from tests.spark.sales import recipe as recipe_of_sales
from tests.spark.sales import write_sales

VIEW = "SELECT *, amount AS other FROM sales"
NIGHTS = ["2024-03-02", "2024-03-03", "2024-03-04"]
RECIPE = """
name: sales
dataset: unused
model: {{factory: sparkring.training.models.tabular:Tabular}}
storage: {{datasets: {home}/datasets, runs: {home}/runs}}
tracking: {{root: {home}/mlflow, system_metrics: false, flush_every_s: 0.05, request_timeout_s: 2, request_retries: 0}}
retention:
  datasets: {{keep: 1}}
  parts: {{keep: 1}}
  runs: {{keep: 2}}
  predictions: {{keep: 1}}
  checkpoints: {{keep: 1}}
"""


@dataclass(frozen=True)
class House:
    """`home` has everything; `datasets` and `runs` are folders by night, oldest first."""

    home: Path
    recipe: Path
    datasets: list[Path]
    runs: list[Path]
    fingerprints: list[str]


def build(spark: Any, folder: Path) -> House:
    """Three nights, each with a window of two days, a run with two checkpoints and a model; the first's is champion."""
    home, recipe = folder / "home", folder / "sales.yaml"
    recipe.write_text(RECIPE.format(home=home))
    sales = write_sales(folder / "sales")
    datasets, runs, fingerprints = list[Path](), list[Path](), list[str]()
    for number, night in enumerate(NIGHTS):
        etl = recipe_of_sales(sales, VIEW, last=night, window=2)
        pinned = pin_window(etl, {})
        built = build_dataset(spark, BuildRequest(etl, pinned, name="sales", root_uri=str(home / "datasets")))
        datasets.append(Path(built.uri))
        fingerprints.append(built.manifest.fingerprint)
        alias = "champion" if number == 0 else None
        runs.append(train(recipe, folder, built.manifest.fingerprint, alias))
    return House(home, recipe, datasets, runs, fingerprints)


def train(recipe: Path, scratch: Path, fingerprint: str, alias: str | None) -> Path:
    """A run as a job leaves it: two checkpoints of three are kept, predictions, a registered model."""
    config = load_config(str(recipe)).config
    runs = Runs(config.storage.runs, config.name)
    with runs.begin(config, fingerprint) as (record, _):
        folder, job = runs.at(record), f"{config.name}/{record.folder}"
        with Tracker(config.tracking.named(config.name), job, config.name) as tracker:
            tracker.tags("job", {"sparkring.fingerprint": fingerprint})
            with tracker.part("train"):
                save_checkpoints(folder.at("checkpoints"), tracker)
                folder.put_atomic("predictions/rank-0.parquet", b"p" * 100)
                folder.put_atomic("model/model.safetensors", b"m" * 100)
                tracker.model("train", tiny_model(scratch), info(fingerprint, alias))
            runs.update(record.folder, mlflow_run_id=tracker.run_id())
    runs.update(record.folder, status="finished", pid=1, start_ticks=1)  # its process has ended
    time.sleep(0.01)
    return Path(folder.uri)


def save_checkpoints(folder: Storage, tracker: Tracker) -> None:
    def on_commit(saved: CheckpointInfo) -> None:
        tracker.checkpoint("train", saved.step, saved.uri, saved.bytes, saved.world)

    checkpointer = Checkpointer(folder, keep=Retention(last=2), asynchronous=False, on_commit=on_commit)
    for step in (1, 2, 3):
        checkpointer.save(step, {"w": torch.arange(64.0)}, {"step": step})
    checkpointer.close()


def tiny_model(folder: Path) -> Path:
    (folder / "tiny").mkdir(exist_ok=True)
    (folder / "tiny" / "model.json").write_text('{"factor": 3}')
    return folder / "tiny"


def info(fingerprint: str, alias: str | None) -> ModelInfo:
    return ModelInfo(
        name="sales-model",
        step=3,
        sha256=fingerprint,
        loader_module="tests.pipelines.tracking.tiny_loader",
        registered_model="sales",
        alias=alias,
        tags={"sparkring.fingerprint": fingerprint},
    )
