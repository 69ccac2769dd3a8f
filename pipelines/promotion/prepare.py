"""What is looked at before training: where it starts, and how far the data has drifted."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from sparkring.conf.blocks.drift import DriftDataset
from sparkring.conf.manifest import DatasetManifest, read_manifest
from sparkring.conf.storage import open_storage
from sparkring.conf.stored import StoredError
from sparkring.pipelines.context.context import JobContext, StartPoint
from sparkring.pipelines.model.model_start import resolve_model_start
from sparkring.pipelines.promotion.champion import Champion, NotComparable, read_champion
from sparkring.pipelines.promotion.drift import (
    DriftStop,
    NoReference,
    Reference,
    dataset_reference,
    drift_metrics,
    input_drift,
    line_of,
    lines_of,
    trained_reference,
)
from sparkring.pipelines.promotion.start import resolve_start
from sparkring.pipelines.run.scratch import scratch_folder
from sparkring.pipelines.tracking.errors import StoreUnreachable
from sparkring.pipelines.tracking.tracker import JOB
from sparkring.training.worker.result import DriftFinding, TrainResult, read_result

log = logging.getLogger(__name__)
ReadChampion = Callable[[], Champion | None]


@dataclass(frozen=True)
class Prepared:
    """What was found before training."""

    start: StartPoint | None = None  # None: the recipe has no `warm_start.from` and no `model.start`
    drift: list[DriftFinding] = field(default_factory=list)


def prepare(job: JobContext) -> tuple[JobContext, Prepared]:
    """Find where training starts, and how far the data has drifted; record both. To be called before training.

    Returns the job with its start in the configuration. Raises DriftStop where a rule says so.
    """
    with champion_reader(job) as champion:
        resolved, chosen = resolve_start(
            job.resolved, job.dataset.manifest, job.folder, job.ds or _begun(job.record.folder), champion
        )
        resolved, given = resolve_model_start(resolved, job.dataset.manifest, job.folder)
        start = chosen or given
        drift = _input_drift(job, champion)
    prepared = Prepared(start, drift)
    if start is not None:
        job.tracker.tags(JOB, {"sparkring.start": start.text})
    for line in [line_of(found) for found in drift if found.exceeded]:
        log.warning("%s", line)
    if stopped := lines_of(drift, "stop"):
        job.tracker.tags(JOB, {"sparkring.drift": "; ".join(stopped)})
        job.tracker.metrics(JOB, 0, drift_metrics(drift))
        raise DriftStop(
            f"nothing is trained, by drift.rules with the action stop: {'; '.join(stopped)}. Look at the sources of "
            "the newest intervals; once the data is right, or the rule's max is, give the same command again"
        )
    return replace(job, resolved=resolved), prepared


def _begun(folder: str) -> str:
    """Return the day in a run folder's name, as ISO text: for a job without a date, stable when resumed."""
    return f"{folder[:4]}-{folder[4:6]}-{folder[6:8]}"


@contextmanager
def champion_reader(job: JobContext) -> Iterator[ReadChampion]:
    """Yield a function that reads the version with the alias, once; its files are kept in the block.

    It returns None if no version has the alias, and raises NotComparable if that is unknown, or unreadable.
    """
    with scratch_folder("champion") as scratch:

        @functools.cache
        def read() -> Champion | None:
            from sparkring.pipelines.tracking.store.registry import Registry  # seconds of imports

            config, tracking = job.config, job.config.tracking.named(job.config.name)
            try:
                if not job.tracker.settled():
                    raise StoreUnreachable("it has not taken what was sent before")
                registry = Registry(tracking)
                version = registry.with_alias(tracking.alias)
                if version is None:
                    return None
                (copy := scratch / version.version).mkdir()
                return read_champion(version, registry.fetch(version, copy), config)
            except StoreUnreachable as error:
                raise NotComparable(f"the tracking store does not answer ({error})") from error
            except StoredError as error:
                raise NotComparable(str(error)) from error

        yield read


def _input_drift(job: JobContext, champion: ReadChampion) -> list[DriftFinding]:
    drift = job.config.drift
    if drift is None or not any(rule.inputs for rule in drift.rules):
        return []
    return input_drift(drift, job.dataset, _reference(job, champion))


def _reference(job: JobContext, champion: ReadChampion) -> Reference | NoReference:
    """Return the dataset to compare inputs with."""
    assert job.config.drift is not None
    against = job.config.drift.against
    try:
        if isinstance(against, DriftDataset):
            return dataset_reference(against)
        if against == "previous":
            previous = previous_result(job)
            return trained_reference(f"run {previous.run}", previous.run_config(), _manifest_of(previous))
        found = _existing(champion, job.config.tracking.alias)
        return trained_reference(f"version {found.version.version}", found.model.config, found.model.manifest)
    except NoReference as error:
        return error


def _existing(champion: ReadChampion, alias: str) -> Champion:
    try:
        found = champion()
    except NotComparable as error:
        raise NoReference(str(error), absent=False) from error
    if found is None:
        raise NoReference(f"no version has the alias {alias!r} yet", absent=True)
    return found


def previous_result(job: JobContext) -> TrainResult:
    """Return the latest finished run before this one, by date if both have one. NoReference if none."""
    for record in reversed(job.runs.records()):
        if record.status != "finished" or record.folder == job.record.folder:
            continue
        try:
            result = read_result(job.runs.at(record))
        except StoredError as error:
            log.warning("%s; this run is passed over", error)
            continue
        day = result.promotion.date if result.promotion else None
        if job.ds is None or day is None or day < job.ds:
            return result
    raise NoReference("no earlier run has finished", absent=True)


def _manifest_of(result: TrainResult) -> DatasetManifest:
    try:
        return read_manifest(open_storage(result.dataset))
    except (StoredError, OSError) as error:
        raise NoReference(f"the dataset of run {result.run} cannot be read: {error}", absent=False) from error
