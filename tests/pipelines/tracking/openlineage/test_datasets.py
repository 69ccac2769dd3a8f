"""Datasets have the names that OpenLineage's specification gives them, whoever reads or writes them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pydantic import TypeAdapter

from sparkring.conf.blocks.etl import EtlConfig
from sparkring.conf.blocks.tracking import TrackingConfig
from sparkring.conf.manifest import DatasetManifest
from sparkring.conf.sources import SourceConfig
from sparkring.etl.sources.pin import pin
from sparkring.pipelines.lineage.record import in_common, reads_of
from sparkring.pipelines.tracking.openlineage.datasets import (
    at_place,
    built_dataset,
    model_dataset,
    place_name,
    predictions_dataset,
    registry_name,
    scoring_model,
    source_dataset,
)
from sparkring.pipelines.tracking.ops import LineageDataset
from tests.pipelines.served import manifest

URL = "jdbc:postgresql://ann:s3cret@db.example.com/shop?ssl=true"


def source(**values: Any) -> SourceConfig:
    etl = {"sources": {"s": values}, "rows": "s", "features": {"x": {"kind": "numeric"}}}
    return EtlConfig.model_validate(etl).sources["s"]


def named(found: LineageDataset) -> tuple[str, str]:
    return found["namespace"], found["name"]


@pytest.mark.parametrize(
    ("uri", "expected"),
    [
        ("/data/flights/", ("file", "/data/flights")),
        ("file:///data/flights", ("file", "/data/flights")),
        ("flights", ("file", f"{os.getcwd()}/flights")),
        ("s3://lake/raw/flights/?endpoint_override=host:9000&scheme=http", ("s3://lake", "raw/flights")),
        ("s3a://lake/raw", ("s3://lake", "raw")),
        ("gs://lake", ("gs://lake", "/")),
        ("hdfs://node:8020/raw/flights", ("hdfs://node:8020", "/raw/flights")),
        ("abfss://lake@host.dfs.core.windows.net/raw", ("abfss://lake@host.dfs.core.windows.net", "raw")),
    ],
)
def test_a_place_is_named_by_its_store_and_its_path(uri: str, expected: tuple[str, str]) -> None:
    assert place_name(uri) == expected


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"path": "/d/*.csv", "format": "csv", "columns": {"x": "int"}}, ("file", "/d/*.csv")),
        ({"path": "s3://lake/t", "format": "delta"}, ("s3://lake", "t")),
        ({"table": "prod.shop.sales", "format": "iceberg"}, ("iceberg://prod", "shop.sales")),
        ({"path": "/t/metadata/v7.metadata.json", "format": "iceberg"}, ("file", "/t")),
        ({"path": "/t/metadata-of/x", "format": "iceberg"}, ("file", "/t/metadata-of/x")),
        ({"table": "shop.sales"}, ("spark_catalog", "shop.sales")),
    ],
)
def test_a_source_is_named_by_where_it_is(values: dict[str, Any], expected: tuple[str, str]) -> None:
    assert named(source_dataset("s", source(**values), {}, {})) == expected


@pytest.mark.parametrize(
    ("url", "values", "expected"),
    [
        (URL, {"dbtable": "sales"}, ("postgres://db.example.com:5432", "shop.public.sales")),
        (URL, {"dbtable": "eu.sales"}, ("postgres://db.example.com:5432", "shop.eu.sales")),
        (URL, {"query": "SELECT 1 AS x"}, ("postgres://db.example.com:5432", "shop.s")),
        ("jdbc:mysql://db:3307/shop", {"dbtable": "sales"}, ("mysql://db:3307", "shop.sales")),
        ("jdbc:postgresql://ann:a/s3cret@db/shop", {"dbtable": "sales"}, ("jdbc:SHOP_URL", "sales")),
        ("jdbc:oracle:thin:@db:1521/x", {"dbtable": "sales"}, ("jdbc:SHOP_URL", "sales")),
    ],
)
def test_a_database_is_named_without_its_credentials(url: str, values: Any, expected: tuple[str, str]) -> None:
    made = source(format="jdbc", url_env="SHOP_URL", **values)
    found = source_dataset("s", made, {}, {"SHOP_URL": url})
    assert named(found) == expected and "s3cret" not in str(found)


def test_a_delta_table_has_the_version_that_was_read(tmp_path: Path) -> None:
    import deltalake

    for rows in ([1, 2], [3]):
        deltalake.write_deltalake(str(tmp_path), pa.table({"x": pa.array(rows, pa.int64())}), mode="append")
    made = source(path=str(tmp_path), format="delta")
    whole = pin("s", made)
    found = source_dataset("s", made, reads_of([whole])["s"], {})
    assert (found["version"], found["files"], found["kind"]) == ("1", 2, "TABLE")
    earlier = pin("s", made.model_copy(update={"versionAsOf": 0}))
    assert reads_of([whole, whole])["s"] == {"version": 1} and reads_of([whole, earlier])["s"] == {}


def test_pieces_have_in_common_only_what_all_of_them_say() -> None:
    assert in_common([{"version": 3, "files": 1}, {"version": 3, "files": 1}]) == {"version": 3}
    assert in_common([{"version": 3}, {}]) == {} and in_common([{}, {"version": 3}]) == {}


def test_files_have_their_fingerprint_as_version(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("x\n1\n")
    made = source(path=str(tmp_path), format="csv", columns={"x": "int"})
    pinned = pin("s", made)
    found = source_dataset("s", made, pinned.lineage(), {})
    assert found["version"] == pinned.fingerprint and (found["files"], found["bytes"]) == (1, 4)
    assert "version" not in source_dataset("s", made, {}, {})
    assert found["schema"] == [{"name": "x", "type": "int"}], "as the recipe declares it"
    assert "schema" not in source_dataset("s", source(table="shop.sales"), {}, {})


def test_a_dataset_has_one_name_for_all_its_fingerprints() -> None:
    made: DatasetManifest = manifest()
    found = built_dataset(f"s3://lake/datasets/flights-{made.fingerprint[:12]}?scheme=http", made)
    assert named(found) == ("s3://lake", "datasets/flights") and found["version"] == made.fingerprint
    assert found["schema"][0]["name"] == made.columns[0].name
    assert built_dataset("/given", made)["name"] == "/given"
    assert found["uri"] == f"s3://lake/datasets/flights-{made.fingerprint[:12]}"
    assert TypeAdapter(LineageDataset).validate_python(found)


def test_a_model_is_named_by_its_registry() -> None:
    server = TrackingConfig(uri="https://ann:s3cret@mlflow.example.com:5001/team/")
    assert registry_name(server) == "mlflow://mlflow.example.com:5001/team"
    assert registry_name(TrackingConfig(root="/d/mlflow")) == "mlflow:///d/mlflow"
    found = model_dataset(server, "flights", "3")
    assert (found["name"], found["version"], found["uri"]) == ("flights", "3", "models:/flights/3")
    assert scoring_model(server, "models:/flights/3", "flights", "3") == found
    assert named(scoring_model(server, "/d/run", "run", "ab")) == ("file", "/d/run")


def test_a_uri_is_one_that_can_be_parsed_and_only_of_a_place() -> None:
    assert at_place("/d/my rows", "FILE")["uri"] == "file:///d/my%20rows"
    assert at_place("s3a://lake/my rows?scheme=http", "FILE")["uri"] == "s3://lake/my%20rows"
    assert "uri" not in source_dataset("s", source(table="shop.sales"), {}, {})


def test_predictions_are_named_by_the_folder_of_all_dates() -> None:
    found = predictions_dataset("s3://lake/predictions", [(10, 100), (5, 50)])
    assert named(found) == ("s3://lake", "predictions")
    assert (found["rows"], found["bytes"], found["files"]) == (15, 150, 2)
