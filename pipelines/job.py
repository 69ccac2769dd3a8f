"""One job from end to end, attended or not: dataset, training, evaluation, model, report. What `sparkring run` calls.

Every job is one parent run in MLflow with a child for each part. A job that is told to stop leaves a checkpoint and
the exit code of the signal; the same command goes on from there, in the same MLflow run.
"""

from __future__ import annotations

import json
import logging
import tempfile
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from pyspark.sql import SparkSession

from conf.load import ConfigError, Resolved
from conf.manifest import DatasetManifest, digest
from conf.rules import dataset_problems, metric_problems
from conf.schema import RunConfig
from conf.secrets import redacted
from conf.storage import Storage
from conf.stored import StoredError
from pipelines import etl_step, evaluate, serving, train_step
from pipelines.etl_step import Dataset
from pipelines.evaluate import Evaluation
from pipelines.exit_codes import Exit
from pipelines.launch.barrier import check_slots, stage_options
from pipelines.plan import layout_problems_of, plan_and_measured, planned_metrics
from pipelines.report import inputs
from pipelines.runs import RunRecord, Runs, Status
from pipelines.spark import spark_session
from pipelines.tracking.rules import client_limits
from pipelines.tracking.tracker import JOB, Tracker, TrackerSettings, git_commit, send_left_behind
from pipelines.train_step import Trained
from training.planner import format_rows
from training.tasks import TABLE_TASKS, build_task
from training.weights import FILE
from training.worker import Columns, pick_columns

log = logging.getLogger("sparkring")


@dataclass
class Timings:
    """Seconds by stage of the job, in order; the report and `summary.json` show them."""

    seconds: dict[str, float]

    def since(self, stage: str, began: float) -> None:
        self.seconds[stage] = time.monotonic() - began


def run_job(resolved: Resolved, *, etl: bool, train: bool) -> int:
    """Run the parts asked for; the exit code. Raises what the parts raise, with MLflow's status already right."""
    config, began = resolved.config, time.monotonic()
    timings = Timings({})
    if train and (problems := [*metric_problems_of(config), *layout_problems_of(config)]):
        raise ConfigError(config.name, problems)
    fingerprint = etl_step.wanted_fingerprint(config)
    found = etl_step.find(config, fingerprint) if etl else etl_step.require(config, fingerprint)
    if found is not None and not train:
        log.info("dataset: %s is there already", found.folder.uri)
        settings = tracker_settings(config)
        with client_limits(settings):
            send_left_behind(settings)
        return Exit.OK
    if found is not None:
        check_against(config, found)
    runs = Runs(config.storage.runs, config.name)
    with runs.begin(config, fingerprint) if train else nullcontext((None, False)) as (record, continued):
        job = f"{config.name}/{record.folder}" if record else digest([resolved.digest, fingerprint])[:16]
        commit = git_commit(Path(__file__).parent) or ""
        try:
            with (
                Tracker(tracker_settings(config), job, config.name, {"sparkring.commit": commit}, continued) as tracker,
                spark_session(config.name, config.spark, config.launch) as spark,
            ):
                timings.since("spark_s", began)
                describe_job(tracker, resolved, spark, fingerprint)
                if train:
                    profile = stage_options(config.launch).profile
                    check_slots(spark, config.launch.world, config.launch.min_world, profile=profile)
                dataset = found or build_dataset(spark, resolved, tracker, commit, timings)
                if record is None:
                    return Exit.OK
                check_against(config, dataset)
                record = runs.update(record.folder, mlflow_run_id=tracker.run_id(timeout_s=1.0))
                return train_and_report(spark, resolved, dataset, runs, record, tracker, commit, timings, began)
        except BaseException as error:
            if record is not None:
                stopped = isinstance(error, KeyboardInterrupt | SystemExit)
                note_end(runs, record, "interrupted" if stopped else "failed")
            raise


def note_end(runs: Runs, record: RunRecord, status: Status) -> None:
    """The status of a run that did not finish. A full disk, say, must not hide what ended it."""
    try:
        runs.update(record.folder, status=status)
    except (OSError, StoredError) as error:
        log.error("%s: run.json still says %r, not %r: %s", runs.at(record).uri, record.status, status, error)


def check_against(config: RunConfig, dataset: Dataset) -> None:
    """ConfigError for settings this dataset or model cannot meet, before a process is started for them."""
    problems = [*dataset_problems(config, dataset.manifest), *metric_problems_of(config, dataset.manifest)]
    problems = problems or layout_problems_of(config, dataset.manifest)
    if problems:
        raise ConfigError(dataset.folder.uri, problems)


