"""Trained trees: one file of XGBoost's own, and what they predict for rows of the dataset's tensors."""

from __future__ import annotations

import torch
import xgboost

from sparkring.conf.config import RunConfig
from sparkring.conf.errors import first_line
from sparkring.conf.manifest import DatasetManifest
from sparkring.conf.storage import Storage
from sparkring.conf.stored import StoredError
from sparkring.training.data.batch import Columns
from sparkring.training.model.folder import TREES_FILE
from sparkring.training.model.recipe_model import pick_columns
from sparkring.training.trees.columns import TreeColumns
from sparkring.training.trees.params import OBJECTIVES
from sparkring.training.trees.stored import read_stored


class TreesModel:
    """Computes what a task takes for a model's outputs: the sums of leaf values, before any link function.

    Called as a module is: `model(columns)` with tensors by name gives (rows,) or (rows, classes or labels) float32.
    """

    def __init__(self, booster: xgboost.Booster, columns: TreeColumns) -> None:
        self.booster, self.columns = booster, columns

    def __call__(self, columns: Columns) -> torch.Tensor:
        sums = self.booster.inplace_predict(self.columns.matrix(columns), predict_type="margin")
        return torch.from_numpy(sums)


def read_trees(folder: Storage, config: RunConfig, manifest: DatasetManifest, threads: int = 1) -> TreesModel:
    """Read the trees of a model folder. StoredError for a file that is damaged, or of another dataset's columns.

    Args:
        folder: folder of the model.
        config: recipe of the model.
        manifest: manifest of the training dataset.
        threads: number of threads that predict.
    """
    data, booster = folder.read_bytes(TREES_FILE), xgboost.Booster({"nthread": threads})
    try:
        stored = read_stored(data)
        booster.load_model(bytearray(data))
    except (ValueError, xgboost.core.XGBoostError) as error:
        why = f"no trees of XGBoost {xgboost.__version__} ({first_line(error)})"
        raise StoredError(f"{folder.uri}/{TREES_FILE}: {why}") from error
    columns = TreeColumns.of(manifest, pick_columns(manifest, config.model).features)
    if stored.names != columns.names or stored.types != columns.types:
        raise StoredError(
            f"{folder.uri}/{TREES_FILE}: its columns are {stored.names}, those of the folder's manifest {columns.names}"
        )
    if stored.objective != (wanted := OBJECTIVES[config.model.kind.name]):
        raise StoredError(
            f"{folder.uri}/{TREES_FILE}: its trees have the objective {stored.objective}; model.task = "
            f"{config.model.task!r} of the folder's recipe has {wanted}: it is a file of another model"
        )
    return TreesModel(booster, columns)


def write_trees(folder: Storage, booster: xgboost.Booster) -> None:
    folder.put_atomic(TREES_FILE, bytes(booster.save_raw("ubj")))
