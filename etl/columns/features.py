"""Decide a fitted feature's state, JSON in the manifest, from what was measured of the training rows.

What readers and serving make of it: `conf/features.py` and `training/data/features/transform.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from sparkring.conf.blocks.etl import (
    CategoricalFeature,
    CyclicFeature,
    Feature,
    HashedFeature,
    ImageFeature,
    NumericFeature,
    PassthroughFeature,
)
from sparkring.conf.features import State
from sparkring.etl.errors import EtlError

# Sums are exact; of a logarithm the last bits differ between processors. Ten digits are far more than float32 outputs
# can show, and people can read them.
SIGNIFICANT_DIGITS = 10
FLAT = 1e-5  # a deviation below this share of the mean has less than five digits left of it


def rounded(value: float) -> float:
    return float(f"{value:.{SIGNIFICANT_DIGITS}g}")


def input_column(name: str, feature: Feature) -> str:
    return feature.column or name


def anchor_of(mean: float, std: float) -> float:
    """Return a value to subtract before the mean is rounded; 0 if ten digits of the mean suffice.

    A large mean with a small deviation needs it, such as readings around 1e12 that differ by ones.
    """
    if not (math.isfinite(mean) and math.isfinite(std)):
        return 0.0
    return rounded(mean) if rounded(mean) != mean and std < abs(mean) * FLAT else 0.0


@dataclass(frozen=True)
class Moments:
    """Of a numeric feature's transformed training values: how many, how many nulls, and their mean and deviation.

    `mean` and `std` are of the values less `anchor`.
    """

    count: int
    nulls: int
    mean: float
    std: float
    anchor: float = 0.0


def numeric_state(name: str, feature: NumericFeature, moments: Moments) -> State:
    """Make the state of a numeric feature. EtlError if it has no values, or infinite ones."""
    column = input_column(name, feature)
    if moments.count == 0:
        raise EtlError(f"etl.features.{name}: the training split has no value in {column!r}; remove it")
    if not (math.isfinite(moments.mean) and math.isfinite(moments.std)):
        raise EtlError(f"etl.features.{name}: {column!r} holds infinite values; null or clip them in SQL")
    center, spread = moments.anchor + rounded(moments.mean), rounded(moments.std)
    fill = center if feature.fill is None else transformed(feature.fill, feature.transform)
    return {
        "name": name,
        "kind": "numeric",
        "column": column,
        "transform": feature.transform,
        "mean": center if feature.scale else 0.0,
        "std": (spread or 1.0) if feature.scale else 1.0,
        "fill": fill,
        "indicator": feature.indicator == "always" or (feature.indicator == "auto" and moments.nulls > 0),
        "train_nulls": moments.nulls,
    }


def transformed(value: float, transform: str) -> float:
    return math.log1p(max(value, 0.0)) if transform == "log1p" else float(value)


def categorical_state(name: str, feature: CategoricalFeature, values: Sequence[str], nulls: int = 0) -> State:
    """Make the state of a categorical feature.

    `values`: kept values by falling count, after min_count and max_size; `nulls`: training rows with null.
    """
    column = input_column(name, feature)
    return {"name": name, "kind": "categorical", "column": column, "values": list(values), "train_nulls": nulls}


def plain_state(name: str, feature: HashedFeature | CyclicFeature | PassthroughFeature | ImageFeature) -> State:
    """Make the state of a feature that is not fitted. An image is a passthrough with a resize method."""
    state = {"name": name, **feature.model_dump(mode="json"), "column": input_column(name, feature)}
    if isinstance(feature, ImageFeature):
        state |= {"kind": "passthrough", "dtype": None, "nulls": "refuse", "fill": None}
    return state
