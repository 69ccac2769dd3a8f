"""Every version of a Delta table has, through Spark, the rows that the package which wrote it reads."""

import contextlib
import datetime as dt
import json
import os
import random
from collections import Counter
from decimal import Decimal
from pathlib import Path

import deltalake
import pyarrow as pa
import pytest
from deltalake.exceptions import DeltaError, DeltaProtocolError

from sparkring.conf.blocks.etl import EtlConfig
from sparkring.conf.sources import DeltaSource
from sparkring.etl.build import BuildRequest, build_dataset
from sparkring.etl.errors import EtlError
from sparkring.etl.sources.pin import pin
from sparkring.etl.spark_platform.session import build_session
from sparkring.etl.windows.window import pin_dataset
from tests.etl.sources.delta.tables import add_mapped_column, adds, change_schema, commit, delete_rows, rename_column

pytestmark = pytest.mark.spark
HISTORIES = int(os.environ.get("SPARKRING_DELTA_HISTORIES", "6"))
OPERATIONS = 7


@pytest.fixture(scope="module")
def session(spark):
    return build_session(spark, {})


def source(root: Path, **changes) -> DeltaSource:
    return DeltaSource.model_validate({"format": "delta", "path": str(root)} | changes)


def multiset(rows: pa.Table) -> Counter[str]:
    """The rows as texts that tell apart null, nan, a decimal's scale and an instant of any zone."""

    def text(value) -> str:
        if isinstance(value, dt.datetime) and value.tzinfo:
            return value.astimezone(dt.UTC).isoformat()
        if isinstance(value, dict):
            return str({name: text(inner) for name, inner in sorted(value.items())})
        return str([text(v) for v in value]) if isinstance(value, list) else repr(value)

    return Counter(str({name: text(row[name]) for name in sorted(row)}) for row in rows.to_pylist())


def oracle(root: Path, version: int) -> pa.Table:
    """The rows as deltalake reads them: by pyarrow, or by its own engine.

    By pyarrow it refuses deletion vectors, and gives nulls for mapped columns.
    """
    table = deltalake.DeltaTable(str(root), version=version)
    if "delta.columnMapping.mode" not in table.metadata().configuration:
        with contextlib.suppress(DeltaProtocolError):
            return table.to_pyarrow_table()
    return pa.table(table.scan().read_all())


# --- Random histories


