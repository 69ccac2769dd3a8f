"""Open an Iceberg table and find the snapshot a recipe asks for, and its files. Metadata is read, no row is.

pyiceberg is imported here only, and only when a recipe has such a source.
"""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import pyarrow.fs as pafs

from sparkring.conf.errors import error_line, first_line
from sparkring.conf.plain_text import count_of
from sparkring.conf.sources import IcebergSource
from sparkring.conf.storage import open_storage
from sparkring.etl.errors import EtlError
from sparkring.etl.sources.iceberg.places import METADATA, is_below
from sparkring.etl.sources.iceberg.settings import ignore_working_directory

if TYPE_CHECKING:
    from pyiceberg.schema import Schema
    from pyiceberg.table.metadata import TableMetadata
    from pyiceberg.table.name_mapping import NameMapping
    from pyiceberg.table.snapshots import Snapshot

    from sparkring.etl.sources.iceberg.io import MetadataIO, TableIO

INSTALL = "pip install 'pyiceberg>=0.12,<0.13'"
NUMBERED = re.compile(r"v([0-9]+)(?:\.gz)?\.metadata\.json")
SHOWN = 10  # names in a message
LATEST_FORMAT = 2
DAMAGED = (
    "the table's metadata is damaged, or of a writer that breaks Iceberg's format; read an older metadata file of the "
    "table (path: .../metadata/<name>.metadata.json), or have the engine that keeps it write it again"
)
GONE = "no such snapshot; it may have expired (expire_snapshots), and then its rows are gone"


@dataclass(frozen=True)
class TableVersion:
    """A table's metadata at one snapshot: what is current in it is what is read."""

    metadata: TableMetadata  # its current snapshot and schema are those that are read
    metadata_io: MetadataIO
    folders: tuple[str, ...]  # where its files may be: its own folder, and those that the recipe allows

    @property
    def snapshot(self) -> Snapshot | None:
        """None for a table to which nothing was ever written."""
        return self.metadata.current_snapshot()

    @property
    def schema(self) -> Schema:
        return self.metadata.schema()

    @property
    def name_mapping(self) -> NameMapping | None:
        return self.metadata.name_mapping()

    @property
    def io(self) -> TableIO:
        """Opens data files."""
        return self.metadata_io.of_data

    def check_place(self, key: str, path: str) -> None:
        """Raise EtlError for a file outside the folders: the metadata could name the rows of any other table."""
        if not is_below(path, self.folders):
            raise EtlError(
                f"{key}: the table's metadata names {path}, which is not below {' or '.join(self.folders)}, where the "
                "table's metadata is: it may be another table's. If this table's files are there, allow the folder: "
                f"{key}.allowed_folders: [{path.rpartition('/')[0]}]"
            )


@contextmanager
def readable(where: str) -> Iterator[None]:
    """Raise what pyiceberg raises of damaged metadata, of many types, as one EtlError."""
    try:
        yield
    except EtlError:
        raise
    except Exception as error:
        text = error_line(error)
        raise EtlError(f"{where}: {DAMAGED} ({type(error).__name__}: {text[:300]})") from error


def open_version(key: str, config: IcebergSource) -> TableVersion:
    """Open the table that `key` declares, at the snapshot it asks for. Raises EtlError if one is missing."""
    location, metadata, metadata_io = _open(key, config)
    folders = (table_folder(location), *config.allowed_folders)
    with readable(key):
        return _at_snapshot(key, config, TableVersion(metadata, metadata_io, folders))


