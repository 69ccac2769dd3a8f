"""Which snapshot a recipe means, with which schema, and what is refused by name. Real tables, no Spark."""

from __future__ import annotations

import datetime as dt
import json
import re
import shutil
import sys
from pathlib import Path

import pyarrow as pa
import pytest
from pyiceberg.schema import Schema
from pyiceberg.types import DateType, LongType, NestedField, StringType

from sparkring.etl.errors import EtlError
from sparkring.etl.sources.iceberg.table import INSTALL, instant, metadata_file
from tests.etl.sources.iceberg.tables import catalog_at, pinned

SCHEMA = Schema(
    NestedField(1, "id", LongType()), NestedField(2, "day", DateType()), NestedField(3, "note", StringType())
)


def rows(*ids, **more):
    columns = {"id": pa.array(ids, pa.int64()), "day": [dt.date(2024, 1, i) for i in ids]}
    return pa.table(columns | {name: pa.array([value] * len(ids)) for name, value in more.items()})


@pytest.fixture(scope="module")
def history(tmp_path_factory):
    """A table with two snapshots; between them a column was renamed and another added."""
    with catalog_at(tmp_path_factory.mktemp("history")) as catalog:
        table = catalog.create_table("db.t", SCHEMA)
        table.append(rows(1, 2, note="a"))
        first = table.current_snapshot()
        table.manage_snapshots().create_tag(first.snapshot_id, "eod").create_branch(first.snapshot_id, "audit").commit()
        with table.update_schema() as update:
            update.rename_column("note", "remark").add_column("n", LongType())
        table.append(rows(3, remark="b", n=7))
        second = table.current_snapshot()
        table.manage_snapshots().create_tag(second.snapshot_id, str(first.snapshot_id)).commit()
        yield table, first, second


OLD, NEW = ["id", "day", "note"], ["id", "day", "remark", "n"]


def read_at(**options):
    snapshot = pinned(**options)
    return snapshot.version.snapshot.snapshot_id, snapshot.columns.names


def test_a_snapshot_is_read_with_its_schema_and_a_branch_with_the_tables(history):
    _, first, second = history
    assert read_at() == (second.snapshot_id, NEW)
    assert read_at(branch="main") == (second.snapshot_id, NEW)
    assert read_at(branch="audit") == (first.snapshot_id, NEW)
    assert read_at(tag="eod") == (first.snapshot_id, OLD)
    assert read_at(snapshot_id=first.snapshot_id) == (first.snapshot_id, OLD)


def test_a_tag_named_like_the_id_of_another_snapshot_is_that_tag(history):
    _, first, second = history
    assert read_at(tag=str(first.snapshot_id)) == (second.snapshot_id, NEW)


def test_as_of_timestamp_is_what_was_current_then(history):
    _, first, second = history
    assert read_at(as_of_timestamp=first.timestamp_ms) == (first.snapshot_id, OLD)
    assert read_at(as_of_timestamp=str(second.timestamp_ms - 1)) == (first.snapshot_id, OLD)
    assert read_at(as_of_timestamp=instant(second.timestamp_ms)) == (second.snapshot_id, NEW)
    in_paris = dt.datetime.fromtimestamp(second.timestamp_ms / 1000 + 60, dt.timezone(dt.timedelta(hours=1)))
    assert read_at(as_of_timestamp=in_paris.isoformat()) == (second.snapshot_id, NEW)


def test_as_of_timestamp_follows_a_rollback(tmp_path):
    with catalog_at(tmp_path) as catalog:
        table = catalog.create_table("db.t", SCHEMA)
        table.append(rows(1))
        first = table.current_snapshot()
        table.append(rows(2))
        second = table.current_snapshot()
        table.manage_snapshots().rollback_to_snapshot(first.snapshot_id).commit()
        assert read_at(as_of_timestamp=second.timestamp_ms)[0] == second.snapshot_id
        assert read_at(as_of_timestamp="2999-01-01")[0] == read_at()[0] == first.snapshot_id


def test_what_is_not_there_is_refused_with_what_is(history):
    _, first, second = history
    for options, words in [
        ({"tag": "eof"}, rf"\.tag = 'eof': no such tag; tag names in the table are \['{first.snapshot_id}', 'eod'\]"),
        ({"tag": "audit"}, r"\.tag = 'audit': no such tag; it is a branch: write `branch: audit`; "),
        ({"branch": "x"}, r"\.branch = 'x': no such branch; branch names in the table are \['audit', 'main'\]"),
        ({"snapshot_id": 5}, rf"\.snapshot-id = 5: no such snapshot; .*expired.* 2 snapshots.*{second.snapshot_id} \("),
        ({"as_of_timestamp": 5}, r"\.as-of-timestamp = 5: the table has no snapshot as old as that; there are 2 snap"),
        ({"table": "prod.db.none"}, r"\.table = 'prod.db.none': catalog 'prod' has no such table"),
        ({"table": "prod.no.t"}, r"\.table = 'prod.no.t': catalog 'prod' has no such table"),
        ({"table": "dev.db.t"}, r"\.table = 'dev.db.t': cannot be opened: .*PYICEBERG_CATALOG__DEV__URI"),
        (
            {"columns": {"ID": "bigint"}},
            r"\.columns: the table has no column 'ID'; it has \['id', 'day', 'remark', 'n'\]",
        ),
        ({"where": "week = 3"}, r"\.where = 'week = 3': week is not a"),
    ]:
        with pytest.raises(EtlError, match=r"etl\.sources\.t" + words):
            pinned(**options)


