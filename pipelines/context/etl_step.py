"""The dataset of a job: built from the recipe's sources, found where it was built before, or given by URI.

What a given dataset needs imports no Spark: `etl` is imported by the functions that pin and build.
"""

from __future__ import annotations

import functools
import logging
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from sparkring.conf.config import RunConfig
from sparkring.conf.errors import first_line
from sparkring.conf.features import State
from sparkring.conf.load import ConfigError, Resolved
from sparkring.conf.manifest import (
    MANIFEST_NAME,
    Accounting,
    Column,
    DatasetManifest,
    Lineage,
    ManifestError,
    read_manifest,
)
from sparkring.conf.rules.dataset import label_problems
from sparkring.conf.storage import Storage, open_storage
from sparkring.etl.errors import EtlError, innermost
from sparkring.pipelines.tracking.ops import DatasetInfo
from sparkring.pipelines.tracking.tracker import Tracker

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from sparkring.etl.build import PinnedDataset
    from sparkring.etl.windows.window import KnownParts

log = logging.getLogger(__name__)
ETL = "etl"  # key of its run in MLflow
SHOWN = 8  # differences between two datasets
DATA_EXCEPTION = "22"  # class of the SQL standard's states


@dataclass(frozen=True)
class Dataset:
    """A finished dataset."""

    manifest: DatasetManifest
    folder: Storage
    rebuilt: bool = False
    seconds: dict[str, float] = field(default_factory=dict)  # by stage of the build; empty where it was found
    written_parts: tuple[str, ...] = ()  # intervals of a window whose day partitions were written for it


def pin(config: RunConfig, session: Callable[[], SparkSession], known: KnownParts | None = None) -> PinnedDataset:
    """Pin the sources, which reads each of their files once; nothing where the dataset is given.

    `session` opens Spark, and is called for sources that only Spark can pin. The sources of `known` parts are not
    looked at.
    """
    from sparkring.etl.build import PinnedSources
    from sparkring.etl.sources.snapshot import PinContext
    from sparkring.etl.spark_platform.session import build_session
    from sparkring.etl.windows.window import NONE_KNOWN, pin_dataset

    if config.etl is None:
        return PinnedSources({}, "")
    settings = config.spark.settings()
    own_session = functools.cache(lambda: build_session(session(), settings))
    context = PinContext(own_session, config.storage.datasets)
    return pin_dataset(config.etl, settings, context, known or NONE_KNOWN)


def pins_without_spark(config: RunConfig) -> bool:
    """Return whether `pin` needs no Spark."""
    return config.etl is None or not any(source.NEEDS_SPARK for source in config.etl.sources.values())


def wanted_fingerprint(config: RunConfig, sources: PinnedDataset) -> str:
    """Return the fingerprint of the dataset for this configuration and its pinned sources. Needs no Spark."""
    if config.dataset is not None:
        return read_manifest(open_storage(config.dataset)).fingerprint
    return sources.fingerprint


def why_built(config: RunConfig, sources: PinnedDataset) -> str:
    """Describe how the newest dataset of this name differs from the one that would be built; '' for the first."""
    from sparkring.etl.fingerprint import made_of, what_differs

    newest = newest_dataset(config)
    if newest is None:
        return ""
    if not newest.lineage.made_of:
        return "what the newest of this name was made of was not recorded"
    assert config.etl is not None
    now = made_of(config.etl, sources.contents, config.spark.settings())
    found = what_differs(newest.lineage.made_of, now)
    if not found:
        return f"that of {newest.created_at} was made of the same, and is not whole"
    more = f" and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
    return f"against that of {newest.created_at} differs: {', '.join(found[:SHOWN])}{more}"


def newest_dataset(config: RunConfig) -> DatasetManifest | None:
    """Return the manifest of the recipe's most recent dataset; None if none can be read."""
    root = open_storage(config.storage.datasets)
    form = re.compile(rf"{re.escape(config.name)}-[0-9a-f]{{12}}")
    paths = [root.path(f"{name}/{MANIFEST_NAME}") for name in root.list_folders() if form.fullmatch(name)]
    there = [info for info in root.fs.get_file_info(paths) if info.mtime_ns is not None]
    for info in sorted(there, key=lambda info: info.mtime_ns, reverse=True):
        with suppress(ManifestError):
            return read_manifest(root.at(info.path.split("/")[-2]))
    return None


