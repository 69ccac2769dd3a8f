"""A small model of four raw columns, exported as training does, and rows for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from sparkring.conf.config import RunConfig
from sparkring.conf.manifest import Column, DatasetManifest
from sparkring.conf.storage import Storage, open_storage
from sparkring.training.checkpoint.weights import write_weights
from sparkring.training.model.folder import describe_model
from sparkring.training.model.recipe_model import build_model, pick_columns
from sparkring.training.parallel.state import TensorInfo
from sparkring.training.trees.columns import CATEGORY, TreeColumns, seen_by
from sparkring.training.trees.model import write_trees
from tests.helpers.datasets import manifest_of

FEATURES: dict[str, Any] = {
    "version": 1,
    "inputs": {"carrier": "string", "month": "int", "wind": "double", "hour": "int"},
    "features": [
        {"name": "carrier", "kind": "categorical", "column": "carrier", "values": ["UA", "B6"]},
        {"name": "month", "kind": "categorical", "column": "month", "values": ["1", "2"]},
        {"name": "wind", "kind": "numeric", "column": "wind", "transform": "none", "mean": 10.0, "std": 5.0,
         "fill": 10.0, "indicator": True, "train_nulls": 1},
        {"name": "hour", "kind": "cyclic", "column": "hour", "period": 24.0},
    ],
}  # fmt: skip
CONFIG = RunConfig.model_validate({"name": "flights", "model": {"args": {"width": 16, "blocks": 1}}})
RAW = pd.DataFrame(
    {"carrier": ["UA", "ZZ", None], "month": [1, 2, 7], "wind": [10.0, np.nan, 30.0], "hour": [0.0, 6.0, 23.0]}
)


def manifest(format_version: int = 2) -> DatasetManifest:
    """Of a dataset of values; of an older sparkring's, 1, whose columns are the tensors."""
    kinds = {"carrier": "string", "month": "int32", "wind": "float64", "hour": "int32"}
    label = Column(name="late", dtype="int8", role="label")
    columns = [*(Column(name=n, dtype=t, role="input", nulls="keep") for n, t in kinds.items()), label]
    if format_version == 1:
        columns = [
            Column(name="carrier", dtype="int32", cardinality=4),
            Column(name="month", dtype="int32", cardinality=4),
            *(Column(name=n, dtype="float32") for n in ("wind", "wind__null", "hour_sin", "hour_cos")),
            label,
        ]
    return manifest_of(columns=columns, format_version=format_version, name="flights", features=FEATURES)


def export(folder: Path, model: torch.nn.Module) -> Storage:
    """The weights as training writes them."""
    state, storage = model.state_dict(), open_storage(str(folder))
    write_weights(storage, [TensorInfo(n, t.dtype, tuple(t.shape)) for n, t in state.items()], state.values(), {})
    return storage


def model_folder(folder: Path, seed: int = 3, described: DatasetManifest | None = None) -> Storage:
    """A finished run's model folder; another seed gives other weights."""
    torch.manual_seed(seed)
    model = build_model(CONFIG, described or manifest())
    for weight in model.parameters():
        torch.nn.init.normal_(weight)  # initial weights of the last layers are zero: few scores would differ
    exported = export(folder, model)
    describe_model(exported, CONFIG, described or manifest())
    return exported


def trees_folder(folder: Path) -> Storage:
    """A finished run's model folder of trees, over the same raw columns."""
    import xgboost

    config = CONFIG.model_copy(update={"model": CONFIG.model.model_copy(update={"family": "trees"})})
    seen = seen_by(config.model, manifest())
    columns = TreeColumns.of(seen, pick_columns(seen, config.model).features)
    draw = np.random.default_rng(5)
    rows = [draw.integers(0, 4, 400) if kind == CATEGORY else draw.standard_normal(400) for kind in columns.types]
    table, labels = np.column_stack(rows).astype(np.float32), draw.integers(0, 2, 400)
    names = {"feature_names": columns.names, "feature_types": columns.types}
    data = xgboost.QuantileDMatrix(table, labels, enable_categorical=True, **names)
    storage = open_storage(str(folder))
    write_trees(storage, xgboost.train({"objective": "binary:logistic", "max_depth": 4, "nthread": 1}, data, 8))
    describe_model(storage, config, manifest())
    return storage


def text_folder(folder: Path) -> tuple[RunConfig, DatasetManifest]:
    """A finished language model of bytes in `folder`, whose rows had 16 tokens."""
    text = {"tokenizer_json": "", "size": 256, "vocab_size": 258, "end_id": 256, "pad_id": 257, "seq_len": 16,
            "splits": {}}  # fmt: skip
    tokens = Column(name="tokens", dtype="int32", layout="vector", shape=(16,), cardinality=258)
    described = manifest().model_copy(update={"columns": (tokens,), "features": {}, "text": text})
    model = {"factory": "sparkring.training.models.gpt:GPT", "task": "language_model"}
    config = RunConfig.model_validate(
        {"name": "text", "model": model | {"args": {"width": 16, "layers": 1, "heads": 2}}}
    )
    torch.manual_seed(0)
    describe_model(export(folder, build_model(config, described)), config, described)
    return config, described


def random_rows(count: int) -> dict[str, list[Any]]:
    """Nulls, values not seen in training, whole numbers where it saw floats, and the other way round."""
    random = np.random.default_rng(1)

    def any_of(*values: Any) -> list[Any]:
        return [values[i] for i in random.integers(0, len(values), count)]

    return {
        "carrier": any_of("UA", "B6", "ZZ", None),
        "month": any_of(1, 2, 7, 1.0, None),
        "wind": any_of(10, 30.5, None, -3, True),
        "hour": any_of(0, 6, 23, None),
    }
