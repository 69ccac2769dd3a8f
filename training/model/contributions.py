"""Contributions of a row's features: numbers that sum, with a base value, to the model's raw prediction of the row.

A feature is a column of the raw rows: all that the model sees of it (a code and a number, a sine and a cosine, an
indicator of nulls) is one. Networks are explained here, trees in training/trees/contributions.py.

Shapes: B rows, F features, O outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from sparkring.conf.config import RunConfig
from sparkring.conf.features import FIRST_CODE, State, output_names
from sparkring.conf.manifest import Column, DatasetManifest
from sparkring.training.data.batch import Columns
from sparkring.training.data.decoding.columns import numpy_dtype
from sparkring.training.data.features.xxhash64 import NULL_ID
from sparkring.training.model.calibration import Calibration
from sparkring.training.model.recipe_model import pick_columns

Array = NDArray[np.float64]
TOLERANCE = 1e-4  # of |base| + the sum of |contributions|: by how much they may miss the raw prediction
PAIRS, SEED = 2, 0  # orders, each with its reverse, in which the features of a network's rows are set


@dataclass(frozen=True)
class Contributions:
    """values: (B, F, O); base: (O,); raw: (B, O), what the model gives for the rows."""

    values: Array
    base: Array
    raw: Array

    def calibrated(self, calibration: Calibration) -> Contributions:
        """Return the contributions to the calibrated raw prediction.

        They keep their proportions where the calibration is a curve: each is multiplied by the slope of the line
        from the base to the row's raw prediction.
        """
        base, raw = (calibration.of_log_odds(torch.from_numpy(each)).numpy() for each in (self.base, self.raw))
        distance = self.raw - self.base
        slope = np.where(distance == 0, calibration.scale, (raw - base) / np.where(distance == 0, 1, distance))
        return Contributions(self.values * slope[:, None], base, raw)

    def mixed(self, share: float, other: Contributions) -> Contributions:
        """Mix raw predictions: share * own + (1 - share) * other, of the same rows and features."""
        values, base, raw = (
            share * getattr(self, name) + (1 - share) * getattr(other, name) for name in ("values", "base", "raw")
        )
        return Contributions(values, base, raw)

    def of_features(self, own: Sequence[str], wanted: Sequence[str]) -> Contributions:
        """Reorder the features. `own`: their present order."""
        places = [own.index(name) for name in wanted]
        return Contributions(self.values[:, places], self.base, self.raw)

    def misses(self) -> NDArray[np.bool_]:
        """Mark rows (B,) whose contributions miss a raw prediction by more than TOLERANCE."""
        missed = np.abs(self.base + self.values.sum(axis=1) - self.raw)
        scale = np.abs(self.base) + np.abs(self.values).sum(axis=1)
        odd: NDArray[np.bool_] = ~(missed <= TOLERANCE * scale).all(axis=1)  # of a NaN, too
        return odd


def joined(parts: Sequence[Contributions]) -> Contributions:
    """Concatenate the rows of all contributions, which share one base."""
    values, raw = (np.concatenate([getattr(part, name) for part in parts]) for name in ("values", "raw"))
    return Contributions(values, parts[0].base, raw)


def contribution_problem(config: RunConfig, manifest: DatasetManifest) -> str | None:
    """Explain why a model's predictions have no contributions; None where they have."""
    model = config.model
    if not model.kind.is_table:
        return f"model.task = {model.task!r}: a raw prediction is known of the tasks of tables alone"
    names = pick_columns(manifest, model).features
    columns = [column for column in manifest.tensors if column.name in names]
    if odd := [column.name for column in columns if column.layout not in ("scalar", "vector")]:
        return f"the model reads {odd}, which are images or sequences; numbers and categories alone have contributions"
    if columns and all(column.name in manifest.hashed for column in columns):
        return (
            f"the model reads ids alone, {[column.name for column in columns]}: no row of ids is a base that others "
            "can be compared with"
        )
    return None


