"""Which columns stand beside a prediction."""

from __future__ import annotations

import pytest
from pyspark.sql import SparkSession

from sparkring.conf.blocks.predict import PredictConfig
from sparkring.etl.errors import EtlError
from sparkring.etl.spark_platform.session import MOST_BATCH_BYTES
from sparkring.pipelines.predict.rows import ARROW_ROWS, bounded, check_kept, pick_columns
from sparkring.pipelines.predict.score import LONG


def test_a_kept_column_does_not_have_the_name_of_a_predicted_one() -> None:
    block = PredictConfig(rows="rows", to="out", keep=["id", "label_red"])
    check_kept(block, ["label_blue", "prediction"])
    with pytest.raises(EtlError, match=r"predict.keep = 'label_red': the model's predictions have a column"):
        check_kept(block, ["label_red", "label_blue"])


def test_a_kept_column_with_a_dot_in_its_name_is_refused_before_spark_takes_it_for_a_field() -> None:
    block = PredictConfig(rows="rows", to="out", keep=["user.id"])
    with pytest.raises(EtlError, match=r"predict.keep: the column 'user.id' has a dot.*SELECT `user.id` AS user_id"):
        pick_columns(block, ["user.id", "age"], ["age"])


@pytest.mark.spark
def test_batches_of_wide_rows_have_fewer_rows_and_those_of_images_their_bytes_counted(spark: SparkSession) -> None:
    texts = bounded(spark.createDataFrame([(1, "UA")], "id bigint, carrier string"))
    assert texts is not None and texts.batch_rows == ARROW_ROWS
    assert texts.long is not None and texts.long.count() == 0 and texts.rows.columns == ["id", "carrier", LONG]
    wide = bounded(spark.createDataFrame([(0.0,) * 500], ", ".join(f"x{n} double" for n in range(500))))
    assert wide is not None and wide.long is None
    assert 500 * 8 * wide.batch_rows < MOST_BATCH_BYTES < 500 * 20 * wide.batch_rows
    assert bounded(spark.createDataFrame([(b"png",)], "image binary")) is None
