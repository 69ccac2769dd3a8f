"""Yesterday's model starts today's training by value: the loss goes on where it was."""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from pydantic import TypeAdapter

from sparkring.conf.config import RunConfig
from sparkring.conf.load import load_config
from sparkring.conf.manifest import (
    ROW_NUMBER,
    Column,
    DatasetManifest,
)
from sparkring.conf.storage import open_storage
from sparkring.pipelines.validate.recipe import warm_start_problems
from sparkring.training.checkpoint.weights import read_weights, write_weights
from sparkring.training.launch.failure import WorkerFailed
from sparkring.training.launch.group import WorkerGroup
from sparkring.training.launch.job import JobSpec
from sparkring.training.launch.messages import ChildEvent, Event, RankMetrics
from sparkring.training.model.folder import describe_model, read_model_folder
from sparkring.training.model.start_match import StartMatch
from sparkring.training.parallel.state import TensorInfo
from sparkring.training.worker.result import WorkerResult
from tests.helpers.datasets import listed, manifest_of, write_manifest

pytestmark = pytest.mark.ranks
ROWS, SHIFT = 6000, 40.0
CARRIERS = [f"carrier {i}" for i in range(30)]
RECIPE = """
name: nightly
dataset: {dataset}
model: {{factory: sparkring.training.models.tabular:Tabular, args: {{width: 16, blocks: 1, bumps: 4}}}}
optim: {{lr: 2e-2, schedule: constant}}
train: {{epochs: 6, global_batch: 1000, log_every_steps: 1, threads_per_rank: 1, device: cpu}}
data: {{lanes: 8}}
tracking: {{enabled: false}}
"""


def write_night(folder: Path, values: list[str], moved: float) -> DatasetManifest:
    """Rows whose label depends on the carrier and a number; `values` in the order of their codes, `moved`: how far the
    number's mean and scale were on this night."""
    random = np.random.default_rng(len(values) + int(moved))
    effect = {name: np.random.default_rng(i).normal(0, 2.5) for i, name in enumerate(CARRIERS)}
    files = []
    for split, rows in (("train", ROWS), ("valid", 1000), ("test", 1000)):
        carrier = random.choice(values, rows)
        x = random.normal(100, 10, rows)
        odds = np.array([effect.get(name, 0.0) for name in carrier]) + (x - 100) / 10
        late = random.random(rows) < 1 / (1 + np.exp(-odds))
        table = pa.table({"carrier": carrier, "x": x, "late": late, ROW_NUMBER: np.arange(rows)})
        path = folder / f"data/{split}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(table, path, row_group_size=500)
        files.append(listed(folder, path, split))
    features: list[dict[str, Any]] = [
        {"name": "carrier", "kind": "categorical", "column": "carrier", "values": values},
        {"name": "x", "kind": "numeric", "column": "x", "transform": "none", "mean": 100.0 + moved,
         "std": 10.0 + moved / 10, "fill": 0.0, "indicator": False},
    ]  # fmt: skip
    manifest = manifest_of(
        columns=(
            Column(name="carrier", dtype="string", role="input", nulls="keep"),
            Column(name="x", dtype="float64", role="input", nulls="keep"),
            Column(name="late", dtype="bool", role="label"),
        ),
        files=files,
        name="nightly",
        fingerprint=hashlib.sha256(repr(values).encode()).hexdigest(),
        features={"version": 1, "inputs": {"carrier": "string", "x": "double"}, "features": features},
    )
    return write_manifest(folder, manifest)


@dataclasses.dataclass
class Night:
    """What one night's training left."""

    run: Path
    config: RunConfig
    losses: dict[int, float]
    from_step: int
    steps: int
    started: StartMatch | None


def train(group: WorkerGroup, world: int, run: Path, dataset: Path, *words: str) -> Night:
    recipe = run.with_suffix(".yaml")
    recipe.write_text(RECIPE.format(dataset=dataset))
    resolved, losses, first = load_config(str(recipe), words), dict[int, float](), list[int]()

    def on_event(event: Event) -> None:
        if isinstance(event, RankMetrics) and event.rank == 0 and "train/loss" in event.values:
            losses[event.step] = event.values["train/loss"]
        if isinstance(event, ChildEvent) and event.name == "training":
            first.append(event.data["from_step"])

    payload = {"config": resolved.as_dict(), "dataset": str(dataset), "run": str(run)}
    found = group.run(JobSpec("sparkring.training.worker.train:train", payload), world, on_event, 1)
    result = TypeAdapter(WorkerResult).validate_python(found.results[0])
    return Night(run, resolved.config, losses, first[0], result.steps, result.started)


@pytest.fixture(scope="module")
def yesterday(group: WorkerGroup, tmp_path_factory: pytest.TempPathFactory) -> tuple[Night, DatasetManifest, Path]:
    folder = tmp_path_factory.mktemp("nights")
    manifest = write_night(folder / "yesterday", CARRIERS, 0.0)
    night = train(group, 2, folder / "run", folder / "yesterday")
    describe_model(open_storage(str(night.run / "model")), night.config, manifest)
    return night, manifest, folder


def first_loss(night: Night) -> float:
    return night.losses[min(night.losses)]


