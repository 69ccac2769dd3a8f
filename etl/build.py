"""The ETL job: raw tables -> one dataset, built once per fingerprint and published by its manifest, last.

A dataset lies at `<root>/<name>-<fingerprint[:12]>/`. Each attempt writes below its own `data-<build id>/`, so a crash
leaves the dataset that was there, or none, and files no manifest lists.
"""

from __future__ import annotations

import importlib.resources
import json
import logging
import re
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from importlib.resources.abc import Traversable
from types import MappingProxyType
from typing import Any

import pyarrow.fs as pafs
from pyspark import StorageLevel
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from conf.manifest import (
    FORMAT_VERSION,
    MANIFEST_NAME,
    Accounting,
    Column,
    DataFile,
    DatasetManifest,
    Lineage,
    ManifestError,
    SplitInfo,
    digest,
    read_manifest,
)
from conf.schema_etl import EtlConfig, same_but_for_case
from conf.storage import Storage, open_storage
from etl import checks, fit, source, table, text
from etl.errors import EtlError
from etl.quarantine import write_quarantine
from etl.shard import ORDER, number_rows, plan, with_order, write_shards
from etl.split import SPLIT, add_split, check_splits
from etl.views import build_rows, own_modules
from etl.write import SHARD

log = logging.getLogger(__name__)

DEAD_BUILD_AGE = timedelta(days=1)
# What decides rows is the recipe's, on every cluster; so the session of a build has these settings, ...
FIXED = {
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.ansi.enabled": "true",
    "spark.sql.sources.partitionColumnTypeInference.enabled": "false",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    # Sources come as lists of files: listing each again in a task of its own would take longer than reading it.
    "spark.sql.sources.parallelPartitionDiscovery.threshold": "100000",
    # Rows of images or whole documents go to Python in batches of bounded size.
    "spark.sql.execution.arrow.maxBytesPerBatch": str(32 << 20),
}
# ... of the cluster's those that decide how fast a query runs, where, or what is shown of it, ...
FREE = tuple(
    "spark.sql." + name
    for name in (
        *(
            "adaptive.",
            "artifact.",
            "autoBroadcastJoinThreshold",
            "broadcastTimeout",
            "catalogImplementation",
            "cbo.",
            "codegen.",
        ),
        *("debug.", "execution.arrow.", "files.maxPartition", "files.minPartitionNum", "files.openCostInBytes"),
        *("inMemoryColumnarStorage.", "join.preferSortMergeJoin", "maxPlanStringLength", "shuffle.partitions"),
        *("sources.parallelPartitionDiscovery.", "statistics.", "thriftServer.", "ui.", "warehouse.dir"),
    )
)
# ... and every other of Spark SQL from the recipe alone, whose fingerprint it is part of (`decides_rows`).
PLAN_CHARACTERS = 20_000


@dataclass(frozen=True)
class Built:
    """A dataset and where it lies. `rebuilt` is False where it already was there; `seconds` by stage are then empty."""

    manifest: DatasetManifest
    uri: str
    rebuilt: bool
    seconds: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Attempt:
    """One try to build: where it writes, below `folder`, and what each stage took."""

    spark: SparkSession
    config: EtlConfig
    storage: Storage
    folder: str
    seconds: dict[str, float]

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        started = time.monotonic()
        yield
        self.seconds[f"{stage}_s"] = time.monotonic() - started


@dataclass(frozen=True)
class Written:
    """The part of a manifest that only tables, or only texts, know how to make."""

    columns: list[Column]
    files: list[DataFile]
    rows_by_split: dict[str, int]
    features: dict[str, Any] = field(default_factory=dict)
    text: dict[str, Any] = field(default_factory=dict)


