"""Which sources are pinned without Spark, and that the others get the job's session."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import deltalake
import pyarrow as pa
import pytest

from sparkring.conf.sources import (
    BY_FORMAT,
    SOURCES,
    CatalogSource,
    DeltaSource,
    FilesSource,
    IcebergSource,
    JdbcSource,
    Source,
)
from sparkring.etl.sources.iceberg.source import IcebergSnapshot
from sparkring.etl.sources.pin import OPENED, pin, pin_sources
from sparkring.etl.sources.snapshot import OpenSource, PinContext
from tests.ci.test_docs import ROOT
from tests.ci.test_strings import CORE
from tests.etl.sources.iceberg.tables import NAME, catalog_at


class Opened(Exception):
    """Spark was asked for."""


def opened() -> Any:
    raise Opened


def test_files_leave_spark_alone_and_tables_of_a_catalog_or_database_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "t.csv").write_text("a\n1\n")
    files = FilesSource(path=str(tmp_path), columns={"a": "int"})
    context = PinContext(opened, str(tmp_path / "datasets"))
    assert pin_sources({"t": files}, context).keys() == pin_sources({"t": files}).keys() == {"t"}
    monkeypatch.setenv("LAKE_URL", "jdbc:postgresql://host/db")
    for source in (CatalogSource(table="db.t"), JdbcSource(format="jdbc", url_env="LAKE_URL", dbtable="t")):
        assert source.NEEDS_SPARK
        with pytest.raises(Opened):
            pin("t", source, context)
        with pytest.raises(AssertionError, match=r"etl\.sources\.t is pinned with Spark"):
            pin("t", source)
    assert {name for name, kind in BY_FORMAT.items() if kind.NEEDS_SPARK} == {"jdbc"}


class Written(dict[str, Any]):
    """Sources whose table is changed by `write` after each that is pinned."""

    write: Callable[[], object]

    def items(self) -> Iterator[tuple[str, Any]]:  # type: ignore[override]
        for item in super().items():
            yield item
            self.write()


def test_sources_that_name_one_delta_table_read_it_at_one_version(tmp_path: Path) -> None:
    rows = pa.table({"x": [1, 2], "day": ["a", "b"]})
    deltalake.write_deltalake(str(tmp_path / "t"), rows, partition_by=["day"])
    given: list[dict[str, Any]] = [{}, {"where": "day = 'b'"}, {"columns": {"x": "bigint"}}, {"versionAsOf": 1}]
    paths = [tmp_path / "t", f"{tmp_path}/t/", f"file://{tmp_path}/t", tmp_path / "t"]
    sources = [DeltaSource(format="delta", path=str(p), **more) for p, more in zip(paths, given, strict=True)]
    named = Written(zip("abcd", sources, strict=True))
    named.write = lambda: deltalake.write_deltalake(str(tmp_path / "t"), rows, mode="append")
    found = pin_sources(named)
    assert [found[name].lineage()["version"] for name in "abcd"] == [0, 0, 0, 1]
    assert [snapshot.key for snapshot in found.values()] == [f"etl.sources.{name}" for name in "abcd"]
    assert [found[name].lineage()["files"] for name in "abc"] == [2, 1, 2]


def test_sources_that_name_one_iceberg_table_read_it_at_one_snapshot(tmp_path: Path) -> None:
    with catalog_at(tmp_path) as catalog:
        rows = pa.table({"x": [1, 2]})
        table = catalog.create_table("db.t", rows.schema)
        table.append(rows)
        first = table.current_snapshot()
        assert first is not None
        given: list[dict[str, Any]] = [{}, {"where": "x = 2"}, {"allowed_folders": [f"{tmp_path}/elsewhere"]}]
        sources = [IcebergSource(format="iceberg", table=NAME, **more) for more in given]
        named = Written(zip("abc", sources, strict=True))
        named.write = lambda: table.append(rows)
        found = pin_sources(named)
        assert {found[name].lineage()["snapshot-id"] for name in "abc"} == {first.snapshot_id}
        folders = [snapshot.version.folders[1:] for snapshot in found.values() if isinstance(snapshot, IcebergSnapshot)]
        assert folders == [(), (), (f"{tmp_path}/elsewhere",)]


def test_a_kind_of_source_is_its_configuration_and_the_class_that_opens_it() -> None:
    """No other code asks of which kind a source is: it calls what every kind has."""
    names = "|".join(kind.__name__ for kind in SOURCES)
    asks = [
        str(path.relative_to(ROOT))
        for package in CORE
        for path in sorted((ROOT / package).rglob("*.py"))
        if not path.relative_to(ROOT).as_posix().startswith(("conf/sources/", "etl/sources/"))
        and re.search(rf"\b({names})\b", path.read_text())
    ]
    assert asks == []
    union, _ = get_args(Source)
    assert [get_args(member)[0] for member in get_args(union)] == [*SOURCES]
    assert OPENED.keys() == {*SOURCES}
    assert all(issubclass(kind, OpenSource) for kind in OPENED.values())
