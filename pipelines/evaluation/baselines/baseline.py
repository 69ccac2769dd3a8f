"""The baselines beside a model: a constant guess, a linear model (one-hot codes + numbers), gradient-boosted trees.

All are fitted on the model's features and rows, and scored on the test rows in the task's metrics: by `linear` and
`trees` in the driver where the rows fit in its memory, else by `mllib` in Spark, and then without trees.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from sparkring.conf.blocks.model import ModelConfig
from sparkring.conf.errors import first_line
from sparkring.conf.manifest import Column
from sparkring.conf.plain_text import count_of
from sparkring.conf.secrets import redact
from sparkring.conf.tasks import LabelForm, TaskKind
from sparkring.pipelines.evaluation.baselines import linear
from sparkring.pipelines.evaluation.baselines.guesses import Fitted
from sparkring.pipelines.evaluation.baselines.linear import Design
from sparkring.pipelines.evaluation.baselines.trees import TREES, grow, named_beside
from sparkring.pipelines.evaluation.split_rows import SplitRows
from sparkring.training.worker.result import MODEL, Scores, TrainResult

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

log = logging.getLogger(__name__)
NEEDS_SPARK = "only a job on Spark fits it"


@dataclass(frozen=True)
class Baselines:
    """What was fitted, by name of baseline, and why others were not."""

    fitted: dict[str, Fitted] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)

    @property
    def scores(self) -> dict[str, Scores]:
        """On the test rows."""
        return {name: each.scores for name, each in self.fitted.items()}

    def beside(self, others: Baselines) -> Baselines:
        """These, and then others."""
        return Baselines(self.fitted | others.fitted, self.missing | others.missing)


def fit_baselines(
    spark: SparkSession | None,
    kind: TaskKind,
    train: SplitRows,
    test: SplitRows,
    read: Sequence[Column],
    labels: Sequence[Column],
) -> Baselines:
    """Fit and score the baselines; without scalar features, the constant guess alone. One that fails is a warning.

    Args:
        spark: the job's session; None of a job without Spark.
        kind: the task.
        train: rows to fit on.
        test: rows to score.
        read: the model's input columns, and its labels.
        labels: one of 0 or 1, a class number, or a value; several of 0 and 1, or a vector of them.
    """
    hashed = train.manifest.hashed
    scalar = [c for c in read if c.layout == "scalar" and c not in labels and c.name not in hashed]

    def designs() -> tuple[Design, Design]:
        return linear.make_designs(train, test, scalar, labels)

    if in_driver(kind, train, test, scalar, labels):
        return fit_in_driver(kind, bool(scalar), designs)
    rows = train.most_rows + test.most_rows
    why = f"{count_of(rows, 'row', ',')} of {count_of(len(scalar), 'feature')} are more than the driver holds"
    trees = [TREES] if scalar else []
    if spark is None:
        return left_out([*linear.linear_fits(kind, bool(scalar), designs), *trees], f"{why}; {NEEDS_SPARK}")
    from sparkring.pipelines.evaluation.baselines.mllib import (
        mllib_fits,  # a second of imports, of use for many rows alone
    )
    from sparkring.pipelines.run.spark_jobs import spark_progress

    with spark_progress(spark):
        found = attempted(mllib_fits(spark, kind, (train, test), scalar, labels))
    return replace(found, missing=found.missing | dict.fromkeys(trees, why))


def best_baseline(scores: Mapping[str, Scores]) -> str:
    """The name of the one with the least loss; empty where none has a loss. MODEL is no baseline."""
    losses = {name: each["loss"] for name, each in scores.items() if name != MODEL and "loss" in each}
    return min(losses, key=lambda name: losses[name], default="")


def beside_baselines(result: TrainResult, model: ModelConfig) -> list[str]:
    """What the model is beside trees, and beside the best baseline where that is another: words after "it is"."""
    loss, best = model.kind.metric("loss").title, best_baseline(result.scores)
    named = ((result.trees_gap, named_beside(model)), (result.best_gap, best))
    return [gap.describe(loss, name) for gap, name in named if gap is not None]


def import_library() -> None:
    """Import what all baselines of the driver are fitted with: most of a second."""
    import sklearn.ensemble
    import sklearn.linear_model  # noqa: F401


def fit_in_driver(kind: TaskKind, has_features: bool, make: Callable[[], tuple[Design, Design]]) -> Baselines:
    """Fit and score all baselines here: trees in a thread of their own, the others meanwhile.

    `make`: reads the designs of the training and of the test rows; it is called once.
    """
    import_library()  # before there are threads: each would find the other's imports half done
    with ThreadPoolExecutor(1) as thread:
        designs = thread.submit(make).result
        trees: dict[str, Callable[[], Fitted]] = {TREES: lambda: grow(kind, *designs())} if has_features else {}
        growing = thread.submit(attempted, trees)
        found = attempted(linear.linear_fits(kind, has_features, designs))
        return found.beside(growing.result())


def in_driver(
    kind: TaskKind, train: SplitRows, test: SplitRows, scalar: Sequence[Column], labels: Sequence[Column]
) -> bool:
    """Whether the baselines are fitted in the driver: by the rows, their features, and how many classes there are.

    Args:
        kind: the task.
        train: rows to fit on.
        test: rows to score.
        scalar: features.
        labels: of the task.
    """
    rows, cells = train.most_rows + test.most_rows, linear.cells_of_row(scalar)
    if kind.form is not LabelForm.CLASS or not linear.fits_in_driver(rows, cells):
        return linear.fits_in_driver(rows, cells)
    highest = [batch.column(0).to_numpy().max() for batch in train.doubles([labels[0].name]) if batch.num_rows]
    classes = 1 + np.nanmax(highest, initial=0)
    return bool(np.isfinite(classes)) and linear.fits_in_driver(rows, cells, int(classes))


def left_out(names: Sequence[str], why: str) -> Baselines:
    """Say in one line that these baselines are not fitted, and why."""
    log.warning("%s: %s; the report goes without %s", ", ".join(names), why, "them" if len(names) > 1 else "it")
    return Baselines(missing=dict.fromkeys(names, why))


def attempted(fits: Mapping[str, Callable[[], Fitted]]) -> Baselines:
    """Call each fit; an error becomes an entry of `missing`, since the model is trained by now."""
    found = Baselines()
    for name, fit in fits.items():
        try:
            fitted = fit()
            if odd := [metric for metric, value in fitted.scores.items() if value is None or not math.isfinite(value)]:
                raise ValueError(f"{', '.join(odd)}: not a finite number")
            found.fitted[name] = fitted
        except Exception as error:
            found.missing[name] = redact(f"{type(error).__name__}: {first_line(error)}")
            log.warning("baseline %s: %s; the report goes without it", name, found.missing[name])
    return found
