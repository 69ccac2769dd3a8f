"""The columns of the rows, by the recipe's text alone: those that Spark finds, or none are named."""

from __future__ import annotations

from typing import Any

import pytest

from sparkring.conf.blocks.etl import EtlConfig
from sparkring.conf.storage import open_storage
from sparkring.etl.analysis import analyze
from sparkring.etl.errors import EtlError
from sparkring.etl.foreseen import row_columns, row_problems

SOURCES = {
    "a": {"path": "a.parquet", "format": "parquet", "columns": {"id": "int", "x": "double", "Name": "string"}},
    "b": {"path": "b", "columns": {"id": "int", "s": "int"}, "partitions": {"day": "date"}},
    "t": {"path": "t", "format": "text"},
}
KNOWN = {
    "SELECT id, x AS z FROM a": ["id", "z"],
    "SELECT * FROM a": ["id", "x", "Name"],
    "SELECT *, 1 AS one FROM b": ["id", "s", "day", "one"],
    "SELECT * FROM t": ["path", "text"],
    "SELECT q.*, b.s FROM a q JOIN b ON q.id = b.id": ["id", "x", "Name", "s"],
    "SELECT a.*, b.* FROM a CROSS JOIN b": ["id", "x", "Name", "id", "s", "day"],
    "SELECT id FROM a UNION ALL SELECT s FROM b": ["id"],
    "SELECT a.id, name FROM A a": ["id", "name"],
    "SELECT count(*) OVER (PARTITION BY id) AS n, * FROM a": ["n", "id", "x", "Name"],
    "FROM a SELECT id": ["id"],
}
LEFT_TO_SPARK = [
    "SELECT x + 1 FROM a",
    "SELECT * FROM a JOIN b USING (id)",
    "SELECT * FROM a LEFT SEMI JOIN b ON a.id = b.id",
    "SELECT * FROM a NATURAL JOIN b",
    "SELECT * EXCEPT (x) FROM a",
    "SELECT * FROM a AS r(p, q, r)",
    "SELECT * FROM (SELECT id FROM a)",
    "WITH c AS (SELECT id FROM a) SELECT * FROM c",
    "SELECT * FROM a LATERAL VIEW explode(array(1, 2)) e AS n",
    "SELECT id, explode(map(1, 2)) AS (k, v) FROM a",
    "VALUES (1, 2)",
]


def etl(view: str, **keys: Any) -> EtlConfig:
    block = {"sources": SOURCES, "views": {"v": view}, "rows": "v", "features": {"id": {"kind": "numeric"}}}
    return EtlConfig.model_validate(block | keys)


@pytest.mark.spark
def test_what_the_text_says_is_what_spark_finds(spark: Any) -> None:
    session = spark.newSession()
    session.createDataFrame([], "id int, x double, Name string").createTempView("a")
    session.createDataFrame([], "id int, s int, day date").createTempView("b")
    session.createDataFrame([], "path string, text string").createTempView("t")
    for sql, columns in KNOWN.items():
        assert row_columns(etl(sql)) == columns == session.sql(sql).columns, sql
    for sql in LEFT_TO_SPARK:
        assert row_columns(etl(sql)) is None, sql
        session.sql(sql)


def test_views_of_views_and_a_functions_rows() -> None:
    views = {"v": "SELECT * FROM a", "w": "SELECT *, x AS y FROM v"}
    assert row_columns(etl("", views=views, rows="w")) == ["id", "x", "Name", "y"]
    assert row_columns(etl("SELECT 1", rows="module:function")) is None
    assert row_columns(etl("SELECT FROM WHERE")) is None


def test_each_name_that_the_rows_lack_is_reported_with_its_key() -> None:
    keys = {"label": "name", "keep": ["X"], "key": ["ident"], "split": {"kind": "time", "column": "day",
            "boundaries": {"valid": "2026-01-01", "test": "2026-02-01"}}}  # fmt: skip
    found = list(row_problems(etl("SELECT * FROM a", **keys)))
    assert [line.split(":")[0] for line in found] == ["etl.label", "etl.split.column", "etl.keep", "etl.key"]
    assert "did you mean 'Name'?" in found[0]
    assert not list(row_problems(etl("SELECT *, day AS Day FROM b", split=keys["split"])))


@pytest.mark.spark
@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"views": {"v": "SELECT idd FROM a"}}, "etl.views.v: "),
        ({"features": {"x": {"kind": "categorical"}}}, "etl.features.x: column 'x' is double; categorical wants"),
        ({"checks": [{"name": "c", "kind": "expression", "sql": "nope > 1"}]}, "etl.checks.0 (c): "),
        (
            {"keep": ["m"], "key": ["id"], "views": {"v": "SELECT *, map(1, 2) AS m FROM a"}},
            "column 'm' is map<int,int>",
        ),
        ({"views": {"v": "SELECT *, rand() AS r FROM a"}}, "uses a random"),
    ],
)
def test_spark_finds_the_rest_on_empty_tables(spark: Any, tmp_path: Any, keys: dict[str, Any], said: str) -> None:
    with pytest.raises(EtlError, match=r"(?s).") as caught:
        analyze(spark, etl("SELECT * FROM a", **keys), [], {}, open_storage(str(tmp_path)))
    assert said in str(caught.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.spark
def test_columns_are_foreseen_with_their_types(spark: Any, tmp_path: Any) -> None:
    storage = open_storage(str(tmp_path))
    found = analyze(spark, etl("SELECT *, 1 AS y FROM a", label="y", keep=["Name"]), [], {}, storage)
    assert found is not None
    assert [(c.name, c.dtype, c.role) for c in found.columns] == [
        ("id", "int32", "input"), ("y", "int32", "label"), ("Name", "string", "meta"),
    ]  # fmt: skip
    assert analyze(spark, etl("SELECT 1", rows="module:function"), [], {}, storage) is None


@pytest.mark.spark
def test_nothing_is_run_to_foresee_a_trial(spark: Any, tmp_path: Any) -> None:
    context = spark.sparkContext
    context.setLocalProperty("spark.jobGroup.id", "foreseen")
    try:
        view = etl("SELECT a.*, b.s FROM a JOIN b ON a.id = b.id", limit_rows=10)
        assert analyze(spark, view, [], {}, open_storage(str(tmp_path))) is not None
        assert context.statusTracker().getJobIdsForGroup("foreseen") == []
    finally:
        context.setLocalProperty("spark.jobGroup.id", None)
