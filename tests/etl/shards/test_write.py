"""The write task without Spark: exact row groups, honest hashes, refusals that name the column."""

import hashlib
from urllib.request import Request, urlopen

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from moto.server import ThreadedMotoServer

from sparkring.conf.manifest import Column
from sparkring.conf.storage import open_storage
from sparkring.etl.shards.write import SHARD, WriteTask, worker_uri, write_shard


def run(tmp_path, columns, batches, row_group=4):
    task = WriteTask(
        str(tmp_path),
        ("d/train-00000.parquet", "d/train-00001.parquet"),
        (0, 100),
        tuple(columns),
        (row_group, row_group),
        "snappy",
    )
    records = [r for b in write_shard(task, iter(batches)) for r in b.to_pylist()]
    return records[0] if records else None


def batch(shard=0, **columns):
    rows = len(next(iter(columns.values())))
    return pa.RecordBatch.from_pydict({**columns, SHARD: pa.array([shard] * rows, pa.int32())})


X = Column(name="x", dtype="int32")


@pytest.mark.parametrize("sizes", [[10], [1] * 10, [3, 0, 7], [4, 4, 2], [9, 1]])
def test_row_groups_do_not_depend_on_the_batches(tmp_path, sizes):
    values, batches = list(range(10)), []
    for size in sizes:
        batches.append(batch(x=pa.array(values[:size], pa.int32())))
        values = values[size:]
    record = run(tmp_path, [X], batches)
    path = tmp_path / "d/train-00000.parquet"
    assert record["rows"] == 10 and record["row_groups"] == [4, 4, 2] and record["problem"] is None
    assert record["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest() and record["bytes"] == path.stat().st_size
    footer = pq.read_metadata(path)
    assert [footer.row_group(i).num_rows for i in range(footer.num_row_groups)] == [4, 4, 2]
    assert pq.read_table(path)["x"].to_pylist() == list(range(10))
    assert not footer.schema.to_arrow_schema().field("x").nullable


def test_every_row_carries_its_number_for_next_to_nothing(tmp_path):
    """Row groups of the second shard go on from its first row; 16,384 numbers take less than a tenth of a byte each."""
    record = run(tmp_path, [X], [batch(1, x=pa.array(range(10), pa.int32()))])
    path = tmp_path / "d/train-00001.parquet"
    assert record["rows"] == 10 and pq.read_table(path)["sparkring_row"].to_pylist() == list(range(100, 110))
    assert [pq.ParquetFile(path).read_row_group(g)["sparkring_row"][0].as_py() for g in range(3)] == [100, 104, 108]
    run(tmp_path, [X], [batch(x=pa.array(range(16384), pa.int32()))], row_group=16384)
    chunk = pq.read_metadata(tmp_path / "d/train-00000.parquet").row_group(0).column(1)
    assert chunk.path_in_schema == "sparkring_row" and chunk.total_compressed_size < 0.1 * 16384
    assert not pq.read_schema(path).field("sparkring_row").nullable


def test_a_flipped_bit_in_a_page_is_found_by_the_pages_checksum(tmp_path):
    values = np.random.default_rng(0).random(4000)  # does not compress: no other check would see it
    run(tmp_path, [Column(name="x", dtype="float64")], [batch(x=values)], row_group=4000)
    path = tmp_path / "d/train-00000.parquet"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(OSError, match="CRC"):
        pq.ParquetFile(path, page_checksum_verification=True).read()


def test_workers_are_given_no_relative_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert worker_uri(open_storage("sets").at("t")) == str(tmp_path / "sets" / "t")
    assert worker_uri(open_storage("file:///x/y")) == "/x/y"
    uri = "s3://bucket/sets?region=us-east-1"
    assert worker_uri(open_storage(uri)) == uri


def test_an_empty_partition_writes_nothing(tmp_path):
    assert run(tmp_path, [X], []) is None and not list(tmp_path.iterdir())


def test_rows_of_two_shards_in_one_partition_are_an_error(tmp_path):
    with pytest.raises(ValueError, match="shard 1 arrived with those of shard 0"):
        run(tmp_path, [X], [batch(x=pa.array([1], pa.int32())), batch(1, x=pa.array([2], pa.int32()))])
    assert not list((tmp_path / "d").iterdir())


@pytest.mark.parametrize(
    ("column", "array", "words"),
    [
        (X, pa.array([1, None], pa.int32()), "column 'x' has nulls"),
        (
            Column(name="x", dtype="float32", layout="vector", shape=(2,)),
            pa.array([[1.0, 2.0], [1.0]]),
            "found 1 value for 2",
        ),
        (Column(name="x", dtype="float32", layout="ragged", logical="array<float>"), pa.array([[1.0, None]]), "inside"),
        (Column(name="x", dtype="float16"), pa.array([1.0, 7e4], pa.float32()), "does not fit float16: it holds 70000"),
        (
            Column(name="x", dtype="string", role="input", nulls="keep"),
            pa.array([b"a", b"\xff"], pa.binary()).view(pa.string()),
            "column 'x' is text and holds bytes that are not UTF-8",
        ),
    ],
)
def test_what_a_column_cannot_hold_is_reported_and_leaves_no_file(tmp_path, column, array, words):
    record = run(tmp_path, [column], [batch(x=array)])
    assert words in record["problem"] and record["rows"] == 0
    assert not list((tmp_path / "d").iterdir())


def test_halves_are_rounded_once_where_they_were_declared(tmp_path):
    values = np.array([0.1, 1 / 3, 65504.0, np.inf], np.float32)
    columns = [
        Column(name="x", dtype="float16"),
        Column(name="v", dtype="float16", layout="vector", shape=(1,), nulls="mask"),
    ]
    vectors = pa.array([[0.1], None, [2.0], [1 / 3]], pa.list_(pa.float32()))
    run(tmp_path, columns, [batch(x=pa.array(values), v=vectors)])
    stored = pq.read_table(tmp_path / "d/train-00000.parquet")
    assert stored["x"].to_pylist() == values.astype(np.float16).astype(np.float32).tolist()
    assert stored["v"].to_pylist() == [[float(np.float16(0.1))], None, [2.0], [float(np.float16(1 / 3))]]


def test_a_matrix_column_keeps_its_levels(tmp_path):
    column = Column(name="m", dtype="int64", layout="vector", shape=(2, 3))
    matrix = [[[1, 2, 3], [4, 5, 6]], [[7, 8, 9], [0, 1, 2]]]
    run(tmp_path, [column], [batch(m=pa.array(matrix))])
    assert pq.read_table(tmp_path / "d/train-00000.parquet")["m"].to_pylist() == matrix
    record = run(tmp_path, [column], [batch(m=pa.array([[[1, 2, 3], [4, 5]]]))])
    assert "found 2 values for 3" in record["problem"]


def test_files_go_straight_to_an_object_store(monkeypatch):
    """No part file and no rename there: an object appears when its stream closes."""
    for name, value in (("ACCESS_KEY_ID", "x"), ("SECRET_ACCESS_KEY", "x"), ("REGION", "us-east-1")):
        monkeypatch.setenv(f"AWS_{name}", value)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        uri = f"s3://bucket/sets?endpoint_override={host}:{port}&scheme=http&region=us-east-1"
        storage = open_storage(uri)
        urlopen(Request(f"http://{host}:{port}/bucket", method="PUT")).close()
        record = run(uri, [X], [batch(x=pa.array(range(10), pa.int32()))])
        assert record["rows"] == 10 and storage.list_files() == ["d/train-00000.parquet"]
        assert storage.sha256("d/train-00000.parquet") == record["sha256"]
    finally:
        server.stop()