def metric_problems_of(config: RunConfig, manifest: DatasetManifest | None = None) -> list[str]:
    """Metrics the task does not give, or columns it cannot have. A user's own task is made for a dataset only."""
    kind = config.model.task
    if manifest is None and kind not in (*TABLE_TASKS, "language_model"):
        return []
    try:
        columns = pick_columns(manifest, config.model.inputs, config.model.label) if manifest else Columns([], "", [])
        task = build_task(kind, columns.features, columns.label, config.model.inputs)
    except ValueError as error:  # names model.inputs, model.label or model.task, and what is wrong with them
        return [str(error)]
    return metric_problems(config, ["loss", *task.metric_names()])


def train_and_report(
    spark: SparkSession,
    resolved: Resolved,
    dataset: Dataset,
    runs: Runs,
    record: RunRecord,
    tracker: Tracker,
    commit: str,
    timings: Timings,
    began: float,
) -> int:
    """Everything after the dataset; writes summary.json and report.html into the run folder."""
    config, folder, alias = resolved.config, runs.at(record), resolved.config.tracking.alias

    def count_attempt(number: int) -> None:
        runs.update(record.folder, attempts=number)

    with tracker.part(train_step.TRAIN):
        for key in (JOB, train_step.TRAIN):  # the job's own, so that a list of jobs shows what each was trained on
            log_dataset(tracker, key, dataset, "training")
        tracker.params(train_step.TRAIN, {k: v for k, v in resolved.as_dict().items() if k not in ("etl", "spark")})
        launched = time.monotonic()
        trained = train_step.train(spark, resolved, dataset, folder, tracker, record.attempts + 1, count_attempt)
        timings.seconds["launch_s"] = trained.start_s
        timings.seconds["train_s"] = time.monotonic() - launched - trained.start_s
        planned = plan_and_measured(config, dataset.manifest, trained.summary["measured"])
        trained = replace(trained, summary=trained.summary | {"plan": format_rows(planned)})
        tracker.artifact(train_step.TRAIN, trained.summary["plan"] + "\n", "plan.txt")
        tracker.metrics(train_step.TRAIN, 0, planned_metrics(planned))
    with tracker.part(evaluate.EVALUATE):
        evaluating = time.monotonic()
        evaluation = evaluate.evaluate(spark, config, dataset, folder, trained)
        tracker.metrics(evaluate.EVALUATE, trained.summary["steps"], evaluation.flat())
        timings.since("evaluate_s", evaluating)
        lost = evaluate.lost_to(evaluation.scores, config.report.must_beat, evaluation.missing)
        publish_model(tracker, config, dataset.manifest, folder, trained, evaluation, None if lost else alias)
    timings.seconds["total_s"] = time.monotonic() - began
    as_run = inputs.as_run(resolved, tracker.url(), commit)
    summary = {
        "name": config.name,
        "run": folder.uri,
        "dataset": dataset.folder.uri,
        "fingerprint": dataset.manifest.fingerprint,
        "attempts": trained.attempt,
        "failed_attempts": trained.failed_attempts,
        "timings": timings.seconds,
        "etl": dataset.seconds,
        "train": trained.summary,
        "scores": evaluation.scores,
        "missing": evaluation.missing,
        "predictions": trained.predictions,
        "sample": evaluation.sample,
        "per_step_s": trained.per_step_s,
        "once_s": trained.once_s,
        "history": trained.history,
    }
    summary = redacted(summary) | asdict(as_run)  # the resolved configuration holds no secret any more
    folder.put_atomic("summary.json", (json.dumps(summary, indent=1) + "\n").encode())
    inputs.write_report(tracker, as_run, dataset, folder, trained, evaluation, timings.seconds)
    tracker.metrics(JOB, 0, {f"time/{name}": value for name, value in timings.seconds.items()} | evaluation.flat())
    runs.update(record.folder, status="finished")
    say(config, folder, trained, evaluation, timings, tracker)
    if not lost:
        return Exit.OK
    tracker.tags(JOB, {"sparkring.lost": "; ".join(lost)})
    log.error("report.must_beat: %s; the model is registered, and %r stays where it was", "; ".join(lost), alias)
    return Exit.QUALITY


