"""Which folders of a partitioned table are opened, and what their names mean. No Spark."""

import datetime as dt
import logging
from decimal import Decimal
from urllib.parse import unquote_plus

import boto3
import pyarrow.fs as pafs
import pytest
from moto.server import ThreadedMotoServer

from sparkring.conf.sources import FilesSource
from sparkring.etl.errors import EtlError
from sparkring.etl.sources.pin import pin

DAY_COUNTRY = {"day": "date", "country": "string"}


def write(root, *paths):
    for path in paths:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text("a\n1\n")


def config(path, partitions=DAY_COUNTRY, **more):
    columns = {} if more.get("format") == "text" else {"a": "int"}
    return FilesSource.model_validate({"path": str(path), "columns": columns, "partitions": partitions} | more)


def values_of(path, partitions=DAY_COUNTRY, **more):
    return {file.path: file.partition for file in pin("t", config(path, partitions, **more)).listed.files}


def test_names_of_folders_are_values_of_the_declared_types(tmp_path):
    write(tmp_path, "day=2024-01-31/country=D%C3%A9%20%2F/x.csv", "day=__HIVE_DEFAULT_PARTITION__/country=é%/sub/y.csv")
    write(tmp_path, "_SUCCESS", "day=2024-01-31/.x.csv", "day=2024-01-31/country=a=b/z.csv", "day=2024-01-31/notes.txt")
    assert values_of(tmp_path) == {
        "day=2024-01-31/country=D%C3%A9%20%2F/x.csv": (dt.date(2024, 1, 31), "Dé /"),
        "day=2024-01-31/country=a=b/z.csv": (dt.date(2024, 1, 31), "a=b"),
        "day=__HIVE_DEFAULT_PARTITION__/country=é%/sub/y.csv": (None, "é%"),
    }


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        ("int", "01", 1),
        ("bigint", "-9223372036854775808", -(2**63)),
        ("decimal(4,2)", "1.5", Decimal("1.5")),
        ("double", "0.1", 0.1),
        ("boolean", "true", True),
        ("timestamp", "2024-01-31 10%3A00%3A00.5", dt.datetime(2024, 1, 31, 10, 0, 0, 500_000, dt.UTC)),
        ("timestamp_ntz", "2024-01-31 10%3A00%3A00", dt.datetime(2024, 1, 31, 10)),
    ],
)
def test_every_type_of_a_partition_column_is_parsed_exactly(tmp_path, kind, name, value):
    write(tmp_path, f"p={name}/x.csv")
    assert values_of(tmp_path, {"p": kind}) == {f"p={name}/x.csv": (value,)}


def test_a_partition_column_may_begin_as_hidden_files_do(tmp_path):
    write(tmp_path, "_h=1/x.csv", "_tmp/y.csv", "_h=2/_x.csv")
    assert values_of(tmp_path, {"_h": "int"}) == {"_h=1/x.csv": (1,)}


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("day=2024-13-01/country=a/x.csv", "day=2024-13-01' is declared date, and its value '2024-13-01' is no date"),
        ("day=/country=a/x.csv", "day=' gives 'day' no value; null is written day=__HIVE_DEFAULT_PARTITION__"),
        ("day=2024-01-31/country=%FF/x.csv", "is declared string, and its value '%FF' is no text in UTF-8"),
        ("day=2024-01-31/x.csv", r"day=2024-01-31/x.csv' is in no folder country=..."),
        ("x.csv", "x.csv' is in no folder day=..."),
        ("country=a/day=2024-01-31/x.csv", "country=a' stands where a folder day=... is declared"),
        ("Day=2024-01-31/country=a/x.csv", "Day=2024-01-31' stands where a folder day=... is declared"),
        ("2024-01-31/country=a/x.csv", "2024-01-31' stands where a folder day=... is declared"),
        ("day=2024-01-31/country=a/hour=3/x.csv", "hour=3' is no declared partition; add its column to partitions"),
    ],
)
def test_a_folder_that_is_no_declared_partition_is_named(tmp_path, path, words):
    write(tmp_path, "day=2024-01-30/country=b/x.csv", path)
    with pytest.raises(EtlError, match=r"^etl\.sources\.t\.path = ") as caught:
        values_of(tmp_path)
    assert words in str(caught.value)


