"""`sparkring reproduce`: say what differs from a run as it was, train it again, and compare weights or metrics.

The training is a run of its own in a scratch folder next to the recipe's runs. Nothing is tracked, registered, promoted
or announced.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

from pyspark.sql import SparkSession

from sparkring.conf.blocks.notify import NotifyConfig
from sparkring.conf.blocks.predict import REGISTERED
from sparkring.conf.blocks.retention import RetentionConfig
from sparkring.conf.blocks.storage import StorageConfig
from sparkring.conf.blocks.tracking import TrackingConfig
from sparkring.conf.config import RunConfig
from sparkring.conf.load import Resolved, leaves
from sparkring.conf.manifest import MANIFEST_NAME, DataFile, read_manifest
from sparkring.conf.plain_text import count_of
from sparkring.conf.secrets import HIDDEN
from sparkring.conf.storage import Storage, check_stored, open_storage
from sparkring.conf.stored import StoredError
from sparkring.pipelines.context.context import PERSONAL, Publication
from sparkring.pipelines.context.etl_step import Dataset
from sparkring.pipelines.job.job import run_job
from sparkring.pipelines.lineage.compare import (
    GONE,
    Check,
    Difference,
    blocking,
    environment_differences,
    is_reproduced,
    metric_lines,
    run_differences,
)
from sparkring.pipelines.lineage.environment import content_digest, environment
from sparkring.pipelines.lineage.keep import start_files
from sparkring.pipelines.lineage.reproduce_record import Record, read_record
from sparkring.pipelines.lineage.show import run_of, source_states
from sparkring.pipelines.run.exit_codes import Exit
from sparkring.pipelines.run.runs import Runs
from sparkring.pipelines.tracking.client import client_limits
from sparkring.pipelines.tracking.tags import WEIGHTS
from sparkring.training.data.decoding.columns import DataError
from sparkring.training.data.files import FileOpener
from sparkring.training.worker.result import MODEL, SUMMARY, TrainResult, read_result

Origin = Literal["dataset", "sources"]
"""Where training begins again: the run's own dataset, or its sources, of which the dataset is built again first."""

SCRATCH = "reproduced"  # folder next to those of the recipes
HASHED_AT_ONCE = 4  # files


@dataclass(frozen=True)
class Request:
    """What is to be reproduced, and how far."""

    target: str  # a run folder, or models:/...
    check: Check = "bits"
    origin: Origin = "dataset"
    dry_run: bool = False


@dataclass(frozen=True)
class KeptRun:
    """A finished run, and what it keeps so that it can be reproduced."""

    folder: Storage
    result: TrainResult
    record: Record
    weights_sha256: str


def reproduce(
    request: Request,
    tracking: TrackingConfig,
    show: Callable[[str], None],
    session: Callable[[], SparkSession] | None = None,
) -> Exit:
    """Reproduce a run and return whether weights (`bits`) or scores (`metrics`) are equal.

    Raises StoredError before anything is started where something differs that makes the check pointless.

    Args:
        request: run to reproduce, and the check.
        tracking: configuration of the registry.
        show: called with lines for the user.
        session: opens a Spark session; None opens a separate one.
    """
    run = find_run(request.target, tracking)
    found = [*run_differences(run.result, run.record), *differences_here(run, request.origin)]
    for each in found:
        show(f"differs  {each.line()}")
    if refused := blocking(found, request.check):
        hint = "; --check metrics may still be worth it" if not blocking(found, "metrics") else ""
        named = "; ".join(each.line() for each in refused)
        raise StoredError(f"{run.folder.uri}: nothing was trained, --check {request.check}: {named}{hint}")
    if not found:
        show("nothing differs from what the run keeps")
    if request.dry_run:
        first = "build its dataset and " if request.origin == "sources" else ""
        show(f"would {first}train it again, on {count_of(run.result.train.world, 'rank')}, and compare {request.check}")
        return Exit.OK
    return train_and_compare(run, request, show, session)


