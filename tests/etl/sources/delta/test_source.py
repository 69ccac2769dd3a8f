"""A Delta table pinned by its log: one snapshot has one fingerprint. Its rows: tests/spark/test_etl_delta.py."""

import datetime as dt
import json
import shutil
import subprocess
import sys
import time

import boto3
import deltalake
import pyarrow as pa
import pytest
from moto.server import ThreadedMotoServer
from pydantic import TypeAdapter, ValidationError
from pyspark.sql.types import LongType, StructField, StructType

from sparkring.conf.sources import DeltaSource, Source
from sparkring.etl.errors import EtlError
from sparkring.etl.sources.delta.source import CONNECTOR, lake_schema, uses_connector
from sparkring.etl.sources.lake_files import FIELD_ID
from sparkring.etl.sources.pin import pin
from tests.etl.sources.delta.tables import adds, commit, delete_rows

ROWS = pa.table({"day": ["a", "a", "b"], "x": [1, 2, 3], "y": [0.5, None, 1.5]})


def config(path, **changes) -> DeltaSource:
    return TypeAdapter(Source).validate_python({"format": "delta", "path": str(path)} | changes)


@pytest.fixture
def table(tmp_path):
    root = tmp_path / "table"
    deltalake.write_deltalake(str(root), ROWS, partition_by=["day"])
    deltalake.write_deltalake(str(root), ROWS, mode="append")
    return root


# --- The declaration


def test_a_timestamp_that_yaml_made_a_date_is_taken_as_its_text():
    assert config("/t", timestampAsOf=dt.date(2026, 11, 21)).timestampAsOf == "2026-11-21"
    at = dt.datetime(2026, 11, 21, 6, 30, tzinfo=dt.UTC)
    assert config("/t", timestampAsOf=at).timestampAsOf == "2026-11-21T06:30:00+00:00"


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"versionAsOf": 1, "timestampAsOf": "2026-11-21"}, "versionAsOf and timestampAsOf both name a version"),
        ({"versionAsOf": -1}, "greater than or equal to 0"),
        ({"timestampAsOf": "yesterday"}, "yesterday"),
        ({"columns": {"a": "int", "A": "int"}}, "'a' and 'A' are one name to Spark"),
        ({"version": 1}, "version"),
    ],
)
def test_declarations_that_name_no_one_version_or_column_are_refused(wrong, words):
    with pytest.raises(ValidationError, match=words):
        config("/t", **wrong)


# --- The fingerprint


def test_the_same_snapshot_has_one_fingerprint_however_it_is_named_and_wherever_it_is(table, tmp_path):
    latest = pin("t", config(table))
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + 1))
    time.sleep(1.1)
    assert latest.version == 1 and pin("t", config(table, versionAsOf=1)).fingerprint == latest.fingerprint
    assert pin("t", config(table, timestampAsOf=now)).fingerprint == latest.fingerprint
    copy = shutil.copytree(table, tmp_path / "copy of é")
    assert pin("other", config(copy)).fingerprint == latest.fingerprint


def test_another_table_of_the_same_files_has_another_fingerprint(table):
    before = pin("t", config(table))
    first = next((table / "_delta_log").glob("*0.json"))
    first.write_text(first.read_text().replace(before.table_id, "00000000-0000-4000-8000-000000000000"))
    after = pin("t", config(table))
    assert after.table_id != before.table_id and after.fingerprint != before.fingerprint
    assert after.files.content() == before.files.content()


