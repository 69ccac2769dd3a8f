"""Several label columns, and tags: counted before a row is written, stored as they are, tensors where they are read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sparkring.conf.blocks.etl import EtlConfig
from sparkring.conf.config import RunConfig
from sparkring.conf.load import ConfigError
from sparkring.conf.manifest import DatasetManifest, read_manifest
from sparkring.conf.rules.dataset import label_problems
from sparkring.conf.storage import open_storage
from sparkring.etl.build import BuildRequest, build_dataset
from sparkring.etl.errors import EtlError
from sparkring.etl.windows.window import pin_dataset, pin_window
from sparkring.training.data.decoding.columns import DataError
from sparkring.training.data.features.tensors import TensorSource
from sparkring.training.data.files import FileOpener
from sparkring.training.data.select import select_all
from sparkring.training.data.source import FileSource

pytestmark = pytest.mark.spark
ROWS, TAGS = 300, ["zebra", "ant", "Öchse"]


def tags_of(row: int) -> list[str]:
    """The third row has its tag twice."""
    return [tag for n, tag in enumerate(TAGS) if row % (n + 2) == 0] * (2 if row == 3 else 1)


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("labels")
    numbers = np.arange(ROWS)
    rows: dict[str, Any] = {"id": numbers, "x": numbers * 0.5, "a": numbers % 2, "b": numbers % 3 == 0}
    rows |= {"tags": [tags_of(i) for i in range(ROWS)], "odd": numbers % 3, "kind": ["k"] * ROWS}
    days = pa.array([f"2026-01-0{1 + i % 2}" for i in range(ROWS)]).cast(pa.date32())
    pq.write_table(pa.table(rows | {"day": days}), folder / "rows.parquet")
    return folder


def block(table: Path, **keys: Any) -> EtlConfig:
    columns = {"id": "bigint", "x": "double", "a": "bigint", "b": "boolean", "tags": "array<string>", "odd": "bigint"}
    source = {"path": str(table), "format": "parquet", "columns": columns | {"kind": "string", "day": "date"}}
    made = {"sources": {"t": source}, "rows": "t", "key": ["id"], "features": {"x": {"kind": "numeric"}}}
    return EtlConfig.model_validate(made | {"label": ["a", "b"]} | keys)


def build(spark: Any, config: EtlConfig, folder: Path, trained: RunConfig | None = None) -> DatasetManifest:
    def check(columns: Any, state: Any) -> None:
        if trained is not None and (problems := label_problems(trained, columns, state)):
            raise ConfigError("t", problems)

    request = BuildRequest(config, pin_dataset(config, {}), "t", str(folder), on_label=check)
    return build_dataset(spark, request).manifest


def counts_by_row(manifest: DatasetManifest, folder: Path, values: Any) -> dict[str, list[int]]:
    """Split -> rows of each label, counted from the stored numbers of the rows."""
    (dataset,) = folder.glob("t-*")
    return {
        split: np.sum([values(i) for f in manifest.files_of(split) for i in
                       (2 * pq.read_table(dataset / f.path)["x"].to_numpy()).astype(int)], axis=0).tolist()
        for split in manifest.splits
    }  # fmt: skip


def test_several_columns_are_labels_by_name_and_in_parts_as_in_one_build(
    spark: Any, table: Path, tmp_path: Path
) -> None:
    manifest = build(spark, block(table), tmp_path)
    assert manifest.label_names == ["a", "b"] and manifest.classes == []
    assert manifest.class_counts == counts_by_row(manifest, tmp_path, lambda i: [i % 2, i % 3 == 0])
    labels = [(c.name, c.dtype, c.layout) for c in manifest.tensors if c.role == "label"]
    assert labels == [("a", "int64", "scalar"), ("b", "bool", "scalar")]
    again = read_manifest(open_storage(str(next(tmp_path.glob("t-*")))))
    assert again.label_names == manifest.label_names and again.class_counts == manifest.class_counts
    config = block(table, interval={"column": "day", "last": "2026-01-02", "window": 2})
    window = build_dataset(spark, BuildRequest(config, pin_window(config, {}), "t", str(tmp_path / "parts"))).manifest
    assert window.features["flags"] == manifest.features["flags"]


def test_values_that_are_no_0_or_1_stop_a_job_of_multilabel_only(spark: Any, table: Path, tmp_path: Path) -> None:
    trained = RunConfig.model_validate({"name": "t", "dataset": "x", "model": {"task": "multilabel"}})
    config = block(table, label=["a", "odd"])
    with pytest.raises(ConfigError, match=r"100 rows have a label 'odd' other than 0 and 1; .*sql: odd IN \(0, 1\)"):
        build(spark, config, tmp_path / "a", trained)
    assert not list((tmp_path / "a").rglob("*.parquet")), "before a row is written"
    manifest = build(spark, config, tmp_path / "b")
    assert manifest.features["flags"]["odd"] == {"a": 0, "odd": 100} and manifest.label_names == []
    check = {"name": "flags", "kind": "expression", "sql": "odd IN (0, 1)", "level": "row"}
    manifest = build(spark, block(table, label=["a", "odd"], checks=[check]), tmp_path / "c", trained)
    assert manifest.label_names == ["a", "odd"] and manifest.accounting.quarantined == {"flags": 100}
    views = {"some": "SELECT *, nullif(a, 1) AS c FROM t"}
    with pytest.raises(EtlError, match=r"etl.label: 'c' is null in 150 rows; .*c IS NOT NULL, level: row"):
        build(spark, block(table, label=["c", "b"], views=views, rows="some"), tmp_path / "d")
    with pytest.raises(EtlError, match="'kind' is string; of several labels each is a number or a boolean"):
        build(spark, block(table, label=["a", "kind"]), tmp_path / "e")


def test_tags_are_kept_as_texts_and_read_as_a_vector_of_0_and_1(spark: Any, table: Path, tmp_path: Path) -> None:
    manifest = build(spark, block(table, label="tags"), tmp_path)
    assert manifest.label_names == ["ant", "zebra", "Öchse"] and manifest.classes == []
    assert manifest.class_counts == counts_by_row(
        manifest, tmp_path, lambda i: [tag in tags_of(i) for tag in manifest.label_names]
    )
    (tensor,) = [column for column in manifest.tensors if column.role == "label"]
    assert (tensor.dtype, tensor.layout, tensor.shape) == ("float32", "vector", (3,))
    (dataset,) = tmp_path.glob("t-*")
    seen = 0
    for split in manifest.splits:
        files = manifest.files_of(split)
        tensors = TensorSource(manifest, ["tags"])
        read = (*tensors.stored, manifest.column("x"))
        source = FileSource(FileOpener(open_storage(str(dataset))), select_all(files), read)
        for group in range(sum(len(file.row_groups) for file in files)):
            stored, _, _ = source.read(group)
            ((_, made, _),) = tensors.made(stored)
            for x, tags, row in zip(stored["x"].to_pylist(), stored["tags"].to_pylist(), made, strict=True):
                assert tags == tags_of(int(2 * x)), "as they were"
                assert row.tolist() == [float(tag in tags) for tag in manifest.label_names]
                seen += 1
    assert seen == ROWS
    features = dict(manifest.features)
    features["labels"] = [dict(features["labels"][0], values=["ant", "yak", "Öchse"])]
    other = DatasetManifest.model_validate(dict(manifest) | {"features": features})
    with pytest.raises(DataError, match=r"label 'tags': \d+ tags are none that a model knows"):
        list(TensorSource(other, ["tags"]).made(pq.read_table(dataset / manifest.files[0].path)))


def test_tags_that_are_none_stop_the_build_and_a_check_leaves_their_rows_out(
    spark: Any, table: Path, tmp_path: Path
) -> None:
    odd = "CASE WHEN id = 7 THEN NULL WHEN id = 8 THEN array('ant', NULL) ELSE tags END AS tags"
    views = {"some": f"SELECT id, x, {odd} FROM t"}
    with pytest.raises(EtlError, match=r"etl.label = 'tags': null in 2 rows") as caught:
        build(spark, block(table, label="tags", views=views, rows="some"), tmp_path)
    assert not list(tmp_path.rglob("*.parquet"))
    (sql,) = [part.removesuffix(", level: row}") for part in str(caught.value).split("sql: ")[1:]]
    check = {"name": "labelled", "kind": "expression", "sql": sql, "level": "row"}
    manifest = build(spark, block(table, label="tags", views=views, rows="some", checks=[check]), tmp_path)
    assert manifest.accounting.quarantined == {"labelled": 2}, "the check that the message proposes"
    with pytest.raises(EtlError, match=r"etl.classes: 'tags' has values that are not listed: 'zebra' \(150 rows\)"):
        build(spark, block(table, label="tags", classes=["ant", "Öchse"]), tmp_path / "listed")
