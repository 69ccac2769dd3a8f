"""The ETL job: raw tables -> one dataset, built once per fingerprint and published by its manifest, last.

A dataset is the folder `<root>/<name>-<fingerprint[:12]>/`. One without `etl.interval` has its files there: each build
writes to its own `data-<build id>/`, so a crash leaves the dataset that was there before, or none, and files no
manifest lists. One with intervals is a manifest over day partitions (`etl/windows/`).
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from pyspark.sql import SparkSession

from sparkring.conf.blocks.etl import EtlConfig
from sparkring.conf.code import code_digest
from sparkring.conf.features import State
from sparkring.conf.manifest import (
    MANIFEST_NAME,
    Accounting,
    Column,
    DataFile,
    DatasetManifest,
    Lineage,
    ManifestError,
    SplitInfo,
    WindowPart,
    read_manifest,
)
from sparkring.conf.plain_text import count_of
from sparkring.conf.storage import Storage, open_storage
from sparkring.etl.checks import Checked, judge
from sparkring.etl.fingerprint import PACKAGE, dataset_fingerprint, made_of
from sparkring.etl.profile import Profile, fit_state
from sparkring.etl.rows import (
    Portion,
    RowsJob,
    Written,
    check_one_per,
    delete_dead_builds,
    deleted_on_failure,
    limited,
    new_folder,
    rows_of,
    write_rows,
)
from sparkring.etl.shards.duplicates import number_duplicates
from sparkring.etl.sources.snapshot import SourceSnapshot
from sparkring.etl.spark_platform.application import application_id
from sparkring.etl.spark_platform.plans import plan_text
from sparkring.etl.spark_platform.session import build_session
from sparkring.etl.split import add_split, check_splits
from sparkring.etl.weights import check_weighted

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class StoredRows:
    """All rows of a dataset in files that no manifest lists yet.

    `parts`: oldest first, with file paths as the manifest lists them; one without intervals is one part. `profile`: of
    all rows. `sources`, `logical_plan` and `application_id` are recorded in the lineage. `listed`: the parts as the
    manifest names them; `new`: intervals whose parts were written, not found.
    """

    parts: Sequence[Written]
    profile: Profile
    sources: dict[str, Any]
    logical_plan: str
    application_id: str
    listed: tuple[WindowPart, ...] = ()
    new: tuple[str, ...] = ()


class PinnedDataset(ABC):
    """What a dataset is made of, known before anything is built. `missing`: intervals without files, skipped."""

    fingerprint: str
    missing: tuple[str, ...] = ()
    shared_digest: str = ""  # of what decides all day partitions; "" without them, or if none was looked at

    @property
    @abstractmethod
    def snapshots(self) -> list[SourceSnapshot]:
        """The snapshots that were taken."""

    @property
    @abstractmethod
    def contents(self) -> dict[str, str]:
        """The fingerprint of each thing that is read, as `made_of` names it."""

    @property
    def part_fingerprints(self) -> dict[str, str]:
        """The fingerprint of each day partition by its interval; {} without intervals."""
        return {}

    @abstractmethod
    def stored(self, job: RowsJob, name: str) -> AbstractContextManager[StoredRows]:
        """Write the rows of the recipe `name`, or find them written, for a manifest that is published within.

        EtlError for whatever the user must correct.
        """


@dataclass(frozen=True)
class PinnedSources(PinnedDataset):
    """A dataset without intervals: its sources, each read whole."""

    sources: Mapping[str, SourceSnapshot]
    fingerprint: str

    @property
    def snapshots(self) -> list[SourceSnapshot]:
        return [*self.sources.values()]

    @property
    def contents(self) -> dict[str, str]:
        return {source.key: source.fingerprint for source in self.snapshots}

    @contextmanager
    def stored(self, job: RowsJob, name: str) -> Iterator[StoredRows]:
        at, folder, config = dataset_folder(name, self.fingerprint), new_folder(), job.config
        with deleted_on_failure(job.storage, [f"{at}/{folder}"], self.snapshots):
            with job.timed("read"):
                tables = {name: source.read(job.spark) for name, source in self.sources.items()}
                rows = rows_of(job, tables)
                (numbered,) = number_duplicates([rows], config)
                kept = limited(numbered, config.key or numbered.columns, config.limit_rows)
                divided = add_split(kept, config.split, config.key)

            def on_counted(checked: Checked) -> dict[str, int]:
                judge(checked, config.checks)
                if config.one_per is not None:
                    check_one_per(config.one_per, tables[config.one_per].count(), checked.rows_in)
                return check_splits(checked.splits, config.split)

            (written,) = write_rows(job, [Portion(divided, tables, on_counted, at, folder, is_whole=True)])
            for source in self.snapshots:  # the fingerprint, taken before they were read, must still be theirs
                source.check_unchanged()
            yield StoredRows(
                [written],
                written.profile,
                {name: source.lineage() for name, source in self.sources.items()},
                plan_text(rows),
                application_id(job.spark),
            )
        delete_dead_builds(job.storage.at(at), {folder})


def pinned_sources(
    config: EtlConfig, sources: Mapping[str, SourceSnapshot], settings: Mapping[str, str]
) -> PinnedSources:
    """Describe the dataset that would be made of these sources.

    Args:
        config: the etl block.
        sources: pinned, by name.
        settings: the recipe's `spark.conf`.
    """
    return PinnedSources(sources, dataset_fingerprint(config, sources, settings))


@dataclass(frozen=True)
class BuildRequest:
    """What to build, and where.

    With the fingerprint of what is `pinned`, `name` is the dataset's folder below `root_uri`; `settings` are the
    recipe's `spark.conf`. `code_commit` (of the user's checkout) and `config_digest` (of the resolved recipe) are
    recorded in the lineage. `before_publish` is called right before the manifest is written, `on_label` with the
    columns and what is known of the label's classes, tags or values before a row is, but for windows; both may raise.
    """

    config: EtlConfig
    pinned: PinnedDataset
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

    `written_parts`: intervals of a window whose day partitions were written, not found.
    """

    manifest: DatasetManifest
    uri: str
    rebuilt: bool
    seconds: dict[str, float] = field(default_factory=dict)
    written_parts: tuple[str, ...] = ()


