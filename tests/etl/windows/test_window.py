"""What a window's manifest is made of, without Spark. Windows of real rows: tests/spark/test_etl_window.py."""

from __future__ import annotations

import datetime as dt
import itertools
import re
from types import SimpleNamespace
from typing import Any

import deltalake
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sparkring.conf.blocks.etl import EtlConfig
from sparkring.conf.manifest import Column, Lineage
from sparkring.conf.sources import FilesSource
from sparkring.etl.build import numbered_files
from sparkring.etl.columns.statistics import Measured, nothing
from sparkring.etl.errors import EtlError
from sparkring.etl.sources.snapshot import PinContext
from sparkring.etl.spark_platform.session import build_session
from sparkring.etl.windows import window
from sparkring.etl.windows.interval import interval_from, window_of
from sparkring.etl.windows.parts import Part
from sparkring.etl.windows.window import (
    PartFolder,
    batches,
    check_alike,
    check_boundaries,
    check_measured,
    pin_dataset,
    pin_window,
    sources_of,
    split_of,
)
from tests.ci.test_docs import ROOT
from tests.etl.sources.iceberg.tables import NAME, catalog_at
from tests.etl.windows.test_parts import BLOCK, config
from tests.helpers.datasets import unread_file


@pytest.fixture
def lake(tmp_path):
    """A source of four days, and one that is read whole."""
    for day in range(1, 5):
        folder = tmp_path / f"a/day=2013-03-0{day}"
        folder.mkdir(parents=True)
        pq.write_table(pa.table({"x": pa.array([day], pa.int32())}), folder / "x.parquet")
    (tmp_path / "b").mkdir()
    pq.write_table(pa.table({"k": pa.array([1], pa.int32())}), tmp_path / "b/x.parquet")
    return tmp_path


def recipe(lake, **interval: Any) -> EtlConfig:
    sources = {name: source | {"path": str(lake / name)} for name, source in BLOCK["sources"].items()}
    return config(sources=sources, split={"kind": "hash"}, interval=BLOCK["interval"] | interval)


def pin(lake, **interval: Any):
    return pin_window(recipe(lake, **interval), {})


def test_windows_share_the_parts_of_the_days_they_share(lake) -> None:
    first, second = pin(lake, last="2013-03-03"), pin(lake)
    prints = [{p.interval.label: p.fingerprint for p in w.parts} for w in (first, second)]
    assert list(prints[0]) == ["2013-03-01", "2013-03-02", "2013-03-03"] and first.fingerprint != second.fingerprint
    assert {d: prints[0][d] for d in ("2013-03-02", "2013-03-03")}.items() <= prints[1].items()
    assert pin(lake).fingerprint == second.fingerprint


def test_one_changed_file_changes_its_part_and_those_that_look_back_at_it(lake) -> None:
    changed = {}
    for look_back in (0, 1):
        before = pin(lake, look_back=look_back)
        pq.write_table(pa.table({"x": pa.array([9 + look_back], pa.int32())}), lake / "a/day=2013-03-02/late.parquet")
        after = pin(lake, look_back=look_back)
        both = zip(before.parts, after.parts, strict=True)
        changed[look_back] = [a.interval.label for a, b in both if a.fingerprint != b.fingerprint]
        assert before.fingerprint != after.fingerprint
    assert changed == {0: ["2013-03-02"], 1: ["2013-03-02", "2013-03-03"]}


def test_a_source_that_is_read_whole_is_in_every_part(lake) -> None:
    before = pin(lake)
    pq.write_table(pa.table({"k": pa.array([2], pa.int32())}), lake / "b/x.parquet")
    after = pin(lake)
    assert not {p.fingerprint for p in before.parts} & {p.fingerprint for p in after.parts}


