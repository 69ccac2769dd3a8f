"""`sparkring lineage`: from a model, a run or a dataset back to its sources, and whether each can still be read."""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from sparkring.conf.blocks.etl import EtlConfig
from sparkring.conf.blocks.predict import REGISTERED
from sparkring.conf.blocks.tracking import TrackingConfig
from sparkring.conf.manifest import MANIFEST_NAME, DatasetManifest, read_manifest
from sparkring.conf.plain_text import count_of, score_text
from sparkring.conf.sources import VERSION_KEYS, SourceConfig
from sparkring.conf.storage import Storage, check_stored, open_storage
from sparkring.conf.stored import StoredError
from sparkring.etl.errors import EtlError
from sparkring.etl.windows.interval import interval_from
from sparkring.pipelines.run.installed import has_spark
from sparkring.pipelines.run.runs import Runs
from sparkring.pipelines.tracking.client import client_limits
from sparkring.training.worker.result import MODEL, SUMMARY, TrainResult, read_result

if TYPE_CHECKING:
    from sparkring.pipelines.tracking.store.fetch import RegisteredBy

State = Literal["same", "changed", "gone", "not looked at"]


@dataclass(frozen=True)
class SourceState:
    """A source as the dataset was made of it (`read`: its lineage), and what is there now."""

    name: str
    read: dict[str, Any]
    state: State
    why: str = ""


@dataclass(frozen=True)
class Origin:
    """What a target was made of; {} for what it has none of, or what is no longer there (`missing` says so)."""

    target: str
    model: dict[str, Any] = field(default_factory=dict)
    run: dict[str, Any] = field(default_factory=dict)
    dataset: dict[str, Any] = field(default_factory=dict)
    sources: list[SourceState] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1, default=str)


def trace(target: str, tracking: TrackingConfig) -> Origin:
    """Trace `models:/...`, a run folder or a dataset folder. StoredError for anything else.

    Sources are pinned again, which reads the files of those that are files. `tracking`: where the registry is.
    """
    if REGISTERED.fullmatch(target) is None:
        folder = open_storage(target)
        if folder.exists(MANIFEST_NAME):
            return of_dataset(Origin(target), target, None)
        if folder.exists(SUMMARY):
            return of_run(Origin(target), folder)
        raise StoredError(
            f"{target}: is no registered model (models:/<name>@<alias>), and no folder of a finished run ({SUMMARY}) "
            f"or of a dataset ({MANIFEST_NAME})"
        )
    from sparkring.pipelines.tracking.store.fetch import find_job, find_model  # MLflow: seconds

    with client_limits(tracking):
        found = find_model(tracking, target)
        job = find_job(tracking, found)
    registered = dt.datetime.fromtimestamp(found.created_ms / 1000, dt.UTC).isoformat(timespec="seconds")
    tags = {name.removeprefix("sparkring."): value for name, value in found.tags.items()}
    model = {"uri": found.uri, "aliases": list(found.aliases), "registered": registered, "tags": tags}
    made = Origin(target, model=model)
    run = None if job is None else run_of(job)
    if run is None:
        where = (
            "MLflow does not know its job" if job is None else f"{job.runs_uri}/{job.recipe} has no run of {job.run_id}"
        )
        return _lacking(made, f"the run of {found.uri}: {where}")
    return of_run(made, run)


def run_of(job: RegisteredBy) -> Storage | None:
    """Return the run folder that a job has written; None if it is gone.

    A run whose tracking was sent later, by `sparkring replay`, does not know its id in MLflow.
    """
    runs = Runs(job.runs_uri, job.recipe)
    own = [
        record
        for record in runs.records()
        if record.mlflow_run_id == job.run_id or f"{job.recipe}/{record.folder}" == job.job
    ]
    return next((folder for folder in map(runs.at, own) if folder.exists(SUMMARY)), None)


def of_run(made: Origin, folder: Storage) -> Origin:
    """Add a finished run, and what it was trained on."""
    result = read_result(folder)
    run = {
        "folder": folder.uri,
        "recipe": result.name,
        "config_digest": result.config_digest,
        "commit": result.commit,
        "start": result.start,
        "engine": result.train.engine,
        "world": result.train.world,
        "steps": result.train.steps,
        "scores": result.scores.get(MODEL, {}),
    }
    made = _with(made, run=run)
    try:
        check_stored(result.dataset, folder.uri)
    except ValueError as error:
        return _lacking(made, f"the dataset {error}")
    return of_dataset(made, result.dataset, result)


def of_dataset(made: Origin, uri: str, result: TrainResult | None) -> Origin:
    """Add a dataset and its sources. Without the run's configuration sources are not looked at."""
    storage = open_storage(uri)
    if not storage.exists(MANIFEST_NAME):
        return _lacking(made, f"the dataset {uri}: no {MANIFEST_NAME} there")
    manifest = read_manifest(storage)
    dataset = {
        "folder": uri,
        "fingerprint": manifest.fingerprint,
        "created": manifest.created_at,
        "commit": manifest.lineage.code_commit,
        "rows": {split: info.rows for split, info in manifest.splits.items()},
        "files": len(manifest.files),
        "parts": [part.interval for part in manifest.parts],
        "missing_intervals": list(manifest.missing),
    }
    made = _with(made, dataset=dataset)
    if result is not None and result.fingerprint != manifest.fingerprint:
        made = _lacking(made, f"the dataset {uri}: is another one now ({manifest.fingerprint[:12]})")
    etl = result.run_config().etl if result is not None else None
    return _with(made, sources=[*source_states(manifest, storage, etl)])


