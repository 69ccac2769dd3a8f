"""The finished model as a folder that predicts from raw rows, wherever sparkring is installed.

The folder is that of training/model_folder.py; MLflow calls `_load_pyfunc`. Nothing in it is code or an unrestricted
pickle. It names code: the classes of `model.factory` and `model.task`, which must be of `sparkring.training.models`, or
of modules that the loading process trusts by SPARKRING_MODEL_MODULES (names with commas between).
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from sparkring.conf.config import RunConfig
from sparkring.conf.manifest import Column, DatasetManifest
from sparkring.conf.references import module_of
from sparkring.conf.storage import CHUNK_BYTES, Storage, open_storage
from sparkring.conf.stored import StoredError
from sparkring.etl.tokenizer import Codec
from sparkring.pipelines.tracking.ops import NamedType
from sparkring.training.checkpoint.weights import read_weights
from sparkring.training.data.features.transform import apply_numpy
from sparkring.training.model_folder import CONFIG, FILES, read_model_folder
from sparkring.training.models.gpt import Sampling, generate
from sparkring.training.models.initial import InitialModel
from sparkring.training.tasks import build_task
from sparkring.training.worker import build_model, pick_columns, start_model

BATCH_ROWS = 8192
TRUSTED = "SPARKRING_MODEL_MODULES"
MLFLOW_TYPES = {"numeric": "double", "cyclic": "double"}


def copy_model_folder(model: Storage, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in FILES:
        with model.fs.open_input_stream(model.path(name)) as source, open(folder / name, "wb") as target:
            shutil.copyfileobj(source, target, CHUNK_BYTES)


def trained_model(config: RunConfig, manifest: DatasetManifest, weights: Mapping[str, torch.Tensor]) -> torch.nn.Module:
    """The module with its trained weights, never compiled: a serving host may have no compiler, nor time for one."""
    without_memory = start_model(config, manifest)
    if isinstance(without_memory, InitialModel):  # refuse sizes other than the weights' before memory is taken
        without_memory.module.load_state_dict({name: weight.to("meta") for name, weight in weights.items()})
    model = build_model(config, manifest)
    model.load_state_dict(weights)
    return model.eval()


class Predictor:
    """Predicts a table task from raw columns, as the feature fit saw them.

    `predict(rows)` gives a frame with `prediction` (binary: probability of the positive class; regression: the value)
    or one `class_<i>` column per class.
    """

    def __init__(self, config: RunConfig, manifest: DatasetManifest, weights: Mapping[str, torch.Tensor]):
        self.manifest = manifest
        self.columns = pick_columns(manifest, config.model.inputs, config.model.label)
        self.task: Any = build_task(config.model.task, self.columns.features, self.columns.label, config.model.inputs)
        self.model = trained_model(config, manifest, weights)

    def predict(self, model_input: Any, params: Any = None) -> pd.DataFrame:
        """`model_input`: a DataFrame, or a dict of equally long columns. KeyError names a column that is missing."""
        rows = pd.DataFrame(model_input)
        parts = [
            self._scores(rows.iloc[start : start + BATCH_ROWS]) for start in range(0, max(len(rows), 1), BATCH_ROWS)
        ]
        scores = np.concatenate(parts)
        if scores.ndim == 1:
            return pd.DataFrame({"prediction": scores}, index=rows.index)
        return pd.DataFrame({f"class_{i}": scores[:, i] for i in range(scores.shape[1])}, index=rows.index)

    def _scores(self, rows: pd.DataFrame) -> np.ndarray:
        columns = self._columns(rows)
        with torch.inference_mode():
            outputs = self.model(*self.task.inputs(columns))
            probabilities: np.ndarray = self.task.probabilities(outputs).numpy()
        return probabilities

    def _columns(self, rows: pd.DataFrame) -> dict[str, torch.Tensor]:
        """A batch as the dataset's reader would make it: raw rows through the fitted features."""
        made: dict[str, Any] = {}
        if self.manifest.features:
            states = self.manifest.features["features"]
            nullable = {state["column"] for state in states if state.get("nulls", "refuse") != "refuse"}
            raw = {name: present(rows[name]) if name in nullable else rows[name].tolist() for name in rows}
            made = dict(apply_numpy(self.manifest.features, raw))
        columns = {}
        for column in (self.manifest.tensor(name) for name in self.columns.read):
            if not {column.name, column.mask} & {*self.columns.features}:
                continue  # the label
            if column.name not in made:
                if column.name not in rows:
                    raise KeyError(f"column {column.name!r} is needed; given: {sorted(map(str, rows))}")
                made |= as_read(column, rows[column.name])
            values = np.ascontiguousarray(made[column.name]).astype(column.dtype)
            columns[column.name] = torch.from_numpy(values)
            if column.mask is not None:
                columns[column.mask] = torch.from_numpy(made[column.mask])
        return columns


