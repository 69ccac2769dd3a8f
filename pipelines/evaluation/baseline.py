"""The baselines a model must beat: a constant guess, and a linear model of MLlib (one-hot codes + numbers).

Both are fitted in Spark, on the model's features and rows, and scored on the test rows in the task's metrics.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from pyspark.ml.classification import LogisticRegression
from pyspark.ml.evaluation import BinaryClassificationEvaluator
from pyspark.ml.feature import OneHotEncoder, VectorAssembler
from pyspark.ml.functions import vector_to_array
from pyspark.ml.regression import LinearRegression
from pyspark.sql import Column as SparkColumn
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from sparkring.conf.errors import first_line
from sparkring.conf.manifest import Column
from sparkring.conf.secrets import redact
from sparkring.etl.session import GONE, described
from sparkring.pipelines.display.spark_jobs import spark_progress
from sparkring.pipelines.evaluation.binary import CLIP
from sparkring.pipelines.evaluation.multiclass import class_counts
from sparkring.pipelines.evaluation.split_rows import SplitRows
from sparkring.training.data.features.tensors import element_names

log = logging.getLogger(__name__)
Scores = dict[str, float]
MAJORITY, LOGISTIC = "majority rate", "logistic regression (Spark MLlib)"
CLASS_RATES, MULTINOMIAL = "class rates", "multinomial logistic regression (Spark MLlib)"
RATES, LOGISTICS = "label rates", "logistic regression per label (Spark MLlib)"
MEAN, LINEAR = "mean", "linear regression (Spark MLlib)"
LABEL, WEIGHT = "__label", "__weight"
MOST_LABELS = 20  # of which each is fitted in turn: some seconds
MOST_COEFFICIENTS = 5_000_000  # of the multinomial regression: MLlib keeps several copies of them in the driver


@dataclass(frozen=True)
class Baselines:
    """Scores by name of baseline, on the test rows, and why others have none."""

    scores: dict[str, Scores] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)


def fit_baselines(
    spark: SparkSession, task: str, train: SplitRows, test: SplitRows, read: Sequence[Column], labels: Sequence[Column]
) -> Baselines:
    """Fit and score the baselines; without scalar features, the constant guess alone. One that fails is a warning.

    Args:
        spark: the job's session.
        task: of the recipe.
        train: rows to fit on.
        test: rows to score.
        read: the model's input columns, and its labels.
        labels: one of 0 or 1, a class number, or a value; several of 0 and 1, or a vector of them.
    """
    weight = train.manifest.weight
    weights = [weight["column"]] if weight is not None else []
    hashed = train.manifest.hashed
    scalar = [c for c in read if c.layout == "scalar" and c not in labels and c.name not in hashed]

    def frames(targets: Sequence[Column], features: Sequence[Column]) -> tuple[DataFrame, DataFrame]:
        names = [*(c.name for c in (*features, *labels)), *weights]
        of_train, of_test = (prepared(rows.frame(spark, names), features, targets, *weights) for rows in (train, test))
        return of_train, of_test

    def shown(name: str, fit: Callable[[], Scores]) -> Scores:
        with described(spark, f"baseline, {name}"):
            return fit()

    def assemble(targets: Sequence[Column]) -> tuple[DataFrame, DataFrame]:
        return assembled(*frames(targets, scalar), scalar)

    if task == "multilabel":
        every = [each for column in labels for each in elements(column)]
        fits = {RATES: lambda: shown(RATES, lambda: label_rate_scores(*frames(every, []), len(every)))}
        if scalar:
            fits[LOGISTICS] = lambda: shown(
                LOGISTICS, lambda: label_logistic_scores([partial(assemble, [each]) for each in every])
            )
    else:
        (constant_name, constant), (linear_name, linear) = {
            "binary": ((MAJORITY, majority_scores), (LOGISTIC, logistic_scores)),
            "multiclass": ((CLASS_RATES, class_rate_scores), (MULTINOMIAL, multinomial_scores)),
            "regression": ((MEAN, mean_scores), (LINEAR, linear_scores)),
        }[task]
        fits = {constant_name: lambda: shown(constant_name, lambda: constant(*frames(labels, scalar)))}
        if scalar:
            fits[linear_name] = lambda: shown(linear_name, lambda: linear(*assemble(labels)))
    with spark_progress(spark):
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


def elements(column: Column) -> list[Column]:
    """The column; of a vector a column for each of its elements."""
    scalar = {"layout": "scalar", "shape": ()}
    return [column.model_copy(update={"name": name, **scalar}) for name in element_names(column)]


def prepared(
    frame: DataFrame, features: Sequence[Column], labels: Sequence[Column], weight: str | None = None
) -> DataFrame:
    """Features, their masks, the labels, and `weight` as WEIGHT: of the rows where it is above 0.

    The first label is LABEL, others are LABEL1 and so on.
    """
    made = {column.name: without_nan(column) for column in features}
    made |= {c.mask: F.col(c.mask) for c in features if c.mask is not None}
    made |= {_label_at(n): without_nan(label) for n, label in enumerate(labels)}
    if weight is None:
        return frame.select(*(value.alias(name) for name, value in made.items()))
    made[WEIGHT] = F.col(weight)
    return frame.select(*(value.alias(name) for name, value in made.items())).where(F.col(WEIGHT) > 0)


def _label_at(number: int) -> str:
    return f"{LABEL}{number or ''}"


def without_nan(column: Column) -> SparkColumn:
    """A column of doubles with NaN, which MLlib refuses, filled as the reader fills nulls."""
    fill = float(column.fill) if column.nulls == "fill" and column.fill is not None else 0.0
    return F.when(F.isnan(column.name), F.lit(fill)).otherwise(F.col(column.name))


def mean(frame: DataFrame, value: SparkColumn) -> SparkColumn:
    """The mean of a column of `frame`, by WEIGHT where it has one."""
    if WEIGHT not in frame.columns:
        return F.avg(value)
    return F.sum(value * F.col(WEIGHT)) / F.sum(WEIGHT)


def counted(frame: DataFrame) -> SparkColumn:
    """`rows`: how many rows a group has, or how much they weigh together."""
    return (F.sum(WEIGHT) if WEIGHT in frame.columns else F.count("*")).alias("rows")


def variance(frame: DataFrame) -> SparkColumn:
    """The variance of LABEL, by WEIGHT where there is one; then its mean is found first, by a job of its own."""
    if WEIGHT not in frame.columns:
        return F.var_pop(LABEL)
    row = frame.agg(mean(frame, F.col(LABEL)), F.min(LABEL) == F.max(LABEL)).first()
    assert row is not None
    return F.lit(0.0) if row[1] else mean(frame, F.pow(F.col(LABEL) - row[0], 2))


def majority_scores(train: DataFrame, test: DataFrame) -> Scores:
    """Always predict the training rows' positive share."""
    return constant_scores(*label_shares(train, test))