def test_a_missing_day_is_named_or_left_out(lake) -> None:
    (lake / "a/day=2013-03-03/x.parquet").unlink()
    with pytest.raises(
        EtlError, match=r"1 of 3 intervals have no file: 2013-03-03 \(etl.sources.a\); .*schedule.missing .* to skip"
    ):
        pin(lake)
    whole, skipped = pin(lake, last="2013-03-02", window=2), pin(lake, missing="skip")
    assert skipped.missing == ("2013-03-03",) and [p.interval.label for p in skipped.parts] == [
        "2013-03-02",
        "2013-03-04",
    ]
    assert skipped.parts[0].fingerprint == whole.parts[1].fingerprint
    with pytest.raises(EtlError, match="3 of 3 intervals have no file"):
        pin(lake, last="2014-03-02", missing="skip")


def test_a_day_before_the_first_is_no_gap_for_those_who_look_back(lake) -> None:
    (first, *_) = pin(lake, last="2013-03-02", window=2, look_back=1).parts
    assert first.sources is not None and first.sources.cut["a"][0] is None


def test_known_parts_are_not_looked_at(lake, monkeypatch) -> None:
    before = pin(lake)
    monkeypatch.setattr(window, "find_part", lambda storage, wanted: wanted if "2013-03-02" in storage.root else None)
    known = window.KnownParts(str(lake), "d", {p.interval.label: p.fingerprint for p in before.parts})
    (lake / "a/day=2013-03-02/x.parquet").unlink()
    after = pin_window(recipe(lake), {}, known=known)
    assert after.fingerprint == before.fingerprint
    assert [p.sources is None for p in after.parts] == [True, False, False]  # the others are not whole


def test_only_the_files_of_the_window_are_hashed(lake, monkeypatch) -> None:
    from sparkring.etl.sources.files import source as file_source

    hashed = []
    real = file_source._sha256
    monkeypatch.setattr(file_source, "_sha256", lambda s, full: hashed.append(full[len(str(lake)) :]) or real(s, full))
    pin(lake, last="2013-03-03", window=2, look_back=1)
    days = [f"/a/day=2013-03-0{d}/x.parquet" for d in (1, 2, 3)]
    assert sorted(hashed) == [*days, "/b/x.parquet"]


def test_a_delta_table_is_cut_by_its_partitions(tmp_path) -> None:
    deltalake = pytest.importorskip("deltalake")
    days = [dt.date(2013, 3, day) for day in (2, 2, 4)]
    table = pa.table({"x": pa.array([1, 2, 3], pa.int32()), "day": days})
    deltalake.write_deltalake(str(tmp_path / "d"), table, partition_by=["day"])
    sources = {"a": {"format": "delta", "path": str(tmp_path / "d")}}
    made = config(sources=sources, split={"kind": "hash"}, interval=BLOCK["interval"] | {"missing": "skip"})
    pinned = pin_window(made, {})
    assert pinned.missing == ("2013-03-03",) and [p.interval.label for p in pinned.parts] == [
        "2013-03-02",
        "2013-03-04",
    ]
    deltalake.write_deltalake(str(tmp_path / "d"), table.slice(2), mode="append")
    again = pin_window(made, {})
    assert [a.fingerprint == b.fingerprint for a, b in zip(pinned.parts, again.parts, strict=True)] == [True, False]


def part(interval: str, splits: dict[str, list[int]], **changes: Any) -> Part:
    """A part whose files have so many rows."""
    files = tuple(
        unread_file(s, n, f"data/{s}-{i:05d}.parquet") for s, counts in splits.items() for i, n in enumerate(counts)
    )
    return Part.model_construct(
        interval=interval, columns=(Column(name="x", dtype="int32"),), inputs={"x": "int"}, files=files, **changes
    )