@pytest.mark.parametrize("kind", ["binary", "array<int>", "integer", "decimal(50,2)", "varchar(3)"])
def test_a_type_that_no_folder_can_have_is_refused(tmp_path, kind):
    write(tmp_path, "p=1/x.csv")
    with pytest.raises(EtlError, match=r"etl\.sources\.t\.partitions\.p = .*not the type of a partition column"):
        values_of(tmp_path, {"p": kind})


@pytest.mark.parametrize("path", ["day=*", "day=2024-01-30/country=b/x.csv", "nowhere"])
def test_the_path_of_a_partitioned_table_is_its_folder(tmp_path, path):
    write(tmp_path, "day=2024-01-30/country=b/x.csv")
    with pytest.raises(EtlError, match=r"etl\.sources\.t\.path.*(has wildcards|is no folder); the path of a table"):
        values_of(tmp_path / path)


@pytest.fixture
def year(tmp_path):
    days = [dt.date(2024, 1, 1) + dt.timedelta(days=n) for n in range(365)]
    write(tmp_path, *(f"day={day}/country={country}/x.csv" for day in days for country in ("a", "b")))
    return tmp_path


def test_where_opens_the_folders_of_the_days_it_names_and_no_other(year, monkeypatch):
    opened = []
    real = pafs.FileSelector
    monkeypatch.setattr(pafs, "FileSelector", lambda path, **more: opened.append(path) or real(path, **more))
    where = "day BETWEEN '2024-03-01' AND '2024-03-28' AND country = 'b'"
    found = values_of(year, where=where)
    assert len(found) == 28 and {country for _, country in found.values()} == {"b"}
    days = {path.split("/day=")[1][:10] for path in opened if "/day=" in path}
    assert days == {f"2024-03-{n:02}" for n in range(1, 29)}
    assert not [path for path in opened if path.endswith("country=a")]


def test_on_an_object_store_only_the_folders_that_where_names_are_listed(monkeypatch, caplog):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    server = ThreadedMotoServer(port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        client = boto3.client("s3", endpoint_url=f"http://{host}:{port}")
        client.create_bucket(Bucket="lake")
        for number in range(1, 31):
            key = f"t/day=2024-03-{number:02}/country=D%C3%A9 é/x.csv"
            client.put_object(Bucket="lake", Key=key, Body=b"a\n1\n")
        uri = f"s3://lake/t?endpoint_override={host}:{port}&scheme=http"
        with caplog.at_level(logging.INFO, "werkzeug"):
            caplog.clear()
            found = values_of(uri, where="day > '2024-03-28'")
    finally:
        server.stop()
    assert list(found.values()) == [(dt.date(2024, 3, 29), "Dé é"), (dt.date(2024, 3, 30), "Dé é")]
    listed = [unquote_plus(line) for line in caplog.messages if "list-type=2" in line]
    assert listed and {line.split("day=")[1][:10] for line in listed if "day=" in line} == {"2024-03-29", "2024-03-30"}


def test_a_where_that_keeps_nothing_says_so(year):
    with pytest.raises(EtlError, match=r"no csv files in the partitions that where = .* keeps \(365 folders were seen"):
        values_of(year, where="day = '2030-01-01'")


def test_an_error_in_where_names_its_key(year):
    with pytest.raises(EtlError, match=r"^etl\.sources\.t\.where = 'hour = 3': hour is not a partition column"):
        values_of(year, where="hour = 3")


def test_a_partitioned_folder_of_a_lake_table_is_refused(year):
    write(year, "_delta_log/00.json")
    with pytest.raises(EtlError, match="is a table of Delta"):
        values_of(year, where="day = '2024-03-01'")