def build_dataset(
    spark: SparkSession,
    config: EtlConfig,
    *,
    name: str,
    root_uri: str,
    settings: Mapping[str, str] = MappingProxyType({}),
    code_commit: str = "",
    config_digest: str = "",
) -> Built:
    """Build the dataset, or find it built. Raises EtlError (ChecksFailed) for whatever is the user's to mend.

    Args:
        name: with the fingerprint, the dataset's folder below `root_uri`.
        settings: the recipe's `spark.conf`.
        code_commit: commit of the user's checkout, for the lineage.
        config_digest: digest of the whole resolved recipe, for the lineage.
    """
    sources = {n: source.find_source(n, c) for n, c in config.sources.items()}
    prints = {n: source.fingerprint(s) for n, s in sources.items()}
    print_ = dataset_fingerprint(config, prints, spark.version, settings)
    storage = open_storage(root_uri).at(f"{name}-{print_[:12]}")
    if (manifest := find_dataset(storage, print_)) is not None:
        log.info("dataset %s is built already: %s", name, storage.uri)
        return Built(manifest, storage.uri, rebuilt=False)
    attempt = Attempt(_own_session(spark, settings), config, storage, f"data-{uuid.uuid4().hex[:12]}", {})
    try:
        lineage = Lineage(
            sources={n: _described(s, prints[n]) for n, s in sources.items()},
            code_commit=code_commit,
            code_digest=code_digest(),
            config_digest=config_digest,
            application_id=spark.sparkContext.applicationId,
        )
        manifest = _build(attempt, name, print_, sources, lineage)
        _check_unchanged(sources)
        storage.put_atomic(MANIFEST_NAME, manifest.to_json().encode())
    except BaseException:
        storage.delete(attempt.folder)
        raise
    _sweep(storage, manifest)
    log.info(
        "dataset %s: %d rows in %d files: %s", name, manifest.accounting.rows_out, len(manifest.files), storage.uri
    )
    return Built(manifest, storage.uri, rebuilt=True, seconds=attempt.seconds)


def dataset_fingerprint(
    config: EtlConfig, sources: dict[str, str], spark_version: str, settings: Mapping[str, str]
) -> str:
    """sha256 over all that decides the dataset's content; known before anything is built.

    Where a source lies is not content, so paths are left out; the order of keys is (columns are stored in it).
    """
    block = config.model_dump(mode="json")
    for declared in block["sources"].values():
        del declared["path"]
    deciding = {key: value for key, value in sorted(settings.items()) if decides_rows(key)}
    parts = [FORMAT_VERSION, sources, json.dumps(block), own_modules(config.rows), code_digest()]
    return digest([*parts, spark_version, deciding])


def decides_rows(key: str) -> bool:
    """Whether a Spark setting may change the rows of a query: Spark SQL's do, but for those fixed or free here."""
    return key.startswith("spark.sql.") and key not in FIXED and not key.startswith(FREE)


def code_digest() -> str:
    """sha256 of this package's sources, subfolders included: other code may build other rows."""
    return digest(sorted(_sources(importlib.resources.files("etl"), "etl")))


def _sources(folder: Traversable, name: str) -> Iterator[list[str]]:
    for entry in folder.iterdir():
        if entry.name.endswith(".py"):
            yield [f"{name}/{entry.name}", entry.read_text()]
        elif entry.is_dir():
            yield from _sources(entry, f"{name}/{entry.name}")


def find_dataset(storage: Storage, fingerprint: str) -> DatasetManifest | None:
    """The manifest, if the dataset is there whole; a listed file missing or of another size means a new build."""
    if not storage.exists(MANIFEST_NAME):
        return None
    try:
        manifest = read_manifest(storage)
    except ManifestError as error:
        log.warning("rebuilding: %s", error)
        return None
    damaged = [f.path for f in manifest.files if storage.size_bytes(f.path) != f.bytes]
    if damaged or manifest.fingerprint != fingerprint:
        log.warning(
            "rebuilding %s: %s", storage.uri, f"damaged files {damaged[:3]}" if damaged else "other fingerprint"
        )
        return None
    return manifest


def _own_session(spark: SparkSession, settings: Mapping[str, str]) -> SparkSession:
    """A session with its own views, where the recipe's `settings` alone decide rows, not the cluster's or caller's."""
    session = spark.newSession()
    for key in session.conf.getAll:
        if decides_rows(key) and key not in settings and session.conf.isModifiable(key):
            log.warning("%s is set on this cluster and not in the recipe's spark.conf: left out of the build", key)
            session.conf.unset(key)
    if (partitions := spark.conf.get("spark.sql.shuffle.partitions", None)) is not None:
        session.conf.set("spark.sql.shuffle.partitions", partitions)
    for key, value in {**{k: v for k, v in settings.items() if k.startswith("spark.sql.")}, **FIXED}.items():
        if session.conf.isModifiable(key):
            session.conf.set(key, value)
    return session