class History:
    """A table that is written at random; every choice follows from the seed."""

    # Not among them: what deltalake itself writes wrongly. As a partition value -0.05 becomes the text 0.-5, which it
    # cannot read; null and the text __HIVE_DEFAULT_PARTITION__ become one partition when written together.
    VALUES = {
        "text": (pa.string(), ["a b/c=d", "é:%", "+#?", "日本", "O'Brien", "null", "x"]),
        "day": (pa.date32(), [dt.date(2024, 2, 29), dt.date(1582, 1, 1), dt.date(9999, 12, 31)]),
        "number": (pa.int32(), [0, -1, 2**31 - 1]),
        "price": (pa.decimal128(10, 2), [Decimal("1.20"), Decimal("0.00"), Decimal("99999999.99")]),
        "flag": (pa.bool_(), [True, False]),
        "moment": (pa.timestamp("us", "UTC"), [dt.datetime(2024, 3, 31, 1, 30, 0, 5), dt.datetime(1820, 1, 1)]),
        "wall": (pa.timestamp("us"), [dt.datetime(2024, 3, 31, 2, 30), dt.datetime(1969, 12, 31, 23, 59, 59, 999999)]),
        "share": (pa.float64(), [0.1, -0.0, float("nan"), float("inf")]),
        "list": (pa.list_(pa.int64()), [[1, None], []]),
        "pair": (pa.struct({"x": pa.int64(), "y": pa.string()}), [{"x": 1, "y": "é"}, {"x": None, "y": None}]),
    }
    PARTITIONS = ("text", "day", "number", "price", "flag", "moment", "wall")

    def __init__(self, root: Path, seed: int) -> None:
        self.root, self.random = root, random.Random(seed)
        self.columns = self.random.sample(list(self.VALUES), 4)
        choices = [name for name in self.columns if name in self.PARTITIONS]
        self.partitions = self.random.sample(choices, self.random.randint(0, min(2, len(choices))))
        self.rows = 0
        mapping = {"delta.columnMapping.mode": mode} if (mode := self.random.choice([None, "name", "id"])) else None
        deltalake.write_deltalake(str(root), self.some_rows(), partition_by=self.partitions, configuration=mapping)
        self.mapped = self.table.protocol().min_reader_version == 2  # not with `wall`: see DeltaVersion.column_mapping

    @property
    def table(self) -> deltalake.DeltaTable:
        return deltalake.DeltaTable(str(self.root))

    def some_rows(self, fixed: dict | None = None) -> pa.Table:
        """Up to 20 rows with all the columns there are; `fixed` have one value."""
        size = self.random.randint(1, 20)
        ids = list(range(self.rows, self.rows + size))
        self.rows += size
        columns = {"id": pa.array(ids, pa.int64())}
        for name in self.columns:
            kind, values = self.VALUES[name.removeprefix("old_").removeprefix("new_")]
            choices = [(fixed or {}).get(name)] if name in (fixed or {}) else [*values, None]
            columns[name] = pa.array([self.random.choice(choices) for _ in ids], kind)
        return pa.table(columns)

    def step(self) -> str:
        steps = [self.append, self.delete, self.update, self.compact, self.vacuum, self.checkpoint, self.empty_commit]
        steps += [self.append, self.delete_by_vector, self.add_column, self.overwrite]
        if self.mapped:
            steps += [self.rename] * 3
        chosen = self.random.choice(steps)
        try:
            chosen()
        except DeltaError as error:  # what deltalake does not write where columns are mapped
            assert self.mapped and "not supported" in str(error), error
        return chosen.__name__

    def append(self) -> None:
        deltalake.write_deltalake(str(self.root), self.some_rows(), mode="append")

    def delete(self) -> None:
        self.table.delete(f"id % 3 = {self.random.randrange(3)}")

    def update(self) -> None:
        self.table.update(predicate=f"id % 4 = {self.random.randrange(4)}", updates={"id": "id + 1000"})

    def compact(self) -> None:
        self.table.optimize.compact()

    def vacuum(self) -> None:
        if self.random.random() < 0.3:
            self.table.vacuum(retention_hours=0, dry_run=False, enforce_retention_duration=False)

    def checkpoint(self) -> None:
        self.table.create_checkpoint()

    def empty_commit(self) -> None:
        commit(self.root, [])

    def delete_by_vector(self) -> None:
        rows = {add["path"]: range(json.loads(add["stats"])["numRecords"]) for add in adds(self.root)}
        chosen = {path: n for path, n in rows.items() if len(n) and self.random.random() < 0.5}
        deleted = {path: self.random.sample(n, self.random.randint(1, len(n))) for path, n in chosen.items()}
        if deleted:
            delete_rows(self.root, deleted, on_disk=self.random.random() < 0.5)

    def add_column(self) -> None:
        name = f"new_{self.random.choice([name for name in self.VALUES if name not in ('pair', 'wall')])}"
        if {name, f"old_{name}"} & set(self.columns):
            return
        self.columns.append(name)
        if self.mapped:  # deltalake does not evolve a schema with mapped columns
            kind = deltalake.Field.from_arrow(pa.field(name, self.VALUES[name.removeprefix("new_")][0])).to_json()
            add_mapped_column(self.root, name, json.loads(kind)["type"])
            self.append()
        else:
            deltalake.write_deltalake(str(self.root), self.some_rows(), mode="append", schema_mode="merge")

    def overwrite(self) -> None:
        simple = [name for name in self.partitions if name in ("number", "flag")]
        if simple and not self.mapped:  # where deltalake takes rows of the partition for others
            value = self.random.choice(self.VALUES[simple[0]][1])
            rows = self.some_rows({simple[0]: value})
            deltalake.write_deltalake(
                str(self.root), rows, mode="overwrite", predicate=f"{simple[0]} = {str(value).lower()}"
            )

    def rename(self) -> None:
        names = [name for name in self.columns if not name.startswith("old_")]
        if names:
            name = self.random.choice(names)
            rename_column(self.root, name, f"old_{name}")
            self.columns, self.partitions = (
                [f"old_{c}" if c == name else c for c in each] for each in (self.columns, self.partitions)
            )


@pytest.mark.parametrize("seed", range(HISTORIES))
def test_every_version_of_a_random_history_has_the_rows_that_deltalake_reads(session, tmp_path, seed):
    history = History(tmp_path / "table é", seed)
    steps = ["create"] + [history.step() for _ in range(OPERATIONS)]
    newest, read = history.table.version(), 0
    for version in range(newest + 1):
        snapshot = pin("t", source(history.root, versionAsOf=version))
        try:
            wanted = multiset(oracle(history.root, version))
        except Exception as error:  # vacuumed: of several types, one by Arrow's C interface
            assert "vacuum" in steps, error
            with pytest.raises(EtlError, match=f"files of version {version} are gone"):
                snapshot.read(session)
            continue
        found = snapshot.read(session)
        assert multiset(found.toArrow()) == wanted, (version, steps)
        read += 1
    assert read and version == newest, steps


# --- What histories do not have


def rows_of(rows) -> list[tuple]:
    return sorted(map(tuple, rows.collect()))


