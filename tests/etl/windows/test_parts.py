"""What decides a part, and that of two writers one is believed. Parts of real rows: tests/spark/test_etl_window.py."""

from __future__ import annotations

import datetime as dt
import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from sparkring.conf.blocks.etl import EtlConfig
from sparkring.conf.manifest import Accounting, Column, DataFile, Lineage
from sparkring.conf.storage import open_storage
from sparkring.etl.windows import parts
from sparkring.etl.windows.interval import interval_from
from sparkring.etl.windows.parts import PART_NAME, Part, PartSources, find_part, part_fingerprint

BLOCK: dict[str, Any] = {
    "sources": {
        "a": {"path": "a", "format": "parquet", "columns": {"x": "int"}, "partitions": {"day": "date"}},
        "b": {"path": "b", "format": "parquet", "columns": {"k": "int"}},
    },
    "rows": "a",
    "one_per": "a",
    "split": {"kind": "time", "column": "day", "boundaries": {"valid": "2013-03-03"}},
    "features": {"x": {"kind": "numeric"}, "c": {"kind": "categorical", "column": "x"}},
    "checks": [{"name": "low", "kind": "range", "column": "x", "min": 0}],
    "interval": {"column": "day", "sources": {"a": "day"}, "last": "2013-03-04", "window": 3},
}


def config(**changes: Any) -> EtlConfig:
    return EtlConfig.model_validate(BLOCK | changes)


def sources(whole: str = "1", cut: tuple[str | None, ...] = ("2",), day: int = 1) -> PartSources:
    recipe = config().interval
    assert recipe is not None
    interval = interval_from(recipe, dt.date(2013, 3, day))
    snapshots: Any = [c and SimpleNamespace(fingerprint=c) for c in cut]
    whole_sources: Any = {"b": SimpleNamespace(fingerprint=whole)}
    return PartSources(interval, whole_sources, {"a": snapshots})


def fingerprint(config: EtlConfig, sources: PartSources, settings: dict[str, str] | None = None) -> str:
    return part_fingerprint(config, sources, settings or {})


@pytest.mark.parametrize(
    "changes",
    [
        {"interval": BLOCK["interval"] | {"last": "2013-03-09", "window": 7, "missing": "skip"}},
        {"features": {"x": {"kind": "numeric", "fill": 1.0, "scale": False}, "c": BLOCK["features"]["c"]}},
        {"features": {"x": {"kind": "numeric"}, "c": BLOCK["features"]["c"] | {"min_count": 9, "max_size": 5}}},
        {"checks": [BLOCK["checks"][0] | {"max_share": 0.5}]},
        {"split": BLOCK["split"] | {"boundaries": {"valid": "2013-03-04"}}},
    ],
    ids=["window", "scale", "vocabulary", "allowed", "boundaries"],
)
def test_what_is_decided_for_the_window_leaves_parts_as_they_are(changes: dict[str, Any]) -> None:
    assert fingerprint(config(**changes), sources()) == fingerprint(config(), sources())


@pytest.mark.parametrize(
    "changes",
    [
        {"features": {"x": {"kind": "numeric", "transform": "log1p"}, "c": BLOCK["features"]["c"]}},
        {"features": {"x": {"kind": "numeric", "indicator": "never"}, "c": BLOCK["features"]["c"]}},
        {"features": {"y": {"kind": "numeric", "column": "x"}, "c": BLOCK["features"]["c"]}},
        {"checks": [BLOCK["checks"][0] | {"level": "row"}]},
        {"checks": [BLOCK["checks"][0] | {"min": 1}]},
        {"shard": {"seed": 1}},
        {"split": {"kind": "hash"}},
        {"key": ["x"]},
        {"interval": BLOCK["interval"] | {"time_zone": "America/New_York"}},
    ],
)
def test_what_is_stored_or_measured_makes_other_parts(changes: dict[str, Any]) -> None:
    assert fingerprint(config(**changes), sources()) != fingerprint(config(), sources())