def _build(
    attempt: Attempt, name: str, fingerprint: str, sources: dict[str, source.Source], lineage: Lineage
) -> DatasetManifest:
    config = attempt.config
    with attempt.timed("read"):
        tables = {n: source.read_source(attempt.spark, s) for n, s in sources.items()}
        rows = build_rows(attempt.spark, tables, config.views, config.rows)
        _check_names(rows)
        key = config.key or rows.columns
        _check_key(rows, key)
        marked = checks.mark(add_split(rows, config.split, key), config.checks, tables, key)
    marked.persist(StorageLevel.DISK_ONLY)
    try:
        with attempt.timed("check"):
            checked = checks.evaluate(marked, config.checks)
            _check_one_per(config, tables, checked.rows_in)
            splits = check_splits(checked.splits, config.split)
            if checked.quarantined:
                written = write_quarantine(checks.bad(marked), attempt.storage, f"{attempt.folder}/quarantine")
                assert written == checked.quarantined, (written, checked.quarantined)
        write = _write_table if config.text is None else _write_text
        made = write(attempt, checks.good(marked), key, splits)
    finally:
        marked.unpersist()
    return DatasetManifest(
        name=name,
        fingerprint=fingerprint,
        created_at=datetime.now(UTC).isoformat(timespec="seconds"),
        columns=tuple(made.columns),
        files=tuple(made.files),
        splits={
            s: SplitInfo(rows=n, files=sum(f.split == s for f in made.files)) for s, n in made.rows_by_split.items()
        },
        accounting=Accounting(rows_in=checked.rows_in, rows_out=sum(splits.values()), quarantined=checked.quarantined),
        features=made.features,
        checks=checked.report,
        text=made.text,
        lineage=lineage.model_copy(update={"logical_plan": _plan_text(rows)}),
    )


def _write_table(attempt: Attempt, good: DataFrame, key: list[str], splits: dict[str, int]) -> Written:
    spark, config = attempt.spark, attempt.config
    with attempt.timed("fit"):
        features = fit.fit(good.where(F.col(SPLIT) == "train"), config.features)
        columns = table.stored_columns(good, config, features)
    with attempt.timed("write"):
        shards = plan(table.to_stored(spark, good, config, features, columns, []), splits, columns, config.shard)
        numbered = number_rows(with_order(good, key, config.shard.seed), shards.shards)
        # Features come after the numbers, so that the passes over the key do not join the vocabularies.
        rows = table.to_stored(spark, numbered, config, features, columns, [ORDER, SHARD])
        files = write_shards(rows, columns, shards, attempt.storage, attempt.folder, config.shard.compression)
    return Written(columns, files, splits, features=features)


def _write_text(attempt: Attempt, good: DataFrame, key: list[str], splits: dict[str, int]) -> Written:
    spark, config = attempt.spark, attempt.config
    assert config.text is not None
    with attempt.timed("fit"):
        packed = text.pack(spark, good, config.text, key, splits, config.shard.seed)
    rows = packed.rows.persist(StorageLevel.DISK_ONLY)
    try:
        with attempt.timed("write"):
            shards = plan(rows, packed.rows_by_split, packed.columns, config.shard)
            numbered = number_rows(with_order(rows, ["sequence"], config.shard.seed), shards.shards)
            files = write_shards(
                numbered, packed.columns, shards, attempt.storage, attempt.folder, config.shard.compression
            )
    finally:
        rows.unpersist()
        packed.held.unpersist()
    return Written(packed.columns, files, packed.rows_by_split, text=packed.info)


def _check_unchanged(sources: dict[str, source.Source]) -> None:
    """The fingerprint was taken before the files were read; it must still be theirs."""
    for name, before in sources.items():
        if source.find_source(name, before.config).files != before.files:
            raise EtlError(
                f"etl.sources.{name}: its files changed while they were read; run again when they are at rest"
            )


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


def _described(found: source.Source, fingerprint: str) -> dict[str, Any]:
    return {
        "path": found.config.path,
        "format": found.config.format,
        "files": len(found.files),
        "bytes": sum(f.bytes for f in found.files),
        "fingerprint": fingerprint,
    }


def _plan_text(rows: DataFrame) -> str:
    plan_text = rows._jdf.queryExecution().analyzed().toString()
    return re.sub(r"#\d+L?", "", plan_text)[:PLAN_CHARACTERS]


def _sweep(storage: Storage, manifest: DatasetManifest) -> None:
    """Delete what builds that were killed left here, once no build can still be writing it."""
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
