"""Datasets and models of two nights, with other vocabularies and scales, for tests of what compares them."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from sparkring.conf.config import RunConfig
from sparkring.conf.manifest import (
    ROW_NUMBER,
    Accounting,
    Column,
    DatasetManifest,
    Lineage,
    WindowPart,
)
from sparkring.conf.storage import open_storage
from sparkring.etl.columns.statistics import Measured, measure
from sparkring.etl.windows.parts import PART_NAME, Part
from sparkring.pipelines.context.etl_step import Dataset
from sparkring.training.checkpoint.weights import write_weights
from sparkring.training.model.folder import describe_model
from sparkring.training.model.recipe_model import build_model
from sparkring.training.parallel.state import TensorInfo
from tests.helpers.datasets import listed, manifest_of, write_manifest

COLUMNS = (
    Column(name="shop", dtype="string", role="input", nulls="keep"),
    Column(name="x", dtype="float64", role="input", nulls="keep"),
    Column(name="late", dtype="bool", role="label"),
)
SPLITS = {"train": 300, "valid": 100, "test": 200}
RECIPE: dict[str, Any] = {"name": "nightly", "model": {"args": {"width": 4, "blocks": 1, "bumps": 2}}}
WANTED = Measured((("x", "none"),), {"shop": "string"})


def config(**blocks: Any) -> RunConfig:
    return RunConfig.model_validate(RECIPE | {"dataset": "somewhere"} | blocks)


def state(values: list[str], mean: float) -> dict[str, Any]:
    return {
        "version": 1,
        "inputs": {"shop": "string", "x": "double"},
        "features": [
            {"name": "shop", "kind": "categorical", "column": "shop", "values": values},
            {"name": "x", "kind": "numeric", "column": "x", "transform": "none", "mean": mean, "std": 2.0 + mean / 10,
             "fill": mean, "indicator": True},
        ],
    }  # fmt: skip


def rows_of(count: int, values: list[str], seed: int, shift: float = 0.0) -> pa.Table:
    draw = np.random.default_rng(seed)
    shops = [None if n % 17 == 0 else str(shop) for n, shop in enumerate(draw.choice(values, count))]
    x = pa.array([None if n % 13 == 0 else float(v) for n, v in enumerate(draw.normal(5 + shift, 2, count))])
    return pa.table({"shop": shops, "x": x, "late": draw.random(count) < 0.4, ROW_NUMBER: np.arange(count)})


def write_dataset(folder: Path, values: list[str], mean: float, seed: int = 0) -> Dataset:
    """A dataset of one file per split, whose features were fitted to `values` and `mean`."""
    files = []
    for number, (split, rows) in enumerate(SPLITS.items()):
        path = folder / f"data/{split}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(rows_of(rows, values, seed + number), path, row_group_size=50)
        files.append(listed(folder, path, split))
    manifest = manifest_of(
        columns=COLUMNS,
        files=files,
        name="nightly",
        fingerprint=hashlib.sha256(f"{values} {mean}".encode()).hexdigest(),
        features=state(values, mean),
    )
    write_manifest(folder, manifest)
    return Dataset(manifest, open_storage(str(folder)))


def write_model(folder: Path, recipe: RunConfig, manifest: DatasetManifest, seed: int = 1) -> Path:
    """A model folder with weights drawn by `seed`."""
    torch.manual_seed(seed)
    weights = build_model(recipe, manifest).state_dict()
    drawn = {name: torch.randn_like(value) if value.is_floating_point() else value for name, value in weights.items()}
    storage = open_storage(str(folder))
    infos = [TensorInfo(name, value.dtype, tuple(value.shape)) for name, value in drawn.items()]
    write_weights(storage, infos, drawn.values(), {})
    describe_model(storage, recipe, manifest)
    return folder


def write_part(root: Path, interval: str, table: pa.Table, fingerprint: str) -> WindowPart:
    """A part as far as drift looks at it: its record and its statistics."""
    folder = root / f"parts/nightly/{interval}/{fingerprint[:12]}"
    folder.mkdir(parents=True)
    data = measure(table, WANTED).to_bytes()
    (folder / "statistics.arrow").write_bytes(data)
    part = Part(
        interval=interval, fingerprint=fingerprint, created_at="", columns=COLUMNS,
        inputs={"shop": "string", "x": "double"}, files=(), splits={}, statistics="statistics.arrow",
        statistics_sha256=hashlib.sha256(data).hexdigest(),
        accounting=Accounting(rows_in=len(table), rows_out=len(table)), failing={}, lineage=Lineage(sources={}),
    )  # fmt: skip
    (folder / PART_NAME).write_text(part.model_dump_json())
    relative = str(folder.relative_to(root))
    return WindowPart(interval=interval, fingerprint=fingerprint, folder=relative, rows=len(table))


def window(root: Path, name: str, parts: list[WindowPart]) -> Dataset:
    """A dataset over parts, without files: only what was counted is looked at."""
    manifest = manifest_of(
        columns=COLUMNS,
        name="nightly",
        fingerprint=hashlib.sha256(name.encode()).hexdigest(),
        features=state(["a", "b"], 5.0),
        parts=tuple(parts),
    )
    (root / name).mkdir()
    write_manifest(root / name, manifest)
    return Dataset(manifest, open_storage(str(root / name)))
