"""`sparkring etl` on tables of a Hive metastore and of a database: one Spark application, in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml

from sparkring.pipelines.run.jvm_options import SHORT
from tests.etl.sources.postgres import PASSWORD, USER, driver_jar, missing, running

pytestmark = pytest.mark.spark
ROOT = Path(__file__).resolve().parents[2]

# Hive's session must be the first of a JVM. The tables are made by one session, the job opens another.
TABLES = """
import json, sys
from sparkring.conf.load import load_config
from sparkring.etl.errors import EtlError
from sparkring.etl.spark_platform.session import build_session
from sparkring.etl.sources.pin import pin
from sparkring.etl.sources.snapshot import PinContext
from sparkring.conf.sources import CatalogSource
from sparkring.pipelines.run import spark as spark_module
from sparkring.pipelines.cli import main

recipe, *forms = sys.argv[1:]
config = load_config(recipe).config
said = {}
with spark_module.spark_session(config.name, config.spark, config.launch) as spark:
    spark.sql("SET hive.exec.dynamic.partition.mode=nonstrict")
    spark.sql("CREATE DATABASE lake")
    rows = "SELECT int(id), id % 7 + 0.5D, date_add(DATE '2024-01-01', int(id % 3)) FROM range(0, 600, 1, 1)"
    for form in forms:  # ORC is read by Spark itself, TEXTFILE by Hive's own reader
        spark.sql(f"CREATE TABLE lake.{form} (id INT, x DOUBLE) PARTITIONED BY (day DATE) STORED AS {form}")
        spark.sql(f"INSERT INTO lake.{form} {rows}")
    if views := ["again"] * (len(forms) > 1):
        spark.sql("CREATE VIEW lake.seen AS SELECT o.id, o.x, o.day FROM lake.orc o JOIN lake.textfile p USING (id)")
        spark.sql("CREATE VIEW lake.again AS SELECT * FROM lake.seen WHERE x >= 0")
    session = build_session(spark, {})
    for table in [*forms, *views]:
        source = CatalogSource(table=f"lake.{table}", where="day IN ('2024-01-02', '2024-01-03')")
        found = pin("t", source, PinContext(lambda: session, ""))
        read = found.read(build_session(spark, {}))
        days = sorted({file.partition for file in found.files})
        counted = {str(row.day): row["count"] for row in read.groupBy("day").count().collect()}
        said[table] = [counted, days, found.lineage()["read"]]
        base = table if table != "again" else "textfile"
        spark.sql(f"INSERT INTO lake.{base} VALUES (999, 1D, DATE '2024-01-03')")
        try:
            found.check_unchanged()
        except EtlError as error:
            said[table].append(str(error))
print("SAID", json.dumps(said))
"""
JOBS = """
opened, real = [], spark_module.spark_session
def counted(*words):
    opened.append(words[0])
    return real(*words)