@pytest.mark.parametrize(("world", "words"), [(1, []), (2, []), (2, ["parallel.zero=3"])])
def test_a_new_value_that_moves_all_codes_costs_nothing(
    group: WorkerGroup, yesterday: tuple[Night, DatasetManifest, Path], tmp_path: Path, world: int, words: list[str]
) -> None:
    """And a naive copy of the weights, which gives each carrier its neighbor's row, starts far worse."""
    before, old, _ = yesterday
    reached = float(np.mean([before.losses[step] for step in sorted(before.losses)[-6:]]))
    # One more than yesterday, in front: every code moves by one; the rarest is gone.
    today = write_night(tmp_path / "today", ["carrier new", *CARRIERS[:-1]], SHIFT)
    words = [*words, "train.epochs=1", "train.steps=3", "optim.lr=1e-9"]  # so slow that each step shows the start
    warm = train(group, world, tmp_path / "warm", tmp_path / "today", *words, f"warm_start.model={before.run}/model")
    cold = train(group, world, tmp_path / "cold", tmp_path / "today", *words)
    as_is = tmp_path / "as_is"
    describe_model(open_storage(str(as_is)), warm.config, today)  # a lie: the weights are of yesterday's codes
    (as_is / "weights.safetensors").write_bytes((before.run / "model/weights.safetensors").read_bytes())
    naive = train(group, world, tmp_path / "naive", tmp_path / "today", *words, f"warm_start.model={as_is}")
    start, copied = (float(np.mean(list(night.losses.values()))) for night in (warm, naive))
    assert abs(start - reached) < 0.05 * reached, (start, reached)
    assert copied > 1.2 * reached and float(np.mean(list(cold.losses.values()))) > 1.2 * reached
    assert read_model_folder(open_storage(str(before.run / "model"))).manifest == old


def test_a_run_that_goes_on_does_not_start_again(
    group: WorkerGroup, yesterday: tuple[Night, DatasetManifest, Path], tmp_path: Path
) -> None:
    before, _, folder = yesterday
    model = tmp_path / "model"
    model.mkdir()
    for name in ("config.json", "manifest.json", "weights.safetensors"):
        (model / name).write_bytes((before.run / "model" / name).read_bytes())
    words = [f"warm_start.model={model}", "checkpoint.every_steps=2"]
    train(group, 2, tmp_path / "run", folder / "yesterday", *words, "train.steps=4")
    for name in ("config.json", "manifest.json", "weights.safetensors"):
        (model / name).unlink()
    on = train(group, 2, tmp_path / "run", folder / "yesterday", *words, "train.steps=6")
    assert (on.from_step, on.steps) == (4, 6)
    with pytest.raises(WorkerFailed, match=r"no model: it has no config.json"):
        train(group, 2, tmp_path / "other", folder / "yesterday", *words)


@pytest.mark.parametrize("words", [[], ["parallel.engine=torch", "parallel.zero=3"]], ids=["ring", "zero3"])
def test_a_model_starts_with_tensors_of_a_file_by_name_and_not_again_when_it_goes_on(
    group: WorkerGroup, yesterday: tuple[Night, DatasetManifest, Path], tmp_path: Path, words: list[str]
) -> None:
    before, _, folder = yesterday
    file = tmp_path / "start.safetensors"
    file.write_bytes((before.run / "model/weights.safetensors").read_bytes())
    words = [*words, f"model.start={file}", "optim.lr=1e-9", "optim.weight_decay=0", "checkpoint.every_steps=1"]
    begun = train(group, 2, tmp_path / "run", folder / "yesterday", *words, "train.steps=2")
    trained, now = (read_weights(open_storage(str(night.run / "model"))) for night in (before, begun))
    for name, weight in trained.items():
        torch.testing.assert_close(now[name], weight, rtol=0, atol=1e-7)
    assert begun.started is not None and not begun.started.missing and set(begun.started.matched) == set(trained)
    zeros = {name: torch.zeros_like(weight) for name, weight in trained.items()}
    infos = [TensorInfo(name, weight.dtype, tuple(weight.shape)) for name, weight in zeros.items()]
    write_weights(open_storage(str(tmp_path)), infos, zeros.values(), {})
    file.write_bytes((tmp_path / "weights.safetensors").read_bytes())
    on = train(group, 2, tmp_path / "run", folder / "yesterday", *words, "train.steps=4")
    assert (on.from_step, on.steps) == (2, 4) and on.started == begun.started
    torch.testing.assert_close(read_weights(open_storage(str(on.run / "model"))), dict(now), rtol=0, atol=1e-7)


def test_what_cannot_start_is_said_before_anything_runs(
    yesterday: tuple[Night, DatasetManifest, Path], tmp_path: Path
) -> None:
    before, _, folder = yesterday
    recipe = tmp_path / "r.yaml"
    recipe.write_text(RECIPE.format(dataset=folder / "yesterday"))

    def problems(*words: str, manifest: DatasetManifest | None = None) -> list[str]:
        return warm_start_problems(load_config(str(recipe), words).config, manifest)

    here = f"warm_start.model={before.run}/model"
    assert problems() == [] == problems(here)
    today = write_night(tmp_path / "today", CARRIERS[::-1], SHIFT)
    assert problems(here, manifest=today) == []
    (gone,) = problems(f"warm_start.model={tmp_path}/nowhere")
    assert gone == f"warm_start.model: {tmp_path}/nowhere: no model: it has no config.json, manifest.json, " + (
        "weights.safetensors"
    )
    (wider,) = problems(here, "model.args.width=32")
    assert "was trained with model.args = " in wider and "'width': 32" in wider and "train from scratch" in wider
    cyclic = [{"name": "carrier", "kind": "cyclic", "column": "x", "period": 7.0}, today.features["features"][1]]
    other = DatasetManifest.model_validate(dict(today) | {"features": today.features | {"features": cyclic}})
    (tensors,) = problems(here, manifest=other)
    assert (
        "was trained on other tensors than dataset 'nightly' has: ['carrier', 'carrier_cos', 'carrier_sin']" in tensors
    )
