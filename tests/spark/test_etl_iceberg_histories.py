"""Random histories of Iceberg tables: every snapshot, tag and branch through Spark is what pyiceberg's own scan reads.

`make test` does a few; SPARKRING_HISTORIES=100 does as many.
"""

from __future__ import annotations

import datetime as dt
import os
import random
from decimal import Decimal

import pyarrow as pa
import pytest
from pyiceberg.expressions import GreaterThanOrEqual, IsNull, LessThan, NotNull
from pyiceberg.schema import Schema
from pyiceberg.table import Table
from pyiceberg.transforms import parse_transform
from pyiceberg.types import (
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    ListType,
    LongType,
    NestedField,
    StringType,
    StructType,
    TimestampType,
    TimestamptzType,
)

from sparkring.etl.spark_platform.session import build_session
from tests.etl.sources.iceberg.tables import catalog_at, delete_by_position, pinned
from tests.spark.test_etl_iceberg import multiset

pytestmark = pytest.mark.spark
HISTORIES = int(os.environ.get("SPARKRING_HISTORIES", "4"))
STEPS = 10
ITEM = StructType(NestedField(100, "p", IntegerType()), NestedField(101, "q", StringType()))
TYPES = [IntegerType(), LongType(), FloatType(), DoubleType(), DecimalType(9, 2), DateType(), TimestampType()]
TYPES += [TimestamptzType(), StringType(), ITEM, ListType(102, IntegerType(), False), ListType(103, ITEM, False)]
WIDER = {"int": LongType(), "float": DoubleType(), "decimal(9, 2)": DecimalType(20, 2)}
TRANSFORMS = ["identity", "bucket[3]", "truncate[2]"]