def label_shares(train: DataFrame, test: DataFrame) -> tuple[float, float]:
    """The positive share of the rows of each."""
    of_train, of_test = (frame.agg(mean(frame, F.col(LABEL))).first()[0] for frame in (train, test))  # type: ignore[index]
    return of_train, of_test


def constant_scores(guess: float, truth: float) -> Scores:
    """Scores of one guess for every row, where a share `truth` of them is positive. Log loss in nats."""
    clipped = min(max(guess, CLIP), 1 - CLIP)
    loss = -(truth * math.log(clipped) + (1 - truth) * math.log(1 - clipped))
    return {"loss": loss, "auc": 0.5, "accuracy": truth if guess > 0.5 else 1 - truth}


def label_rate_scores(train: DataFrame, test: DataFrame, labels: int) -> Scores:
    """Always predict each label's share of the training rows."""
    guesses, truths = ([*frame.agg(*(mean(frame, F.col(_label_at(n))) for n in range(labels))).first()]  # type: ignore[misc]
                       for frame in (train, test))  # fmt: skip
    return mean_of_labels([constant_scores(guess, truth) for guess, truth in zip(guesses, truths, strict=True)], truths)


def label_logistic_scores(assemble: Sequence[Callable[[], tuple[DataFrame, DataFrame]]]) -> Scores:
    """Means of `logistic_scores` over the labels. ValueError where there are more than MOST_LABELS.

    `assemble`: makes the training and test rows of each label.
    """
    if len(assemble) > MOST_LABELS:
        raise ValueError(f"{len(assemble)} labels, more than {MOST_LABELS}: each would be fitted in turn")
    scores, truths = list[Scores](), list[float]()
    for make in assemble:
        train, test = make()
        guess, truth = label_shares(train, test)
        is_constant = guess in (0.0, 1.0)  # of which MLlib makes a model of one class
        scores.append(constant_scores(guess, truth) if is_constant else logistic_scores(train, test))
        truths.append(truth)
    return mean_of_labels(scores, truths)