spark_module.spark_session = counted
codes = [main(["etl", recipe]), main(["etl", recipe])]
spark_module.spark_session = None  # a dataset that is given is found without Spark
(folder,) = (p for p in __import__("pathlib").Path("data/datasets").glob("lake-*"))
codes.append(main(["etl", recipe, "etl=null", f"dataset={folder}"]))
print("SAID", json.dumps([codes, opened]))
"""


def recipe(folder: Path, has_database: bool) -> dict[str, Any]:
    events = {"table": "lake.again", "where": "day < '2024-01-03'", "columns": {"id": "int", "x": "double"}}
    users = {"format": "jdbc", "url_env": "LAKE_URL", "user_env": "LAKE_USER", "password_env": "LAKE_PASSWORD"}
    users |= {"dbtable": "account", "partitionColumn": "id", "numPartitions": 3}
    settings = {
        "spark.sql.catalogImplementation": "hive",
        "spark.sql.warehouse.dir": str(folder / "warehouse"),
        "spark.hadoop.javax.jdo.option.ConnectionURL": f"jdbc:derby:;databaseName={folder}/metastore;create=true",
        "spark.driver.extraJavaOptions": " ".join([*SHORT, f"-Dderby.system.home={folder}"]),
        "spark.driver.memory": "1g",
    }
    joined = "SELECT e.id, e.x, u.balance FROM events e JOIN users u USING (id)"
    return {
        "name": "lake",
        "etl": {
            "sources": {"events": events} | ({"users": users} if has_database else {}),
            "views": {"lines": joined if has_database else "SELECT id, x, 1 AS balance FROM events WHERE id < 600"},
            "rows": "lines",
            "key": ["id"],
            "keep": ["balance"],
            "features": {"x": {"kind": "numeric"}},
        },
        "spark": {"master": "local[2]", "conf": settings | ({"spark.jars": driver_jar()} if has_database else {})},
    }


def run(folder: Path, script: str, forms: list[str], environment: dict[str, str]) -> tuple[str, list[Any]]:
    """What a script wrote, and what it said of its tables and jobs."""
    (folder / "script.py").write_text(script)
    variables = os.environ | {"PYTHONPATH": str(ROOT), "MLFLOW_DISABLE_TELEMETRY": "true"} | environment
    command = [sys.executable, "script.py", "lake.yaml", *forms]
    done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    lines = [line.removeprefix("SAID ") for line in done.stdout.splitlines() if line.startswith("SAID ")]
    return done.stderr + done.stdout, [json.loads(line) for line in lines]


def test_a_hive_table_that_spark_leaves_to_hives_own_reader_is_pinned_by_its_files(tmp_path: Path) -> None:
    (tmp_path / "lake.yaml").write_text(yaml.safe_dump(recipe(tmp_path, False), sort_keys=False))
    _, [said] = run(tmp_path, TABLES, ["textfile"], {})
    counted, days, read, changed = said["textfile"]
    assert counted == {"2024-01-02": 200, "2024-01-03": 200} and len(days) == 2
    assert read == ["spark_catalog.lake.textfile"]
    assert "changed after it was pinned (1 file added, removed or written, such as day=2024-01-03/" in changed


@pytest.mark.slow  # of a database alone: tests/etl/sources/test_jdbc.py; of views: tests/etl/sources/catalog
def test_a_job_reads_a_hive_metastore_and_a_database_in_one_application(tmp_path: Path) -> None:
    with nullcontext() if missing() else running() as server:
        environment = dict[str, str]()
        if server is not None:
            server.table("account", "SELECT id::int, 1000 AS balance FROM generate_series(0, 599) id")
            environment |= {"LAKE_URL": server.url, "LAKE_USER": USER, "LAKE_PASSWORD": PASSWORD}
        (tmp_path / "lake.yaml").write_text(yaml.safe_dump(recipe(tmp_path, server is not None), sort_keys=False))
        written_out, [said, (codes, opened)] = run(tmp_path, TABLES + JOBS, ["orc", "textfile"], environment)
    for table in ("orc", "textfile", "again"):
        counted, days, read, changed = said[table]
        more = 1 if table == "again" else 0  # the row that the turn of `textfile` has added, joined with that of `orc`
        assert counted == {"2024-01-02": 200, "2024-01-03": 200 + more}
        assert "changed after it was pinned (1 file added, removed or written, such as day=2024-01-03/" in changed
        names = ["orc", "textfile"] if table == "again" else [table]
        assert read == [f"spark_catalog.lake.{name}" for name in names]
        assert table == "again" or len(days) == 2
    assert codes == [0, 0, 0] and opened == ["lake", "lake"]
    (manifest,) = tmp_path.glob("data/datasets/lake-*/_manifest.json")
    found = json.loads(manifest.read_text())
    assert found["lineage"]["sources"]["events"]["read"] == ["spark_catalog.lake.orc", "spark_catalog.lake.textfile"]
    shards = [pq.read_table(manifest.parent / file["path"]) for file in found["files"]]
    assert sum(table.num_rows for table in shards) == found["accounting"]["rows_out"] == 400
    if server is None:
        pytest.skip(f"the database was left out: {missing()}")
    assert sum(sum(table["balance"].to_pylist()) for table in shards) == 400_000
    assert found["lineage"]["sources"]["users"]["rows"] == 600
    assert len(list(tmp_path.glob("data/datasets/landed/*/_landed.json"))) == 2
    secrets = [PASSWORD, USER, server.url]
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(written) > 20 and any(path.name == "mlflow.db" for path in written)
    holding = [path for path in written if any(secret.encode() in path.read_bytes() for secret in secrets)]
    assert not holding and not [secret for secret in secrets if secret in written_out]