def test_a_part_is_of_its_sources_and_of_the_intervals_it_looks_back_at() -> None:
    made = [sources(), sources(whole="x"), sources(cut=("x",)), sources(cut=("1", "2")), sources(cut=(None, "2"))]
    prints = {fingerprint(config(), s) for s in [*made, sources(day=2)]}
    assert len(prints) == 6
    assert fingerprint(config(), sources(), {"spark.sql.caseSensitive": "true"}) not in prints
    assert fingerprint(config(), sources(), {"spark.executor.memory": "1g"}) in prints


def test_the_files_of_a_parts_own_interval_are_named() -> None:
    recipe = config().interval
    assert recipe is not None
    days: Any = [SimpleNamespace(paths=[f"day={day}/{n}.parquet" for n in range(4)]) for day in (1, 2)]
    others: Any = [SimpleNamespace(paths=["x.orc", "y.orc"])]
    made = PartSources(interval_from(recipe, dt.date(2013, 3, 2)), {}, {"a": days, "b": others, "c": [None]})
    first = ", ".join(f"a: day=2/{n}.parquet" for n in range(4))
    assert made.own_files() == f"{first}, b: x.orc and 1 more"
    assert replace(made, cut={"b": others}).own_files() == "b: x.orc, b: y.orc"


def write(storage, folder: str) -> Part:
    """The files of a part, not yet published."""
    with storage.create(f"{folder}/rows-00000.parquet") as file:
        file.write(b"rows")
    storage.put_atomic(f"{folder}/statistics.arrow", b"s")
    file = DataFile(
        path=f"{folder}/rows-00000.parquet", split="rows", rows=2, bytes=4, sha256="0" * 64, row_groups=(2,)
    )
    return Part(
        interval="2013-03-01", fingerprint="1" * 64, created_at="", columns=(Column(name="x", dtype="int32"),),
        inputs={"x": "int"}, files=(file,), splits={"rows": 2}, statistics=f"{folder}/statistics.arrow",
        statistics_sha256="2" * 64, accounting=Accounting(rows_in=2, rows_out=2), failing={},
        lineage=Lineage(sources={}),
    )  # fmt: skip


def test_of_two_writers_one_part_is_left_whole(tmp_path) -> None:
    storage, barrier, found = open_storage(str(tmp_path)), threading.Barrier(8), dict[int, Part]()

    def publish(number: int) -> None:
        part = write(storage, f"data-{number}")
        barrier.wait()
        found[number] = parts._publish(storage, f"data-{number}", part)

    threads = [threading.Thread(target=publish, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({p.files[0].path for p in found.values()}) == 1 and len(found) == 8
    assert find_part(storage, "1" * 64) == found[0]
    assert storage.list_folders() == [found[0].files[0].path.split("/")[0]]
    assert storage.list_files().count(PART_NAME) == 1 and len(storage.list_files()) == 3


@pytest.mark.parametrize("damage", ["shard", "statistics", "marker", "other"])
def test_a_damaged_part_is_written_anew(tmp_path, damage: str, caplog) -> None:
    storage = open_storage(str(tmp_path))
    assert find_part(storage, "1" * 64) is None and not caplog.messages
    part = parts._publish(storage, "data-1", write(storage, "data-1"))
    assert find_part(storage, "1" * 64) == part
    {
        "shard": lambda: storage.put_atomic("data-1/rows-00000.parquet", b"row"),
        "statistics": lambda: storage.delete("data-1/statistics.arrow"),
        "marker": lambda: storage.put_atomic(PART_NAME, b"{"),
        "other": lambda: storage.put_atomic(PART_NAME, replace_print(part).encode()),
    }[damage]()
    assert find_part(storage, "1" * 64) is None and "again" in caplog.text
    again = parts._publish(storage, "data-2", write(storage, "data-2"))
    assert again.files[0].path.startswith("data-2/") and find_part(storage, "1" * 64) == again


def replace_print(part: Part) -> str:
    return part.model_copy(update={"fingerprint": "9" * 64}).model_dump_json()


def test_the_snapshots_of_a_part_are_those_that_were_looked_at() -> None:
    assert [snapshot.fingerprint for snapshot in sources(cut=(None, "2")).snapshots] == ["1", "2"]
