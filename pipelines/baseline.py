"""The baselines a binary model must beat: the majority rate, and MLlib's logistic regression (one-hot codes + numbers).

Both are fitted in Spark, on the model's features and rows.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from pyspark.ml.classification import LogisticRegression
from pyspark.ml.evaluation import BinaryClassificationEvaluator
from pyspark.ml.feature import OneHotEncoder, VectorAssembler
from pyspark.ml.functions import vector_to_array
from pyspark.sql import Column as SparkColumn
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from sparkring.conf.errors import first_line
from sparkring.conf.manifest import Column
from sparkring.conf.secrets import redact
from sparkring.pipelines.split_rows import SplitRows

log = logging.getLogger(__name__)
Scores = dict[str, float]
MAJORITY, LOGISTIC = "majority rate", "logistic regression (Spark MLlib)"


@dataclass(frozen=True)
class Baselines:
    """Scores by name of baseline, on the test rows, and why others have none."""

    scores: dict[str, Scores] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)


def fit_baselines(
    spark: SparkSession, train: SplitRows, test: SplitRows, read: Sequence[Column], label: Column
) -> Baselines:
    """Fit and score the baselines; without scalar features, the majority rate alone. One that fails is a warning.

    Args:
        spark: the job's session.
        train: rows to fit on.
        test: rows to score.
        read: the model's input columns, and its label.
        label: 0 or 1.
    """
    scalar = [c for c in read if c.layout == "scalar" and c.name != label.name]

    def frames() -> tuple[DataFrame, DataFrame]:
        names = [c.name for c in (*scalar, label)]
        return prepared(train.frame(spark, names), scalar, label), prepared(test.frame(spark, names), scalar, label)

    fits = {MAJORITY: lambda: majority_scores(*frames())}
    if scalar:
        fits[LOGISTIC] = lambda: logistic_scores(*frames(), scalar)
    return attempted(fits)


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


def prepared(frame: DataFrame, features: Sequence[Column], label: Column) -> DataFrame:
    """Features, their masks, and the label as `__label`."""
    made = {column.name: without_nan(column) for column in features}
    made |= {c.mask: F.col(c.mask) for c in features if c.mask is not None}
    made["__label"] = without_nan(label)
    return frame.select(*(value.alias(name) for name, value in made.items()))


def without_nan(column: Column) -> SparkColumn:
    """A column of doubles with NaN, which MLlib refuses, filled as the reader fills nulls."""
    fill = float(column.fill) if column.nulls == "fill" and column.fill is not None else 0.0
    return F.when(F.isnan(column.name), F.lit(fill)).otherwise(F.col(column.name))


def majority_scores(train: DataFrame, test: DataFrame) -> Scores:
    """Always predict the training rows' positive share."""
    guess, truth = (frame.agg(F.avg("__label")).first()[0] for frame in (train, test))  # type: ignore[index]
    return constant_scores(guess, truth)


def constant_scores(guess: float, truth: float) -> Scores:
    """Scores of one guess for every row, where a share `truth` of them is positive. Log loss in nats."""
    clipped = min(max(guess, 1e-15), 1 - 1e-15)
    loss = -(truth * math.log(clipped) + (1 - truth) * math.log(1 - clipped))
    return {"loss": loss, "auc": 0.5, "accuracy": truth if guess > 0.5 else 1 - truth}


def logistic_scores(train: DataFrame, test: DataFrame, features: Sequence[Column]) -> Scores:
    """Log loss in nats, ROC AUC and accuracy of MLlib's logistic regression on the test rows."""
    coded = [c.name for c in features if c.cardinality is not None]
    columns = [name for name in train.columns if name not in {*coded, "__label"}]
    if coded:
        encoder = OneHotEncoder(inputCols=coded, outputCols=[f"{c}__onehot" for c in coded], handleInvalid="keep")
        encoder_model = encoder.fit(train)
        train, test = encoder_model.transform(train), encoder_model.transform(test)
        columns += encoder.getOutputCols()
    assembler = VectorAssembler(inputCols=columns, outputCol="__features")
    train, test = (assembler.transform(frame).select("__features", "__label") for frame in (train, test))
    train = train.persist()
    try:
        model = LogisticRegression(
            featuresCol="__features", labelCol="__label", maxIter=50, regParam=1e-5, standardization=False
        ).fit(train)
    finally:
        train.unpersist()
    scored = model.transform(test).withColumn("__p", vector_to_array(F.col("probability"))[1])
    p = F.greatest(F.least(F.col("__p"), F.lit(1 - 1e-15)), F.lit(1e-15))
    loss = F.avg(-F.when(F.col("__label") > 0.5, F.log(p)).otherwise(F.log(1 - p)))
    hit = F.avg(((F.col("__p") > 0.5) == (F.col("__label") > 0.5)).cast("double"))
    row = scored.agg(loss.alias("loss"), hit.alias("accuracy")).first()
    assert row is not None
    auc = BinaryClassificationEvaluator(labelCol="__label", rawPredictionCol="rawPrediction", numBins=0).evaluate(
        scored
    )
    return {"loss": row["loss"], "auc": auc, "accuracy": row["accuracy"]}
