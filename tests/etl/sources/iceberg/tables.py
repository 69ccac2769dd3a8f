"""Real Iceberg tables: pyiceberg writes them, with a catalog in sqlite. Delete files, which it cannot write, are made
here and committed by it."""

from __future__ import annotations

import datetime as dt
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyiceberg.catalog import Catalog, load_catalog
from pyiceberg.manifest import DataFile, DataFileContent, FileFormat, ManifestContent, ManifestWriterV2
from pyiceberg.table import Table
from pyiceberg.table.snapshots import Operation
from pyiceberg.table.update.snapshot import _FastAppendFiles
from pyiceberg.transforms import IdentityTransform
from pyiceberg.typedef import Record
from pyiceberg.utils.config import Config

from sparkring.conf.sources import IcebergSource
from sparkring.etl.sources.iceberg.source import IcebergSnapshot, OpenIceberg

NAME = "prod.db.t"


@contextmanager
def catalog_at(root: Path) -> Iterator[Catalog]:
    """The catalog `prod`, which pyiceberg finds by variables of the environment, with the namespace `db`."""
    with pytest.MonkeyPatch.context() as patch:
        (root / "lake").mkdir()
        patch.setenv("PYICEBERG_CATALOG__PROD__URI", f"sqlite:///{root}/catalog.db")
        patch.setenv("PYICEBERG_CATALOG__PROD__WAREHOUSE", f"file://{root}/lake")
        patch.setattr("pyiceberg.catalog._ENV_CONFIG", Config())  # it reads the environment once, when it is imported
        catalog = load_catalog("prod")
        catalog.create_namespace("db")
        yield catalog


def source(**options: Any) -> IcebergSource:
    """A source of the table NAME, or of `path`; `as_of_timestamp` is the option `as-of-timestamp`."""
    values = {name if name == "allowed_folders" else name.replace("_", "-"): v for name, v in options.items()}
    return IcebergSource.model_validate({"format": "iceberg"} | ({} if "path" in values else {"table": NAME}) | values)


def pinned(**options: Any) -> IcebergSnapshot:
    config = source(**options)
    return OpenIceberg.open("t", config).pin(config)


def partitioned(catalog: Catalog, days: int = 365) -> Table:
    """A table with one row and one file per day."""
    schema = pa.schema(
        [("day", pa.date32()), ("at", pa.timestamp("us", "UTC")), ("who", pa.string()), ("n", pa.int64())]
    )
    table = catalog.create_table("db.t", schema)
    with table.update_spec() as update:
        update.add_field("day", IdentityTransform(), "day")
    first = dt.date(2024, 1, 1)
    dates = [first + dt.timedelta(days=n) for n in range(days)]
    table.append(
        pa.table(
            {
                "day": dates,
                "at": [dt.datetime(d.year, d.month, d.day, 12, tzinfo=dt.UTC) for d in dates],
                "who": [f"u{n % 5}" for n in range(days)],
                "n": list(range(days)),
            },
            schema=schema,
        )
    )
    return table


def paths(table: Table) -> list[str]:
    """The data files of the current snapshot."""
    return sorted(task.file.file_path for task in table.scan().plan_files())


def delete_by_position(table: Table, path: str, positions: list[int]) -> None:
    """Commit a file that says which rows of a data file are deleted."""
    fields = [("file_path", pa.string(), 2147483546), ("pos", pa.int64(), 2147483545)]
    rows = _table(fields, [[path] * len(positions), positions])
    _commit(table, path, rows, DataFileContent.POSITION_DELETES, None)


def delete_by_value(table: Table, path: str, column: str, value: Any) -> None:
    """Commit a file of equality deletes, as Flink writes them, for the partition of a data file."""
    field = table.schema().find_field(column)
    rows = _table([(column, table.schema().as_arrow().field(column).type, field.field_id)], [[value]])
    _commit(table, path, rows, DataFileContent.EQUALITY_DELETES, [field.field_id])


class _DeleteWriter(ManifestWriterV2):
    def content(self) -> ManifestContent:
        return ManifestContent.DELETES

    @property
    def _meta(self) -> dict[str, str]:
        return {**super()._meta, "content": "deletes"}


class _AppendDeletes(_FastAppendFiles):
    def new_manifest_writer(self, spec: Any) -> ManifestWriterV2:
        return _DeleteWriter(spec, self.schema(), self.new_manifest_output(), self._snapshot_id, self._compression)


def _table(fields: list[tuple[str, pa.DataType, int]], columns: list[list[Any]]) -> pa.Table:
    schema = pa.schema([pa.field(n, k, False, {"PARQUET:field_id": str(i)}) for n, k, i in fields])
    return pa.Table.from_pydict({n: c for (n, _, _), c in zip(fields, columns, strict=True)}, schema)


def _commit(table: Table, data_path: str, rows: pa.Table, content: DataFileContent, ids: list[int] | None) -> None:
    (data,) = [task.file for task in table.scan().plan_files() if task.file.file_path == data_path]
    path = f"{table.location()}/data/{uuid.uuid4()}-deletes.parquet"
    with table.io.new_output(path).create() as stream:
        pq.write_table(rows, stream)
    file = _file(content, path, len(table.io.new_input(path)), rows.num_rows, data.partition, equality_ids=ids)
    file.spec_id = data.spec_id
    with table.transaction() as transaction:
        producer = _AppendDeletes(operation=Operation.DELETE, transaction=transaction, io=table.io)
        producer.append_data_file(file)
        producer.commit()


def append_file(table: Table, rows: pa.Table, partition: Record) -> None:
    """Commit a data file as it is, as of this partition of the current spec."""
    path = f"{table.location()}/data/{uuid.uuid4()}.parquet"
    with table.io.new_output(path).create() as stream:
        pq.write_table(rows, stream)
    _append(table, _file(DataFileContent.DATA, path, len(table.io.new_input(path)), rows.num_rows, partition))


def append_orc(table: Table) -> None:
    """Commit an ORC file that is nowhere, in the partition of a file that is there."""
    like = next(iter(table.scan().plan_files())).file
    path = f"{table.location()}/data/a.orc"
    _append(table, _file(DataFileContent.DATA, path, 1, 1, like.partition, file_format=FileFormat.ORC))


def _append(table: Table, file: DataFile) -> None:
    file.spec_id = table.spec().spec_id
    with table.transaction() as transaction, transaction.update_snapshot().fast_append() as append:
        append.append_data_file(file)


def _file(content: DataFileContent, path: str, size: int, rows: int, partition: Any, **more: Any) -> DataFile:
    counts = ("column_sizes", "value_counts", "null_value_counts", "nan_value_counts", "lower_bounds", "upper_bounds")
    values = dict.fromkeys(("key_metadata", "split_offsets", "equality_ids", "sort_order_id"))
    values |= {name: {} for name in counts} | {"file_format": FileFormat.PARQUET} | more
    return DataFile.from_args(
        content=content, file_path=path, file_size_in_bytes=size, record_count=rows, partition=partition, **values
    )
