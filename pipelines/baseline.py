"""What the trained model must beat, fitted in Spark on the same features and rows: the majority rate, and MLlib's
logistic regression (one-hot codes + numbers)."""

from __future__ import annotations

import math

from pyspark.ml.classification import LogisticRegression
from pyspark.ml.evaluation import BinaryClassificationEvaluator
from pyspark.ml.feature import OneHotEncoder, VectorAssembler
from pyspark.ml.functions import vector_to_array
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from conf.manifest import Column, DatasetManifest
from conf.storage import Storage

Scores = dict[str, float]


def read_split(spark: SparkSession, folder: Storage, manifest: DatasetManifest, split: str) -> DataFrame:
    """The listed files of one split as a DataFrame; unlisted files of the folder are never read."""
    return spark.read.parquet(*[f"{spark_path(folder)}/{file.path}" for file in manifest.files_of(split)])


def spark_path(folder: Storage) -> str:
    """The folder as Spark writes it: local paths made absolute with their scheme, others as the user wrote them."""
    return f"file://{folder.root}" if folder.is_local else folder.uri.partition("?")[0]


def majority_scores(train: DataFrame, test: DataFrame, label: str) -> Scores:
    """Always predict the training split's positive share. Log loss in nats, AUC 0.5 by definition."""
    guess = train.agg(F.avg(F.col(label).cast("double"))).first()[0]  # type: ignore[index]
    truth = test.agg(F.avg(F.col(label).cast("double"))).first()[0]  # type: ignore[index]
    clipped = min(max(guess, 1e-15), 1 - 1e-15)
    loss = -(truth * math.log(clipped) + (1 - truth) * math.log(1 - clipped))
    return {"loss": loss, "auc": 0.5, "accuracy": max(truth, 1 - truth) if (guess > 0.5) == (truth > 0.5) else truth}


def logistic_scores(train: DataFrame, test: DataFrame, features: list[Column], label: str) -> Scores:
    """Log loss in nats, ROC AUC and accuracy of MLlib's logistic regression on the test rows."""
    coded = [c.name for c in features if c.cardinality is not None]
    numeric = [c.name for c in features if c.cardinality is None]
    train, test = (_prepared(frame, numeric, label) for frame in (train, test))
    columns = [*numeric]
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


def _prepared(frame: DataFrame, numeric: list[str], label: str) -> DataFrame:
    """Numbers as doubles (MLlib knows no other kind), label as `__label`."""
    casts = {name: F.col(name).cast("double") for name in numeric}
    return frame.withColumns(casts | {"__label": F.col(label).cast("double")})


def baseline_scores(
    spark: SparkSession, folder: Storage, manifest: DatasetManifest, label: str, train_split: str, test_split: str
) -> dict[str, Scores]:
    """Scores by name of baseline, on the test split."""
    train, test = (read_split(spark, folder, manifest, split) for split in (train_split, test_split))
    features = [c for c in manifest.columns if c.role == "feature" and c.layout == "scalar"]
    return {
        "majority rate": majority_scores(train, test, label),
        "logistic regression (Spark MLlib)": logistic_scores(train, test, features, label),
    }
