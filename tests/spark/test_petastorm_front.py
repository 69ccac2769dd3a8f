"""Moving over from petastorm: its converter and its writer, on a real Spark session."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipelines.petastorm_front import make_spark_converter, write_petastorm
from training.data import petastorm as adapter
from training.data import petastorm_compat
from training.data.petastorm import PetastormReader, PetastormSettings, is_unischema, unischema

pytestmark = [pytest.mark.spark, pytest.mark.filterwarnings("ignore")]


def test_a_converter_hands_out_equal_loaders(spark: Any, tmp_path: Path) -> None:
    df = spark.range(1000).selectExpr("id", "cast(id as float) / 2 as x", "id % 7 as k")
    converter = make_spark_converter(df, f"file://{tmp_path}", row_group_rows=100, files=3)
    assert len(converter) == 1000
    seen: list[int] = []
    for rank in range(2):
        with converter.make_torch_dataloader(batch_size=64, data_rank=rank, data_size=2, num_epochs=2) as loader:
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
    from petastorm.codecs import CompressedImageCodec, NdarrayCodec, ScalarCodec
    from pyspark.sql.types import IntegerType

    assert petastorm_compat.SUPPORTED == "0.12.1"
    fields = [
        ("id", np.int32, (), ScalarCodec(IntegerType()), False),
        ("matrix", np.float32, (2, 3), NdarrayCodec(), False),
        ("words", np.int64, (None,), NdarrayCodec(), False),
    ]
    schema = unischema("Thing", fields)
    del CompressedImageCodec  # needs OpenCV, which this project does not

    def thing(i: int) -> dict[str, Any]:
        return {"id": np.int32(i), "matrix": np.full((2, 3), i, np.float32), "words": np.arange(i % 4, dtype=np.int64)}

    url = f"file://{tmp_path}/set"
    write_petastorm(spark, spark.sparkContext.parallelize(range(50), 4).map(thing), schema, url)
    assert is_unischema(url) and sum(adapter.row_group_rows(url)) == 50
    how = PetastormSettings(pool=pool, workers=2, seed=1)  # type: ignore[arg-type]
    batches = list(PetastormReader(url, None, 10, settings=how).batches(0))
    assert sorted(i for b in batches for i in b.columns["id"].tolist()) == list(range(50))
    for batch in batches:
        ids = batch.columns["id"].tolist()
        assert batch.columns["matrix"].shape == (10, 2, 3) and batch.columns["matrix"][:, 1, 2].tolist() == ids
        assert batch.columns["words"].offsets[0].diff().tolist() == [i % 4 for i in ids]


def test_a_script_of_petastorms_own_runs_as_it_is(spark: Any, tmp_path: Path) -> None:
    """`dict_to_spark_row` and a schema in a closure: unpickled by Spark's Python workers, which never imported us."""
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
    (batch,) = PetastormReader(url, None, 20, settings=PetastormSettings(pool="dummy", shuffle=False)).batches(0)
    assert sorted(batch.columns["id"].tolist()) == list(range(20))
