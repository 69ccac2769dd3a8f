"""The recipe's `trees` block as XGBoost's parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from sparkring.conf.blocks.model import ModelConfig
from sparkring.conf.blocks.trees import TreesConfig
from sparkring.conf.manifest import DatasetManifest
from sparkring.conf.tasks import BINARY, MULTICLASS, MULTILABEL, POISSON, REGRESSION, LabelForm, TaskKind

OBJECTIVES = {
    BINARY.name: "binary:logistic",
    MULTICLASS.name: "multi:softprob",
    MULTILABEL.name: "binary:logistic",  # trees for each label
    REGRESSION.name: "reg:squarederror",
    POISSON.name: "count:poisson",
}
"""Task -> objective whose sums of leaf values are the outputs that the task's loss takes (training/tasks.py)."""
ROWS_PER_LEAF = {LabelForm.NUMBER: 5.0}
OTHER_ROWS_PER_LEAF = 30.0  # the label of a row says less than an amount
MAX_DELTA_STEP = 0.7  # XGBoost's of count:poisson, which is added to the logarithm of a rate


def rows_per_leaf(trees: TreesConfig, kind: TaskKind) -> float:
    """Return the least rows in a leaf, at mean curvature."""
    return ROWS_PER_LEAF.get(kind.form, OTHER_ROWS_PER_LEAF) if trees.rows_per_leaf is None else trees.rows_per_leaf


def curvatures(kind: TaskKind, margins: NDArray[np.float32]) -> NDArray[np.float64]:
    """Compute second derivatives of rows' losses by XGBoost's objectives, in the shape of the margins.

    margins: predictions before the link function, (rows,) or (rows, classes or labels).
    """
    z = margins.astype(np.float64)
    if kind is REGRESSION:
        return np.ones_like(z)
    if kind is POISSON:
        return np.exp(z + MAX_DELTA_STEP)
    if kind is MULTICLASS:
        p = np.exp(z - z.max(axis=1, keepdims=True))
        p /= p.sum(axis=1, keepdims=True)
        return 2 * p * (1 - p)
    p = 1 / (1 + np.exp(-z))
    return p * (1 - p)


def booster_params(trees: TreesConfig, kind: TaskKind, classes: int, seed: int, threads: int) -> dict[str, Any]:
    """Make the parameters of a booster. `subsample` and `columns_per_tree` are sample.py's, `rows_per_leaf` grow.py's.

    Args:
        trees: block `trees` of the recipe.
        kind: kind of the task.
        classes: number of classes; unused for other tasks.
        seed: seed of the samples of rows and columns.
        threads: number of threads of this rank.
    """
    params = {
        "objective": OBJECTIVES[kind.name],
        "tree_method": "hist",
        "device": "cpu",
        "disable_default_eval_metric": True,  # ours are computed from predictions
        "learning_rate": trees.learning_rate,
        "max_depth": trees.max_depth,
        "reg_lambda": trees.l2,
        "gamma": trees.min_gain,
        "max_bin": trees.max_bin,
        "max_cat_threshold": trees.categories_per_split,
        "seed": seed,
        "nthread": threads,
        "verbosity": 1,
    }
    return params | ({"num_class": classes} if kind.form is LabelForm.CLASS else {})


def count_classes(
    manifest: DatasetManifest, model: ModelConfig, labels: torch.Tensor, gather: Callable[[bytes], list[bytes]]
) -> int:
    """Count the classes of a label: those of its texts, or up to the largest number on any rank. Collective.

    Args:
        manifest: manifest of the dataset.
        model: block `model` of the recipe.
        labels: labels of this rank's training rows.
        gather: all-gather of bytes between the ranks.
    """
    if model.kind.form is not LabelForm.CLASS:
        return 1
    largest = int(labels.max()) if len(labels) else 0
    return len(manifest.classes) or 1 + max(int(answer) for answer in gather(str(largest).encode()))