def _at_snapshot(key: str, config: IcebergSource, version: TableVersion) -> TableVersion:
    metadata = version.metadata
    if metadata.format_version > LATEST_FORMAT:
        raise EtlError(
            f"{key}: the table has Iceberg's format-version {metadata.format_version}, and only versions 1 and 2 are "
            "read (not the deletion vectors, default values and types of version 3); copy it into a table of version 2 "
            "with the engine that keeps it (CREATE TABLE ... TBLPROPERTIES ('format-version'='2') AS SELECT ...)"
        )
    main, current = metadata.refs.get("main"), metadata.current_snapshot_id
    if current is not None and metadata.snapshot_by_id(current) is None:
        raise ValueError(f"current-snapshot-id {current} is not one of the table's snapshots")
    if main is not None and main.snapshot_id != current:
        raise ValueError(f"current-snapshot-id is {current}, and the branch main is at {main.snapshot_id}")
    snapshot, schema_id = resolve(key, config, metadata)
    if metadata.schema_by_id(schema_id) is None:
        raise ValueError(f"schema {schema_id} is not one of the table's schemas")
    if snapshot is not None:
        instant(snapshot.timestamp_ms)  # ValueError, OverflowError
    at = {"current_snapshot_id": snapshot and snapshot.snapshot_id, "current_schema_id": schema_id}
    return replace(version, metadata=metadata.model_copy(update=at))


# --- which table


def _open(key: str, config: IcebergSource) -> tuple[str, TableMetadata, MetadataIO]:
    """Read a table's metadata: the file it is in, what it says, and how the table's files are opened."""
    try:
        ignore_working_directory()
        from pyiceberg.catalog import load_catalog
        from pyiceberg.exceptions import NoSuchNamespaceError, NoSuchTableError
        from pyiceberg.serializers import FromInputFile

        from sparkring.etl.sources.iceberg.io import MetadataIO, with_own_io
    except ImportError as error:
        raise EtlError(f"{key}.format = 'iceberg': needs the package pyiceberg ({error}): {INSTALL}") from error
    if config.path is not None:
        where = f"{key}.path = {config.path!r}"
        location = metadata_file(where, config.path)
    else:
        where = f"{key}.table = {config.table!r}"
        catalog_name, _, table_name = str(config.table).partition(".")
    try:
        if config.path is not None:
            files = MetadataIO()
            return location, FromInputFile.table_metadata(files.new_input(location)), files
        table = with_own_io(load_catalog(catalog_name)).load_table(table_name)
        return table.metadata_location or f"{table.metadata.location}/metadata/", table.metadata, table.io
    except (NoSuchTableError, NoSuchNamespaceError) as error:
        raise EtlError(f"{where}: catalog {catalog_name!r} has no such table ({first_line(error)})") from error
    except Exception as error:  # of the catalog's client: it may be SQL, REST, Thrift or an SDK
        remedy = (
            ""
            if config.path is not None
            else f"; pyiceberg reads what catalog {catalog_name!r} is from ~/.pyiceberg.yaml or "
            f"PYICEBERG_CATALOG__{catalog_name.upper()}__URI and its like"
        )
        raise EtlError(f"{where}: cannot be opened: {error_line(error)}{remedy}") from error


def table_folder(metadata_location: str) -> str:
    """Return the table's folder from its metadata file's path; the content could claim any folder."""
    folder = metadata_location.rpartition("/")[0]
    return folder.removesuffix("/metadata") or "/"


def metadata_file(where: str, path: str) -> str:
    """Find the metadata file for a path: the file itself, or the last one of a folder with numbered versions.

    In such a folder (of a Hadoop catalog) a version is written by a rename that only one writer can win, so the highest
    number is the table. Where a catalog names the current file, the folder also holds files of failed commits.
    """
    if path.endswith(METADATA):
        return path
    storage = open_storage(path)
    infos = storage.fs.get_file_info(pafs.FileSelector(storage.path("metadata"), allow_not_found=True))
    names = sorted(i.base_name for i in infos if i.base_name.endswith(METADATA) and i.type == pafs.FileType.File)
    if not names:
        raise EtlError(f"{where}: no Iceberg table: there is no metadata/*.metadata.json below it")
    found = {int(match[1]): name for name in names if (match := NUMBERED.fullmatch(name))}
    if len(found) < len(names):
        raise EtlError(
            f"{where}: is a table of a catalog, and which of its {count_of(len(names), 'metadata file')} is current "
            "only the catalog knows; declare `table: catalog.namespace.table`, or one of these files "
            f"({', '.join(names[-3:])})"
        )
    return f"{path.rstrip('/')}/metadata/{found[max(found)]}"


