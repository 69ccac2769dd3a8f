"""Which sources are pinned without Spark, and that the others get the job's session."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sparkring.conf.sources import KINDS, CatalogSource, FilesSource, JdbcSource
from sparkring.etl.sources.pin import PinContext, pin, pin_sources


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
    assert {name for name, kind in KINDS.items() if kind.NEEDS_SPARK} == {"jdbc"}
