"""Iceberg tables through Spark: every column by its field id, whatever happened to names, types and rows since."""

from __future__ import annotations

import datetime as dt
from collections import Counter
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyiceberg.schema import Schema
from pyiceberg.transforms import BucketTransform, IdentityTransform, MonthTransform, TruncateTransform
from pyiceberg.typedef import Record
from pyiceberg.types import DecimalType, DoubleType, LongType, NestedField, StringType

from sparkring.etl.errors import EtlError
from sparkring.etl.spark_platform.session import build_session
from tests.etl.sources.iceberg.tables import append_file, catalog_at, delete_by_position, partitioned, paths, pinned

pytestmark = pytest.mark.spark

ID = "PARQUET:field_id"


@pytest.fixture(scope="module")
def session(spark):
    return build_session(spark, {})


@pytest.fixture
def catalog(tmp_path):
    with catalog_at(tmp_path) as made:
        yield made


def multiset(rows):
    """Rows as they compare: a struct is its values, a list a tuple, NaN equal to itself."""

    def plain(value):
        if isinstance(value, dict):
            return tuple(plain(v) for v in value.values())
        if isinstance(value, list | tuple):
            return tuple(plain(v) for v in value)
        return "nan" if value != value else value

    return Counter(tuple(plain(v) for v in (row.values() if isinstance(row, dict) else row)) for row in rows)


def read(session, **options):
    """Rows as Spark reads them, instants in UTC as pyarrow gives them."""
    return multiset(pinned(**options).read(session).toArrow().to_pylist())


def scanned(table, **options):
    return multiset(table.scan(**options).to_arrow().to_pylist())


def test_columns_are_found_by_their_id_after_every_change_of_names(session, catalog):
    table = catalog.create_table("db.t", pa.schema([("a", pa.int64()), ("b", pa.int64()), ("c", pa.string())]))
    table.append(pa.table({"a": [1, 2], "b": [100, 200], "c": ["x", "y"]}))
    with table.update_schema() as update:
        update.rename_column("a", "was_a").rename_column("b", "a").move_first("c")
    with table.update_schema() as update:
        update.rename_column("was_a", "b").delete_column("c")
    with table.update_schema() as update:
        update.add_column("c", StringType())
    table.append(pa.table({"b": pa.array([3], pa.int64()), "a": pa.array([300], pa.int64()), "c": ["z"]}))
    assert pinned().columns.names == ["b", "a", "c"]
    assert read(session) == scanned(table) == Counter([(1, 100, None), (2, 200, None), (3, 300, "z")])
    # Spark skips row groups by names: by `a` of the first file, at most 2, it would skip all there is.
    assert read(session, where="a >= 100 AND a < 250") == Counter([(1, 100, None), (2, 200, None)])
    assert pinned().read(session).where("a > 50").count() == 3


def test_types_that_were_widened_are_read_from_old_and_new_files(session, catalog):
    inner = pa.struct([("i", pa.int32()), ("f", pa.float32()), ("d", pa.decimal128(5, 2))])
    old = pa.schema(
        [("i", pa.int32()), ("f", pa.float32()), ("d", pa.decimal128(5, 2)), ("s", inner), ("l", pa.list_(inner))]
    )
    table = catalog.create_table("db.t", old)
    small = {"i": -(2**31), "f": 0.1, "d": Decimal("-999.99")}
    table.append(pa.table({**{k: [v] for k, v in small.items()}, "s": [small], "l": [[small, None]]}, schema=old))
    with table.update_schema() as update:
        for path in ("", "s.", "l.element."):
            for name, kind in [("i", LongType()), ("f", DoubleType()), ("d", DecimalType(38, 2))]:
                update.update_column(path + name, field_type=kind)
    new = table.schema().as_arrow()
    wide = {"i": 2**62, "f": 0.1, "d": Decimal("1e30")}
    table.append(pa.table({**{k: [v] for k, v in wide.items()}, "s": [wide], "l": [[wide]]}, schema=new))
    assert read(session) == scanned(table)
    assert read(session, where="i < 0") == scanned(table, row_filter="i < 0")


def test_structs_lists_and_maps_change_within(session, catalog):
    struct = pa.struct([("p", pa.int64()), ("q", pa.string())])
    kinds = pa.schema([("s", struct), ("l", pa.list_(struct)), ("m", pa.map_(pa.string(), struct))])
    table = catalog.create_table("db.t", kinds)
    one = {"p": 1, "q": "a"}
    table.append(pa.table({"s": [one, None], "l": [[one, None], None], "m": [[("k", one)], None]}, schema=kinds))
    with table.update_schema() as update:
        for path in ("s", "l.element", "m.value"):
            update.delete_column(f"{path}.p").rename_column(f"{path}.q", "p").add_column(
                (*path.split("."), "r"), LongType()
            )
    assert read(session) == scanned(table)
    with table.update_schema() as update:  # nothing is left that the file has: a struct must not become null by that
        update.delete_column("s.p")
    assert read(session) == scanned(table)
    assert sum(row[0] is None for row in read(session).elements()) == 1


