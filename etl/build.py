"""The ETL job: raw tables -> one dataset, built once per fingerprint and published by its manifest, last.

A dataset is the folder `<root>/<name>-<fingerprint[:12]>/`. Each build writes to its own `data-<build id>/` below it,
so a crash leaves the dataset that was there before, or none, and files no manifest lists.
"""

from __future__ import annotations

import logging
import uuid
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from sparkring.conf.blocks.etl import EtlConfig
from sparkring.conf.code import code_digest
from sparkring.conf.features import State
from sparkring.conf.manifest import (
    MANIFEST_NAME,
    Accounting,
    Column,
    DatasetManifest,
    Lineage,
    ManifestError,
    SplitInfo,
    read_manifest,
)
from sparkring.conf.storage import Storage, open_storage
from sparkring.etl.checks import Checked, judge
from sparkring.etl.classes import fit_label
from sparkring.etl.fingerprint import PACKAGE, dataset_fingerprint, made_of
from sparkring.etl.fit import fit
from sparkring.etl.flags import fit_flags
from sparkring.etl.rows import Portion, RowsJob, check_one_per, delete_dead_builds, plan_text, rows_of, write_rows
from sparkring.etl.session import build_session
from sparkring.etl.sources.snapshot import SourceSnapshot
from sparkring.etl.split import add_split, check_splits
from sparkring.etl.weights import fit_weight

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class BuildRequest:
    """What to build, and where.

    `sources` are pinned; with the fingerprint, `name` is the dataset's folder below `root_uri`; `settings` are the
    recipe's `spark.conf`. `code_commit` (of the user's checkout) and `config_digest` (of the resolved recipe) are
    recorded in the lineage. `before_publish` is called right before the manifest is written, `on_label` with the
    columns and what is known of the label's classes, tags or values before a row is; both may raise.
    """

    config: EtlConfig
    sources: Mapping[str, SourceSnapshot]
    name: str
    root_uri: str
    settings: Mapping[str, str] = field(default_factory=dict)
    code_commit: str = ""
    config_digest: str = ""
    before_publish: Callable[[str], None] = lambda what: None
    on_label: Callable[[Sequence[Column], State], None] = lambda columns, state: None


@dataclass(frozen=True)
class Built:
    """A finished dataset and its URI. `rebuilt` is False if it was found; `seconds` by stage are then empty.

    `written_parts`: intervals of a window whose parts were written, not found.
    """

    manifest: DatasetManifest
    uri: str
    rebuilt: bool
    seconds: dict[str, float] = field(default_factory=dict)
    written_parts: tuple[str, ...] = ()


def build_dataset(spark: SparkSession, request: BuildRequest) -> Built:
    """Build the dataset, or find it built. Raises EtlError (ChecksFailed) for whatever the user must correct."""
    fingerprint = dataset_fingerprint(request.config, request.sources, spark.version, request.settings)
    storage = open_storage(request.root_uri).at(f"{request.name}-{fingerprint[:12]}")
    if (manifest := find_dataset(storage, fingerprint)) is not None:
        log.info("dataset %s is built already: %s", request.name, storage.uri)
        return Built(manifest, storage.uri, rebuilt=False)
    session = build_session(spark, request.settings)
    folder = f"data-{uuid.uuid4().hex[:12]}"
    job = RowsJob(request.config, session, storage, folder, on_label=request.on_label)
    try:
        manifest = _build(job, request, fingerprint)
        for source in request.sources.values():  # the fingerprint, taken before they were read, must still be theirs
            source.check_unchanged()
        request.before_publish("the dataset")
        storage.put_atomic(MANIFEST_NAME, manifest.to_json().encode())
    except BaseException as error:
        storage.delete(job.folder)
        if isinstance(error, (PySparkException, Py4JJavaError, OSError)):
            for source in request.sources.values():  # a file that has gone is why it could not be read
                source.check_unchanged()
        raise
    delete_dead_builds(storage, {f.path.split("/")[0] for f in manifest.files})
    rows, files = manifest.accounting.rows_out, len(manifest.files)
    log.info("dataset %s: %d rows in %d files: %s", request.name, rows, files, storage.uri)
    return Built(manifest, storage.uri, rebuilt=True, seconds=job.seconds)


def find_dataset(storage: Storage, fingerprint: str) -> DatasetManifest | None:
    """Read the manifest of a whole dataset; None, so a new build, if a listed file is missing or of another size."""
    if not storage.exists(MANIFEST_NAME):
        return None
    try:
        manifest = read_manifest(storage)
    except ManifestError as error:
        log.warning("rebuilding: %s", error)
        return None
    files = manifest.files_folder(storage)
    sizes = files.sizes_bytes([f.path for f in manifest.files])
    damaged = [f.path for f, size in zip(manifest.files, sizes, strict=True) if size != f.bytes]
    if damaged or manifest.fingerprint != fingerprint:
        reason = f"damaged files {damaged[:3]}" if damaged else "other fingerprint"
        log.warning("rebuilding %s: %s", storage.uri, reason)
        return None
    return manifest


def contents_of(sources: Mapping[str, SourceSnapshot]) -> dict[str, str]:
    """The fingerprint of each source, as `made_of` names it."""
    return {source.key: source.fingerprint for source in sources.values()}


def _build(job: RowsJob, request: BuildRequest, fingerprint: str) -> DatasetManifest:
    """Write the files of a dataset; returns the manifest that makes them one."""
    config, report = job.config, list[dict[str, Any]]()
    with job.timed("read"):
        tables = {name: source.read(job.spark) for name, source in request.sources.items()}
        rows = rows_of(job, tables)
        divided = add_split(rows, config.split, config.key)

    def on_counted(checked: Checked) -> dict[str, int]:
        report.extend(judge(checked, config.checks))
        if config.one_per is not None:
            check_one_per(config.one_per, tables[config.one_per].count(), checked.rows_in)
        return check_splits(checked.splits, config.split)

    ((checked, written),) = write_rows(job, [Portion(divided, tables, on_counted, job.folder)])
    features: State = {}
    if written.statistics is not None:
        with job.timed("fit"):
            features = fit(written.statistics, config.features, written.inputs)
            features |= fit_label(written.columns, written.classes, config.classes, written.rows_by_split)
            features |= fit_flags(written.columns, written.classes, written.odd, written.rows_by_split)
            features |= fit_weight(config.weight, written.statistics)
    files_by_split = Counter(file.split for file in written.files)
    return DatasetManifest(
        name=request.name,
        fingerprint=fingerprint,
        created_at=datetime.now(UTC).isoformat(timespec="seconds"),
        columns=tuple(written.columns),
        files=tuple(written.files),
        splits={s: SplitInfo(rows=n, files=files_by_split[s]) for s, n in written.rows_by_split.items()},
        accounting=Accounting(
            rows_in=checked.rows_in, rows_out=sum(checked.splits.values()), quarantined=checked.quarantined
        ),
        features=features,
        checks=report,
        text=written.text,
        lineage=Lineage(
            sources={name: source.lineage() for name, source in request.sources.items()},
            logical_plan=plan_text(rows),
            code_commit=request.code_commit,
            code_digest=code_digest(PACKAGE),
            config_digest=request.config_digest,
            application_id=job.spark.sparkContext.applicationId,
            made_of=made_of(config, contents_of(request.sources), job.spark.version, request.settings),
        ),
    )
