"""The baseline of Spark's ALS: who took what, factorized, without any feature.

For implicit feedback (Hu, Koren and Volinsky 2008): a pair of list and item is as certain as it has positive training
rows, and any other pair a weak zero, so rows of label 0 are not looked at. A list without a positive training row, such
as a new user's, has the mean of the lists' vectors, which orders items much as popularity does. An item without one has
the prediction 0, that of what nobody takes.

Shapes: N test rows, R the rank of the factorization.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame, SparkSession, Window
from pyspark.sql import functions as F
from pyspark.sql.types import StructField, StructType

from sparkring.conf.blocks.report import AlsConfig
from sparkring.conf.plain_text import count_of
from sparkring.etl.spark_platform.application import GONE
from sparkring.etl.spark_platform.versions import to_arrow
from sparkring.pipelines.evaluation.ranking import positive_rows
from sparkring.pipelines.evaluation.split_rows import SplitRows

Array = np.ndarray
LIST, ITEM, ROWS, NUMBER = "list", "item", "rows", "number"  # columns of our frames
SEED = 0
MOST_FACTORS = 200_000_000  # numbers of all vectors, which the driver holds: 800 MB
CHUNK_ROWS = 1 << 18  # test rows multiplied at a time


def als_predictions(
    spark: SparkSession, config: AlsConfig, train: SplitRows, test: SplitRows, columns: tuple[str, str, str]
) -> Array:
    """Fit on the positive training rows and predict the test rows, (N,), a higher value ranking earlier.

    ValueError without a positive training row, or where the vectors have more than MOST_FACTORS numbers.

    Args:
        spark: the job's session.
        config: settings of the factorization.
        train: rows to fit on.
        test: rows to score.
        columns: columns of list, item and label.
    """
    from pyspark.ml.recommendation import ALS  # with scipy, of use for this baseline alone

    group, item, label = columns
    pairs = positive_pairs(spark, train, group, item, label).persist()
    numbers = {side: numbered(pairs, side).persist() for side in (LIST, ITEM)}
    try:
        check_size(config.rank, *(known.count() for known in numbers.values()))
        coded = pairs
        for side, known in numbers.items():
            coded = coded.join(known, side).drop(side).withColumnRenamed(NUMBER, f"{side}_{NUMBER}")
        model = ALS(
            rank=config.rank, maxIter=config.iterations, regParam=config.reg, alpha=config.alpha, implicitPrefs=True,
            seed=SEED, userCol=f"{LIST}_{NUMBER}", itemCol=f"{ITEM}_{NUMBER}", ratingCol=ROWS,
        ).fit(coded)  # fmt: skip
        lists, of_list = vectors(model.userFactors, numbers[LIST], LIST, test.column(group))
        items, of_item = vectors(model.itemFactors, numbers[ITEM], ITEM, test.column(item))
    finally:
        with suppress(*GONE):
            for frame in (pairs, *numbers.values()):
                frame.unpersist()
    lists[-1] = lists[:-1].mean(axis=0)
    return products(lists, of_list, items, of_item)


def positive_pairs(spark: SparkSession, train: SplitRows, group: str, item: str, label: str) -> DataFrame:
    """Count the positive training rows of each LIST and ITEM, as ROWS; rows with a null in either are left out.

    Args:
        spark: the job's session.
        train: the training rows.
        group: column of the lists.
        item: column of the items.
        label: column of 0 and 1.
    """
    manifest = train.manifest
    weight = [manifest.weight["column"]] if manifest.weight is not None else []
    stored = train.stored(spark, dict.fromkeys([group, item, label, *weight]))

    def positive(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            rows = positive_rows(pa.Table.from_batches([batch]), manifest, label)
            yield from pa.table({LIST: rows[group], ITEM: rows[item]}).drop_null().to_batches()

    types = StructType(
        [StructField(side, stored.schema[name].dataType) for side, name in ((LIST, group), (ITEM, item))]
    )
    return stored.mapInArrow(positive, types).groupBy(LIST, ITEM).agg(F.count("*").alias(ROWS))


def numbered(pairs: DataFrame, side: str) -> DataFrame:
    """Enumerate the distinct values of LIST or ITEM in order from 0: ALS takes whole numbers."""
    place = F.row_number().over(Window.orderBy(side)) - 1
    return pairs.select(side).distinct().withColumn(NUMBER, place)


def check_size(rank: int, lists: int, items: int) -> None:
    """Raise ValueError where there is nothing to fit, or more than the driver should hold."""
    if not lists:
        raise ValueError("no positive training row has both a list and an item")
    if (numbers := rank * (lists + items)) > MOST_FACTORS:
        raise ValueError(
            f"{count_of(numbers, 'number', ',')} of {count_of(lists, 'list', ',')} and {count_of(items, 'item', ',')}, "
            f"more than {MOST_FACTORS:,}"
        )


def vectors(factors: DataFrame, numbers: DataFrame, side: str, values: pa.ChunkedArray) -> tuple[Array, Array]:
    """Return a side's vectors (known + 1, R), the last 0 for unknown, and each value's place (N,)."""
    joined = factors.join(numbers, factors["id"] == numbers[NUMBER])
    rows = to_arrow(joined.select(side, "features")).sort_by(side)
    known, found = rows[side].combine_chunks().cast(values.type), rows["features"].combine_chunks()
    table = np.zeros((len(known) + 1, len(found.flatten()) // len(known)), np.float32)
    table[:-1] = found.flatten().to_numpy().reshape(len(known), -1)
    places: Any = pc.fill_null(pc.index_in(values, value_set=known, skip_nulls=True), len(known))
    return table, places.to_numpy()


def products(lists: Array, of_list: Array, items: Array, of_item: Array) -> Array:
    """Compute the product of each row's two vectors, (N,) float32, CHUNK_ROWS at a time."""
    chunks = [slice(start, start + CHUNK_ROWS) for start in range(0, len(of_list), CHUNK_ROWS)]
    return np.concatenate([np.einsum("nr,nr->n", lists[of_list[c]], items[of_item[c]]) for c in chunks])
