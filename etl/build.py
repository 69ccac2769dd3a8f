"""The ETL job: raw tables -> one dataset, built once per fingerprint and published by its manifest, last.

A dataset is the folder `<root>/<name>-<fingerprint[:12]>/`. Each build writes to its own `data-<build id>/` below it,
so a crash leaves the dataset that was there before, or none, and files no manifest lists.
"""

from __future__ import annotations

import logging
import re
import time
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow.fs as pafs
from py4j.protocol import Py4JJavaError
from pyspark import StorageLevel
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from sparkring.conf.code import code_digest
from sparkring.conf.config import EtlConfig
from sparkring.conf.manifest import (
    MANIFEST_NAME,
    Accounting,
    Column,
    DataFile,
    DatasetManifest,
    Lineage,
    ManifestError,
    SplitInfo,
    read_manifest,
    tensor_columns,
)
from sparkring.conf.schema import same_but_for_case
from sparkring.conf.storage import Storage, open_storage
from sparkring.etl import checks, fit, table, text
from sparkring.etl.errors import EtlError
from sparkring.etl.fingerprint import PACKAGE, dataset_fingerprint
from sparkring.etl.quarantine import write_quarantine
from sparkring.etl.session import build_session
from sparkring.etl.shard import ORDER, number_rows, plan_files, with_order, write_shards
from sparkring.etl.sources.snapshot import SourceSnapshot
from sparkring.etl.split import SPLIT, add_split, check_splits
from sparkring.etl.views import build_rows
from sparkring.etl.write import SHARD

log = logging.getLogger(__name__)

DEAD_BUILD_AGE = timedelta(days=1)
PLAN_CHARACTERS = 20_000


@dataclass(frozen=True)
class BuildRequest:
    """What to build, and where.

    `sources` are pinned; with the fingerprint, `name` is the dataset's folder below `root_uri`; `settings` are the
    recipe's `spark.conf`. `code_commit` (of the user's checkout) and `config_digest` (of the resolved recipe) are
    recorded in the lineage.
    """

    config: EtlConfig
    sources: Mapping[str, SourceSnapshot]
    name: str
    root_uri: str
    settings: Mapping[str, str] = field(default_factory=dict)
    code_commit: str = ""
    config_digest: str = ""


@dataclass(frozen=True)
class Built:
    """A finished dataset and its URI. `rebuilt` is False if it was found; `seconds` by stage are then empty."""

    manifest: DatasetManifest
    uri: str
    rebuilt: bool
    seconds: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Build:
    """A build at work: its session, the folder below `storage` that it writes to, and seconds by finished stage."""

    request: BuildRequest
    spark: SparkSession
    storage: Storage
    folder: str
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        started = time.monotonic()
        yield
        self.seconds[f"{stage}_s"] = time.monotonic() - started


@dataclass(frozen=True)
class Written:
    """The part of a manifest that depends on the kind of dataset, table or text."""

    columns: list[Column]
    files: list[DataFile]
    rows_by_split: dict[str, int]
    features: dict[str, Any] = field(default_factory=dict)
    text: dict[str, Any] = field(default_factory=dict)


def build_dataset(spark: SparkSession, request: BuildRequest) -> Built:
    """Build the dataset, or find it built. Raises EtlError (ChecksFailed) for whatever the user must correct."""
    fingerprint = dataset_fingerprint(request.config, request.sources, spark.version, request.settings)
    storage = open_storage(request.root_uri).at(f"{request.name}-{fingerprint[:12]}")
    if (manifest := find_dataset(storage, fingerprint)) is not None:
        log.info("dataset %s is built already: %s", request.name, storage.uri)
        return Built(manifest, storage.uri, rebuilt=False)
    build = Build(request, build_session(spark, request.settings), storage, f"data-{uuid.uuid4().hex[:12]}")
    try:
        manifest = _build(build, fingerprint)
        for source in request.sources.values():  # the fingerprint, taken before they were read, must still be theirs
            source.check_unchanged()
        storage.put_atomic(MANIFEST_NAME, manifest.to_json().encode())
    except BaseException as error:
        storage.delete(build.folder)
        if isinstance(error, (PySparkException, Py4JJavaError)):
            for source in request.sources.values():  # a file that has gone is why Spark could not go on
                source.check_unchanged()
        raise
    _sweep(storage, manifest)
    rows, files = manifest.accounting.rows_out, len(manifest.files)
    log.info("dataset %s: %d rows in %d files: %s", request.name, rows, files, storage.uri)
    return Built(manifest, storage.uri, rebuilt=True, seconds=build.seconds)


def find_dataset(storage: Storage, fingerprint: str) -> DatasetManifest | None:
    """Read the manifest of a whole dataset; None, so a new build, if a listed file is missing or of another size."""
    if not storage.exists(MANIFEST_NAME):
        return None
    try:
        manifest = read_manifest(storage)
    except ManifestError as error:
        log.warning("rebuilding: %s", error)
        return None
    damaged = [f.path for f in manifest.files if storage.size_bytes(f.path) != f.bytes]
    if damaged or manifest.fingerprint != fingerprint:
        reason = f"damaged files {damaged[:3]}" if damaged else "other fingerprint"
        log.warning("rebuilding %s: %s", storage.uri, reason)
        return None
    return manifest