def mean_of_labels(scores: Sequence[Scores], truths: Sequence[float]) -> Scores:
    """Mean loss and accuracy, and mean AUC of the labels that some test rows have, not all. `truths`: their shares."""
    found = {name: math.fsum(each[name] for each in scores) / len(scores) for name in ("loss", "accuracy")}
    known = [each["auc"] for each, truth in zip(scores, truths, strict=True) if 0 < truth < 1]
    return found | ({"macro_auc": math.fsum(known) / len(known)} if known else {})


def class_rate_scores(train: DataFrame, test: DataFrame) -> Scores:
    """Always predict the training rows' share of each class, so the most frequent one."""
    return class_rates(*({int(row[LABEL]): row["rows"] for row in frame.groupBy(LABEL).agg(counted(frame)).collect()}
                         for frame in (train, test)))  # fmt: skip


def class_rates(trained: Mapping[int, float], tested: Mapping[int, float]) -> Scores:
    """Scores of the shares of `trained` (class -> rows, or their weight) as probabilities of every row of `tested`."""
    rows, guess = sum(trained.values()), min(trained, key=lambda label: (-trained[label], label))
    loss = -sum(n * math.log(max(trained.get(label, 0) / rows, CLIP)) for label, n in tested.items())
    return {"loss": loss / sum(tested.values())} | class_metrics([(label, guess, n) for label, n in tested.items()])


def class_metrics(groups: Sequence[tuple[int, int, float]]) -> Scores:
    """Accuracy and macro F1 of groups of (class, predicted class, rows or their weight)."""
    labels, predicted = np.array([group[:2] for group in groups], dtype=np.int64).T
    rows = np.array([group[2] for group in groups])
    counts = class_counts(labels, predicted, int(max(labels.max(), predicted.max())) + 1, rows)
    return {"accuracy": float(counts.right.sum() / rows.sum()), "macro_f1": counts.macro_f1}


def mean_scores(train: DataFrame, test: DataFrame) -> Scores:
    """Always predict the training rows' mean."""
    row = train.agg(mean(train, F.col(LABEL))).first()
    assert row is not None
    return value_scores(test.withColumn("prediction", F.lit(row[0])))


def value_scores(scored: DataFrame) -> Scores:
    """Scores of the column `prediction`; R2 only where the labels differ."""
    error = F.col("prediction") - F.col(LABEL)
    row = scored.agg(
        mean(scored, error * error).alias("loss"),
        mean(scored, F.abs(error)).alias("abs_error"),
        variance(scored).alias("var"),
    ).first()
    assert row is not None
    scores = {"loss": row["loss"], "rmse": math.sqrt(row["loss"]), "abs_error": row["abs_error"]}
    return scores | ({"r2": 1 - row["loss"] / row["var"]} if row["var"] > 0 else {})