def build_dataset(spark: SparkSession, resolved: Resolved, tracker: Tracker, commit: str, timings: Timings) -> Dataset:
    """The etl part: build, and record what was built, or why not (the checks report too)."""
    began = time.monotonic()
    with tracker.part("etl"):
        dataset = etl_step.build(spark, resolved, commit)
        accounting = dataset.manifest.accounting
        counts = {f"rows/quarantined_{rule}": float(n) for rule, n in accounting.quarantined.items()}
        counts |= {"rows/in": float(accounting.rows_in), "rows/out": float(accounting.rows_out)}
        counts |= {f"rows/{split}": float(info.rows) for split, info in dataset.manifest.splits.items()}
        tracker.metrics("etl", 0, counts | {f"time/{name}": value for name, value in dataset.seconds.items()})
        log_dataset(tracker, "etl", dataset, "output")
        tracker.artifact_json("etl", dataset.manifest.checks, "checks.json", "etl")
        tracker.artifact_json("etl", dataset.manifest.model_dump(mode="json"), "manifest.json", "etl")
    timings.since("etl_s", began)
    log.info("dataset: %s rows in, %s out: %s", accounting.rows_in, accounting.rows_out, dataset.folder.uri)
    return dataset


def tracker_settings(config: RunConfig) -> TrackerSettings:
    tracking = config.tracking
    return TrackerSettings(
        experiment=tracking.experiment or config.name,
        uri=tracking.uri,
        root=tracking.root,
        enabled=tracking.enabled,
        tags=tracking.tags,
        system_metrics_every_s=tracking.system_metrics_every_s if tracking.system_metrics else None,
        flush_every_s=tracking.flush_every_s,
        request_timeout_s=tracking.request_timeout_s,
        request_retries=tracking.request_retries,
    )


def describe_job(tracker: Tracker, resolved: Resolved, spark: SparkSession, fingerprint: str) -> None:
    config = resolved.config
    tracker.tags(
        JOB,
        {
            "sparkring.config_digest": resolved.digest,
            "sparkring.fingerprint": fingerprint,
            "sparkring.application_id": spark.sparkContext.applicationId,
            "sparkring.world": config.launch.world,
            "sparkring.code_path": str(Path(__file__).parent.parent),
        },
    )
    tracker.params(JOB, resolved.as_dict())
    tracker.artifact_json(JOB, resolved.as_dict(), "config.json")


def log_dataset(tracker: Tracker, key: str, dataset: Dataset, context: str) -> None:
    manifest = dataset.manifest
    profile = {f"rows_{split}": info.rows for split, info in manifest.splits.items()} | {"files": len(manifest.files)}
    schema = [{"name": c.name, "type": mlflow_type(c.dtype)} for c in manifest.columns]
    tracker.dataset(key, manifest.name, dataset.folder.uri, manifest.fingerprint, context, profile, schema)


def mlflow_type(dtype: str) -> str:
    """MLflow's name for a stored element type."""
    if dtype in ("int8", "int16", "int32"):
        return "integer"
    return {"bool": "boolean", "int64": "long", "float64": "double", "binary": "binary"}.get(dtype, "float")


def publish_model(
    tracker: Tracker,
    config: RunConfig,
    manifest: DatasetManifest,
    folder: Storage,
    trained: Trained,
    evaluation: Evaluation,
    alias: str | None,
) -> None:
    """The final model with its signature, features and scores, registered under `alias` where one is given."""
    tracking, summary = config.tracking, trained.summary
    weights = folder.at(summary["weights"])
    sha256 = weights.sha256(FILE)
    with tempfile.TemporaryDirectory() as scratch:
        target = Path(scratch) / "model"
        serving.write_model_folder(target, config, manifest, weights)
        tracker.model(
            evaluate.EVALUATE,
            target,
            "pipelines.serving",
            f"{config.name}-model",
            summary.get("exported_step", summary["steps"]),
            sha256,
            inputs=serving.signature_inputs(manifest),
            outputs=serving.signature_outputs(config.model.task),
            registered_model=tracking.registered_model or config.name,
            alias=alias,
            tags={
                "sparkring.fingerprint": manifest.fingerprint,
                "sparkring.engine": summary["engine"],
                "sparkring.weights_sha256": sha256,
            },
            params=evaluation.flat(),
        )


def say(
    config: RunConfig,
    folder: Storage,
    trained: Trained,
    evaluation: Evaluation,
    timings: Timings,
    tracker: Tracker,
) -> None:
    """The last lines of a job: what came out, and where to look."""
    for name, scores in evaluation.scores.items():
        log.info("%-36s %s", name, "  ".join(f"{k} {v:.4f}" for k, v in scores.items()))
    spent = "  ".join(f"{name.removesuffix('_s')} {value:.0f} s" for name, value in timings.seconds.items())
    log.info("%s steps by %s; %s", trained.summary["steps"], trained.summary["engine"], spent)
    log.info("report: %s/report.html", folder.uri)
    log.info(
        "browse: sparkring ui   (%s)",
        tracker.url() or f"MLflow experiment {config.tracking.experiment or config.name!r}",
    )
