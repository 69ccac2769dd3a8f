"""Damaged metadata of a table is one error, in bounded memory, whatever is damaged in it."""

from __future__ import annotations

import bz2
import gzip
import json
import random
import tracemalloc
import zlib
from pathlib import Path

import pyarrow as pa
import pytest
import zstandard

from sparkring.etl.errors import EtlError
from sparkring.etl.sources.iceberg.avro import MOST_BYTES, check_avro
from tests.etl.sources.iceberg.tables import catalog_at, pinned
from tests.fuzz.mutate import mutated

SYNC = b"s" * 16
ZEROS = bytes(MOST_BYTES + 1)


def integer(value: int) -> bytes:
    rest, found = (value << 1) ^ (value >> 63), b""
    while rest > 0x7F:
        rest, found = rest >> 7, found + bytes([rest & 0x7F | 0x80])
    return found + bytes([rest])


def sized(data: bytes) -> bytes:
    return integer(len(data)) + data


def avro(schema, block: bytes, records: int = 1, codec: str = "null") -> bytes:
    """An Avro file of one block."""
    meta = {"avro.schema": json.dumps(schema), "avro.codec": codec}
    head = integer(len(meta)) + b"".join(sized(k.encode()) + sized(v.encode()) for k, v in meta.items()) + integer(0)
    return b"Obj\x01" + head + SYNC + integer(records) + sized(block) + SYNC


def record(kind) -> dict:
    return {"type": "record", "name": "r", "fields": [{"name": "a", "type": kind}]}


def raw_deflate(data: bytes) -> bytes:
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    return packer.compress(data) + packer.flush()


@pytest.mark.parametrize(
    ("codec", "packed"),
    [("deflate", raw_deflate), ("bzip2", bz2.compress), ("zstandard", zstandard.ZstdCompressor().compress)],
)
def test_a_block_that_decompresses_without_end_is_refused_in_bounded_memory(codec, packed):
    data = avro("bytes", packed(ZEROS * 4), codec=codec)
    assert len(data) < MOST_BYTES / 100
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="decompresses to more than"):
            check_avro(data)
        assert tracemalloc.get_traced_memory()[1] < 3 * MOST_BYTES
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("schema", "block"),
    [
        (record({"type": "array", "items": "null"}), integer(1 << 40) + integer(0)),
        (record({"type": "array", "items": {"type": "record", "name": "e", "fields": []}}), integer(1 << 40)),
        (record({"type": "array", "items": "int"}), integer(1 << 62) + integer(0)),
        (record({"type": "array", "items": "int"}), integer(-(1 << 62)) + integer(0)),
        (record({"type": "map", "values": "bytes"}), integer(1 << 62)),
        (record("bytes"), integer(1 << 62)),
        (record("string"), integer(-5)),
        (record("long"), b"\xff" * 20),
        (record({"type": "fixed", "name": "f", "size": 1 << 50}), b"a"),
        (record(["null", "int"]), integer(7)),
        (record("double"), b"1"),
        (record("long"), b""),
        (record("r"), b"a"),
        (record(None), b"a"),
        (7, b"a"),
        ({"type": "record", "name": "r", "fields": 3}, b"a"),
    ],
)
def test_counts_and_lengths_beyond_the_file_are_refused_whatever_the_schema(schema, block):
    with pytest.raises(ValueError, match=r"damaged|schema|has a block"):
        check_avro(avro(schema, block))


def test_a_block_of_more_records_than_bytes_is_refused():
    nothing = {"type": "record", "name": "r", "fields": []}
    with pytest.raises(ValueError, match=f"block of {1 << 40} records in 1 byte"):
        check_avro(avro(nothing, b"a", records=1 << 40))


@pytest.mark.parametrize(
    ("kind", "block"),
    [
        ({"type": "array", "items": "null"}, integer(1000) + integer(0)),
        ({"type": "array", "items": {"type": "record", "name": "e", "fields": []}}, integer(900) + integer(0)),
        ({"type": "map", "values": "int"}, integer(900) + bytes(1800) + integer(0)),
        ("long", integer(1)),
    ],
)
def test_few_bytes_that_would_be_many_objects_are_refused(monkeypatch, kind, block):
    """Repeated, they are packed into some hundred bytes."""
    monkeypatch.setattr("sparkring.etl.sources.iceberg.avro.MOST_OBJECTS", 100_000)
    count = 10_000
    with pytest.raises(ValueError, match="holds more than 100000 values"):
        check_avro(avro(record(kind), raw_deflate(block * count + bytes(1000)), count + 1000, "deflate"))


@pytest.fixture
def table(tmp_path):
    with catalog_at(tmp_path) as catalog:
        made = catalog.create_table(
            "db.t", pa.schema([("n", pa.int64())]), properties={"write.avro.compression-codec": "null"}
        )
        made.append(pa.table({"n": [1, 2]}))
        yield made