def test_files_are_listed_split_by_split_and_numbered_through() -> None:
    parts = [part("1", {"train": [3, 2], "test": [1]}), part("2", {}), part("3", {"train": [4], "test": [5]})]
    files = [PartFolder(one, f"p/{one.interval}", is_new=False).files(None) for one in parts]
    found = numbered_files(files, ["train", "test"])
    assert [(f.path, f.split, f.row_offset) for f in found] == [
        ("p/1/data/train-00000.parquet", "train", 0),
        ("p/1/data/train-00001.parquet", "train", 0),
        ("p/3/data/train-00000.parquet", "train", 5),
        ("p/1/data/test-00000.parquet", "test", 0),
        ("p/3/data/test-00000.parquet", "test", 1),
    ]
    undivided = [part(str(i), {"rows": [2]}) for i in range(3)]
    decided = zip(undivided, "abc", ["train", "train", "test"], strict=True)
    files = [PartFolder(one, folder, is_new=False).files(split) for one, folder, split in decided]
    found = numbered_files(files, ["train", "test"])
    assert [(f.path[0], f.split, f.row_offset) for f in found] == [
        ("a", "train", 0),
        ("b", "train", 2),
        ("c", "test", 0),
    ]


def test_parts_of_other_features_or_types_are_refused() -> None:
    a, b = part("2013-03-01", {}), part("2013-03-02", {})
    check_alike([a, b])
    other = b.model_copy(update={"inputs": {"x": "bigint"}})
    with pytest.raises(
        EtlError, match="2013-03-01 and 2013-03-02 do not fit: feature's column 'x' was int, is bigint; "
    ):
        check_alike([a, other])
    more = b.model_copy(update={"columns": (*b.columns, Column(name="y", dtype="int8"))})
    with pytest.raises(EtlError, match="stored column 'y' was not there, is  as scalar int8; "):
        check_alike([a, more])


def test_a_part_that_was_measured_for_other_features_is_refused() -> None:
    recipe = config(features={"x": {"kind": "numeric"}, "c": {"kind": "categorical", "column": "x"}})
    made = part("2013-03-01", {})
    check_measured(made, nothing(Measured((("x", "none"),), {"x": "int"})), recipe)
    for other in (Measured((("x", "log1p"),), {"x": "int"}), Measured((("x", "none"),)), Measured()):
        with pytest.raises(EtlError, match="the part 2013-03-01 was measured for other features"):
            check_measured(made, nothing(other), recipe)


def test_a_split_by_time_takes_whole_intervals() -> None:
    later = config(split=BLOCK["split"] | {"boundaries": {"valid": "2013-03-03", "test": "2013-03-04"}})
    days = ["2013-03-02", "2013-03-03", "2013-03-04", "2013-03-05"]
    assert [split_of(later, day) for day in days] == ["train", "valid", "test", "test"]
    assert split_of(config(split={"kind": "hash"}), days[0]) is None


@pytest.mark.parametrize(
    ("boundaries", "words"),
    [
        ({"valid": "2013-03-03T12:00:00"}, "boundaries.valid = .*not a day"),
        ({"valid": "2013-03-02"}, "every split must have an interval of the window, which is 2013-03-02 to 2013-03-04"),
        ({"valid": "2013-03-05"}, "every split must have"),
    ],
)
def test_boundaries_are_first_days_of_intervals_of_the_window(boundaries, words: str) -> None:
    recipe = config(split=BLOCK["split"] | {"boundaries": boundaries})
    assert recipe.interval is not None
    with pytest.raises(EtlError, match=words):
        check_boundaries(recipe, window_of(recipe.interval))


def test_a_condition_of_the_recipe_holds_beside_that_of_the_interval() -> None:
    interval = config().interval
    assert interval is not None
    source = FilesSource.model_validate(BLOCK["sources"]["a"] | {"where": "day > '2000-01-01' OR day IS NULL"})
    cut = source.cut(interval_from(interval, dt.date(2013, 3, 1)).condition("day"))
    assert isinstance(cut, FilesSource)
    assert cut.where == "(day > '2000-01-01' OR day IS NULL) AND `day` >= '2013-03-01' AND `day` < '2013-03-02'"


