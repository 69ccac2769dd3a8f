"""Baselines of any number of rows, fitted and scored in Spark: a constant guess, and a linear model of MLlib."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import pyarrow as pa
from pyspark.ml.classification import LogisticRegression
from pyspark.ml.evaluation import BinaryClassificationEvaluator
from pyspark.ml.feature import OneHotEncoder, VectorAssembler
from pyspark.ml.functions import vector_to_array
from pyspark.ml.regression import GeneralizedLinearRegression, LinearRegression
from pyspark.sql import Column as SparkColumn
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from sparkring.conf.manifest import Column
from sparkring.conf.tasks import ACCURACY, BINARY, LOG_LOSS, Metric, TaskKind
from sparkring.etl.spark_platform.application import GONE, described
from sparkring.pipelines.evaluation.baselines.guesses import (
    Fitted,
    check_coefficients,
    check_labels,
    class_metrics,
    class_rates,
    constant_scores,
    mean_of_labels,
)
from sparkring.pipelines.evaluation.split_rows import SplitRows
from sparkring.training.data.features.tensors import element_names
from sparkring.training.metrics import OF_LOSS, Rows, is_mean, row_values
from sparkring.training.worker.result import Scores

MAJORITY, LOGISTIC = "majority rate", "logistic regression (Spark MLlib)"
CLASS_RATES, MULTINOMIAL = "class rates", "multinomial logistic regression (Spark MLlib)"
RATES, LOGISTICS = "label rates", "logistic regression per label (Spark MLlib)"
MEAN, LINEAR = "mean", "linear regression (Spark MLlib)"
RATE = "Poisson regression (Spark MLlib)"
LABEL, WEIGHT = "__label", "__weight"
Fit = Callable[[DataFrame, DataFrame], Scores]


def mllib_fits(
    spark: SparkSession,
    kind: TaskKind,
    rows: tuple[SplitRows, SplitRows],
    scalar: Sequence[Column],
    labels: Sequence[Column],
) -> dict[str, Callable[[], Fitted]]:
    """The baselines by name, each a function that fits and scores it; Spark keeps what they predict.

    Args:
        spark: the job's session.
        kind: the task.
        rows: to fit on, and to score.
        scalar: features; without any there is the constant guess alone.
        labels: one of 0 or 1, a class number, or a value; several of 0 and 1, or a vector of them.
    """
    weight = rows[0].manifest.weight
    weights = [weight["column"]] if weight is not None else []

    def frames(targets: Sequence[Column], features: Sequence[Column]) -> tuple[DataFrame, DataFrame]:
        names = [*(c.name for c in (*features, *labels)), *weights]
        of_train, of_test = (prepared(each.frame(spark, names), features, targets, *weights) for each in rows)
        return of_train, of_test

    def shown(name: str, fit: Callable[[], Scores]) -> Fitted:
        with described(spark, f"baseline, {name}"):
            return Fitted(fit())

    def assemble(targets: Sequence[Column]) -> tuple[DataFrame, DataFrame]:
        return assembled(*frames(targets, scalar), scalar)

    if kind.has_several_labels:
        every = [each for column in labels for each in elements(column)]
        fits = {RATES: lambda: shown(RATES, lambda: label_rate_scores(*frames(every, []), len(every)))}
        if scalar:
            fits[LOGISTICS] = lambda: shown(
                LOGISTICS, lambda: label_logistic_scores([partial(assemble, [each]) for each in every])
            )
        return fits
    known: dict[str, tuple[tuple[str, Fit], tuple[str, Fit]]] = {
        "binary": ((MAJORITY, majority_scores), (LOGISTIC, logistic_scores)),
        "multiclass": ((CLASS_RATES, class_rate_scores), (MULTINOMIAL, multinomial_scores)),
        "poisson": ((MEAN, partial(mean_scores, kind)), (RATE, partial(rate_scores, kind))),
        "regression": ((MEAN, partial(mean_scores, kind)), (LINEAR, partial(linear_scores, kind))),
    }
    (constant_name, constant), (linear_name, linear) = known[kind.name]
    fits = {constant_name: lambda: shown(constant_name, lambda: constant(*frames(labels, scalar)))}
    return fits | ({linear_name: lambda: shown(linear_name, lambda: linear(*assemble(labels)))} if scalar else {})


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


def mean_values(scored: DataFrame, kind: TaskKind, metrics: Iterable[Metric]) -> Scores:
    """Compute metrics that are means over rows, of LABEL and `prediction`, by the formulas of training/metrics.py.

    Args:
        scored: with WEIGHT where rows have weights.
        kind: the task.
        metrics: the means.
    """
    wanted = [metric for metric in metrics if is_mean(metric)]

    def sums(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            values = {name: batch.column(name).to_numpy() for name in batch.schema.names}
            rows, weights = Rows(kind.form, values[LABEL], values["prediction"]), values["weight"]
            found = [weights.sum(), *(row_values(metric, rows) @ weights for metric in wanted)]
            yield pa.RecordBatch.from_pydict({"sums": [found]})

    weight = F.col(WEIGHT) if WEIGHT in scored.columns else F.lit(1.0)
    read = scored.select(LABEL, "prediction", weight.cast("double").alias("weight"))
    parts = [row["sums"] for row in read.mapInArrow(sums, "sums array<double>").collect()]
    total, *found = (math.fsum(values) for values in zip(*parts, strict=True))
    return {metric.name: value / total for metric, value in zip(wanted, found, strict=True)}


def majority_scores(train: DataFrame, test: DataFrame) -> Scores:
    """Always predict the training rows' positive share."""
    return constant_scores(*label_shares(train, test))