# --- which snapshot


def resolve(key: str, config: IcebergSource, metadata: TableMetadata) -> tuple[Snapshot | None, int]:
    """Return the requested snapshot and its schema id, as Iceberg defines them.

    A branch is read with the table's schema of today, everything else with the schema of its snapshot.
    """
    if config.branch is not None:
        return _of_ref(key, "branch", config.branch, metadata), metadata.current_schema_id
    if config.tag is not None:
        snapshot = _of_ref(key, "tag", config.tag, metadata)
    elif config.snapshot_id is not None:
        found = metadata.snapshot_by_id(config.snapshot_id)
        if found is None:
            raise EtlError(f"{key}.snapshot-id = {config.snapshot_id}: {GONE}; {_snapshots(metadata)}")
        snapshot = found
    elif config.as_of_ms is not None:
        snapshot = _as_of(key, config, metadata)
    else:
        return metadata.current_snapshot(), metadata.current_schema_id
    if snapshot.schema_id is None:  # tables of version 1 may not record it
        return snapshot, metadata.current_schema_id
    if metadata.schema_by_id(snapshot.schema_id) is None:
        raise EtlError(f"{key}: snapshot {snapshot.snapshot_id} has schema {snapshot.schema_id}, which was removed")
    return snapshot, snapshot.schema_id


def _of_ref(key: str, kind: str, name: str, metadata: TableMetadata) -> Snapshot:
    kinds = {ref: str(value.snapshot_ref_type) for ref, value in metadata.refs.items()}
    if kinds.get(name) != kind:
        other = f"it is a {kinds[name]}: write `{kinds[name]}: {name}`; " if name in kinds else ""
        there = sorted(ref for ref, its in kinds.items() if its == kind)
        what = f"{kind} names in the table are {there[:SHOWN]}" if there else f"the table has no {kind}"
        raise EtlError(f"{key}.{kind} = {name!r}: no such {kind}; {other}{what}")
    snapshot = metadata.snapshot_by_name(name)
    if snapshot is None:  # Iceberg keeps a snapshot as long as a name refers to it
        raise ValueError(f"{kind} {name!r} is a snapshot that is not one of the table's")
    return snapshot


def _as_of(key: str, config: IcebergSource, metadata: TableMetadata) -> Snapshot:
    """Return the latest snapshot in the main branch's history at the requested time."""
    where = f"{key}.as-of-timestamp = {config.as_of_timestamp!r}"
    then = [entry for entry in metadata.snapshot_log if entry.timestamp_ms <= (config.as_of_ms or 0)]
    if not then:
        raise EtlError(f"{where}: the table has no snapshot as old as that; {_snapshots(metadata)}")
    snapshot = metadata.snapshot_by_id(then[-1].snapshot_id)
    if snapshot is None:
        raise EtlError(f"{where}: was snapshot {then[-1].snapshot_id}: {GONE}; {_snapshots(metadata)}")
    return snapshot


def _snapshots(metadata: TableMetadata) -> str:
    latest = sorted(metadata.snapshots, key=lambda s: s.timestamp_ms)[-SHOWN:]
    shown = ", ".join(f"{s.snapshot_id} ({instant(s.timestamp_ms)})" for s in latest)
    return f"there are {count_of(len(metadata.snapshots), 'snapshot')}" + (f", the last {shown}" if shown else "")


def instant(timestamp_ms: int) -> str:
    """Format an instant as 2024-01-31T12:00:00.000Z."""
    moment = dt.datetime.fromtimestamp(timestamp_ms // 1000, dt.UTC) + dt.timedelta(milliseconds=timestamp_ms % 1000)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")
