"""What a pinned table is known by: its fingerprint, its lineage, and who reads it. Real tables, no Spark."""

from __future__ import annotations

import datetime as dt
from dataclasses import replace

import pyarrow as pa
import pytest
from pyiceberg.types import LongType

from sparkring.etl.errors import EtlError
from sparkring.etl.sources.iceberg.files import IcebergFile
from sparkring.etl.sources.iceberg.source import CONNECTOR, fingerprint, lake_files, uses_connector
from sparkring.etl.sources.lake_files import LakeFile
from tests.etl.sources.iceberg.tables import catalog_at, partitioned, pinned


@pytest.fixture
def catalog(tmp_path):
    with catalog_at(tmp_path) as made:
        yield made


def test_the_fingerprint_is_the_snapshots_however_it_is_named(catalog):
    table = partitioned(catalog, days=28)
    first = table.current_snapshot()
    table.manage_snapshots().create_tag(first.snapshot_id, "eod").commit()
    before = pinned(snapshot_id=first.snapshot_id)
    table.append(
        pa.table({"day": [dt.date(2025, 1, 1)], "at": [None], "who": ["a"], "n": [1]}, schema=table.schema().as_arrow())
    )
    again = pinned(snapshot_id=first.snapshot_id)
    same = [again, pinned(tag="eod"), pinned(as_of_timestamp=first.timestamp_ms), pinned(where=None, tag="eod")]
    assert {snapshot.fingerprint for snapshot in same} == {before.fingerprint}
    others = [pinned(), pinned(tag="eod", where="n = 1"), pinned(tag="eod", columns={"n": "bigint"})]
    assert len({before.fingerprint, *[snapshot.fingerprint for snapshot in others]}) == 4
    assert pinned(where="day < '2025-01-01'").fingerprint == before.fingerprint  # the new file is not part of it
    lineage = before.lineage()
    assert lineage["snapshot-id"] == first.snapshot_id and lineage["table-uuid"] == str(table.metadata.table_uuid)
    assert lineage["files"] == 28 and lineage["bytes"] == sum(
        t.file.file_size_in_bytes for t in table.scan(snapshot_id=first.snapshot_id).plan_files()
    )


def test_the_fingerprint_is_not_of_the_place_and_is_of_the_files(catalog):
    partitioned(catalog, days=2)
    snapshot = pinned()
    version, columns, files = snapshot.version, snapshot.columns, snapshot.files
    here = version.metadata.location
    moved = [replace(file, path=file.path.replace(here, "s3://lake/t")) for file in files]
    elsewhere = replace(version, metadata=version.metadata.model_copy(update={"location": "s3://lake/t/"}))
    assert fingerprint(elsewhere, columns, moved) == fingerprint(version, columns, files) == snapshot.fingerprint
    delete = IcebergFile(f"{here}/data/d.parquet", 9, 1)
    for other in [
        files[1:],
        [replace(files[0], bytes=1), files[1]],
        [replace(files[0], path=files[0].path + "x"), files[1]],
        [replace(files[0], deletes=(delete,)), files[1]],
        [replace(files[0], identity=((1, 5),)), files[1]],
    ]:
        assert fingerprint(version, columns, other) != snapshot.fingerprint


def test_a_column_that_was_dropped_and_added_again_is_another(catalog):
    table = partitioned(catalog, days=2)
    before = pinned()
    with table.update_schema() as update:
        update.delete_column("n")
    with table.update_schema() as update:
        update.add_column("n", LongType())
    assert pinned().columns.simpleString() == before.columns.simpleString()
    assert pinned().fingerprint != before.fingerprint


def test_a_condition_on_no_column_is_refused_with_those_that_it_may_name(catalog):
    partitioned(catalog, days=1)
    with pytest.raises(EtlError, match=r"where = 'x = 1': x is not a comparable column; comparable columns are .*'n'"):
        pinned(where="x = 1")


def test_files_are_below_the_last_folder_they_share():
    found = lake_files("", [LakeFile("/a/b/day=1/x", 1), LakeFile("/a/b/day=2/y", 1)], None)
    assert found.storage.root == "/a/b" and [file.path for file in found.files] == ["day=1/x", "day=2/y"]
    one = lake_files("", [LakeFile("/a/b/x", 1)], None)
    assert one.storage.root == "/a/b" and one.files[0].path == "x"


def test_sparks_connector_reads_a_snapshot_whose_own_schema_is_wanted(catalog):
    table = partitioned(catalog, days=1)
    first = table.current_snapshot().snapshot_id
    table.manage_snapshots().create_branch(first, "audit").commit()
    with table.update_schema() as update:
        update.add_column("x", LongType())
    by_id, branch = pinned(snapshot_id=first).version, pinned(branch="audit").version
    assert uses_connector(by_id, True, lambda name: name == CONNECTOR)
    assert not uses_connector(by_id, True, lambda _: False)
    assert not uses_connector(by_id, False, lambda _: True)
    assert not uses_connector(branch, True, lambda _: True)