class History:
    """A table and what is done to it, all decided by a seed."""

    def __init__(self, catalog, seed: int):
        self.random = random.Random(seed)
        self.table: Table = catalog.create_table("db.t", Schema(NestedField(1, "id", LongType())))
        self.names = 0
        self.refs: list[str] = []
        for _ in range(3):
            self.add_column()
        self.append()

    def step(self) -> str:
        """Do one thing; returns its name."""
        often = [self.append, self.delete, self.overwrite, self.delete_position]
        name = self.random.choice(
            [
                *often,
                *often,
                self.compact,
                self.rename,
                self.rename,
                self.drop,
                self.add_column,
                self.add_again,
                self.widen,
                self.move,
                self.nest,
                self.partition,
                self.tag,
                self.branch,
                self.branch_append,
                self.expire,
            ]
        )
        name()
        self.table.refresh()
        return name.__name__

    def columns(self, *, nested: bool = False):
        wanted = (StructType, ListType)
        return [f for f in self.table.schema().fields if f.name != "id" and isinstance(f.field_type, wanted) == nested]

    def value(self, kind):
        r = self.random
        if r.random() < 0.15:
            return None
        if pa.types.is_list(kind) or pa.types.is_large_list(kind):
            return [self.value(kind.value_type) for _ in range(r.randrange(3))]
        if pa.types.is_struct(kind):
            return {f.name: self.value(f.type) for f in kind}
        if pa.types.is_integer(kind):
            return r.randrange(-(2 ** (kind.bit_width - 1)), 2 ** (kind.bit_width - 1))
        if pa.types.is_floating(kind):
            return r.choice([0.0, 1.5, float("nan"), float("inf"), r.randrange(1000) / 8])
        if pa.types.is_decimal(kind):
            return Decimal(r.randrange(-(10**8), 10**8)).scaleb(-kind.scale)
        if pa.types.is_date(kind):
            return dt.date(1960, 1, 1) + dt.timedelta(days=r.randrange(30_000))
        if pa.types.is_timestamp(kind):
            moment = dt.datetime(1960, 1, 1) + dt.timedelta(microseconds=r.randrange(2 * 10**15))
            return moment.replace(tzinfo=dt.UTC) if kind.tz else moment
        return r.choice(["", "a", "b", "é", "zz", "a long text that is cut in statistics"])

    def rows(self) -> pa.Table:
        schema = self.table.schema().as_arrow()
        count = self.random.randrange(1, 6)
        data = {f.name: [self.value(f.type) for _ in range(count)] for f in schema}
        return pa.table(data | {"id": [self.random.randrange(40) for _ in range(count)]}, schema=schema)

    def filter(self):
        near = self.random.randrange(40)
        choice = [LessThan("id", near - 20), GreaterThanOrEqual("id", near)]
        for field in self.columns():
            choice += [IsNull(field.name)] + ([NotNull(field.name)] if self.random.random() < 0.2 else [])
        return self.random.choice(choice)

    def append(self):
        self.table.append(self.rows())

    def delete(self):
        self.table.delete(self.filter())

    def overwrite(self):
        self.table.overwrite(self.rows(), self.filter())

    def compact(self):
        self.table.overwrite(self.table.scan().to_arrow())

    def delete_position(self):
        files = [task.file for task in self.table.scan().plan_files()]
        files = [file for file in files if file.spec_id == self.table.spec().spec_id]
        if files:
            file = min(files, key=lambda file: (self.random.random(), file.file_path))
            gone = {self.random.randrange(file.record_count) for _ in range(2)}
            delete_by_position(self.table, file.file_path, sorted(gone))

    def fresh(self) -> str:
        self.names += 1
        return f"{self.random.choice(['c', 'a b', 'é', 'dotted-'])}{self.names}"

    def add_column(self):
        with self.table.update_schema() as update:
            update.add_column((self.fresh(),), self.random.choice(TYPES))

    def add_again(self):
        """A column by a name that another one had."""
        had = {f.name for s in self.table.schemas().values() for f in s.fields} - set(self.table.schema().column_names)
        if free := sorted(had - {f.name for f in self.table.schema().fields}):
            with self.table.update_schema() as update:
                update.add_column((self.random.choice(free),), self.random.choice(TYPES))

    def rename(self):
        """Two columns swap their names, or one gets a new one."""
        fields = [f.name for f in self.columns() + self.columns(nested=True)]
        if len(fields) > 1 and self.random.random() < 0.5:
            one, other = self.random.sample(fields, 2)
            for old, new in [(one, "swap"), (other, one), ("swap", other)]:
                with self.table.update_schema() as update:
                    update.rename_column(old, new)
        elif fields:
            with self.table.update_schema() as update:
                update.rename_column(self.random.choice(fields), self.fresh())

    def sources(self):
        return {field.source_id for spec in self.table.specs().values() for field in spec.fields}

    def drop(self):
        free = [f for f in self.columns() + self.columns(nested=True) if f.field_id not in self.sources()]
        if len(free) > 1:
            with self.table.update_schema() as update:
                update.delete_column((self.random.choice(free).name,))

    def widen(self):
        free = [f for f in self.columns() if str(f.field_type) in WIDER]
        if free:
            field = self.random.choice(free)
            with self.table.update_schema() as update:
                update.update_column((field.name,), field_type=WIDER[str(field.field_type)])

    def nest(self):
        """A field within a struct is renamed, dropped, widened or added."""
        structs = [f for f in self.columns(nested=True) if isinstance(f.field_type, StructType)]
        if not structs:
            return
        field = self.random.choice(structs)
        inner = self.random.choice(field.field_type.fields)
        with self.table.update_schema() as update:
            what = self.random.randrange(4)
            if what == 0:
                update.rename_column((field.name, inner.name), self.fresh())
            elif what == 1 and len(field.field_type.fields) > 1:
                update.delete_column((field.name, inner.name))
            elif what == 2 and str(inner.field_type) in WIDER:
                update.update_column((field.name, inner.name), field_type=WIDER[str(inner.field_type)])
            else:
                update.add_column((field.name, self.fresh()), LongType())

    def move(self):
        with self.table.update_schema() as update:
            update.move_first(self.random.choice(self.columns() + self.columns(nested=True)).name)

    def partition(self):
        if self.random.random() < 0.3 and (fields := self.table.spec().fields):
            with self.table.update_spec() as update:
                update.remove_field(self.random.choice(fields).name)
            return
        kinds = ("int", "long", "string", "date")
        fields = [f for f in self.columns() if str(f.field_type) in kinds and f.field_id not in self.sources()]
        if fields:
            field = self.random.choice(fields)
            transform = "month" if str(field.field_type) == "date" else self.random.choice(TRANSFORMS)
            self.names += 1
            with self.table.update_spec() as update:
                update.add_field(field.name, parse_transform(transform), f"part{self.names}")

    def tag(self):
        self.names += 1
        snapshot = self.random.choice(self.table.snapshots())
        self.table.manage_snapshots().create_tag(snapshot.snapshot_id, f"tag{self.names}").commit()

    def branch(self):
        self.names += 1
        snapshot = self.random.choice(self.table.snapshots())
        self.table.manage_snapshots().create_branch(snapshot.snapshot_id, f"branch{self.names}").commit()

    def branch_append(self):
        branches = [name for name in self.table.refs() if name.startswith("branch")]
        if branches:
            self.table.append(self.rows(), branch=self.random.choice(branches))

    def expire(self):
        held = {ref.snapshot_id for ref in self.table.refs().values()}
        if free := [s.snapshot_id for s in self.table.snapshots() if s.snapshot_id not in held]:
            self.table.maintenance.expire_snapshots().by_id(self.random.choice(free)).commit()


@pytest.fixture(scope="module")
def session(spark):
    return build_session(spark, {})


@pytest.mark.parametrize("seed", range(HISTORIES))
def test_every_snapshot_of_a_history_has_the_rows_that_pyiceberg_reads(session, tmp_path, seed):
    with catalog_at(tmp_path) as catalog:
        history = History(catalog, seed)
        steps = [history.step() for _ in range(STEPS)]
        table = history.table
        wanted = [({"snapshot_id": s.snapshot_id}, table.scan(snapshot_id=s.snapshot_id)) for s in table.snapshots()]
        wanted.append(({}, table.scan()))
        for name, ref in table.refs().items():
            kind = str(ref.snapshot_ref_type)
            if kind == "tag":
                wanted.append(({"tag": name}, table.scan(snapshot_id=ref.snapshot_id)))
            else:
                at = table.metadata.model_copy(update={"current_snapshot_id": ref.snapshot_id})
                wanted.append(({"branch": name}, type(table)(table.name(), at, "", table.io, catalog).scan()))
        for options, scan in wanted:
            expected = scan.to_arrow()
            found = pinned(**options).read(session)
            assert found.columns == expected.column_names
            assert multiset(found.toArrow().to_pylist()) == multiset(expected.to_pylist()), (options, steps)
