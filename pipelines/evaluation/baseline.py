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

from sparkring.conf.errors import first_line
from sparkring.conf.manifest import Column
from sparkring.conf.plain_text import count_of
from sparkring.conf.secrets import redact
from sparkring.conf.tasks import LabelForm, TaskKind
from sparkring.pipelines.evaluation import linear
from sparkring.pipelines.evaluation.linear import Design
from sparkring.pipelines.evaluation.split_rows import SplitRows
from sparkring.pipelines.evaluation.trees import TREES, Grown, grow
from sparkring.training.metrics import task_scores
from sparkring.training.worker.result import Scores

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

log = logging.getLogger(__name__)
NEEDS_SPARK = "only a job on Spark fits it"


@dataclass(frozen=True)
class Baselines:
    """Scores by name of baseline, on the test rows, and why others have none."""

    scores: dict[str, Scores] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    trees: Grown | None = None


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
    from sparkring.pipelines.evaluation.mllib import mllib_fits  # a second of imports, of use for many rows alone
    from sparkring.pipelines.run.spark_jobs import spark_progress

    with spark_progress(spark):
        found = attempted(mllib_fits(spark, kind, (train, test), scalar, labels))
    return replace(found, missing=found.missing | dict.fromkeys(trees, why))


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
        growing = thread.submit(fit_trees, kind, designs) if has_features else None
        found = attempted(linear.linear_fits(kind, has_features, designs))
        if growing is None:
            return found
        trees = growing.result()
    return Baselines(found.scores | trees.scores, found.missing | trees.missing, trees.trees)


def fit_trees(kind: TaskKind, designs: Callable[[], tuple[Design, Design]]) -> Baselines:
    """Fit and score trees."""
    grown: Grown | None = None

    def fit() -> Scores:
        nonlocal grown
        train, test = designs()
        grown = grow(kind, train, test)
        labels = test.labels if kind.has_several_labels else test.labels[:, 0]
        return task_scores(kind, labels, grown.predictions, test.weights, kind.baseline_metrics)

    found = attempted({TREES: fit})
    return replace(found, trees=grown if found.scores else None)


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


def attempted(fits: Mapping[str, Callable[[], Scores]]) -> Baselines:
    """Call each fit; an error becomes an entry of `missing`, since the model is trained by now."""
    found = Baselines()
    for name, fit in fits.items():
        try:
            scores = fit()
            if odd := [metric for metric, value in scores.items() if value is None or not math.isfinite(value)]:
                raise ValueError(f"{', '.join(odd)}: not a finite number")
            found.scores[name] = scores
        except Exception as error:
            found.missing[name] = redact(f"{type(error).__name__}: {first_line(error)}")
            log.warning("baseline %s: %s; the report goes without it", name, found.missing[name])
    return found
