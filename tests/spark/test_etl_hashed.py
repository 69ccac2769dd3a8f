"""Features of kind hashed: a reader makes, bit by bit, Spark's xxhash64 of the values that shards hold."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from sparkring.conf.blocks.etl import EtlConfig
from sparkring.etl.build import BuildRequest, build_dataset
from sparkring.etl.errors import EtlError
from sparkring.etl.windows.window import pin_dataset
from sparkring.training.models.tabular import Tabular
from tests.spark.test_etl_values import read_all

pytestmark = pytest.mark.spark
TYPES = {"id": "bigint", "who": "string", "item": "bigint", "shop": "smallint", "y": "double"}
FEATURES: dict[str, Any] = {
    "who": {"kind": "hashed"},
    "item": {"kind": "hashed"},
    "shop_id": {"kind": "hashed", "column": "shop"},
}


def config(folder: Path, **features: Any) -> EtlConfig:
    return EtlConfig.model_validate({
        "sources": {"t": {"path": str(folder), "format": "parquet", "columns": TYPES}},
        "views": {"s": "SELECT *, id / 2 AS half, 'train' AS part FROM t"},
        "rows": "s", "key": ["id"], "split": {"kind": "column", "column": "part"}, "label": "y",
        "keep": ["id"], "features": features, "shard": {"shards": {"train": 2}, "row_group": 64},
    })  # fmt: skip


def test_a_reader_makes_the_ids_that_spark_would(spark: SparkSession, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    sizes = [int(size) for size in rng.integers(0, 90, 300)]
    texts = ["".join(chr(int(c)) for c in rng.integers(32, 0x2FF, size)) for size in sizes]
    rows = pd.DataFrame({
        "id": range(300),
        "who": [None if i % 17 == 0 else text for i, text in enumerate(texts)],
        "item": [None if i % 13 == 0 else int(x) for i, x in enumerate(rng.integers(-(2**63), 2**63 - 1, 300))],
        "shop": [None if i % 11 == 0 else i % 5 - 2 for i in range(300)],
        "y": rng.normal(size=300),
    }, dtype=object)  # fmt: skip
    schema = ", ".join(f"{name} {kind}" for name, kind in TYPES.items())
    frame = spark.createDataFrame([tuple(row) for row in rows.itertuples(index=False)], schema)
    frame.coalesce(1).write.parquet(str(tmp_path / "raw"))
    recipe = config(tmp_path / "raw", **FEATURES)
    made = build_dataset(spark, BuildRequest(recipe, pin_dataset(recipe, {}), "h", str(tmp_path / "datasets")))
    got = read_all(made.uri, made.manifest, "train")
    shop = F.xxhash64(F.col("shop").cast("bigint"))
    wanted = (
        frame.orderBy("id")
        .select(F.xxhash64("who").alias("who"), F.xxhash64("item").alias("item"), shop.alias("shop_id"))
        .toPandas()
    )
    for name in FEATURES:
        assert got[name].dtype == np.int64 and got[name].tolist() == wanted[name].tolist(), name
    assert made.manifest.hashed == [*FEATURES] and (got["who"] == 42).sum() == 18
    model = Tabular.from_manifest(made.manifest)
    assert model.hashed_names == [*FEATURES] and model.numeric_names == [] and model.coded_names == []


def test_what_has_no_ids_is_refused(spark: SparkSession, tmp_path: Path) -> None:
    frame = spark.createDataFrame([(1, "a", 2, 3, 0.5)], ", ".join(f"{name} {kind}" for name, kind in TYPES.items()))
    frame.coalesce(1).write.parquet(str(tmp_path / "raw"))
    recipe = config(tmp_path / "raw", z={"kind": "hashed", "column": "half"})
    with pytest.raises(EtlError, match=r"etl\.features\.z: column 'half' is double; hashed wants a string"):
        build_dataset(spark, BuildRequest(recipe, pin_dataset(recipe, {}), "h", str(tmp_path / "datasets")))