def test_the_lineage_of_a_window_is_of_all_its_intervals() -> None:
    def read(day: int) -> Part:
        cut = [{"files": 7, "bytes": 7}, {"files": day, "bytes": 10 * day}]  # looked back at, its own
        return part(f"2013-03-0{day}", {}, lineage=Lineage(sources={"a": cut, "b": {"files": 3}}))

    assert sources_of([read(1), read(2), read(4)]) == {
        "a": {
            "intervals": 3,
            "first_interval": "2013-03-01",
            "last_interval": "2013-03-04",
            "files": 7,
            "bytes": 70,
            "details": "_part.json of each part",
        },
        "b": {"files": 3},
    }


def test_small_parts_are_written_at_once_and_large_ones_alone(monkeypatch) -> None:
    monkeypatch.setattr(window, "PARTS_AT_ONCE", 3)
    monkeypatch.setattr(window, "BYTES_AT_ONCE", 10)
    assert batches([]) == []
    assert batches([1] * 7) == [range(3), range(3, 6), range(6, 7)]
    assert batches([4, 6, 1, 11, 5, 5, 1]) == [range(2), range(2, 3), range(3, 4), range(4, 6), range(6, 7)]


# --- one version for all intervals, whatever is committed while they are pinned


DAYS = [dt.date(2013, 3, day) for day in (2, 3, 4)]


def moving(monkeypatch, move) -> None:
    """Call `move(number)` after each interval that is pinned: a writer that works at the same time."""
    real = window.open_source

    def opened(*given):
        pin_rows, count = real(*given), itertools.count()

        def pinned(config):
            found = pin_rows(config)
            move(next(count))
            return found

        return pinned

    monkeypatch.setattr(window, "open_source", opened)


def lake_recipe(source: dict[str, Any]) -> EtlConfig:
    interval = {**BLOCK["interval"], "look_back": 0}
    return config(sources={"a": source}, split={"kind": "hash"}, interval=interval)


def test_a_window_of_a_delta_table_is_of_one_version(tmp_path, monkeypatch) -> None:
    """Each commit moves every row to the next file; after the first interval not even the log can be read any more."""
    root, rows = tmp_path / "t", pa.table({"x": pa.array([1, 2, 3], pa.int32()), "day": DAYS})
    deltalake.write_deltalake(str(root), rows, partition_by=["day"])
    recipe = lake_recipe({"path": str(root), "format": "delta"})
    at_rest = pin_window(recipe, {})

    def move(number: int) -> None:
        if number:
            (root / "_delta_log").rename(root / f"log-{number}")
            return
        moved = rows.set_column(1, "day", pa.array(DAYS[1:] + DAYS[:1]))
        deltalake.write_deltalake(str(root), moved, partition_by=["day"], mode="overwrite")

    def once(number: int) -> None:
        if number < 2:
            move(number)

    moving(monkeypatch, once)
    assert pin_window(recipe, {}).fingerprint == at_rest.fingerprint
    (root / "log-1").rename(root / "_delta_log")
    monkeypatch.undo()
    after = pin_window(recipe, {})
    assert after.fingerprint != at_rest.fingerprint
    versions = [{part.sources.cut["a"][-1].lineage()["version"] for part in w.parts} for w in (at_rest, after)]
    assert versions == [{0}, {1}]


def test_a_table_that_two_sources_name_is_read_at_one_version_by_intervals_and_whole(tmp_path, monkeypatch) -> None:
    root, rows = tmp_path / "t", pa.table({"x": pa.array([1, 2, 3], pa.int32()), "day": DAYS})
    deltalake.write_deltalake(str(root), rows, partition_by=["day"])
    source = {"path": str(root), "format": "delta"}
    recipe = lake_recipe(source).model_copy(deep=True)
    recipe.sources["whole"] = recipe.sources["a"].model_copy(update={"columns": {"x": "int"}, "path": f"{root}/"})
    moving(monkeypatch, lambda number: deltalake.write_deltalake(str(root), rows, mode="append"))
    pinned = pin_window(recipe, {})
    versions = {s.lineage()["version"] for part in pinned.parts for s in part.sources.cut["a"]}
    assert {part.sources.whole["whole"].lineage()["version"] for part in pinned.parts} == versions == {0}


