"""Which files a snapshot has, what is deleted in them, and what is refused by name. Real tables, no Spark."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from sparkring.etl.errors import EtlError
from sparkring.etl.sources.iceberg.files import deleted_rows, field_ids, footers, gone
from sparkring.etl.sources.iceberg.places import split_host
from tests.etl.sources.iceberg.tables import (
    append_orc,
    catalog_at,
    delete_by_position,
    delete_by_value,
    partitioned,
    paths,
    pinned,
)


@pytest.fixture
def catalog(tmp_path):
    with catalog_at(tmp_path) as made:
        yield made


def test_equality_deletes_are_refused(catalog):
    table = partitioned(catalog, days=2)
    delete_by_value(table, paths(table)[0], "n", 1)
    with pytest.raises(
        EtlError, match=r"sources\.t: the table has equality deletes \(.*-deletes\.parquet\), .*rewrite_data_files"
    ):
        pinned()


def test_files_of_other_formats_are_refused(catalog):
    table = partitioned(catalog, days=1)
    append_orc(table)
    with pytest.raises(
        EtlError, match=r"sources\.t: file:.*\.orc is a file of ORC, and only Parquet is read; set write"
    ):
        pinned()


def test_deletes_by_position_are_of_their_file_and_each_row_once(catalog):
    table = partitioned(catalog, days=2)
    table.append(table.scan().to_arrow())
    one, other = paths(table)[:2]
    before = pinned()
    delete_by_position(table, one, [0])
    delete_by_position(table, one, [0])
    snapshot = pinned()
    rows = deleted_rows("", snapshot.version, snapshot.files)
    assert {path: found.tolist() for path, found in rows.items() if len(found)} == {one: [0]}
    assert rows[one].dtype == np.int64 and other in {file.path for file in snapshot.files}
    assert not any(file.deletes for file in before.files)


def test_files_that_are_gone_are_named_by_all_that_open_them(catalog):
    table = partitioned(catalog, days=2)
    snapshot = pinned()
    assert gone(snapshot.version, snapshot.files) == []
    assert {i for schema in footers("k", snapshot.version, snapshot.files) for i in field_ids(schema)} == {1, 2, 3, 4}
    table.io.delete(paths(table)[1])
    assert [problem.split(":")[-1] for problem in gone(snapshot.version, snapshot.files)] == [
        " is gone; was it expired, or the table dropped? Run again, which reads the table as it is then"
    ]
    with pytest.raises(EtlError, match=r"^k: 1 of the table's files cannot be read:\n  - file:.*parquet: is gone; "):
        footers("k", snapshot.version, snapshot.files)


def test_field_ids_are_found_at_any_depth():
    def field(name, kind, number):
        return pa.field(name, kind, metadata={"PARQUET:field_id": str(number)})

    inner = pa.struct([field("a", pa.int64(), 5), pa.field("b", pa.int64())])
    kinds = [pa.list_(field("element", inner, 4)), pa.map_(pa.string(), field("value", inner, 7)), inner]
    assert list(field_ids(pa.schema([field(str(n), kind, n) for n, kind in enumerate(kinds)]))) == [
        0,
        4,
        5,
        1,
        7,
        5,
        2,
        5,
    ]
    assert list(field_ids(pa.schema([("a", inner.field(1).type)]))) == []


def test_a_local_path_is_the_same_however_it_is_written():
    for path in ("/a/b%20c", "file:/a/b%20c", "file:///a/b%20c"):
        assert split_host(path) == ("", "/a/b%20c")
    assert split_host("s3://bucket/a//b") == ("s3://bucket", "/a//b")