def find(config: RunConfig, fingerprint: str) -> Dataset | None:
    """Return the finished dataset, or None if it must be built. ManifestError if `dataset` is not one."""
    if config.dataset is not None:
        return given(config)
    from sparkring.etl.build import dataset_folder, find_dataset

    folder = open_storage(config.storage.datasets).at(dataset_folder(config.name, fingerprint))
    manifest = find_dataset(folder, fingerprint)
    return None if manifest is None else Dataset(manifest, folder)


def found(config: RunConfig, manifest: DatasetManifest) -> Dataset | None:
    """Return the dataset of a manifest; None if its files are missing."""
    try:
        return find(config, manifest.fingerprint)
    except ManifestError:
        return None


def given(config: RunConfig) -> Dataset:
    """Return the dataset that `dataset` names, or raise ManifestError. Needs no Spark."""
    assert config.dataset is not None
    folder = open_storage(config.dataset)
    return Dataset(read_manifest(folder), folder)


def require(config: RunConfig, fingerprint: str) -> Dataset:
    """Return the dataset like `find`, or raise ManifestError naming the command that builds it."""
    found = find(config, fingerprint)
    if found is None:
        from sparkring.etl.build import dataset_folder

        where = open_storage(config.storage.datasets).at(dataset_folder(config.name, fingerprint)).uri
        raise ManifestError(f"{where}: no dataset of these sources and this configuration; run `sparkring etl` first")
    return found


def foresee(spark: SparkSession, config: RunConfig, sources: PinnedDataset) -> DatasetManifest | None:
    """Make Spark analyze what would be built: the manifest it would have, without rows; None where rows decide it.

    EtlError where the views, checks or features do not fit the tables. Nothing is read or written.
    """
    from sparkring.etl.analysis import analyze

    assert config.etl is not None
    storage = open_storage(config.storage.datasets)
    found = analyze(spark, config.etl, sources.snapshots, config.spark.settings(), storage)
    if found is None:
        return None
    return DatasetManifest(
        name=config.name,
        fingerprint="0" * 64,
        created_at="",
        columns=found.columns,
        files=(),
        splits={},
        accounting=Accounting(rows_in=0, rows_out=0),
        features=found.features,
        lineage=Lineage(sources={}),
    )


def build(
    spark: SparkSession,
    resolved: Resolved,
    sources: PinnedDataset,
    commit: str,
    tracker: Tracker,
    before_publish: Callable[[str], None] = lambda what: None,
    trained: bool = False,
) -> Dataset:
    """Build the dataset, or find it built by another job meanwhile; record it in MLflow as the run `etl`.

    Args:
        spark: the session that builds.
        resolved: the job's configuration.
        sources: the snapshots that the fingerprint was made of.
        commit: commit of this code, stored in the manifest.
        tracker: tracker of the job.
        before_publish: called right before the dataset is published, and may raise.
        trained: whether it is trained on: ConfigError if its label does not fit the task.
    """
    from sparkring.etl.build import BuildRequest, build_dataset
    from sparkring.pipelines.run.spark_jobs import spark_progress

    config = resolved.config
    assert config.etl is not None
    began = time.monotonic()
    with tracker.part(ETL):
        request = BuildRequest(
            config.etl,
            sources,
            name=config.name,
            root_uri=config.storage.datasets,
            settings=config.spark.settings(),
            code_commit=commit,
            config_digest=resolved.digest,
            before_publish=before_publish,
            on_label=(lambda columns, state: _check_label(config, columns, state)) if trained else _any_label,
        )
        with spark_progress(spark), data_errors_named():
            built = build_dataset(spark, request)
        seconds = {**built.seconds, "total_s": time.monotonic() - began} if built.rebuilt else {}
        dataset = Dataset(built.manifest, open_storage(built.uri), built.rebuilt, seconds, built.written_parts)
        record_build(tracker, dataset)
    accounting = built.manifest.accounting
    log.info("dataset: %s rows in, %s out: %s", accounting.rows_in, accounting.rows_out, dataset.folder.uri)
    return dataset