def test_a_window_of_an_iceberg_table_is_of_one_snapshot(tmp_path, monkeypatch) -> None:
    with catalog_at(tmp_path) as catalog:
        rows = pa.table({"x": pa.array([1, 2, 3], pa.int32()), "day": DAYS})
        table = catalog.create_table("db.t", rows.schema)
        table.append(rows)
        recipe = lake_recipe({"table": NAME, "format": "iceberg"})
        at_rest = pin_window(recipe, {})
        moving(monkeypatch, lambda number: table.overwrite(rows.set_column(1, "day", pa.array(DAYS[1:] + DAYS[:1]))))
        assert pin_window(recipe, {}).fingerprint == at_rest.fingerprint
        assert table.refresh().current_snapshot().snapshot_id not in {
            part.sources.cut["a"][-1].lineage()["snapshot-id"] for part in at_rest.parts
        }


def test_the_manifest_names_the_version_of_each_part() -> None:
    def part(day: int, **version: Any) -> Any:
        own = {"files": 1, "bytes": 2, **version}
        return SimpleNamespace(interval=f"2013-03-0{day}", lineage=Lineage(sources={"a": [own], "b": {}}))

    found = sources_of([part(1, version=4), part(2, version=7)])
    assert found["a"]["version"] == {"2013-03-01": 4, "2013-03-02": 7}
    assert sources_of([part(1, **{"snapshot-id": 5})])["a"]["snapshot-id"] == {"2013-03-01": 5}
    assert not {"version", "snapshot-id"} & sources_of([part(1), part(2)])["a"].keys()


@pytest.mark.spark
def test_a_window_of_a_catalogs_table_that_changes_while_it_is_pinned_is_refused(spark, tmp_path, monkeypatch) -> None:
    name = f"db_{tmp_path.name}".lower()
    session = build_session(spark, {})
    session.sql(f"CREATE DATABASE {name} LOCATION '{tmp_path}/w'")
    try:
        session.sql(f"CREATE TABLE {name}.t (x INT, day DATE) USING parquet PARTITIONED BY (day)")
        for number, day in enumerate(DAYS):
            session.sql(f"INSERT INTO {name}.t VALUES ({number}, DATE '{day}')")
        recipe, context = lake_recipe({"table": f"{name}.t"}), PinContext(lambda: session, "")
        pin_window(recipe, {}, context)

        def move(number: int) -> None:
            if number == 1:
                session.sql(f"INSERT INTO {name}.t VALUES (9, DATE '{DAYS[0]}')")

        moving(monkeypatch, move)
        with pytest.raises(EtlError, match=r"etl\.sources\.a\.table = .*: changed after it was pinned \(1 file added"):
            pin_window(recipe, {}, context)
    finally:
        session.sql(f"DROP DATABASE {name} CASCADE")


def test_with_intervals_or_without_a_dataset_is_pinned_as_one_kind_of_thing(lake) -> None:
    """So the builder, the ledger and the commands never ask which it is."""
    windowed = recipe(lake)
    plain = windowed.model_copy(update={"interval": None})
    window, whole = pin_dataset(windowed, {}), pin_dataset(plain, {})
    assert [snapshot.name for snapshot in whole.snapshots] == [*plain.sources]
    assert [*whole.contents] == [f"etl.sources.{name}" for name in plain.sources]
    assert (whole.part_fingerprints, whole.missing, whole.shared_digest) == ({}, (), "")
    assert [*window.contents] == [f"the part {label}" for label in window.part_fingerprints]
    assert len(window.part_fingerprints) == 3 and len(window.shared_digest) == 64
    assert pin_window(windowed, {}) == window
    assert pin_dataset(plain, {}).fingerprint == whole.fingerprint != window.fingerprint
    asked = [p for p in (ROOT / "pipelines").rglob("*.py") if re.search(r"isinstance\([^)]*Pinned", p.read_text())]
    assert asked == []