def path_of(location: str) -> Path:
    return Path(location.removeprefix("file://"))


def test_whatever_is_damaged_in_the_metadata_is_one_error(table):
    """Bytes and values of each file in turn; `make fuzz` does it many times more."""
    snapshot = table.current_snapshot()
    manifest = snapshot.manifests(table.io)[0].manifest_path
    rng, refused = random.Random(0), 0
    for location in (table.metadata_location, snapshot.manifest_list, manifest):
        file = path_of(location)
        whole = file.read_bytes()
        for _ in range(100):
            file.write_bytes(mutated(rng, whole))
            try:
                pinned(path=table.metadata_location)
            except EtlError as error:
                assert str(error).startswith("etl.sources.t") and "\n" not in str(error)
                refused += 1
        file.write_bytes(whole)
    assert refused > 150 and len(pinned().files) == 1


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"current-snapshot-id": 999}, "current-snapshot-id 999 is not one of the table's snapshots"),
        ({"current-snapshot-id": None}, "current-snapshot-id is None, and the branch main is at"),
        ({"current-snapshot-id": -1}, "current-snapshot-id is None, and the branch main is at"),
        ({"snapshots": []}, "is not one of the table's snapshots"),
        ({"refs": {"main": {"snapshot-id": 999, "type": "branch"}}}, "the branch main is at 999"),
    ],
)
def test_a_current_snapshot_that_is_not_in_the_list_is_damage_not_an_empty_table(table, changed, words):
    file = path_of(table.metadata_location)
    file.write_text(json.dumps(json.loads(file.read_text()) | changed))
    with pytest.raises(EtlError, match=f"metadata is damaged.*{words}"):
        pinned()


def test_a_tag_of_a_snapshot_that_is_not_in_the_list_is_damage(table):
    file = path_of(table.metadata_location)
    found = json.loads(file.read_text())
    found["refs"]["eod"] = {"snapshot-id": 999, "type": "tag"}
    file.write_text(json.dumps(found))
    with pytest.raises(EtlError, match=r"metadata is damaged.*tag 'eod' is a snapshot that is not"):
        pinned(tag="eod")


def test_a_compressed_metadata_file_is_read_within_the_bound(table, tmp_path):
    """Named by a path, and by a catalog."""
    whole = path_of(table.metadata_location)
    packed = whole.with_name("v9.gz.metadata.json")
    packed.write_bytes(gzip.compress(whole.read_bytes()))
    assert pinned(path=str(packed)).fingerprint == pinned().fingerprint
    packed.write_bytes(gzip.compress(ZEROS * 4))
    with pytest.raises(EtlError, match=r"cannot be opened: .*v9\.gz\.metadata\.json: has more than \d+ bytes"):
        pinned(path=str(packed))
    whole.write_bytes(ZEROS)
    with pytest.raises(EtlError, match=r"cannot be opened: .*has more than \d+ bytes"):
        pinned()


@pytest.mark.parametrize("value", ["{}", "[]", "1", '{"snapshot-id":1,"timestamp-ms":1}'])
@pytest.mark.parametrize("key", ["snapshot-log", "unknown"])
def test_a_metadata_file_of_too_many_values_is_refused(table, monkeypatch, key, value):
    """Packed, it has some hundred bytes."""
    monkeypatch.setattr("sparkring.etl.sources.iceberg.io.MOST_VALUES", 20_000)
    found = json.loads(path_of(table.metadata_location).read_text()) | {key: 0}
    text = json.dumps(found).replace(f'"{key}": 0', f'"{key}": [{",".join([value] * 20_000)}]')
    packed = path_of(table.metadata_location).with_name("v9.gz.metadata.json")
    packed.write_bytes(gzip.compress(text.encode()))
    with pytest.raises(EtlError, match=r"v9\.gz\.metadata\.json: holds more than 20000 values"):
        pinned(path=str(packed))


def test_a_list_that_names_a_manifest_twice_is_damage(table):
    """Else a small list of one manifest would be any number of files."""
    file = path_of(table.current_snapshot().manifest_list)
    block = file.read_bytes().split(file.read_bytes()[-16:])[1]
    file.write_bytes(file.read_bytes() + block + file.read_bytes()[-16:])
    with pytest.raises(EtlError, match=r"metadata is damaged.*names a manifest twice"):
        pinned()


@pytest.mark.parametrize("codec", ["null", "gzip", "zstd"])
def test_a_table_whose_rows_were_all_deleted_is_empty(tmp_path, codec):
    with catalog_at(tmp_path) as catalog:
        properties = {"write.avro.compression-codec": codec}
        made = catalog.create_table("db.t", pa.schema([("n", pa.int64())]), properties=properties)
        made.append(pa.table({"n": [1, 2]}))
        assert len(pinned().files) == 1
        made.delete()
        assert pinned().files == ()