def assembled(train: DataFrame, test: DataFrame, features: Sequence[Column]) -> tuple[DataFrame, DataFrame]:
    """The features as one vector `__features`, codes one-hot, beside LABEL and WEIGHT."""
    coded = [c.name for c in features if c.cardinality is not None]
    columns = [name for name in train.columns if name not in {*coded, LABEL, WEIGHT}]
    if coded:
        encoder = OneHotEncoder(inputCols=coded, outputCols=[f"{c}__onehot" for c in coded], handleInvalid="keep")
        encoder_model = encoder.fit(train)
        train, test = encoder_model.transform(train), encoder_model.transform(test)
        columns += encoder.getOutputCols()
    assembler = VectorAssembler(inputCols=columns, outputCol="__features")
    kept = ["__features", *(name for name in (LABEL, WEIGHT) if name in train.columns)]
    train, test = (assembler.transform(frame).select(*kept) for frame in (train, test))
    return train, test


def fitted(model: Any, train: DataFrame, test: DataFrame) -> DataFrame:
    """The test rows with what `model`, an estimator of MLlib, predicts of them when it is fitted."""
    if WEIGHT in train.columns:
        model = model.setWeightCol(WEIGHT)
    train = train.persist()
    try:
        scored: DataFrame = model.fit(train).transform(test)
        return scored
    finally:
        with suppress(*GONE):
            train.unpersist()


def logistic_scores(train: DataFrame, test: DataFrame) -> Scores:
    """Log loss in nats, ROC AUC and accuracy of MLlib's logistic regression on the test rows."""
    scored = fitted(_logistic("auto"), train, test).withColumn("__p", vector_to_array(F.col("probability"))[1])
    p = F.greatest(F.least(F.col("__p"), F.lit(1 - CLIP)), F.lit(CLIP))
    loss = mean(scored, -F.when(F.col(LABEL) > 0.5, F.log(p)).otherwise(F.log(1 - p)))
    hit = mean(scored, ((F.col("__p") > 0.5) == (F.col(LABEL) > 0.5)).cast("double"))
    row = scored.agg(loss.alias("loss"), hit.alias("accuracy")).first()
    assert row is not None
    ranking = BinaryClassificationEvaluator(labelCol=LABEL, rawPredictionCol="rawPrediction", numBins=0)
    auc = (ranking.setWeightCol(WEIGHT) if WEIGHT in scored.columns else ranking).evaluate(scored)
    return {"loss": row["loss"], "auc": auc, "accuracy": row["accuracy"]}


def multinomial_scores(train: DataFrame, test: DataFrame) -> Scores:
    """Log loss in nats, accuracy and macro F1 of MLlib's multinomial regression on the test rows.

    ValueError where it has more than MOST_COEFFICIENTS.
    """
    row = train.select(F.max(LABEL), F.first("__features")).first()
    assert row is not None
    if (coefficients := (int(row[0]) + 1) * len(row[1])) > MOST_COEFFICIENTS:
        raise ValueError(f"{coefficients:,} coefficients, more than {MOST_COEFFICIENTS:,}")
    scored = fitted(_logistic("multinomial"), train, test)
    # a class that no training row has is no class of MLlib's: its probability is 0
    own = F.coalesce(F.get(vector_to_array(F.col("probability")), F.col(LABEL).cast("int")), F.lit(0.0))
    loss = -F.log(F.greatest(own, F.lit(CLIP)))
    total = F.sum(loss * F.col(WEIGHT) if WEIGHT in scored.columns else loss).alias("loss")
    groups = scored.groupBy(LABEL, "prediction").agg(counted(scored), total).collect()
    mean_loss = math.fsum(group["loss"] for group in groups) / sum(group["rows"] for group in groups)
    pairs = [(int(group[LABEL]), int(group["prediction"]), group["rows"]) for group in groups]
    return {"loss": mean_loss} | class_metrics(pairs)


def linear_scores(train: DataFrame, test: DataFrame) -> Scores:
    """Squared error, its root, absolute error and R2 of MLlib's linear regression on the test rows."""
    model = LinearRegression(featuresCol="__features", labelCol=LABEL, maxIter=50, regParam=1e-5)
    return value_scores(fitted(model, train, test))


def _logistic(family: str) -> LogisticRegression:
    return LogisticRegression(
        featuresCol="__features",
        labelCol=LABEL,
        family=family,
        maxIter=50,
        regParam=1e-5,
        standardization=False,
    )