def source_states(manifest: DatasetManifest, storage: Storage, etl: EtlConfig | None) -> Iterator[SourceState]:
    """Yield the present state of each source. `etl`: block that read them; None skips the check."""
    for name, read in manifest.lineage.sources.items():
        config = etl.sources.get(name) if etl is not None else None
        if etl is None or config is None:
            yield SourceState(name, read, "not looked at", "the run's configuration says how it is read")
        elif why := _elsewhere(config, storage):
            yield SourceState(name, read, "not looked at", why)
        elif not has_spark():
            yield SourceState(name, read, "not looked at", "pyspark, which knows its types, is not installed")
        elif etl.interval is not None and name in etl.interval.sources:
            yield _states_of_parts(name, read, manifest, storage, etl)
        else:
            yield source_state(name, read, config)


def _elsewhere(config: SourceConfig, dataset: Storage) -> str:
    """Return why a source is not checked: only the stored configuration names its server; "" otherwise."""
    try:
        check_stored(config.location or "", dataset.uri)
    except ValueError as error:
        return str(error)
    return ""


def source_state(name: str, read: Mapping[str, Any], config: SourceConfig) -> SourceState:
    """Pin a source as it was read, and compare fingerprints."""
    from sparkring.etl.sources.pin import pin

    shown = dict(read)
    if config.NEEDS_SPARK:
        return SourceState(name, shown, "not looked at", "only Spark reads it")
    try:
        found = pin(name, config.at_version(read))
    except (EtlError, OSError, ValueError) as error:
        return SourceState(name, shown, "gone", str(error))
    if found.fingerprint != read["fingerprint"]:
        return SourceState(name, shown, "changed", "what is there now is not what was read")
    return SourceState(name, shown, "same")


def _states_of_parts(
    name: str, read: Mapping[str, Any], manifest: DatasetManifest, storage: Storage, etl: EtlConfig
) -> SourceState:
    """Return the state of a source read by interval: the first changed interval decides.

    Args:
        name: name of the source.
        read: summary of the source in the window.
        manifest: manifest of the window.
        storage: folder of the dataset.
        etl: etl block that read it.
    """
    from sparkring.etl.windows.parts import PART_NAME, Part

    assert etl.interval is not None
    root = manifest.files_folder(storage)
    for known in manifest.parts:
        where = f"{root.uri}/{known.folder}/{PART_NAME}"
        if not root.exists(f"{known.folder}/{PART_NAME}"):
            return SourceState(name, dict(read), "not looked at", f"{where} is gone")
        part = Part.model_validate_json(root.read_bytes(f"{known.folder}/{PART_NAME}"))
        interval = interval_from(etl.interval, dt.date.fromisoformat(known.interval))
        cut = etl.sources[name].cut(interval.condition(etl.interval.sources[name]))
        found = source_state(name, part.lineage.sources[name][-1], cut)
        if found.state != "same":
            return SourceState(name, dict(read), found.state, f"interval {known.interval}: {found.why}")
    return SourceState(name, dict(read), "same")


def _with(made: Origin, **changes: Any) -> Origin:
    return Origin(**{**vars(made), **changes})


def _lacking(made: Origin, what: str) -> Origin:
    return _with(made, missing=[*made.missing, what])


def text(made: Origin) -> str:
    """Format the lineage as one screen of text."""
    lines = [*_model_lines(made.model), *_run_lines(made.run), *_dataset_lines(made.dataset)]
    width = max((len(source.name) for source in made.sources), default=0)
    for source in made.sources:
        why = f": {source.why}" if source.why else ""
        lines.append(f"source   {source.name:<{width}}  {_read_words(source.read)}  {source.state}{why}")
    return "\n".join([*lines, *(f"missing  {what}" for what in made.missing)])


def _model_lines(model: Mapping[str, Any]) -> list[str]:
    if not model:
        return []
    aliases = f" ({', '.join(model['aliases'])})" if model["aliases"] else ""
    weights = model["tags"].get("weights_sha256", "")
    return [f"model    {model['uri']}{aliases}, registered {model['registered']}, weights {weights[:12] or 'unknown'}"]


def _run_lines(run: Mapping[str, Any]) -> list[str]:
    if not run:
        return []
    scores = ", ".join(f"{name} {score_text(value)}" for name, value in run["scores"].items())
    ranks, steps = count_of(run["world"], "rank"), count_of(run["steps"], "step")
    made = f"commit {run['commit'] or 'unknown'}, {ranks} of {run['engine']}, {steps}"
    start = [f"start    {run['start']}"] if run["start"] else []
    return [f"scores   {scores}", f"run      {run['folder']}: {made}", *start]


def _dataset_lines(dataset: Mapping[str, Any]) -> list[str]:
    if not dataset:
        return []
    rows = ", ".join(f"{split} {count}" for split, count in dataset["rows"].items())
    content = f"fingerprint {dataset['fingerprint'][:12]}, rows: {rows}; {dataset['files']} files"
    lines = [f"dataset  {dataset['folder']}: {content}"]
    if parts := dataset["parts"]:
        lacking = dataset["missing_intervals"]
        lines.append(f"parts    {len(parts)}, {parts[0]} to {parts[-1]}" + (f"; without {lacking}" if lacking else ""))
    return lines


def _read_words(read: Mapping[str, Any]) -> str:
    where = read.get("path") or read.get("table") or read.get("dbtable") or ""
    shown = [f"{key} {read[key]}" for key in (*sorted(VERSION_KEYS), "intervals", "files", "bytes") if read.get(key)]
    return f"{where} ({', '.join(shown)})".strip()
