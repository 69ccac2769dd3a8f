"""What workers do with files: check each, then give its rows with the values of its folder. No session."""

import datetime as dt

import pyarrow as pa
import pytest
from pyspark.sql.types import DateType, IntegerType, StructField, StructType

from sparkring.conf.sources import FilesSource
from sparkring.conf.sources.files import CsvOptions
from sparkring.etl.sources.files import task as file_task
from sparkring.etl.sources.files.listing import list_files
from sparkring.etl.sources.files.task import CsvFormat, FileTask, JsonFormat

V, DAY = StructField("v", IntegerType()), StructField("day", DateType())
DAYS = StructType([DAY])


def task(root, kind, columns=(V,)):
    declared = {f.name: f.dataType.simpleString() for f in columns}
    listed = list_files("t", FilesSource(path=str(root), format=kind, columns=declared, partitions={"day": "date"}))
    schema = StructType(list(columns))
    names = dict.fromkeys([*schema.names, "day"])
    return FileTask(
        str(root),
        listed.files,
        JsonFormat(schema) if kind == "json" else CsvFormat(schema, CsvOptions()),
        DAYS,
        tuple(names),
    )


def run(step, count):
    batches = [pa.record_batch({"file": pa.array([n], pa.int32())}) for n in range(count)]
    return [row for batch in step(iter(batches)) for row in batch.to_pylist()]


def write(root, day, name, text):
    (root / f"day={day}").mkdir(exist_ok=True)
    (root / f"day={day}" / name).write_text(text)


def test_rows_have_the_values_of_their_folder(tmp_path):
    write(tmp_path, "2024-01-31", "x.csv", "v\n1\n2\n")
    write(tmp_path, "__HIVE_DEFAULT_PARTITION__", "x.csv", "v\n3\n")
    csv = task(tmp_path, "csv")
    assert run(csv.check, 2) == []
    day = dt.date(2024, 1, 31)
    assert run(csv.read, 2) == [{"v": 1, "day": day}, {"v": 2, "day": day}, {"v": 3, "day": None}]


def test_a_value_of_the_file_that_is_not_its_folders_is_a_problem(tmp_path):
    write(tmp_path, "2024-01-31", "x.csv", "day,v\n2024-01-31,1\n2024-02-01,2\n,3\n")
    write(tmp_path, "__HIVE_DEFAULT_PARTITION__", "x.csv", "day,v\n,3\n2024-01-31,4\n")
    found = [row["problem"] for row in run(task(tmp_path, "csv", (DAY, V)).check, 2)]
    itself = "has the partition column 'day' itself, and there it is"
    assert found == [
        f"day=2024-01-31/x.csv: {itself} '2024-02-01' (and 1 more)",
        f"day=__HIVE_DEFAULT_PARTITION__/x.csv: {itself} '2024-01-31'",
    ]


def test_a_json_file_may_have_the_column_in_some_records(tmp_path):
    write(tmp_path, "2024-01-31", "x.json", '{"v": 1, "day": "2024-01-31"}\n{"v": 2}\n')
    json = task(tmp_path, "json")
    assert run(json.check, 1) == []
    assert [row["v"] for row in run(json.read, 1)] == [1, 2]
    write(tmp_path, "2024-01-31", "x.json", '{"v": 1, "day": "2024-01-30"}\n')
    assert "'2024-01-30'" in run(json.check, 1)[0]["problem"]


def test_undeclared_keys_are_told_up_to_a_limit(tmp_path, monkeypatch):
    write(tmp_path, "2024-01-31", "x.json", '{"k": 1, "l": 1, "m": 1}\n{"l": 1}\n')
    monkeypatch.setattr(file_task, "MOST_KEYS", 2)
    found = [(row["key"], row["records"]) for row in run(task(tmp_path, "json").check, 1)]
    assert found[0] == ("l", 2) and len(found) == 2


@pytest.mark.parametrize(("suffix", "codec"), [("gz", "gzip"), ("bz2", "bz2"), ("zst", "zstd"), ("lz4", "lz4")])
@pytest.mark.parametrize("damage", ["cut", "flipped"])
@pytest.mark.parametrize("kind", ["csv", "json"])
def test_a_compressed_file_that_breaks_in_the_middle_is_named(tmp_path, suffix, codec, damage, kind):
    write(tmp_path, "2024-01-31", "a.csv", "v\n1\n") if kind == "csv" else None
    rows = [str(n * 7919 % 10007) for n in range(20_000)]
    text = "\n".join(["v", *rows] if kind == "csv" else [f'{{"v": {row}}}' for row in rows]) + "\n"
    (tmp_path / "day=2024-02-01").mkdir()
    file = tmp_path / f"day=2024-02-01/b.{kind}.{suffix}"
    with pa.output_stream(str(file), compression=codec) as sink:
        sink.write(text.encode())
    data = bytearray(file.read_bytes())
    half = len(data) // 2
    data[half : half + 40] = bytes(0xA5 ^ byte for byte in data[half : half + 40])
    file.write_bytes(bytes(data[:half] if damage == "cut" else data))
    found = run(task(tmp_path, kind).check, 2 if kind == "csv" else 1)
    assert found and all(row["problem"].startswith(f"day=2024-02-01/b.{kind}.{suffix}: ") for row in found)