@pytest.mark.parametrize("mode", ["name", "id"])
def test_renamed_columns_with_deletion_vectors_in_odd_partitions_are_read(session, tmp_path, mode):
    """Renamed first, then a new column takes the old name: neither may get the values of the other."""
    rows = pa.table({"p": ["a b/c=d", "é:%"] * 2, "x": [1, 2, 3, 4], "s": [{"u": n} for n in range(4)]})
    mapping = {"delta.columnMapping.mode": mode}
    deltalake.write_deltalake(str(tmp_path), rows, partition_by=["p"], configuration=mapping)
    for old, new in (("x", "old x"), ("p", "q")):
        rename_column(tmp_path, old, new)
    change_schema(tmp_path, lambda fields: fields[2]["type"]["fields"][0].update(name="v"))
    add_mapped_column(tmp_path, "x", "long")
    more = pa.table({"q": ["é:%"], "old x": [5], "s": [{"v": 9}], "x": [50]})
    deltalake.write_deltalake(str(tmp_path), more, mode="append")
    first = [add["path"] for add in adds(tmp_path) if json.loads(add["stats"])["numRecords"] == 2]
    delete_rows(tmp_path, {path: [0] for path in first})
    found = pin("t", source(tmp_path)).read(session).select("q", "old x", "s.v", "x")
    assert rows_of(found) == [("a b/c=d", 3, 2, None), ("é:%", 4, 3, None), ("é:%", 5, 9, 50)]
    declared = pin("t", source(tmp_path, columns={"old x": "bigint"}, where="q = 'é:%'"))
    assert rows_of(declared.read(session)) == [(4,), (5,)]
    assert rows_of(pin("t", source(tmp_path, versionAsOf=0, columns={"x": "bigint"})).read(session))[0] == (1,)


def test_where_opens_no_other_file(session, tmp_path):
    days = [dt.date(2024, 1, 1) + dt.timedelta(n) for n in range(40)]
    deltalake.write_deltalake(str(tmp_path), pa.table({"day": days, "a": range(40)}), partition_by=["day"])
    where = "day BETWEEN '2024-01-05' AND '2024-01-07'"
    found = pin("t", source(tmp_path, where=where)).read(session)
    assert sorted(path.split("/")[-2] for path in found.inputFiles()) == [f"day=2024-01-0{n}" for n in (5, 6, 7)]
    assert [row.a for row in found.orderBy("day").collect()] == [4, 5, 6]


def test_a_table_whose_rows_were_all_deleted_has_its_columns_and_no_rows(session, tmp_path):
    deltalake.write_deltalake(str(tmp_path), pa.table({"a": [1], "b": ["x"]}))
    deltalake.DeltaTable(str(tmp_path)).delete()
    found = pin("t", source(tmp_path)).read(session)
    assert found.collect() == [] and found.columns == ["a", "b"]


def test_a_table_that_is_dropped_or_vacuumed_after_it_was_pinned_is_not_read(session, tmp_path):
    deltalake.write_deltalake(str(tmp_path / "t"), pa.table({"a": [1]}))
    snapshot = pin("t", source(tmp_path / "t"))
    deltalake.write_deltalake(str(tmp_path / "t"), pa.table({"a": [2]}), mode="overwrite")
    table = deltalake.DeltaTable(str(tmp_path / "t"))
    table.vacuum(retention_hours=0, dry_run=False, enforce_retention_duration=False)
    with pytest.raises(EtlError, match=r"data files of version 0 are gone, 1 of 1,.*have all files: \[1, 2, 3\]"):
        snapshot.read(session)
    latest = pin("t", source(tmp_path / "t"))
    (tmp_path / "t").rename(tmp_path / "moved")
    with pytest.raises(EtlError, match="the table is gone since version 3 of it was pinned"):
        latest.read(session)


def test_a_dataset_of_a_delta_table_is_found_again_after_an_empty_commit(spark, tmp_path):
    rows = pa.table({"day": ["a", "b"] * 50, "x": [float(n) for n in range(100)], "y": [0, 1] * 50})
    deltalake.write_deltalake(str(tmp_path / "t"), rows, partition_by=["day"])
    block = {"sources": {"t": {"format": "delta", "path": str(tmp_path / "t")}}, "rows": "t", "label": "y"}
    config = EtlConfig.model_validate(block | {"features": {"x": {"kind": "numeric"}}})

    def build():
        request = BuildRequest(config, pin_dataset(config, {}), "delta", str(tmp_path / "datasets"))
        return build_dataset(spark, request)

    first = build()
    assert first.manifest.accounting.rows_out == 100 and first.rebuilt
    recorded = first.manifest.lineage.sources["t"]
    assert (recorded["format"], recorded["version"], recorded["files"]) == ("delta", 0, 2)
    commit(tmp_path / "t", [])
    assert not build().rebuilt
    deltalake.write_deltalake(str(tmp_path / "t"), rows, mode="append")
    assert build().manifest.accounting.rows_out == 200
