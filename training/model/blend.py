"""A blend: what a network and trees that learned the same rows predict, mixed by a weight.

The file blend.json of a model folder says the weight, where rows that neither was trained on have shown that the mix is
better than both (pipelines/job/blend.py). Predictions are mixed before the task's link function: log-odds,
logarithms of class probabilities or of counts, and numbers as they are. So contributions of features mix the same way.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from sparkring.conf.storage import Storage
from sparkring.conf.stored import CLOSED, Finite, read, up_to
from sparkring.conf.tasks import POISSON, LabelForm, TaskKind
from sparkring.training.model.calibration import LEAST, MOST

Array = NDArray[np.float64]
FILE = "blend.json"


@dataclass(frozen=True, kw_only=True)
class Blend:
    """share * network + (1 - share) * trees, of predictions before the link function."""

    __pydantic_config__ = CLOSED

    format: Annotated[int, up_to(1)] = 1
    share: Annotated[Finite, Field(gt=0, lt=1)]  # of the network

    def of(self, kind: TaskKind, net: Array, trees: Array) -> Array:
        """Mix predictions (N,), (N, C) or (N, L)."""
        return mixed(kind, self.share, before_link(kind, net), before_link(kind, trees))

    def write(self, folder: Storage) -> None:
        """Write the file to a model folder."""
        folder.put_atomic(FILE, json.dumps(asdict(self)).encode())


def read_blend(folder: Storage) -> Blend | None:
    """Read a model folder's blend; None where it has none. StoredError for a damaged file."""
    return read(Blend, folder, FILE) if folder.exists(FILE) else None


def mixed(kind: TaskKind, share: float | Array, net: Array, trees: Array) -> Array:
    """Mix predictions before the link function. `share`: the network's, one value, (N,) or (N, 1)."""
    return after_link(kind, share * net + (1 - share) * trees)


def before_link(kind: TaskKind, predictions: Array) -> Array:
    """Invert the task's link function; finite for probabilities of 0 and 1, too."""
    if kind.form in (LabelForm.FLAG, LabelForm.FLAGS):
        p = np.clip(predictions, LEAST, MOST)
        return np.asarray(np.log(p) - np.log1p(-p))
    if kind.form is LabelForm.CLASS or kind.name == POISSON.name:
        return np.asarray(np.log(np.maximum(predictions, LEAST)))
    return predictions


def after_link(kind: TaskKind, raw: Array) -> Array:
    """Apply the link function: the inverse of `before_link`, with class probabilities summing to 1."""
    if kind.form in (LabelForm.FLAG, LabelForm.FLAGS):
        return np.asarray(1 / (1 + np.exp(-raw)))
    if kind.form is LabelForm.CLASS:
        powers = np.exp(raw - raw.max(axis=1, keepdims=True))
        return np.asarray(powers / powers.sum(axis=1, keepdims=True))
    return np.asarray(np.exp(raw)) if kind.name == POISSON.name else raw