def _build(build: Build, fingerprint: str) -> DatasetManifest:
    """Write the files of a dataset; returns the manifest that makes them one."""
    request, config = build.request, build.request.config
    with build.timed("read"):
        tables = {name: source.read(build.spark) for name, source in request.sources.items()}
        rows = build_rows(build.spark, tables, config.views, config.rows)
        _check_names(rows)
        key = config.key or rows.columns
        _check_key(rows, key)
        marked = checks.mark(add_split(rows, config.split, key), config.checks, tables, key)
    marked.persist(StorageLevel.DISK_ONLY)
    try:
        with build.timed("check"):
            checked = checks.evaluate(marked, config.checks)
            _check_one_per(config, tables, checked.rows_in)
            splits = check_splits(checked.splits, config.split)
            if checked.quarantined:
                quarantined = write_quarantine(checks.bad(marked), build.storage, f"{build.folder}/quarantine")
                assert quarantined == checked.quarantined, (quarantined, checked.quarantined)
        write = _write_table if config.text is None else _write_text
        written = write(build, checks.good(marked), key, splits)
    finally:
        marked.unpersist()
    files_by_split = Counter(file.split for file in written.files)
    return DatasetManifest(
        name=request.name,
        fingerprint=fingerprint,
        created_at=datetime.now(UTC).isoformat(timespec="seconds"),
        columns=tuple(written.columns),
        files=tuple(written.files),
        splits={s: SplitInfo(rows=n, files=files_by_split[s]) for s, n in written.rows_by_split.items()},
        accounting=Accounting(rows_in=checked.rows_in, rows_out=sum(splits.values()), quarantined=checked.quarantined),
        features=written.features,
        checks=checked.report,
        text=written.text,
        lineage=Lineage(
            sources={name: source.lineage() for name, source in request.sources.items()},
            logical_plan=_plan_text(rows),
            code_commit=request.code_commit,
            code_digest=code_digest(PACKAGE),
            config_digest=request.config_digest,
            application_id=build.spark.sparkContext.applicationId,
        ),
    )


def _write_table(build: Build, good: DataFrame, key: list[str], splits: dict[str, int]) -> Written:
    config = build.request.config
    with build.timed("fit"):
        features = fit.fit(good.where(F.col(SPLIT) == "train"), config.features)
        columns = table.stored_columns(good, config, features)
    with build.timed("write"):
        # Sized by what a reader holds of a row, so that another encoding of files does not move rows between them.
        tensors = list(tensor_columns(columns, features))
        plan = plan_files(table.to_stored(good, config, features, columns), splits, tensors, config.shard)
        numbered = number_rows(with_order(good, key, config.shard.seed), plan.shards)
        rows = table.to_stored(numbered, config, features, columns, carry=[ORDER, SHARD])
        files = write_shards(rows, columns, plan, build.storage, build.folder)
    return Written(columns, files, splits, features=features)


def _write_text(build: Build, good: DataFrame, key: list[str], splits: dict[str, int]) -> Written:
    config = build.request.config
    assert config.text is not None
    with build.timed("fit"):
        packed = text.pack(with_order(good, key, config.shard.seed), config.text, splits)
    rows = packed.rows.persist(StorageLevel.DISK_ONLY)
    try:
        with build.timed("write"):
            plan = plan_files(rows, packed.rows_by_split, packed.columns, config.shard)
            numbered = number_rows(with_order(rows, ["sequence"], config.shard.seed), plan.shards)
            files = write_shards(numbered, packed.columns, plan, build.storage, build.folder)
    finally:
        rows.unpersist()
        packed.held.unpersist()
    return Written(packed.columns, files, packed.rows_by_split, text=packed.info)


def _check_names(rows: DataFrame) -> None:
    if twice := same_but_for_case(rows.columns):
        raise EtlError(
            f"etl.rows: two columns are called {twice[0]!r} and {twice[1]!r}; Spark does not tell names apart by case: "
            "rename one, or select one of them"
        )
    if taken := [c for c in rows.columns if c.startswith("__")]:
        raise EtlError(
            f"etl.rows: names with two underscores before them, as {taken[0]!r}, are the job's own; rename it"
        )


def _check_key(rows: DataFrame, key: list[str]) -> None:
    if missing := [c for c in key if c not in rows.columns]:
        raise EtlError(f"etl.key: rows have no column {missing[0]!r}; they have {rows.columns}")


def _check_one_per(config: EtlConfig, tables: dict[str, DataFrame], rows_in: int) -> None:
    if config.one_per is None:
        return
    wanted = tables[config.one_per].count()
    if wanted != rows_in:
        verb = "multiplied" if rows_in > wanted else "lost"
        raise EtlError(
            f"etl.one_per = {config.one_per!r}: the table has {wanted} rows, etl.rows {rows_in}: joins {verb} rows; "
            "join on a unique key, and with LEFT JOIN"
        )


def _plan_text(rows: DataFrame) -> str:
    plan_text = rows._jdf.queryExecution().analyzed().toString()
    return re.sub(r"#\d+L?", "", plan_text)[:PLAN_CHARACTERS]


def _sweep(storage: Storage, manifest: DatasetManifest) -> None:
    """Delete the folders of killed builds, once no build can still be writing to them."""
    storage.sweep()
    used = {f.path.split("/")[0] for f in manifest.files}
    limit = datetime.now(UTC) - DEAD_BUILD_AGE
    newest: dict[str, datetime] = {}
    for info in storage.fs.get_file_info(pafs.FileSelector(storage.root, recursive=True)):
        top = info.path[len(storage.root) + 1 :].split("/")[0]
        if top.startswith("data-") and top not in used and info.mtime is not None:
            newest[top] = max(newest.get(top, info.mtime), info.mtime)
    for top in sorted(t for t, at in newest.items() if at < limit):
        log.info("deleting %s: left by a build that was killed", storage.at(top).uri)
        storage.delete(top)