def present(given: pd.Series) -> list[Any]:
    """The values with None for missing ones: pandas knows a null among numbers as NaN only."""
    values: list[Any] = given.astype(object).where(given.notna(), None).tolist()
    return values


def as_read(column: Column, given: pd.Series) -> dict[str, np.ndarray]:
    """A stored column and its mask, if it has one; nulls are filled as the dataset's reader fills them.

    ValueError for nulls in a column that refuses them.
    """
    values = given.tolist() if column.nulls == "refuse" else present(given)
    valid = np.array([value is not None for value in values], bool)
    if column.nulls == "refuse" and not valid.all():
        raise ValueError(f"column {column.name!r}: {int((~valid).sum())} of {len(valid)} values are null, none may be")
    fill = np.full(column.shape, column.fill if column.nulls == "fill" and column.fill is not None else 0)
    stacked = np.array([fill if value is None else value for value in values]).reshape(len(values), *column.shape)
    return {column.name: stacked} | ({column.mask: valid} if column.mask is not None else {})


class Writer:
    """Continues prompts with a language model; the same row gives the same text.

    `predict(rows)` takes a column `prompt`, optionally `tokens` (how many to add, 100) and `temperature` (0.8; 0 is
    greedy), and gives a frame with `text`, the continuation of each prompt.
    """

    def __init__(self, config: RunConfig, manifest: DatasetManifest, weights: Mapping[str, torch.Tensor]):
        self.codec = Codec(manifest.text["tokenizer_json"], manifest.text["size"])
        self.context: int = manifest.text["seq_len"] - 1
        self.model = trained_model(config, manifest, weights)

    def predict(self, model_input: Any, params: Any = None) -> pd.DataFrame:
        rows = pd.DataFrame(model_input)
        if "prompt" not in rows:
            raise KeyError(f"column 'prompt' is needed; given: {sorted(map(str, rows))}")
        texts = [self._continue(row) for row in rows.to_dict("records")]
        return pd.DataFrame({"text": texts}, index=rows.index, dtype=object)

    def _continue(self, row: Mapping[Any, Any]) -> str:
        (encoded,) = self.codec.encode([row["prompt"]])
        prompt = [self.codec.end_id, *encoded[:-1].tolist()]  # as a document begins: after the end of another
        count, temperature = _given(row, "tokens", 100), _given(row, "temperature", 0.8)
        return self.codec.decode(
            generate(self.model, prompt, int(count), self.context, Sampling(temperature=float(temperature)))
        )


def _given(row: Mapping[Any, Any], name: str, default: float) -> float:
    value = row.get(name)
    return default if value is None or value != value else value


def _load_pyfunc(path: str) -> Predictor | Writer:
    """Load a model folder; MLflow calls this."""
    folder = open_storage(path)
    model = read_model_folder(folder)
    check_trusted(model.config, f"{path}/{CONFIG}")
    kind = Writer if model.config.model.task == "language_model" else Predictor
    weights = read_weights(folder)
    try:
        return kind(model.config, model.manifest, weights)
    except (ValueError, TypeError, RuntimeError) as error:  # RuntimeError: torch's, of memory and of shapes
        why = " ".join(str(error).split())
        raise StoredError(f"{path}: config.json and manifest.json make no model for its weights: {why}") from error


def check_trusted(config: RunConfig, where: str) -> None:
    """Raise StoredError where a stored configuration names code of a module that is not trusted here."""
    trusted = ("sparkring.training.models", *filter(None, os.environ.get(TRUSTED, "").split(",")))
    for key, reference in (("model.factory", config.model.factory), ("model.task", config.model.task)):
        module = module_of(reference)
        if ":" in reference and not any(f"{module}.".startswith(f"{name}.") for name in trusted):
            raise StoredError(
                f"{where}: {key} = {reference!r}: a stored file may name code of sparkring.training.models only; if "
                f"you trust that module and have it, set {TRUSTED}={module} where the model is loaded"
            )


def signature_inputs(manifest: DatasetManifest) -> list[NamedType]:
    """The raw columns that features are made of, as MLflow columns; none is required, since nulls were learned.

    Categories may be text, numbers or dates in the source, so their type is `any`.
    """
    if manifest.text:
        return [
            {"name": "prompt", "type": "string", "required": True},
            {"name": "tokens", "type": "long", "required": False},
            {"name": "temperature", "type": "double", "required": False},
        ]
    columns: dict[str, NamedType] = {}
    for state in manifest.features.get("features", []):
        kind = MLFLOW_TYPES.get(state["kind"], "any")
        known = columns.get(state["column"])
        if known is None or known["type"] == "any":
            columns[state["column"]] = {"name": state["column"], "type": kind, "required": False}
    return list(columns.values())


def signature_outputs(task: str) -> list[NamedType]:
    """The prediction's columns, where their number does not depend on the data."""
    if task == "language_model":
        return [{"name": "text", "type": "string", "required": True}]
    if task not in ("binary", "regression"):
        return []
    return [{"name": "prediction", "type": "double", "required": True}]