def test_an_empty_commit_changes_nothing_but_the_version_and_more_rows_or_a_rewrite_do(table):
    before = pin("t", config(table))
    commit(table, [])
    deltalake.DeltaTable(str(table)).alter.set_table_properties({"delta.logRetentionDuration": "interval 9 days"})
    deltalake.DeltaTable(str(table)).alter.set_table_description("of a test")
    after = pin("t", config(table))
    assert after.version == before.version + 3 and after.fingerprint == before.fingerprint
    prints = [after.fingerprint]
    deltalake.DeltaTable(str(table)).optimize.compact()
    prints.append(pin("t", config(table)).fingerprint)
    delete_rows(table, {adds(table)[0]["path"]: [0]})
    prints.append(pin("t", config(table)).fingerprint)
    delete_rows(table, {adds(table)[0]["path"]: [1]})
    prints.append(pin("t", config(table)).fingerprint)
    deltalake.write_deltalake(str(table), ROWS, mode="append")
    prints.append(pin("t", config(table)).fingerprint)
    assert len(set(prints)) == 5


def test_a_new_column_changes_the_fingerprint_unless_others_are_declared(table):
    columns = {"x": "bigint", "day": "string"}
    before, declared = pin("t", config(table)), pin("t", config(table, columns=columns))
    field = deltalake.Field("z", deltalake.schema.PrimitiveType("string"), nullable=True)
    deltalake.DeltaTable(str(table)).alter.add_columns(field)
    assert pin("t", config(table)).fingerprint != before.fingerprint
    assert pin("t", config(table, columns=columns)).fingerprint == declared.fingerprint


def test_a_snapshot_is_pinned_in_a_process_without_spark(table):
    """The promise of a dataset that is found: no Spark session, so no JVM, and no data file is opened."""
    for add in adds(table):
        (table / add["path"]).unlink()
    code = """
import json, sys
from sparkring.conf.sources import DeltaSource
from sparkring.etl.sources.pin import pin
found = pin("t", DeltaSource(format="delta", path=sys.argv[1], versionAsOf=1)).fingerprint
from pyspark import SparkContext
print(json.dumps([found, SparkContext._gateway is None]))
"""
    done = subprocess.run([sys.executable, "-c", code, str(table)], capture_output=True, text=True, check=True)
    found, no_jvm = json.loads(done.stdout)
    assert found == pin("t", config(table)).fingerprint and no_jvm


# --- Partitions and columns


def test_where_keeps_the_files_of_the_partitions_it_is_true_for(table):
    kept = pin("t", config(table, where="day = 'a'"))
    assert [f.partition for f in kept.files.files] == [("a",), ("a",)]
    assert len(pin("t", config(table)).files.files) == 4
    deltalake.write_deltalake(str(table), ROWS.slice(2), mode="append")
    assert pin("t", config(table, where="day = 'a'")).fingerprint == kept.fingerprint
    assert pin("t", config(table, where="day <> 'b'", columns={"x": "bigint"})).files.schema.partitions == ()
    with pytest.raises(EtlError, match=r"etl\.sources\.t\.where = \"x > 1\".*not a partition column|x > 1"):
        pin("t", config(table, where="x > 1"))


def test_columns_that_the_table_does_not_have_so_are_refused(table):
    with pytest.raises(EtlError, match=r"t\.columns: the table has no column \['z'\]; it has \['day', 'x', 'y'\]"):
        pin("t", config(table, columns={"x": "int", "z": "bigint"}))


def test_mapped_columns_are_read_by_physical_name_or_by_id_in_structs_too():
    names = {"delta.columnMapping.id": 7, "delta.columnMapping.physicalName": "col-7"}
    inner = {"delta.columnMapping.id": 8, "delta.columnMapping.physicalName": "col-8"}
    within = {"type": "struct", "fields": [{"name": "u", "type": "long", "nullable": True, "metadata": inner}]}
    fields = [{"name": "s", "type": within, "nullable": False, "metadata": names}]
    table = StructType.fromJson({"type": "struct", "fields": fields})
    plain = StructType([StructField("s", StructType([StructField("u", LongType())]))])
    assert lake_schema(table, "none", ()).stored == plain
    assert lake_schema(table, "name", ()).stored.simpleString() == "struct<col-7:struct<col-8:bigint>>"
    by_id = lake_schema(table, "id", ()).stored
    assert by_id["s"].metadata == {FIELD_ID: 7} and by_id["s"].dataType["u"].metadata == {FIELD_ID: 8}
    assert {lake_schema(table, mode, ()).columns.json() for mode in ("none", "name", "id")} == {plain.json()}