def test_values_of_every_type_come_through(session, catalog):
    moment = dt.datetime(1969, 12, 31, 23, 59, 59, 999999)
    values = {
        "i": (pa.int32(), -(2**31)),
        "l": (pa.int64(), -(2**63)),
        "f": (pa.float32(), float("nan")),
        "d": (pa.float64(), 5e-324),
        "e": (pa.decimal128(38, 10), Decimal("-1.0000000001")),
        "b": (pa.bool_(), True),
        "day": (pa.date32(), dt.date(1, 1, 1)),
        "at": (pa.timestamp("us", "UTC"), moment.replace(tzinfo=dt.UTC)),
        "wall": (pa.timestamp("us"), moment),
        "s": (pa.string(), "é\0"),
        "y": (pa.binary(), b"\0\xff"),
        "x": (pa.binary(3), b"abc"),
    }
    schema = pa.schema([(name, kind) for name, (kind, _) in values.items()])
    table = catalog.create_table("db.t", schema)
    table.append(pa.table({name: [value, None] for name, (_, value) in values.items()}, schema=schema))
    assert read(session) == scanned(table)
    types = {f.name: f.dataType.simpleString() for f in pinned().read(session).schema}
    assert types["at"] == "timestamp" and types["wall"] == "timestamp_ntz" and types["e"] == "decimal(38,10)"
    declared = {"wall": "timestamp_ntz", "e": "decimal(38, 10)"}
    assert pinned(columns=declared).read(session).columns == ["wall", "e"]
    with pytest.raises(EtlError, match=r"(?s)t\.columns: .*column 'e' is decimal\(38,10\), declared decimal\(9,2\)"):
        pinned(columns={"e": "decimal(9,2)"}).read(session)


def test_a_condition_opens_the_files_it_needs_and_no_other(session, catalog):
    table = partitioned(catalog)
    where = "day BETWEEN '2024-02-01' AND '2024-02-28'"
    snapshot = pinned(where=where)
    assert len(snapshot.files) == 28 and len(paths(table)) == 365
    for path in set(paths(table)) - {file.path for file in snapshot.files}:
        Path(path.removeprefix("file://")).unlink()
    rows = snapshot.read(session)
    assert sorted(row.n for row in rows.collect()) == list(range(31, 59)) and len(rows.inputFiles()) == 28
    snapshot.check_unchanged()


