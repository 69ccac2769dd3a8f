"""Read the log of a Delta table on the driver, with the package `deltalake`: versions, schema, files. No Spark session.

Which versions there are, and when each was committed, is found here: for a time before the first version the package
gives the first.
"""

from __future__ import annotations

import datetime as dt
import json
import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import parse_qsl, unquote

import numpy as np
import pyarrow as pa
import pyarrow.fs as pafs

from sparkring.conf.errors import first_line
from sparkring.conf.sources import DeltaSource
from sparkring.conf.sources.base import instant
from sparkring.conf.storage import Storage
from sparkring.conf.uris import check_below
from sparkring.etl.errors import EtlError

INSTALL = "pip install deltalake==1.6.6"
DELETED = "deletionVectors"
ONLY_VACUUM = "vacuumProtocolCheck"  # asks nothing of who reads: which files VACUUM may delete
READER_FEATURES = frozenset({"columnMapping", DELETED, "timestampNtz", "v2Checkpoint", ONLY_VACUUM})
WITHOUT_FEATURE = (
    "remove it with the engine that keeps the table (ALTER TABLE ... DROP FEATURE ...), or copy the rows to a table "
    "without it (CREATE TABLE ... AS SELECT)"
)
LOG = "_delta_log"
COMMIT = re.compile(r"(\d{20})\.json")
CHECKPOINT = re.compile(r"(\d{20})\.checkpoint(?:\.(\d{10})\.(\d{10})|\.[0-9a-f-]{36})?\.(?:parquet|json)")
ABSOLUTE = re.compile(r"/|[A-Za-z][A-Za-z0-9+.-]*:")  # a path in the log is a URI, relative to the table or not
COLUMN_MAPPING = "delta.columnMapping.mode"
IN_COMMIT = "delta.enableInCommitTimestamps"
IN_COMMIT_VERSION = "delta.inCommitTimestampEnablementVersion"
IN_COMMIT_SINCE = "delta.inCommitTimestampEnablementTimestamp"


# --- Versions: by the names and times of the files in the log's folder


@dataclass(frozen=True)
class DeltaLog:
    """What is in a log's folder: the time of each commit's file in ms since 1970, versions with a whole checkpoint."""

    storage: Storage
    commits: Mapping[int, int]
    checkpoints: frozenset[int]

    @property
    def versions(self) -> range:
        """The versions that can be read: from the first, or the oldest checkpoint, with all commits after it."""
        latest, oldest = max(self.commits), self.oldest_commit
        starts = [0] if oldest == 0 else [v for v in self.checkpoints if oldest - 1 <= v <= latest]
        return range(min(starts, default=latest + 1), latest + 1)

    @property
    def oldest_commit(self) -> int:
        """The version from which on no commit is missing."""
        oldest = max(self.commits)
        while oldest - 1 in self.commits:
            oldest -= 1
        return oldest

    def times_ms(self) -> dict[int, int]:
        """Return each version's commit time by its file, at least 1 ms after the one before (as Delta does)."""
        times: dict[int, int] = {}
        latest = -1
        for version in sorted(self.commits):
            latest = times[version] = max(self.commits[version], latest + 1)
        return times

    def time_in_commit_ms(self, version: int) -> int:
        """Return a version's commit time from its first log line (`delta.enableInCommitTimestamps`)."""
        line = self.storage.read_bytes(f"{LOG}/{version:020}.json").split(b"\n", 1)[0]
        return int(json.loads(line)["commitInfo"]["inCommitTimestamp"])