def find_run(target: str, tracking: TrackingConfig) -> KeptRun:
    """Find the run behind a folder or a registered model. StoredError where it is gone, or keeps too little."""
    if REGISTERED.fullmatch(target) is None:
        return _kept(open_storage(target))
    from sparkring.pipelines.tracking.store.fetch import find_job, find_model  # MLflow: seconds

    with client_limits(tracking):
        model = find_model(tracking, target)
        job = find_job(tracking, model)
    folder = None if job is None else run_of(job)
    if folder is None:
        raise StoredError(f"{model.uri}: cannot be reproduced: its run folder is gone (see sparkring lineage {target})")
    run = _kept(folder)
    if model.tags.get(WEIGHTS, run.weights_sha256) != run.weights_sha256:
        raise StoredError(f"{model.uri}: has weights {model.tags[WEIGHTS]}, its run {folder.uri} {run.weights_sha256}")
    return run


def _kept(folder: Storage) -> KeptRun:
    if not folder.exists(SUMMARY):
        raise StoredError(
            f"{folder.uri}: is no registered model (models:/<name>@<alias>) and no folder of a finished run ({SUMMARY})"
        )
    result = read_result(folder)
    check_stored(result.dataset, folder.uri)
    record = read_record(folder)
    for uri in record.datasets:
        check_stored(uri, folder.uri)
    if record.weights_sha256 is None:
        raise StoredError(f"{folder.uri}: keeps no sha256 of its weights; it did not finish")
    return KeptRun(folder, result, record, record.weights_sha256)


def differences_here(run: KeptRun, origin: Origin) -> Iterator[Difference]:
    """Yield differences of this machine: environment, start files, and all files of the datasets.

    With `sources`, those of the dataset that is built again instead of its files.
    """
    config = run.result.run_config()
    yield from environment_differences(run.record.environment, environment(config))
    yield from start_differences(run.record, config)
    left_out = {*run.result.train.train_left_out, *run.result.train.test_left_out}
    built_again = run.result.dataset if origin == "sources" else None
    if built_again is not None:
        yield from source_differences(run)
    for uri, sha256 in run.record.datasets.items():
        if uri != built_again:
            yield from dataset_differences(uri, sha256, left_out)


def source_differences(run: KeptRun) -> Iterator[Difference]:
    """Yield changed sources of the run's dataset. StoredError if no recipe built it."""
    etl = run.result.run_config().etl
    if etl is None:
        raise StoredError(f"{run.folder.uri}: --from sources: the run was given its dataset (`dataset`), not built one")
    storage = open_storage(run.result.dataset)
    if not storage.exists(MANIFEST_NAME):
        why = "so sources are read as they are now; what is built is compared before training"
        yield Difference(f"dataset {storage.uri}", "", GONE, "none", why)
        return
    for source in source_states(read_manifest(storage), storage, etl):
        if source.state in ("changed", "gone"):
            yield Difference(f"source {source.name}", "as read", source.state, "training", source.why)
        elif source.state != "same":
            yield Difference(f"source {source.name}", "", source.state, "none", source.why)


def start_differences(record: Record, config: RunConfig) -> Iterator[Difference]:
    """Yield changed files of the start model. StoredError for a missing one."""
    try:
        here = start_files(config)
    except OSError as error:
        raise StoredError(f"the model that training began from cannot be read: {error}") from error
    for name, sha256 in record.start.items():
        if here.get(name) != sha256:
            why = "training began from other weights"
            yield Difference(f"file {name}", sha256[:12], here.get(name, "not there")[:12], "training", why)


def dataset_differences(uri: str, sha256: str, left_out: set[str]) -> Iterator[Difference]:
    """Yield differences of a dataset: its manifest, or files that differ from the manifest.

    Args:
        uri: URI of the dataset's folder. StoredError if it is gone.
        sha256: digest of the manifest's content when the run was trained.
        left_out: files that were damaged then, and not read.
    """
    storage = open_storage(uri)
    manifest = read_manifest(storage)
    if (now := content_digest(manifest)) != sha256:
        why = "the manifest lists other files or features; see sparkring lineage for what the run read"
        yield Difference(f"dataset {uri}", sha256[:12], now[:12], "training", why)
        return
    root = manifest.files_folder(storage)
    opener = FileOpener(root)

    def problem(file: DataFile) -> str:
        try:
            opener.check(file, content=True)
        except DataError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(HASHED_AT_ONCE) as pool:
        for file, found in zip(manifest.files, pool.map(problem, manifest.files), strict=True):
            if bool(found) != (file.path in left_out):
                why = found or "it was damaged and left out, and is sound now: the run would read it"
                yield Difference(f"file {root.uri}/{file.path}", "", "", "training", why)


