"""What a finished job tells the report: facts, curves, scores, timings, attempts. Written into the run folder."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, NotRequired

from pydantic import AfterValidator
from typing_extensions import TypedDict  # pydantic asks for this one below Python 3.12

from conf.load import Resolved, leaves
from conf.manifest import ManifestError, read_manifest
from conf.schema import RunConfig
from conf.storage import Storage, open_storage
from conf.stored import OPEN, Count, RelativePath, parse, read
from pipelines.etl_step import Dataset
from pipelines.evaluate import MODEL, Evaluation, lost_to, read_predictions, share_groups, tested_rows
from pipelines.report.report import HeldOut, ReportInputs, build_report, publish
from pipelines.runs import Runs
from pipelines.tracking.tracker import JOB, Tracker
from pipelines.train_step import Trained

log = logging.getLogger(__name__)


@OPEN
class TrainSummary(TypedDict):
    """What rank 0 said at the end, as far as the report draws it."""

    engine: str
    world: Count
    steps: Count
    samples: Count
    best_step: Count | None
    rows_per_s: float
    plan: str
    test_rows: NotRequired[Count]
    exported_step: NotRequired[Count]
    test_left_out: NotRequired[list[RelativePath]]


def _has(name: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    def check(values: dict[str, Any]) -> dict[str, Any]:
        if name not in values:
            raise ValueError(f"{name!r} is missing")
        return values

    return check


@OPEN
class Summary(TypedDict):
    """summary.json, as far as the report is drawn from it."""

    dataset: str
    config: dict[str, Any]
    origins: dict[str, str]
    config_digest: str
    tracking_url: str | None
    commit: str
    attempts: Count
    failed_attempts: list[dict[str, Any]]
    timings: Annotated[dict[str, float], AfterValidator(_has("launch_s"))]
    train: TrainSummary
    scores: Annotated[dict[str, dict[str, float]], AfterValidator(_has(MODEL))]
    missing: dict[str, str]
    predictions: list[RelativePath]
    sample: str
    per_step_s: dict[str, float]
    once_s: dict[str, float]
    history: dict[str, list[tuple[Count, float]]]


@dataclass(frozen=True)
class AsRun:
    """The configuration a run was made with, wherever its report is drawn; summary.json keeps it under these names."""

    config: dict[str, Any]  # resolved
    origins: dict[str, str]
    config_digest: str
    tracking_url: str | None
    commit: str = ""  # of the code that trained; the dataset's own is in its manifest

    def checked(self, where: str) -> RunConfig:
        """ManifestError where it is no configuration of this version of sparkring."""
        return parse(RunConfig, json.dumps(self.config), f"{where}: the run's configuration", ManifestError)


def as_run(resolved: Resolved, tracking_url: str | None, commit: str = "") -> AsRun:
    return AsRun(resolved.as_dict(), resolved.origins, resolved.digest, tracking_url, commit)


def write_report(
    tracker: Tracker,
    run: AsRun,
    dataset: Dataset,
    folder: Storage,
    trained: Trained,
    evaluation: Evaluation,
    timings_s: dict[str, float],
) -> None:
    """report.html in the run folder; with its figures also in the job's run in MLflow, which a browser meets first.

    One that cannot be drawn fails no job: the model is registered by now.
    """
    try:
        inputs = report_inputs(run, dataset, folder, trained, evaluation, timings_s)
        folder.put_atomic("report.html", publish(inputs, tracker, JOB).encode())
    except Exception as error:
        log.exception("the report could not be drawn; once that is mended, `sparkring report` draws it")
        tracker.tags(JOB, {"sparkring.report": f"not drawn: {type(error).__name__}: {error}"})


def redraw(resolved: Resolved) -> str:
    """Draw the report of the recipe's newest finished run again, from what its folder holds; the file's URI.

    `resolved` says where runs are, and nothing of what the report shows. ManifestError where no run has finished.
    """
    runs = Runs(resolved.config.storage.runs, resolved.config.name)
    finished = [record for record in runs.records() if record.status == "finished"]
    if not finished:
        raise ManifestError(
            f"{runs.storage.uri}: no finished run of {resolved.config.name!r}; run `sparkring run` first"
        )
    folder = runs.at(finished[-1])
    summary: dict[str, Any] = dict(read(Summary, folder, "summary.json", ManifestError))
    run = AsRun(**{name: summary[name] for name in AsRun.__dataclass_fields__})
    config = run.checked(f"{folder.uri}/summary.json")
    where = open_storage(summary["dataset"])
    dataset = Dataset(read_manifest(where), where)
    missing = summary["missing"]
    evaluation = Evaluation(summary["scores"], sample=summary["sample"], missing=missing)
    if config.train.test_split is not None and summary["predictions"]:
        test = tested_rows(config, dataset, summary["train"])
        labels, predictions = read_predictions(folder, summary["predictions"], test)
        groups = share_groups(config, dataset, test)
        evaluation = Evaluation(summary["scores"], labels, predictions, groups, missing=missing)
    trained = Trained(
        summary["train"],
        summary["predictions"],
        summary["timings"]["launch_s"],
        summary["attempts"],
        summary["history"],
        summary["failed_attempts"],
        summary["per_step_s"],
        summary["once_s"],
    )
    inputs = report_inputs(run, dataset, folder, trained, evaluation, summary["timings"])
    folder.put_atomic("report.html", build_report(inputs).encode())
    return f"{folder.uri}/report.html"


def report_inputs(
    run: AsRun,
    dataset: Dataset,
    folder: Storage,
    trained: Trained,
    evaluation: Evaluation,
    timings_s: dict[str, float],
) -> ReportInputs:
    config, summary, manifest = RunConfig.model_validate(run.config), trained.summary, dataset.manifest
    lost, alias = lost_to(evaluation.scores, config.report.must_beat, evaluation.missing), config.tracking.alias
    label = next((c.name for c in manifest.columns if c.role == "label"), "positive")
    facts = {
        "run": folder.uri,
        "dataset": dataset.folder.uri,
        "fingerprint": manifest.fingerprint,
        "code": run.commit or "not a git checkout",
        "configuration": run.config_digest,
        "engine": f"{summary['engine']}, {summary.get('world', config.launch.world)} ranks",
        "model": f"models:/{config.tracking.registered_model or config.name}" + ("" if lost else f"@{alias}"),
        "steps": f"{summary['steps']:,} ({summary['samples']:,} samples), best at step {summary['best_step']}; "
        f"the model is step {summary.get('exported_step', summary['steps'])}'s",
    }
    if lost:
        facts["not good enough"] = f"{'; '.join(lost)}: the alias {alias!r} was not given to it"
    if evaluation.missing:
        facts["baselines without scores"] = "; ".join(f"{name} ({why})" for name, why in evaluation.missing.items())
    if run.tracking_url:
        facts["MLflow"] = run.tracking_url
    binary = config.model.task == "binary" and len(evaluation.labels) > 0
    return ReportInputs(
        name=config.name,
        status="finished",
        description=config.description,
        task=config.model.task,
        positive=config.model.label or label,
        facts=facts,
        history={name: points for name, points in trained.history.items() if name.endswith("/loss")},
        model_name=MODEL,
        model_scores={k: v for k, v in evaluation.scores[MODEL].items() if k != "positive_share"},
        baselines={name: scores for name, scores in evaluation.scores.items() if name != MODEL},
        held_out=HeldOut(evaluation.labels, evaluation.predictions, evaluation.groups) if binary else None,
        manifest=manifest,
        timings_s=timings_s,
        rates={
            "training": f"{summary['rows_per_s']:,.0f} rows/s",
            "launch": f"{trained.start_s:.1f} s",
        }
        | {name.removesuffix("_s").replace("_", " "): f"{s:.2f} s" for name, s in trained.once_s.items()}
        | {
            f"{name.removesuffix('_s').replace('_', ' ')}, a step": f"{s * 1000:.1f} ms"
            for name, s in trained.per_step_s.items()
        },
        attempts=trained.failed_attempts,
        config=[(key, str(value), run.origins.get(key, "default")) for key, value in leaves(run.config)],
        sample=evaluation.sample,
        plan=summary.get("plan", ""),
    )