def build_dataset(spark: SparkSession, request: BuildRequest) -> Built:
    """Build the dataset, or find it built. Raises EtlError (ChecksFailed) for whatever the user must correct."""
    root, fingerprint = open_storage(request.root_uri), request.pinned.fingerprint
    storage = root.at(dataset_folder(request.name, fingerprint))
    if (manifest := stored_dataset(storage, fingerprint)[0]) is not None:  # a job has looked before, and has reported
        log.info("dataset %s is built already: %s", request.name, storage.uri)
        return Built(manifest, storage.uri, rebuilt=False)
    job = RowsJob(request.config, build_session(spark, request.settings), root, on_label=request.on_label)
    with request.pinned.stored(job, request.name) as stored:
        manifest = assemble(job, request, stored)
        request.before_publish("the dataset")
        storage.put_atomic(MANIFEST_NAME, manifest.to_json().encode())
    rows, files = count_of(manifest.accounting.rows_out, "row"), count_of(len(manifest.files), "file")
    parts = f" of {count_of(len(manifest.parts), 'part')}, {len(stored.new)} of them new" if manifest.parts else ""
    log.info("dataset %s: %s in %s%s: %s", request.name, rows, files, parts, storage.uri)
    return Built(manifest, storage.uri, rebuilt=True, seconds=job.seconds, written_parts=stored.new)


def dataset_folder(name: str, fingerprint: str) -> str:
    """Return a dataset's folder, relative to the root of datasets; `name` is the recipe's."""
    return f"{name}-{fingerprint[:12]}"


def find_dataset(storage: Storage, fingerprint: str) -> DatasetManifest | None:
    """Read the manifest of a whole dataset; None, so a new build, if a listed file is missing or of another size."""
    manifest, problem = stored_dataset(storage, fingerprint)
    if problem:
        log.warning("rebuilding: %s", problem)
    return manifest


def stored_dataset(storage: Storage, fingerprint: str) -> tuple[DatasetManifest | None, str]:
    """Return (manifest of an intact dataset or None, problem with a damaged one or "")."""
    if not storage.exists(MANIFEST_NAME):
        return None, ""
    try:
        manifest = read_manifest(storage)
    except ManifestError as error:
        return None, str(error)
    files = manifest.files_folder(storage)
    sizes = files.sizes_bytes([f.path for f in manifest.files])
    damaged = [f.path for f, size in zip(manifest.files, sizes, strict=True) if size != f.bytes]
    if damaged:
        return None, f"{storage.uri}: damaged files {damaged[:3]}"
    return (manifest, "") if manifest.fingerprint == fingerprint else (None, f"{storage.uri}: other fingerprint")


def assemble(job: RowsJob, request: BuildRequest, stored: StoredRows) -> DatasetManifest:
    """Make the manifest of the stored rows. ChecksFailed or EtlError where they must not become a dataset."""
    config, checked, first = request.config, stored.profile.checked, stored.parts[0]
    report = judge(checked, config.checks)
    splits = check_splits(checked.splits, config.split)
    check_weighted(config.weight, stored.profile.weighted, splits)
    files = numbered_files([part.files for part in stored.parts], list(splits))
    with job.timed("fit"):
        features = fit_state(stored.profile, first.columns, first.inputs, config)
    rows_by_file = [(file.split, file.rows) for file in files]
    return DatasetManifest(
        name=request.name,
        fingerprint=request.pinned.fingerprint,
        created_at=datetime.now(UTC).isoformat(timespec="seconds"),
        columns=tuple(first.columns),
        files=tuple(files),
        splits={split: _split_info([rows for own, rows in rows_by_file if own == split]) for split in splits},
        accounting=Accounting(
            rows_in=checked.rows_in, rows_out=sum(checked.splits.values()), quarantined=checked.quarantined
        ),
        features=features,
        checks=report,
        text=first.text,
        lineage=Lineage(
            sources=stored.sources,
            logical_plan=stored.logical_plan,
            code_commit=request.code_commit,
            code_digest=code_digest(PACKAGE),
            config_digest=request.config_digest,
            application_id=stored.application_id,
            spark_version=job.spark.version,
            made_of=made_of(config, request.pinned.contents, request.settings),
        ),
        parts=stored.listed,
        missing=request.pinned.missing,
    )


def _split_info(rows: Sequence[int]) -> SplitInfo:
    """Count the rows and files of a split; `rows` holds each file's row count."""
    return SplitInfo(rows=sum(rows), files=len(rows))


def numbered_files(parts: Sequence[Sequence[DataFile]], splits: Sequence[str]) -> list[DataFile]:
    """List the files of each split, one day partition after another, with rows numbered through.

    `parts`: the files of each, oldest first. `splits`: in the order of storing.
    """
    found = []
    for split in splits:
        offset = 0
        for files in parts:
            own = [file for file in files if file.split == split]
            found += [file.model_copy(update={"row_offset": offset}) for file in own]
            offset += sum(file.rows for file in own)
    return found
