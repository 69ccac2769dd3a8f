"""petastorm's converter and its writer, on a real Spark session."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sparkring.conf.blocks.data import DataConfig, PetastormConfig
from sparkring.training.data.petastorm_adapter.dataset import is_unischema, row_group_rows
from sparkring.training.data.petastorm_adapter.reader import PetastormReader
from sparkring.training.data.petastorm_adapter.spark import make_spark_converter, write_petastorm
from sparkring.training.data.request import DataRank

pytestmark = [pytest.mark.spark, pytest.mark.filterwarnings("ignore")]


def test_a_converter_hands_out_equal_loaders(spark: Any, tmp_path: Path) -> None:
    df = spark.range(1000).selectExpr("id", "cast(id as float) / 2 as x", "id % 7 as k")
    converter = make_spark_converter(df, f"file://{tmp_path}", row_group_rows=100, files=3)
    assert len(converter) == 1000
    seen: list[int] = []
    for rank in range(2):
        with converter.make_torch_dataloader(batch_size=64, num_epochs=2, rank=DataRank(rank, 2)) as loader:
            batches = list(loader)
            assert len(batches) == len(loader) and all(len(b["id"]) == 64 for b in batches)
            first = [i for b in batches[: len(batches) // 2] for i in b["id"].tolist()]
            assert all(
                float(x) == i / 2 for b in batches for i, x in zip(b["id"].tolist(), b["x"].tolist(), strict=True)
            )
            seen += first
    assert len(set(seen)) == len(seen) and len(seen) > 700
    converter.delete()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("pool", ["thread", "process"])
def test_a_unischema_dataset_is_written_by_executors_and_read_back(spark: Any, tmp_path: Path, pool: str) -> None:
    from petastorm.codecs import NdarrayCodec, ScalarCodec
    from petastorm.unischema import Unischema, UnischemaField
    from pyspark.sql.types import IntegerType

    fields = [
        ("id", np.int32, (), ScalarCodec(IntegerType()), False),
        ("matrix", np.float32, (2, 3), NdarrayCodec(), False),
        ("words", np.int64, (None,), NdarrayCodec(), False),
    ]
    schema = Unischema("Thing", [UnischemaField(*field) for field in fields])

    def thing(i: int) -> dict[str, Any]:
        return {"id": np.int32(i), "matrix": np.full((2, 3), i, np.float32), "words": np.arange(i % 4, dtype=np.int64)}

    url = f"file://{tmp_path}/set"
    write_petastorm(spark, spark.sparkContext.parallelize(range(50), 4).map(thing), schema, url)
    assert is_unischema(url) and sum(row_group_rows(url)) == 50
    config = DataConfig.model_validate({"seed": 1, "petastorm": {"pool": pool, "workers": 2}})
    batches = list(PetastormReader(url, None, 10, config=config).batches())
    assert sorted(i for b in batches for i in b.columns["id"].tolist()) == list(range(50))
    for batch in batches:
        ids = batch.columns["id"].tolist()
        assert batch.columns["matrix"].shape == (10, 2, 3) and batch.columns["matrix"][:, 1, 2].tolist() == ids
        assert batch.columns["words"].offsets[0].diff().tolist() == [i % 4 for i in ids]


def test_a_script_that_uses_petastorm_alone_runs_unchanged(spark: Any, tmp_path: Path) -> None:
    """`dict_to_spark_row` and a schema in a closure: unpickled by Spark's Python workers, which import neither."""
    from petastorm.codecs import NdarrayCodec, ScalarCodec
    from petastorm.etl.dataset_metadata import materialize_dataset
    from petastorm.unischema import Unischema, UnischemaField, dict_to_spark_row
    from pyspark.sql.types import IntegerType

    fields = [("id", np.int32, (), ScalarCodec(IntegerType()), False), ("v", np.float32, (2,), NdarrayCodec(), False)]
    schema = Unischema("Own", [UnischemaField(*field) for field in fields])
    url = f"file://{tmp_path}/own"
    with materialize_dataset(spark, url, schema):
        rows = spark.sparkContext.parallelize(range(20), 2).map(
            lambda i: dict_to_spark_row(schema, {"id": np.int32(i), "v": np.full(2, i, np.float32)})
        )
        spark.createDataFrame(rows, schema.as_spark_schema()).write.parquet(url)
    config = DataConfig(shuffle=False, petastorm=PetastormConfig(pool="dummy"))
    (batch,) = PetastormReader(url, None, 20, config=config).batches()
    assert sorted(batch.columns["id"].tolist()) == list(range(20))