def test_an_expired_snapshot_is_refused_and_one_that_a_tag_holds_is_not(tmp_path):
    with catalog_at(tmp_path) as catalog:
        table = catalog.create_table("db.t", SCHEMA)
        ids = []
        for n in (1, 2, 3):
            table.append(rows(n))
            ids.append(table.current_snapshot().snapshot_id)
        table.manage_snapshots().create_tag(ids[0], "kept").commit()
        table.maintenance.expire_snapshots().older_than(dt.datetime.now() + dt.timedelta(days=1)).commit()
        assert read_at(tag="kept")[0] == ids[0]
        with pytest.raises(EtlError, match=rf"snapshot-id = {ids[1]}: no such snapshot; it may have expired"):
            pinned(snapshot_id=ids[1])


def test_a_table_without_a_snapshot_has_no_files(tmp_path):
    with catalog_at(tmp_path) as catalog:
        catalog.create_table("db.t", SCHEMA)
        snapshot = pinned()
        assert snapshot.files == () and snapshot.lineage()["snapshot-id"] is None
        with pytest.raises(EtlError, match="tag = 'a': no such tag; the table has no tag"):
            pinned(tag="a")


def test_version_3_is_refused(tmp_path):
    """pyiceberg writes none, so the number is changed in the metadata of a table without rows."""
    with catalog_at(tmp_path) as catalog:
        table = catalog.create_table("db.t", SCHEMA)
        file = Path(table.metadata_location.removeprefix("file://"))
        file.write_text(json.dumps(json.loads(file.read_text()) | {"format-version": 3, "next-row-id": 0}))
        with pytest.raises(
            EtlError, match=r"sources\.t: the table has Iceberg's format-version 3, .*'format-version'='2'"
        ):
            pinned()


def test_without_pyiceberg_the_command_that_installs_it_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "pyiceberg.catalog", None)
    with pytest.raises(
        EtlError, match=r"sources\.t\.format = 'iceberg': needs the package pyiceberg .*" + re.escape(INSTALL)
    ):
        pinned()


# --- tables without a catalog


def hadoop_table(table, folder, versions):
    """The table as a Hadoop catalog leaves it: its metadata files are numbered."""
    (folder / "metadata").mkdir(parents=True)
    files = [entry.metadata_file for entry in table.metadata.metadata_log] + [table.metadata_location]
    for version in versions:
        shutil.copy(files[version].removeprefix("file://"), folder / "metadata" / f"v{version}.metadata.json")
    (folder / "metadata/version-hint.text").write_text(str(versions[0]))
    return folder


def test_a_folder_with_numbered_versions_is_the_highest_whatever_the_hint_says(history, tmp_path):
    table, first, second = history
    last = len(table.metadata.metadata_log)
    folder = hadoop_table(table, tmp_path / "t", [2, last])
    allowed = {"allowed_folders": [table.location()]}  # only the metadata was copied
    assert read_at(path=str(folder), **allowed) == read_at(path=f"file://{folder}/", **allowed)
    assert read_at(path=str(folder), **allowed) == (second.snapshot_id, NEW)
    assert read_at(path=str(folder), tag="eod", **allowed) == (first.snapshot_id, OLD)
    assert pinned(path=str(folder), **allowed).fingerprint == pinned().fingerprint
    for version in (9, 10):
        (folder / f"metadata/v{version}.metadata.json").touch()
    assert metadata_file("", str(folder)).endswith("/v10.metadata.json")


def test_a_folder_of_which_one_file_only_has_no_number_is_refused_too(history, tmp_path):
    folder = hadoop_table(history[0], tmp_path / "t", [2])
    (folder / "metadata/00003-5f0b7a3e-0d0c-4a53-8f5b-7d1c0c1b2a3d.metadata.json").touch()
    with pytest.raises(EtlError, match=r"which of its 2 metadata files is current only the catalog knows"):
        metadata_file("etl.sources.t.path", str(folder))


def test_a_metadata_file_is_the_table_as_it_was_then(history):
    table, first, _ = history
    then = next(e for e in table.metadata.metadata_log if e.timestamp_ms >= first.timestamp_ms)
    assert read_at(path=then.metadata_file) == (first.snapshot_id, OLD)


def test_a_folder_of_a_catalogs_table_is_refused_since_only_the_catalog_knows_which_file_is_current(history, tmp_path):
    table, _, _ = history
    with pytest.raises(EtlError, match=r"sources\.t\.path = .*/db/t': is a table of a catalog, .*declare `table: "):
        pinned(path=table.location())
    with pytest.raises(
        EtlError, match=r"sources\.t\.path = .*: no Iceberg table: there is no metadata/\*\.metadata\.json"
    ):
        pinned(path=str(tmp_path))
    with pytest.raises(EtlError, match=r"sources\.t\.path = .*: cannot be opened: "):
        pinned(path=f"{tmp_path}/v1.metadata.json")
