"""The baselines a model must beat: a constant guess, and a linear model (one-hot codes + numbers).

Both are fitted on the model's features and rows, and scored on the test rows in the task's metrics: by `linear` in the
driver where the rows fit in its memory, else by `mllib` in Spark.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from pyspark.sql import SparkSession

from sparkring.conf.errors import first_line
from sparkring.conf.manifest import Column
from sparkring.conf.secrets import redact
from sparkring.conf.tasks import LabelForm, TaskKind
from sparkring.pipelines.evaluation import linear
from sparkring.pipelines.evaluation.split_rows import SplitRows
from sparkring.pipelines.run.spark_jobs import spark_progress
from sparkring.training.worker.result import Scores

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Baselines:
    """Scores by name of baseline, on the test rows, and why others have none."""

    scores: dict[str, Scores] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)


def fit_baselines(
    spark: SparkSession,
    kind: TaskKind,
    train: SplitRows,
    test: SplitRows,
    read: Sequence[Column],
    labels: Sequence[Column],
) -> Baselines:
    """Fit and score the baselines; without scalar features, the constant guess alone. One that fails is a warning.

    Args:
        spark: the job's session.
        kind: the task.
        train: rows to fit on.
        test: rows to score.
        read: the model's input columns, and its labels.
        labels: one of 0 or 1, a class number, or a value; several of 0 and 1, or a vector of them.
    """
    hashed = train.manifest.hashed
    scalar = [c for c in read if c.layout == "scalar" and c not in labels and c.name not in hashed]
    if in_driver(kind, train, test, scalar, labels):
        return attempted(linear.linear_fits(kind, train, test, scalar, labels))
    from sparkring.pipelines.evaluation.mllib import mllib_fits  # a second of imports, of use for many rows alone

    with spark_progress(spark):
        return attempted(mllib_fits(spark, kind, (train, test), scalar, labels))


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