def _any_label(columns: Sequence[Column], state: State) -> None:
    """Accept any label, because nothing is trained."""


def _check_label(config: RunConfig, columns: Sequence[Column], state: State) -> None:
    if problems := label_problems(config, columns, state):
        raise ConfigError(config.name, problems)


@contextmanager
def data_errors_named() -> Iterator[None]:
    """Convert Spark's error about a file or a value to EtlError: no number, an overflow, a division by zero."""
    from pyspark.errors import PySparkException

    from sparkring.etl.spark_platform.jvm import JavaThrew

    try:
        yield
    except (PySparkException, JavaThrew) as error:
        if file := re.search(r"while reading file (.+?)\.(?: +SQLSTATE| +Details|$)", str(error), re.MULTILINE):
            why = f"it is damaged or cut ({innermost(error)}); copy it again from where it is whole"
            raise EtlError(f"{file[1].removeprefix('file://')}: {why}") from error
        if isinstance(error, JavaThrew) or not (error.getSqlState() or "").startswith(DATA_EXCEPTION):
            raise
        raise EtlError(
            f"{first_line(error)} A view, a check's column, the split's column or a feature asks for it: correct the "
            "value or cast it in the recipe's SQL"
        ) from error


def record_build(tracker: Tracker, dataset: Dataset) -> None:
    """Record rows by split and quarantine rule, partitions, seconds, dataset, checks and manifest."""
    manifest = dataset.manifest
    counts = {f"rows/quarantined_{rule}": float(n) for rule, n in manifest.accounting.quarantined.items()}
    counts |= {"rows/in": float(manifest.accounting.rows_in), "rows/out": float(manifest.accounting.rows_out)}
    counts |= {f"rows/{split}": float(info.rows) for split, info in manifest.splits.items()}
    if manifest.parts:
        counts |= {"parts/all": float(len(manifest.parts)), "parts/written": float(len(dataset.written_parts))}
    tracker.metrics(ETL, 0, counts | {f"time/{name}": value for name, value in dataset.seconds.items()})
    tracker.dataset(ETL, dataset_info(dataset), "output")
    tracker.artifact_json(ETL, manifest.checks, "checks.json", "etl")
    tracker.artifact_json(ETL, manifest.model_dump(mode="json"), "manifest.json", "etl")


def dataset_info(dataset: Dataset) -> DatasetInfo:
    """Describe the dataset for MLflow."""
    manifest = dataset.manifest
    return DatasetInfo(
        name=manifest.name,
        uri=dataset.folder.uri,
        fingerprint=manifest.fingerprint,
        profile={f"rows_{split}": info.rows for split, info in manifest.splits.items()}
        | {"files": len(manifest.files)},
        schema=[{"name": column.name, "type": mlflow_type(column)} for column in manifest.columns],
    )


def split_info(dataset: Dataset, split: str) -> DatasetInfo:
    """Describe one split as a separate MLflow dataset, so that a run may have several inputs."""
    manifest, whole = dataset.manifest, dataset_info(dataset)
    files = sum(file.split == split for file in manifest.files)
    profile = {"rows": manifest.splits[split].rows, "files": files}
    return replace(whole, name=split_name(manifest.name, split), profile=profile)


def split_name(dataset: str, split: str) -> str:
    """Return a split's name among MLflow's datasets."""
    return f"{dataset}.{split}"


def mlflow_type(column: Column) -> str:
    """Return MLflow's name for the type of a column's stored elements."""
    element, dtype = column.logical.replace("array<", "").rstrip(">"), column.dtype
    if element in ("date", "timestamp", "timestamp_ntz"):
        return "datetime"
    if dtype in ("int8", "int16", "int32"):
        return "integer"
    same = {"bool": "boolean", "int64": "long", "float64": "double", "string": "string", "binary": "binary"}
    return same.get(dtype, "float")