# --- What happens to the table between pin and read


def test_a_table_that_was_dropped_since_it_was_pinned_is_refused(table):
    snapshot = pin("t", config(table))
    snapshot.check_unchanged()
    shutil.rmtree(table)
    with pytest.raises(EtlError, match=r"t\.path = .*: the table is gone since version 1 of it was pinned"):
        snapshot.check_unchanged()


def test_a_vacuumed_version_is_refused_with_the_versions_that_are_whole(table):
    deltalake.DeltaTable(str(table)).optimize.compact()
    deltalake.write_deltalake(str(table), ROWS, mode="append")
    old, new = (pin("t", config(table, versionAsOf=v)) for v in (1, 3))
    deltalake.DeltaTable(str(table)).vacuum(retention_hours=0, dry_run=False, enforce_retention_duration=False)
    new.check_unchanged()
    with pytest.raises(EtlError) as caught:
        old.check_unchanged()
    message = str(caught.value)
    assert "data files of version 1 are gone, 4 of 4, such as day=a/part-" in message
    assert message.endswith("VACUUM has deleted them. Of the newest 20 versions these have all files: [2, 3, 4, 5]")
    assert pin("t", config(table, versionAsOf=1)).fingerprint == old.fingerprint  # so its dataset is still found


# --- Storage, and who reads


def test_a_table_on_s3_is_pinned_by_the_storage_options_of_its_uri(table, monkeypatch):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    server = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        client = boto3.client("s3", endpoint_url=f"http://{host}:{port}", region_name="us-east-1")
        client.create_bucket(Bucket="lake")
        delete_rows(table, {adds(table)[0]["path"]: [0]}, on_disk=True)
        for path in table.rglob("*"):
            if path.is_file():
                client.upload_file(str(path), "lake", f"the/t/{path.relative_to(table)}")
        uri = f"s3://lake/the/t?endpoint_override={host}:{port}&scheme=http&region=us-east-1"
        found = pin("t", config(uri))
        assert found.fingerprint == pin("t", config(table)).fingerprint and found.version == 2
        found.check_unchanged()
        assert found.files._spark_path(found.files.files[0]).startswith("s3://lake/the/t/day=a/part-")
        client.delete_object(Bucket="lake", Key=f"the/t/{found.files.files[0].path}")
        with pytest.raises(EtlError, match=r"data files of version 2 are gone, 1 of 4,"):
            found.check_unchanged()
    finally:
        server.stop()


@pytest.mark.parametrize(
    ("extensions", "jar", "used"),
    [
        (CONNECTOR, True, True),
        (f"org.other.Extension, {CONNECTOR}", True, True),
        (CONNECTOR, False, False),
        ("", True, False),
        (f"{CONNECTOR}Not", True, False),
    ],
)
def test_sparks_connector_is_used_where_it_is_configured_and_its_jar_is_there(extensions, jar, used):
    asked = []
    assert uses_connector(extensions, lambda name: asked.append(name) or jar) is used
    assert asked in ([], [CONNECTOR])


def test_a_table_partitioned_by_bytes_is_refused_unless_the_column_is_left_out(tmp_path):
    rows = pa.table({"k": pa.array([b"a", b"\x00\xff", b"%41"]), "n": [1, 2, 3]})
    deltalake.write_deltalake(str(tmp_path / "t"), rows, partition_by=["k"])
    with pytest.raises(EtlError, match=r"sources\.t: the table is partitioned by 'k', which is binary, .*`columns`"):
        pin("t", config(tmp_path / "t"))
    assert len(pin("t", config(tmp_path / "t", columns={"n": "bigint"})).paths) == 3