class SameRows(Publication):
    """Lets a run train again if the dataset that was built again has the rows of the first."""

    def __init__(self, run: KeptRun, show: Callable[[str], None]) -> None:
        self.run, self.show = run, show

    def on_dataset(self, dataset: Dataset) -> None:
        was, now = self.run.record.datasets[self.run.result.dataset], content_digest(dataset.manifest)
        if was != now:
            named = f"{dataset.folder.uri}: built from the sources, its content is {now[:12]}; the run read {was[:12]}"
            raise StoredError(f"{named}; nothing was trained")
        self.show(f"dataset built again: its content is equal ({now[:12]})")


def train_and_compare(
    run: KeptRun, request: Request, show: Callable[[str], None], session: Callable[[], SparkSession] | None
) -> Exit:
    """Train the run again and compare. The scratch folder is deleted if both are equal.

    Raises StoredError, before training, where a dataset that was built again is another.

    Args:
        run: run to reproduce.
        request: what must be equal, and where to start.
        show: called with lines for the user.
        session: opens a Spark session; None opens a separate one.
    """
    check, from_sources = request.check, request.origin == "sources"
    root, name = run.folder.parent.parent.at(SCRATCH), uuid.uuid4().hex[:12]
    scratch = root.at(name)
    config = scratch_config(run.result, check, scratch.uri)
    if from_sources:
        config = with_sources(config, run.result)
    show(f"trains again below {scratch.uri}")

    run_job(
        Resolved(config, dict.fromkeys((key for key, _ in leaves(config.model_dump(mode="json"))), "reproduce")),
        etl=from_sources,
        session=session,
        publication=SameRows(run, show) if from_sources else PERSONAL,
    )
    runs = Runs(scratch.uri, config.name)
    again = _kept(runs.at(runs.records()[-1]))
    weights, scores = (run.weights_sha256, again.weights_sha256), (run.result.scores[MODEL], again.result.scores[MODEL])
    show(f"weights sha256: recorded {weights[0]}, now {weights[1]}")
    for line in metric_lines(*scores):
        show(line)
    if not is_reproduced(check, weights, scores):
        show(f"not reproduced: {check} differ; what was trained is in {again.folder.uri}")
        return Exit.QUALITY
    root.delete(name)
    show(f"reproduced: {check} are equal; {scratch.uri} is deleted")
    return Exit.OK


def scratch_config(result: TrainResult, check: Check, runs: str) -> RunConfig:
    """Return the run's configuration with the same dataset, ranks and threads, writing only below `runs`.

    For the check of bits also the same engine: `auto` takes what is installed.
    """
    config, ranks = result.run_config(), result.train
    engine = {"horovod": "horovod", "torch-gloo": "torch", "torch-nccl": "torch"}.get(ranks.engine)
    parallel: dict[str, Any] = {"engine": engine} if engine and check == "bits" else {}
    settings = {key: value for key, value in config.spark.settings().items() if value != HIDDEN}
    alone = {
        "dataset": result.dataset, "etl": None, "schedule": None, "predict": None, "promote": None, "drift": None,
        "retention": RetentionConfig(), "notify": NotifyConfig(), "storage": StorageConfig(datasets=runs, runs=runs),
    }  # fmt: skip
    blocks = {
        "spark": config.spark.model_copy(update={"conf": settings}),
        "train": config.train.model_copy(update={"threads_per_rank": ranks.threads_per_rank, "hooks": []}),
        "parallel": config.parallel.model_copy(update=parallel),
        "launch": config.launch.model_copy(update={"world": ranks.world, "min_world": None}),
        "checkpoint": config.checkpoint.model_copy(update={"resume": False}),
        "tracking": config.tracking.model_copy(update={"enabled": False, "openlineage": None}),
        "report": config.report.model_copy(update={"baselines": False, "must_beat": [], "must_beat_trees": []}),
    }
    return config.model_copy(update=alone | blocks)


def with_sources(config: RunConfig, result: TrainResult) -> RunConfig:
    """Return the configuration with the recipe for the run's dataset, at the table versions it read."""
    etl = result.run_config().etl
    assert etl is not None, "source_differences has refused a run without"
    storage = open_storage(result.dataset)
    if etl.interval is None and storage.exists(MANIFEST_NAME):
        read = read_manifest(storage).lineage.sources
        pinned = {name: source.at_version(read[name]) for name, source in etl.sources.items()}
        etl = etl.model_copy(update={"sources": pinned})
    return config.model_copy(update={"dataset": None, "etl": etl})
