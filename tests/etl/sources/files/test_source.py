"""A pinned source: its fingerprint, that each file is hashed once, and that later changes are noticed."""

import os

import pytest

from sparkring.conf.sources import FilesSource
from sparkring.conf.storage import Storage
from sparkring.etl.errors import EtlError
from sparkring.etl.sources.pin import pin, pin_sources


@pytest.fixture
def table(tmp_path):
    for name in ("a.csv", "b.csv"):
        (tmp_path / name).write_text("a,b\n1,2\n")
    return tmp_path


def config(path, **changes) -> FilesSource:
    return FilesSource.model_validate({"path": str(path), "columns": {"a": "int", "b": "int"}} | changes)


def test_a_source_that_changes_while_it_is_read_is_refused(table):
    snapshot = pin("t", config(table))
    snapshot.check_unchanged()
    (table / "b.csv").write_text("a,b\n1,2\n3,4\n")
    with pytest.raises(EtlError, match=r"etl\.sources\.t: its files changed"):
        snapshot.check_unchanged()


def test_the_fingerprint_follows_content_and_declaration_but_not_the_place(table, tmp_path):
    first = pin("t", config(table)).fingerprint
    moved = table.rename(tmp_path.with_name(f"{tmp_path.name}-moved"))
    assert pin("t", config(moved)).fingerprint == first
    options = {"options": {"nullValue": "NA"}}
    others = [config(moved, columns={"b": "int", "a": "int"}), config(moved, **options), config(moved / "a.csv")]
    prints = {pin("t", other).fingerprint for other in others}
    (moved / "b.csv").write_text("a,b\n1,3\n")
    assert len({first, *prints, pin("t", config(moved)).fingerprint}) == 5


def test_pinning_hashes_every_file_once_and_stat_hashes_none(table, monkeypatch):
    hashed, real = [], Storage.sha256
    monkeypatch.setattr(Storage, "sha256", lambda self, name, *a: hashed.append(name) or real(self, name, *a))
    pin_sources({"t": config(table)})
    assert sorted(hashed) == ["a.csv", "b.csv"]
    pin_sources({"t": config(table, fingerprint="stat")})
    assert len(hashed) == 2


def test_stat_fingerprints_see_a_touched_file(tmp_path):
    (tmp_path / "t.csv").write_text("a\n1\n")
    config = FilesSource(path=str(tmp_path / "t.csv"), columns={"a": "int"}, fingerprint="stat")
    before = pin("t", config).fingerprint
    assert pin("t", config).fingerprint == before
    os.utime(tmp_path / "t.csv", (1, 1))
    assert pin("t", config).fingerprint != before


@pytest.fixture
def days(tmp_path):
    for day in ("2024-01-01", "2024-01-02", "2024-01-03"):
        (tmp_path / f"day={day}").mkdir()
        (tmp_path / f"day={day}/x.csv").write_text("a,b\n1,2\n")
    return tmp_path


def of_days(path, where=None, kind="date") -> FilesSource:
    return config(path, partitions={"day": kind}, where=where)


def test_a_file_outside_where_does_not_matter(days):
    snapshot = pin("t", of_days(days, "day > '2024-01-01'"))
    (days / "day=2024-01-01/x.csv").unlink()
    (days / "day=2024-01-01/y.csv").write_text("not a table")
    snapshot.check_unchanged()
    assert pin("t", of_days(days, "day > '2024-01-01'")).fingerprint == snapshot.fingerprint
    (days / "day=2024-01-02/y.csv").write_text("a,b\n1,2\n")
    with pytest.raises(EtlError, match="its files changed"):
        snapshot.check_unchanged()


def test_the_fingerprint_is_that_of_the_partitions_read_however_where_names_them(days):
    last = pin("t", of_days(days, "day >= '2024-01-02'")).fingerprint
    assert pin("t", of_days(days, "NOT day = '2024-01-01'")).fingerprint == last
    others = [of_days(days), of_days(days, "day = '2024-01-02'"), of_days(days, "day >= '2024-01-02'", "timestamp")]
    (days / "day=2024-01-04").mkdir()
    moved = pin("t", of_days(days, "day >= '2024-01-02'")).fingerprint
    assert moved == last  # an empty folder has no rows
    prints = {pin("t", other).fingerprint for other in others}
    (days / "day=2024-01-03").rename(days / "day=2024-01-05")  # the same bytes on another day
    assert len({last, *prints, pin("t", of_days(days, "day >= '2024-01-02'")).fingerprint}) == 5


def test_lineage_names_what_was_read(days):
    lineage = pin("t", of_days(days, "day < '2024-01-03'")).lineage()
    read = {"partitions": 2, "first_partition": "day=2024-01-01", "last_partition": "day=2024-01-02"}
    assert lineage.items() >= {**read, "where": "day < '2024-01-03'", "files": 2, "bytes": 16, "format": "csv"}.items()
    assert "where" not in pin("t", config(days / "day=2024-01-01")).lineage()
