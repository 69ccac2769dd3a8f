"""Small datasets with what trees must get right: nulls, categories, a masked column, weights."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from sparkring.conf.manifest import (
    ROW_NUMBER,
    Column,
)
from tests.helpers.datasets import listed, manifest_of, write_manifest

SIZES = {"train": 900, "valid": 300, "test": 200}
COLUMNS = (
    Column(name="price", dtype="float64", role="input", nulls="keep"),
    Column(name="city", dtype="string", role="input", nulls="keep"),
    Column(name="area", dtype="float32", nulls="mask"),
    Column(name="place", dtype="float32", layout="vector", shape=(2,)),
    Column(name="label", dtype="float64", role="label"),
)
FEATURES: dict[str, Any] = {
    "version": 1,
    "inputs": {"price": "double", "city": "string", "area": "float", "place": "array<float>"},
    "features": [
        {"name": "price", "kind": "numeric", "column": "price", "transform": "log1p", "mean": 2.0, "std": 0.5,
         "fill": 1.5, "indicator": True, "train_nulls": 3},
        {"name": "city", "kind": "categorical", "column": "city", "values": ["Oslo", "Rome", "Lima"], "train_nulls": 1},
        {"name": "area", "kind": "passthrough", "column": "area", "dtype": None, "shape": None, "nulls": "mask",
         "fill": None},
        {"name": "place", "kind": "passthrough", "column": "place", "dtype": None, "shape": [2], "nulls": "refuse",
         "fill": None},
    ],
}  # fmt: skip


def homes(rows: int, seed: int, kind: str = "binary") -> dict[str, Any]:
    """Rows whose label depends on a price, which may be null, on a city, one of which no list has, and on an area."""
    random = np.random.default_rng(seed)
    price = random.exponential(5, rows)
    city = random.choice(["Oslo", "Rome", "Lima", "Bern"], rows)
    area, place = random.normal(size=rows), random.normal(size=(rows, 2))
    strength = (
        np.where(price > 4, 1.5, -1.0) + np.where(city == "Lima", 2.0, 0.0) + area * (city != "Rome") - place[:, 1]
    )
    labels = {
        "binary": (random.random(rows) < 1 / (1 + np.exp(-strength))).astype(float),
        "multiclass": np.digitize(strength, [-1.0, 1.0]).astype(float),
        "regression": strength + random.normal(0, 0.3, rows),
        "poisson": random.poisson(np.exp(strength / 3)).astype(float),
    }
    return {
        "price": pa.array(price, mask=random.random(rows) < 0.1),
        "city": pa.array(city, mask=random.random(rows) < 0.1),
        "area": pa.array(area.astype(np.float32), mask=random.random(rows) < 0.1),
        "place": pa.FixedSizeListArray.from_arrays(pa.array(place.ravel().astype(np.float32)), 2),
        "label": pa.array(labels[kind]),
    }


def write_homes(
    folder: Path, sizes: Mapping[str, int] = SIZES, kind: str = "binary", weigh: bool = False, **changed: Any
) -> Path:
    """Write a dataset of homes. `changed`: column -> function of a split's values and its name."""
    files, mean = [], 1.0
    for number, (split, rows) in enumerate(sizes.items()):
        columns = homes(rows, number, kind)
        for name, change in changed.items():
            columns[name] = change(columns[name], split)
        if weigh:
            columns["trust"] = pa.array(np.arange(rows) % 3 + 0.5)
            mean = mean if split != "train" else float(np.mean(columns["trust"].to_numpy()))
        path = folder / f"{split}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table(columns | {ROW_NUMBER: np.arange(rows)}), path, row_group_size=50)
        files.append(listed(folder, path, split))
    weight = {"weight": {"column": "trust", "mean": mean}} if weigh else {}
    manifest = manifest_of(
        columns=(*COLUMNS, *([Column(name="trust", dtype="float64", role="weight")] if weigh else [])),
        files=files,
        name="homes",
        fingerprint=hashlib.sha256(repr(sizes).encode()).hexdigest(),
        features=FEATURES | weight,
    )
    write_manifest(folder, manifest)
    return folder