def tensors_by_feature(manifest: DatasetManifest, features: Sequence[str]) -> dict[str, list[str]]:
    """Map each raw column to the tensors and masks among `features` that are made of it."""
    states: list[State] = manifest.features.get("features", [])
    raw = {output: state["column"] for state in states for output in output_names(state)}
    raw |= {c.mask: raw.get(c.name, c.name) for c in manifest.tensors if c.mask is not None}
    found: dict[str, list[str]] = {}
    for name in features:
        found.setdefault(raw.get(name, name), []).append(name)
    return found


def base_row(manifest: DatasetManifest, features: Sequence[str]) -> dict[str, torch.Tensor]:
    """Make the row that a network's contributions start from, each tensor (1, *shape).

    A number that is scaled has the training rows' mean, a category its most frequent value, an id that of a null; what
    is neither is 0, and nothing is null.
    """
    masks = {column.mask for column in manifest.tensors if column.mask is not None}
    return {
        name: torch.ones(1, dtype=torch.bool)
        if name in masks
        else base_value(manifest.tensor(name), name in manifest.hashed)
        for name in features
    }


def base_value(column: Column, is_hashed: bool) -> torch.Tensor:
    code = 0 if column.cardinality is None else min(FIRST_CODE, column.cardinality - 1)
    value = NULL_ID if is_hashed else code
    return torch.from_numpy(np.full((1, *column.shape), value, numpy_dtype(column)))


class NetExplainer:
    """Estimates Shapley values of the game in which an absent feature has the value of a base row.

    The features are set one after the other from the base row's values to the row's, in a few orders, each followed by
    its reverse (Mitchell et al. 2022, arXiv:2104.12199); a contribution is the mean change of the output. In each order
    the changes sum to the output less that of the base row. With the reverses they are exact for a model whose features
    act alone or in pairs. The orders are the same for all rows, so equal rows have equal contributions.
    """

    def __init__(
        self,
        model: Callable[[Columns], torch.Tensor],
        base: Mapping[str, torch.Tensor],
        features: Sequence[Sequence[str]],
    ) -> None:
        """Prepare to permute features against a base row.

        Args:
            model: function from tensors by name to outputs, (B,) or (B, O).
            base: tensors (1, *shape) of the base row, by name.
            features: names of tensors that are set together.
        """
        self._model, self._base, self._features = model, base, features
        self._orders = orders_of(len(features))

    def __call__(self, rows: Columns) -> Contributions:
        """Explain the rows of a batch. `rows`: tensors (B, *shape) by name."""
        base, raw = _outputs(self._model, self._base), _outputs(self._model, rows)
        values = np.zeros((len(raw), len(self._features), raw.shape[1]))
        for order in self._orders:
            self._walk(order, rows, base, values)
        return Contributions(values / len(self._orders), base[0], raw)

    def _walk(self, order: Sequence[int], rows: Columns, base: Array, values: Array) -> None:
        """Add to `values` what each feature changes where they are set in this order."""
        now = {name: tensor.expand(len(values), *tensor.shape[1:]) for name, tensor in self._base.items()}
        before = np.broadcast_to(base, (len(values), base.shape[1]))
        for place in order:
            now |= {name: rows[name] for name in self._features[place]}
            after = _outputs(self._model, now)
            values[:, place] += after - before
            before = after


def orders_of(features: int) -> list[list[int]]:
    """Draw PAIRS feature orders and their reverses; one pair for two features or fewer."""
    random = np.random.default_rng(SEED)
    orders = [random.permutation(features).tolist() for _ in range(PAIRS if features > 2 else 1)]
    return [each for order in orders for each in (order, order[::-1])]


def _outputs(model: Callable[[Columns], torch.Tensor], columns: Mapping[str, torch.Tensor]) -> Array:
    """Compute the outputs (B, O) as doubles."""
    with torch.inference_mode():
        found = model(dict(columns)).double().numpy()
    values: Array = found if found.ndim > 1 else found[:, None]
    return values
