"""A column of weights in shards, its mean in the feature state, and weights that are none; in parts as in one build."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sparkring.conf.blocks.etl import EtlConfig
from sparkring.conf.manifest import DatasetManifest
from sparkring.etl.build import BuildRequest, build_dataset
from sparkring.etl.errors import EtlError
from sparkring.etl.windows.window import KnownParts, pin_dataset, pin_window

pytestmark = pytest.mark.spark
ROWS = 200


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights of 0 to 4; `odd` has a null, a negative number and an infinite one."""
    folder = tmp_path_factory.mktemp("weighted")
    odd: list[float | None] = [1.0] * ROWS
    odd[3], odd[5], odd[7] = None, -2.0, math.inf
    for day in (1, 2):
        rows = {"id": np.arange(ROWS) + day * ROWS, "x": np.arange(ROWS) * 0.5, "w": np.arange(ROWS) % 5, "odd": odd}
        (folder / f"at=2026-01-0{day}").mkdir()
        pq.write_table(pa.table(rows | {"late": np.arange(ROWS) % 2}), folder / f"at=2026-01-0{day}/rows.parquet")
    return folder


def block(table: Path, **keys: Any) -> EtlConfig:
    columns = {"id": "bigint", "x": "double", "w": "bigint", "odd": "double", "late": "bigint"}
    source = {"path": str(table), "format": "parquet", "columns": columns, "partitions": {"at": "date"}}
    return EtlConfig.model_validate(
        {
            "sources": {"t": source},
            "rows": "t",
            "key": ["id"],
            "features": {"x": {"kind": "numeric"}},
            "label": "late",
            "weight": "w",
        }
        | keys
    )


def build(spark: Any, config: EtlConfig, folder: Path) -> DatasetManifest:
    return build_dataset(spark, BuildRequest(config, pin_dataset(config, {}), "t", str(folder))).manifest


def build_parts(spark: Any, config: EtlConfig, folder: Path) -> DatasetManifest:
    pinned = pin_window(config, {}, known=KnownParts())
    return build_dataset(spark, BuildRequest(config, pinned, "t", str(folder))).manifest


def test_weights_are_stored_as_they_are_and_their_training_mean_is_known(
    spark: Any, table: Path, tmp_path: Path
) -> None:
    manifest = build(spark, block(table), tmp_path)
    stored = manifest.column("w")
    assert (stored.role, stored.dtype, stored.layout) == ("weight", "int64", "scalar")
    (dataset,) = tmp_path.glob("t-*")
    train = np.concatenate([pq.read_table(dataset / f.path)["w"].to_numpy() for f in manifest.files_of("train")])
    assert manifest.weight == {"column": "w", "mean": train.mean()}
    assert [c.name for c in manifest.tensors if c.role == "feature"] == ["x"]


def test_weights_that_are_none_stop_the_build_before_it_writes_and_a_check_leaves_their_rows_out(
    spark: Any, table: Path, tmp_path: Path
) -> None:
    message = r"etl.weight = 'odd': 6 rows have no weight \(null: 2, negative: 2, NaN or infinite: 2\); .*level: row"
    with pytest.raises(EtlError, match=message):
        build(spark, block(table, weight="odd"), tmp_path)
    assert not list(tmp_path.rglob("*.parquet"))
    check = {"name": "weighted", "kind": "expression", "sql": "odd BETWEEN 0 AND 1e300", "level": "row"}
    manifest = build(spark, block(table, weight="odd", checks=[check]), tmp_path)
    assert manifest.accounting.quarantined == {"weighted": 6} and manifest.weight == {"column": "odd", "mean": 1.0}


def test_a_split_of_weight_0_and_a_weight_that_is_no_number_are_refused(
    spark: Any, table: Path, tmp_path: Path
) -> None:
    views = {"none": "SELECT id, x, late, at, w * 0 AS w, cast(w AS string) AS text FROM t"}
    with pytest.raises(EtlError, match=r"every row of the split 't\w+' has the weight 0"):
        build(spark, block(table, views=views, rows="none"), tmp_path)
    with pytest.raises(EtlError, match=r"etl.weight = 'text': the column is string; a weight is a number"):
        build(spark, block(table, views=views, rows="none", weight="text"), tmp_path)
    assert not list(tmp_path.rglob("*.parquet"))


def test_a_window_has_the_mean_of_one_build_and_its_parts_may_hold_weights_of_0(
    spark: Any, table: Path, tmp_path: Path
) -> None:
    """The split is by time, so the first day's part is of training alone."""
    split = {"kind": "time", "column": "at", "boundaries": {"test": "2026-01-02"}}
    views = {"some": "SELECT *, if(id < 230, 0, w) AS weight FROM t"}
    whole = block(table, views=views, rows="some", weight="weight", split=split)
    interval = {"column": "at", "sources": {"t": "at"}, "last": "2026-01-02", "window": 2}
    window = EtlConfig.model_validate(whole.model_dump() | {"interval": interval})
    made = build_parts(spark, window, tmp_path / "window")
    alone = build(spark, whole, tmp_path / "whole")
    assert made.weight == alone.weight == {"column": "weight", "mean": np.mean(np.arange(30, ROWS) % 5) * 170 / ROWS}
    empty = EtlConfig.model_validate(window.model_dump() | {"views": {"some": "SELECT *, w * 0 AS weight FROM t"}})
    with pytest.raises(EtlError, match="every row of the split 'train' has the weight 0"):
        build_parts(spark, empty, tmp_path / "empty")


def test_a_part_that_is_written_alone_may_hold_weights_of_0_alone(spark: Any, table: Path, tmp_path: Path) -> None:
    """Whether a split has any weight is the window's to say, however many of its parts are new."""
    views = {"some": "SELECT *, if(at < '2026-01-02', w, 0) AS weight FROM t"}
    whole = block(table, views=views, rows="some", weight="weight", split={"kind": "hash", "shares": {"train": 1.0}})
    interval = {"column": "at", "sources": {"t": "at"}, "last": "2026-01-02", "window": 2}
    window = EtlConfig.model_validate(whole.model_dump() | {"interval": interval})
    together = build_parts(spark, window, tmp_path)
    (dataset,) = tmp_path.glob("t-*")
    shutil.rmtree(dataset)
    shutil.rmtree(tmp_path / "parts/t/2026-01-02")
    assert build_parts(spark, window, tmp_path).weight == together.weight