def test_rows_of_a_file_are_filtered_too_by_any_column(session, catalog):
    table = catalog.create_table(
        "db.t", pa.schema([("at", pa.timestamp("us", "UTC")), ("who", pa.string()), ("n", pa.int64())])
    )
    with table.update_spec() as update:
        update.add_field("at", MonthTransform(), "month").add_field("who", BucketTransform(2), "who_2")
        update.add_field("n", TruncateTransform(10), "tens")
    moments = [dt.datetime(2024, 1 + n // 20, 1 + n % 20, tzinfo=dt.UTC) for n in range(40)]
    table.append(pa.table({"at": moments, "who": [None if n == 7 else f"u{n % 3}" for n in range(40)], "n": range(40)}))
    for where, wanted in [
        ("at >= '2024-01-05' AND at < '2024-02-02'", range(4, 21)),
        ("who = 'u1' AND n < 13", [n for n in range(13) if n % 3 == 1 and n != 7]),
        ("who IS NULL", [7]),
        ("NOT (n <> 11)", [11]),
    ]:
        snapshot = pinned(where=where, columns={"n": "bigint"})
        assert sorted(row.n for row in snapshot.read(session).collect()) == list(wanted)
        assert len(snapshot.files) < len(paths(table))


def test_rows_deleted_by_position_are_left_out(session, catalog):
    table = partitioned(catalog, days=3)
    table.append(
        pa.table(
            {"day": [dt.date(2024, 1, 1)] * 4, "at": [None] * 4, "who": list("abcd"), "n": [5, 6, 7, 8]},
            schema=table.schema().as_arrow(),
        )
    )
    four = next(t.file.file_path for t in table.scan().plan_files() if t.file.record_count == 4)
    before = pinned().fingerprint
    delete_by_position(table, four, [0, 2])
    delete_by_position(table, four, [2, 3])
    assert sorted(row[3] for row in read(session).elements()) == [0, 1, 2, 6]
    assert read(session) == scanned(table) and len({before, pinned().fingerprint}) == 2
    assert read(session, where="n >= 5") == Counter([(dt.date(2024, 1, 1), None, "b", 6)])
    with table.update_schema() as update:
        update.rename_column("who", "name")
    assert read(session) == scanned(table)


def migrated(catalog, folder, parts):
    """A table over files that another writer made, without field ids."""
    files = []
    for number, part in enumerate(parts):
        files.append(f"{folder}/part-{number}.parquet")
        pq.write_table(part, files[-1])
    return [f"file://{file}" for file in files]


def test_files_without_field_ids_are_read_by_the_tables_name_mapping(session, catalog, tmp_path):
    struct = pa.struct([("p", pa.int64()), ("q", pa.string())])
    schema = pa.schema([("a", pa.int64()), ("b", pa.string()), ("s", struct), ("l", pa.list_(struct))])
    data = pa.table(
        {"a": [1, 2], "b": ["x", None], "s": [{"p": 1, "q": "z"}, None], "l": [[{"p": 1, "q": "z"}], None]},
        schema=schema,
    )
    table = catalog.create_table("db.t", schema)
    allowed = {"allowed_folders": [str(tmp_path)]}  # where the files of the table were before it was one of Iceberg's
    table.add_files(migrated(catalog, tmp_path, [data, data.drop_columns("b")]))
    table.append(data)
    with table.update_schema() as update:
        update.rename_column("a", "z").rename_column("s.p", "pp").rename_column("l.element.q", "qq")
        update.delete_column("s.q")
    with table.update_schema() as update:
        update.add_column("c", LongType()).rename_column("b", "d")
    found = list(read(session, **allowed).elements())
    # pyiceberg 0.12 reads and writes a null list of structs as an empty one; Spark has the null that is in two files.
    assert Counter((*row[:3], row[3] or (), *row[4:]) for row in found) == scanned(table)
    assert sum(row[3] is None for row in found) == 2 and Counter(row[0] for row in found) == Counter({1: 3, 2: 3})
    with table.update_schema() as update:  # what was `a` in these files now is, by the mapping, another column's name
        update.rename_column("d", "a")
    with pytest.raises(
        EtlError, match=r"part-0\.parquet was written without field ids, and has columns \['b', 'a'\], which"
    ):
        pinned(**allowed).read(session)
    with table.transaction() as transaction:
        transaction.remove_properties("schema.name-mapping.default")
    with pytest.raises(
        EtlError, match=r"sources\.t: file.*/part-0\.parquet was written without field ids, and the table has no"
    ):
        pinned(**allowed).read(session)


def test_a_partition_column_that_is_not_in_a_file_has_the_value_of_the_partition(session, catalog):
    """As in tables migrated from Hive, whose files lack the columns of their folders."""
    schema = Schema(NestedField(1, "n", LongType()), NestedField(2, "who", StringType()))
    table = catalog.create_table("db.t", schema)
    with table.update_spec() as update:
        update.add_field("who", IdentityTransform(), "who")
    for n, who in [(1, "a"), (2, "b"), (3, None)]:
        append_file(
            table, pa.table({"n": [n]}, pa.schema([pa.field("n", pa.int64(), metadata={ID: "1"})])), Record(who)
        )
    assert read(session) == scanned(table) == Counter([(1, "a"), (2, "b"), (3, None)])
    assert read(session, where="who = 'b'", columns={"n": "bigint"}) == Counter([(2,)])


def test_files_that_are_gone_or_changed_are_named_before_spark_reads(session, catalog):
    table = partitioned(catalog, days=2)
    snapshot = pinned()
    path = Path(paths(table)[0].removeprefix("file://"))
    kept = path.read_bytes()
    path.write_bytes(kept + b"x")
    with pytest.raises(
        EtlError, match=rf"(?s)sources\.t: 1 of the table's files .*{path.name}: has {len(kept) + 1} bytes, and"
    ):
        snapshot.read(session)
    path.unlink()
    with pytest.raises(
        EtlError, match=rf"(?s)sources\.t: 1 of the table's files .*\n  - file:.*{path.name}: is gone; was it"
    ):
        snapshot.read(session)
    with pytest.raises(EtlError, match=rf"sources\.t: files of the table vanished .*{path.name}: is gone"):
        snapshot.check_unchanged()


def test_a_table_dropped_after_it_was_pinned_is_named(session, catalog):
    table = partitioned(catalog, days=2)
    snapshot = pinned()
    catalog.drop_table("db.t")
    assert snapshot.read(session).count() == 2  # its files are still there
    for path in paths(table):
        Path(path.removeprefix("file://")).unlink()
    with pytest.raises(
        EtlError, match=r"(?s)2 of the table's files cannot be read:.*was it expired, or the table dropped"
    ):
        snapshot.read(session)
    with pytest.raises(EtlError, match="has no such table"):
        pinned()


def test_a_table_that_was_emptied_has_its_columns_and_no_row(session, catalog):
    table = partitioned(catalog, days=2)
    table.delete()
    rows = pinned(where="n = 1").read(session)
    assert rows.columns == ["day", "at", "who", "n"] and rows.collect() == []


def test_a_time_column_is_refused_unless_it_is_left_out(session, catalog):
    table = catalog.create_table("db.t", pa.schema([("n", pa.int64()), ("t", pa.time64("us"))]))
    table.append(pa.table({"n": [1], "t": pa.array([5], pa.time64("us"))}))
    with pytest.raises(EtlError, match=r"sources\.t: column 't' is time, which Spark cannot read; leave it out"):
        pinned()
    assert read(session, columns={"n": "bigint"}) == Counter([(1,)])