def list_log(storage: Storage) -> DeltaLog | None:
    """List the log of the table in this folder; None where there is no Delta table."""
    infos = storage.fs.get_file_info(pafs.FileSelector(storage.path(LOG), allow_not_found=True))
    files = {info.base_name: (info.mtime_ns or 0) // 1_000_000 for info in infos}
    commits = {int(match[1]): ms for name, ms in files.items() if (match := COMMIT.fullmatch(name))}
    return DeltaLog(storage, commits, whole_checkpoints(files)) if commits else None


def whole_checkpoints(names: Iterable[str]) -> frozenset[int]:
    """Find the versions that have a checkpoint, and where it is in parts, all of them."""
    parts: dict[tuple[int, int], int] = {}
    for match in filter(None, map(CHECKPOINT.fullmatch, names)):
        group = int(match[1]), int(match[3] or 1)
        parts[group] = parts.get(group, 0) + 1
    return frozenset(version for (version, wanted), found in parts.items() if found >= wanted)


def version_at(versions: Sequence[int], at_ms: int, time_ms: Callable[[int], int]) -> int | None:
    """Find the last version committed at `at_ms` or before; None where all were later."""
    position = bisect_right(versions, at_ms, key=time_ms)
    return versions[position - 1] if position else None


def _asked_version(key: str, config: DeltaSource, log: DeltaLog, properties: Callable[[], dict[str, str]]) -> int:
    """Return the version the recipe asks for. `properties()` returns the latest version's properties."""
    there = log.versions
    listed = f"the versions that can be read are {there[0]} to {there[-1]}"
    if config.versionAsOf is not None:
        asked = f"{key}.versionAsOf = {config.versionAsOf}"
        if config.versionAsOf > there[-1]:
            raise EtlError(f"{asked}: there is no such version; {listed}")
        if config.versionAsOf < there[0]:
            raise EtlError(
                f"{asked}: its log was cleaned up (the table's delta.logRetentionDuration keeps it longer); {listed}"
            )
        return config.versionAsOf
    if config.timestampAsOf is None:
        return there[-1]
    asked, at = f"{key}.timestampAsOf = {config.timestampAsOf!r}", instant(config.timestampAsOf)
    if at > dt.datetime.now(dt.UTC):
        raise EtlError(f"{asked}: is in the future: until then the table may change; leave it out for the latest")
    at_ms, times = int(at.timestamp() * 1000), log.times_ms()
    of_table = properties()
    by_commit = of_table.get(IN_COMMIT) == "true" and at_ms >= int(of_table.get(IN_COMMIT_SINCE, 0))
    with_file = [version for version in there if version in times]  # a checkpoint alone has no time
    if by_commit:
        with_time = [version for version in with_file if version >= int(of_table.get(IN_COMMIT_VERSION, 0))]
        found = version_at(with_time, at_ms, log.time_in_commit_ms)
    else:
        found = version_at(with_file, at_ms, times.__getitem__)
    if found is None:
        oldest = dt.datetime.fromtimestamp(times[with_file[0]] / 1000, dt.UTC).isoformat(timespec="milliseconds")
        raise EtlError(f"{asked}: is before version {with_file[0]}, of {oldest}; {listed}")
    return found


# --- One version: what deltalake reads of it


@dataclass(frozen=True)
class DeltaFile:
    """A data file as the log has it.

    `path` is below the table, as on disk; `partition` has a Python value of its type for each partition column;
    `deleted` (rows,) are the positions of rows deleted since.
    """

    path: str
    bytes: int
    partition: Mapping[str, Any]
    deleted: np.ndarray


@dataclass(frozen=True)
class DeltaVersion:
    """One version of a table; `table` is deltalake's DeltaTable of it."""

    key: str
    version: int
    table: Any

    @property
    def table_id(self) -> str:
        return str(self.table.metadata().id)

    @property
    def properties(self) -> dict[str, str]:
        return dict(self.table.metadata().configuration)

    @property
    def column_mapping(self) -> str:
        """How columns are named in files: none, name or id. Without the feature in the protocol the property is idle.

        deltalake 1.6 writes such tables: with a `timestamp_ntz` column the feature is left out.
        """
        protocol = self.table.protocol()
        mapped = protocol.min_reader_version == 2 or "columnMapping" in (protocol.reader_features or ())
        return self.properties.get(COLUMN_MAPPING, "none") if mapped else "none"

    @property
    def partition_columns(self) -> tuple[str, ...]:
        return tuple(self.table.metadata().partition_columns)

    @property
    def schema(self) -> dict[str, Any]:
        """The schema as Spark's JSON of a StructType, with physical names and ids in the metadata of mapped columns."""
        found: dict[str, Any] = json.loads(self.table.schema().to_json())
        return found

    def check_features(self) -> None:
        """Raise EtlError if the table needs of its readers what is not done here: they would read other rows."""
        if unknown := sorted(set(self.table.protocol().reader_features or ()) - READER_FEATURES):
            raise EtlError(
                f"{self.key}: version {self.version} needs the Delta feature {', '.join(unknown)} of its readers; done "
                f"here are {', '.join(sorted(READER_FEATURES))}: {WITHOUT_FEATURE}"
            )
        if self._has(DELETED) and self._has(ONLY_VACUUM):
            raise EtlError(
                f"{self.key}: version {self.version} has the Delta features {DELETED} and {ONLY_VACUUM}, and deltalake "
                f"tells no deleted rows of a table with both: of {ONLY_VACUUM}, {WITHOUT_FEATURE}"
            )

    def _has(self, feature: str) -> bool:
        return feature in (self.table.protocol().reader_features or ())

    def files(self) -> list[DeltaFile]:
        """List the data files, in the order of their paths."""
        with _named_errors(self.key, self.version):
            actions = pa.table(self.table.get_add_actions(flatten=False))
            # deltalake tells no vectors of a table with vacuumProtocolCheck, which check_features refuses in that pair.
            vectors = pa.table(self.table.deletion_vectors().read_all()) if self._has(DELETED) else None
        uris, sizes = actions["path"].to_pylist(), actions["size_bytes"].to_pylist()
        if outside := [uri for uri in uris if _is_outside(uri)]:
            raise EtlError(
                f"{self.key}: version {self.version} has files of another table, such as {outside[0]}: a shallow clone "
                "loses them when that one is vacuumed; declare that table, or a deep clone"
            )
        values = actions["partition"].to_pylist() if self.partition_columns else [{}] * len(uris)
        deleted, none = self._deleted(vectors) if vectors else {}, np.empty(0, np.int64)
        files = [
            DeltaFile(unquote(uri), size, value, deleted.pop(unquote(uri), none))
            for uri, size, value in zip(uris, sizes, values, strict=True)
        ]
        if deleted:
            raise EtlError(f"{self.key}: the log has deletion vectors of other files than its own: {min(deleted)}")
        return sorted(files, key=lambda file: file.path)

    def _deleted(self, vectors: pa.Table) -> dict[str, np.ndarray]:
        """Return the positions of deleted rows (rows,) by file path."""
        root = self.table.table_uri.rstrip("/") + "/"
        paths = [unquote(uri.removeprefix(root)) for uri in vectors["filepath"].to_pylist()]
        masks = [kept.values.to_numpy(zero_copy_only=False) for kept in vectors["selection_vector"]]
        return {path: np.flatnonzero(~mask).astype(np.int64) for path, mask in zip(paths, masks, strict=True)}


def _is_outside(uri: str) -> bool:
    """Return whether a file's URI in the log leaves the table's folder."""
    try:
        check_below(unquote(uri))
    except ValueError:
        return True
    return ABSOLUTE.match(uri) is not None


def open_version(key: str, config: DeltaSource, storage: Storage) -> DeltaVersion:
    """Open the version that the recipe asks for: by number, by time, else the latest.

    Raises EtlError where there is no such table or version, or it cannot be read here.
    """
    load = partial(_load, key, _deltalake(key), storage)
    log = list_log(storage)
    if log is None:
        raise EtlError(f"{key}.path = {config.path!r}: is not a Delta table: it has no commits in {LOG}/")
    if not log.versions:
        raise EtlError(
            f"{key}.path = {config.path!r}: its {LOG}/ lacks version {log.oldest_commit - 1}, and has no whole "
            "checkpoint from there on: bring the file back, or copy the rows into a new table"
        )
    version = _asked_version(key, config, log, lambda: load(log.versions[-1]).properties)
    found = load(version)
    found.check_features()
    return found


def _deltalake(key: str) -> ModuleType:
    try:
        import deltalake
    except ImportError as error:
        raise EtlError(f"{key}: Delta tables are read with the package deltalake on the driver: {INSTALL}") from error
    return deltalake


def _load(key: str, deltalake: ModuleType, storage: Storage, version: int) -> DeltaVersion:
    if unquote(storage.root) != storage.root:
        raise EtlError(
            f"{key}.path = {storage.root!r}: deltalake decodes {unquote(storage.root)!r} from it, another folder; "
            "rename the folder so that its name has no percent-encoding"
        )
    uri, options = object_store(storage)
    with _named_errors(key, version):
        return DeltaVersion(key, version, deltalake.DeltaTable(uri, version=version, storage_options=options))


@contextmanager
def _named_errors(key: str, version: int) -> Iterator[None]:
    """Raise what deltalake raises, of many types, as EtlError."""
    try:
        yield
    except Exception as error:
        raise EtlError(
            f"{key}: deltalake cannot read the log of version {version}: {first_line(error)}; if that is a feature of "
            f"the table, {WITHOUT_FEATURE}"
        ) from error


def object_store(storage: Storage) -> tuple[str, dict[str, str]]:
    """Return the storage's URI and options in deltalake's form. Credentials come from the environment here too."""
    if storage.is_local:
        return Path(storage.root).as_uri(), {}
    uri, _, query = storage.uri.partition("?")
    given = dict(parse_qsl(query))
    options = {"region": given["region"]} if "region" in given else {}
    if "endpoint_override" in given:
        scheme = given.get("scheme", "https")
        options |= {"endpoint_url": f"{scheme}://{given['endpoint_override']}", "allow_http": str(scheme == "http")}
    for ours, theirs in (("request_timeout", "timeout"), ("connect_timeout", "connect_timeout")):
        if ours in given:
            options[theirs] = f"{round(float(given[ours]) * 1000)}ms"
    return uri, options