def label_shares(train: DataFrame, test: DataFrame) -> tuple[float, float]:
    """The positive share of the rows of each."""
    of_train, of_test = (frame.agg(mean(frame, F.col(LABEL))).first()[0] for frame in (train, test))  # type: ignore[index]
    return of_train, of_test


def label_rate_scores(train: DataFrame, test: DataFrame, labels: int) -> Scores:
    """Always predict each label's share of the training rows."""
    guesses, truths = ([*frame.agg(*(mean(frame, F.col(_label_at(n))) for n in range(labels))).first()]  # type: ignore[misc]
                       for frame in (train, test))  # fmt: skip
    return mean_of_labels([constant_scores(guess, truth) for guess, truth in zip(guesses, truths, strict=True)], truths)


def label_logistic_scores(assemble: Sequence[Callable[[], tuple[DataFrame, DataFrame]]]) -> Scores:
    """Means of `logistic_scores` over the labels. ValueError where there are more than MOST_LABELS.

    `assemble`: makes the training and test rows of each label.
    """
    check_labels(len(assemble))
    scores, truths = list[Scores](), list[float]()
    for make in assemble:
        train, test = make()
        guess, truth = label_shares(train, test)
        is_constant = guess in (0.0, 1.0)  # of which MLlib makes a model of one class
        scores.append(constant_scores(guess, truth) if is_constant else logistic_scores(train, test))
        truths.append(truth)
    return mean_of_labels(scores, truths)


def class_rate_scores(train: DataFrame, test: DataFrame) -> Scores:
    """Always predict the training rows' share of each class, so the most frequent one."""
    return class_rates(*({int(row[LABEL]): row["rows"] for row in frame.groupBy(LABEL).agg(counted(frame)).collect()}
                         for frame in (train, test)))  # fmt: skip


def mean_scores(kind: TaskKind, train: DataFrame, test: DataFrame) -> Scores:
    """Always predict the training rows' mean."""
    row = train.agg(mean(train, F.col(LABEL))).first()
    assert row is not None
    return value_scores(kind, test.withColumn("prediction", F.lit(row[0])))


def value_scores(kind: TaskKind, scored: DataFrame) -> Scores:
    """Scores of the column `prediction`, a number; R2 only where the labels differ."""
    metrics = [kind.metric(name) for name in kind.baseline_metrics]
    found = mean_values(scored, kind, metrics)
    row = scored.agg(mean(scored, F.col(LABEL)), F.min(LABEL) == F.max(LABEL)).first()
    assert row is not None
    constant = scored.withColumn("prediction", F.lit(row[0]))
    best = 0.0 if row[1] else mean_values(constant, kind, [kind.metric("loss")])["loss"]
    found |= {each.name: OF_LOSS[each][1](found["loss"], best) for each in metrics if each in OF_LOSS}
    return {name: found[name] for name in kind.baseline_metrics if not math.isnan(found[name])}


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
    found = mean_values(scored.withColumn("prediction", F.col("__p")), BINARY, [LOG_LOSS, ACCURACY])
    ranking = BinaryClassificationEvaluator(labelCol=LABEL, rawPredictionCol="rawPrediction", numBins=0)
    auc = (ranking.setWeightCol(WEIGHT) if WEIGHT in scored.columns else ranking).evaluate(scored)
    return {"loss": found["loss"], "auc": auc, "accuracy": found["accuracy"]}


def multinomial_scores(train: DataFrame, test: DataFrame) -> Scores:
    """Log loss in nats, accuracy and macro F1 of MLlib's multinomial regression on the test rows.

    ValueError where it has more than MOST_COEFFICIENTS.
    """
    row = train.select(F.max(LABEL), F.first("__features")).first()
    assert row is not None
    check_coefficients((int(row[0]) + 1) * len(row[1]))
    scored = fitted(_logistic("multinomial"), train, test)
    # a class that no training row has is no class of MLlib's: its probability is 0
    own = F.coalesce(F.get(vector_to_array(F.col("probability")), F.col(LABEL).cast("int")), F.lit(0.0))
    of_own = scored.withColumn("prediction", own).withColumn(LABEL, F.lit(1.0))  # the event that a row is of its class
    loss = mean_values(of_own, BINARY, [LOG_LOSS])["loss"]
    groups = scored.groupBy(LABEL, "prediction").agg(counted(scored)).collect()
    return {"loss": loss} | class_metrics([(int(g[LABEL]), int(g["prediction"]), g["rows"]) for g in groups])


def linear_scores(kind: TaskKind, train: DataFrame, test: DataFrame) -> Scores:
    """Scores of MLlib's linear regression on the test rows."""
    model = LinearRegression(featuresCol="__features", labelCol=LABEL, maxIter=50, regParam=1e-5)
    return value_scores(kind, fitted(model, train, test))


def rate_scores(kind: TaskKind, train: DataFrame, test: DataFrame) -> Scores:
    """Scores of MLlib's Poisson regression, with a log link, on the test rows."""
    model = GeneralizedLinearRegression(
        featuresCol="__features", labelCol=LABEL, family="poisson", link="log", maxIter=50, regParam=1e-5
    )
    return value_scores(kind, fitted(model, train, test))


def _logistic(family: str) -> LogisticRegression:
    return LogisticRegression(
        featuresCol="__features",
        labelCol=LABEL,
        family=family,
        maxIter=50,
        regParam=1e-5,
        standardization=False,
    )
