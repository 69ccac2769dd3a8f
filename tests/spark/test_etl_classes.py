"""A label of texts: classes by name, counted before a row is written, in shards as they are, in a batch as places."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sparkring.conf.blocks.etl import EtlConfig
from sparkring.conf.manifest import DatasetManifest, read_manifest
from sparkring.conf.storage import open_storage
from sparkring.etl.build import BuildRequest, build_dataset
from sparkring.etl.errors import EtlError
from sparkring.etl.windows.window import pin_dataset, pin_window
from sparkring.training.data.decoding.columns import DataError
from sparkring.training.data.features.tensors import TensorSource

pytestmark = pytest.mark.spark
KINDS = ["zebra", "ant", "Öchse", "bee"]
ROWS = 400


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("animals")
    legs = np.arange(ROWS, dtype=np.float64)
    kinds = [KINDS[i % 3] if i % 10 else "bee" for i in range(ROWS)]
    days = [f"2026-01-0{1 + i % 2}" for i in range(ROWS)]
    rows = {"id": np.arange(ROWS), "legs": legs, "kind": kinds, "place": [f"p{i}" for i in range(ROWS)]}
    pq.write_table(pa.table(rows | {"day": pa.array(days).cast(pa.date32())}), folder / "animals.parquet")
    return folder


def block(table: Path, **keys: Any) -> EtlConfig:
    columns = {"id": "bigint", "legs": "double", "kind": "string", "place": "string", "day": "date"}
    return EtlConfig.model_validate(
        {
            "sources": {"animals": {"path": str(table), "format": "parquet", "columns": columns}},
            "rows": "animals",
            "key": ["id"],
            "features": {"legs": {"kind": "numeric"}},
            "label": "kind",
            "keep": ["place"],
        }
        | keys
    )


def build(spark: Any, config: EtlConfig, folder: Path) -> DatasetManifest:
    request = BuildRequest(config, pin_dataset(config, {}), "animals", str(folder))
    return build_dataset(spark, request).manifest


def labels_of(manifest: DatasetManifest, folder: Path) -> dict[int, tuple[str, int]]:
    """Number of the animal -> (kind as stored, the tensor's value)."""
    source, found = TensorSource(manifest, ["legs", "kind"]), dict[int, tuple[str, int]]()
    (dataset,) = folder.glob("animals-*")
    for file in manifest.files:
        stored = pq.read_table(dataset / file.path)
        made = {column.name: values for column, values, _ in source.made(stored)}
        assert made["kind"].dtype == np.int64
        numbers = [int(place[1:]) for place in stored["place"].to_pylist()]
        found |= dict(zip(numbers, zip(stored["kind"].to_pylist(), made["kind"].tolist(), strict=True), strict=True))
    return found


def test_classes_are_kept_by_name_and_read_as_their_places(spark: Any, table: Path, tmp_path: Path) -> None:
    manifest = build(spark, block(table), tmp_path)
    assert manifest.classes == ["ant", "bee", "zebra", "Öchse"]
    assert {s: sum(n) for s, n in manifest.class_counts.items()} == {s: i.rows for s, i in manifest.splits.items()}
    assert [sum(of_class) for of_class in zip(*manifest.class_counts.values(), strict=True)] == [120, 40, 120, 120]
    (tensor,) = [column for column in manifest.tensors if column.role == "label"]
    assert (tensor.dtype, tensor.cardinality) == ("int64", 4)
    assert [c.name for c in manifest.tensors if c.role == "feature"] == ["legs"], "no model sees the label"
    found = labels_of(manifest, tmp_path)
    assert len(found) == ROWS
    assert all(manifest.classes[place] == kind for kind, place in found.values())
    assert all(kind == (KINDS[i % 3] if i % 10 else "bee") for i, (kind, _) in found.items())
    again = read_manifest(open_storage(str(next(tmp_path.glob("animals-*")))))
    assert again.classes == manifest.classes and again.class_counts == manifest.class_counts


def test_the_recipes_order_of_classes_is_kept_and_others_are_refused(spark: Any, table: Path, tmp_path: Path) -> None:
    listed = ["bee", "Öchse", "zebra", "ant", "yak"]
    manifest = build(spark, block(table, classes=listed), tmp_path / "a")
    assert manifest.classes == listed and all(counts[4] == 0 for counts in manifest.class_counts.values())
    with pytest.raises(EtlError, match=r"etl.classes: 'kind' has values that are not listed: 'bee' \(40 rows\); list"):
        build(spark, block(table, classes=["ant", "zebra", "Öchse"]), tmp_path / "b")
    assert not list((tmp_path / "b").rglob("*.parquet"))
    with pytest.raises(EtlError, match=r"etl.classes: the label is no text"):
        build(
            spark, block(table, label="legs", features={"id": {"kind": "numeric"}}, classes=["1", "2"]), tmp_path / "c"
        )


def test_rows_without_a_class_stop_the_build_before_it_writes_and_a_check_leaves_them_out(
    spark: Any, table: Path, tmp_path: Path
) -> None:
    views = {"some": "SELECT id, legs, place, nullif(kind, 'bee') AS kind FROM animals"}
    with pytest.raises(EtlError, match=r"etl.label = 'kind': null in 40 rows; .*kind IS NOT NULL, level: row"):
        build(spark, block(table, views=views, rows="some"), tmp_path)
    assert not list(tmp_path.rglob("*.parquet"))
    check = {"name": "labelled", "kind": "expression", "sql": "kind IS NOT NULL", "level": "row"}
    manifest = build(spark, block(table, views=views, rows="some", checks=[check]), tmp_path)
    assert manifest.classes == ["ant", "zebra", "Öchse"] and manifest.accounting.quarantined == {"labelled": 40}


def test_a_class_that_a_model_does_not_know_is_no_place(spark: Any, table: Path, tmp_path: Path) -> None:
    manifest = build(spark, block(table), tmp_path)
    features = dict(manifest.features)
    features["labels"] = [dict(features["labels"][0], values=["ant", "bee", "zebra", "yak"])]
    other = DatasetManifest.model_validate(dict(manifest) | {"features": features})
    with pytest.raises(DataError, match=r"label 'kind': .* rows are of no class"):
        labels_of(other, tmp_path)


def test_the_parts_of_a_window_add_up_to_its_classes(spark: Any, table: Path, tmp_path: Path) -> None:
    config = block(table, interval={"column": "day", "last": "2026-01-02", "window": 2})
    pinned = pin_window(config, {})
    window = build_dataset(spark, BuildRequest(config, pinned, "animals", str(tmp_path))).manifest
    whole = build(spark, block(table), tmp_path / "whole")
    assert (window.classes, window.class_counts) == (whole.classes, whole.class_counts)


def test_a_limit_keeps_the_same_rows_in_every_pass_and_some_of_each_split(
    spark: Any, table: Path, tmp_path: Path
) -> None:
    manifest = build(spark, block(table, limit_rows=150), tmp_path / "a")
    assert 110 < manifest.accounting.rows_out < 190 and all(split.rows for split in manifest.splits.values())
    again = build(spark, block(table, limit_rows=150), tmp_path / "b")
    assert [file.sha256 for file in manifest.files] == [file.sha256 for file in again.files]
