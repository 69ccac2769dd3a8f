"""One job from end to end, attended or not: dataset, training, evaluation, model, report.

What `sparkring run` and `sparkring train` call. Every job is one parent run in MLflow with a child for each part. A job
stopped by a signal leaves a checkpoint and the signal's exit code; the same command goes on from there, in the same
MLflow run.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from pyspark.sql import SparkSession

from sparkring.conf.blocks.tracking import TrackingConfig
from sparkring.conf.load import Resolved
from sparkring.conf.stored import StoredError
from sparkring.pipelines import serving
from sparkring.pipelines.context import etl_step
from sparkring.pipelines.context.context import NO_HOOKS, JobContext, JobHooks
from sparkring.pipelines.context.etl_step import split_name
from sparkring.pipelines.display.outcome import ModelPlace, outcome
from sparkring.pipelines.evaluation.evaluate import EVALUATE, evaluate, lost_to
from sparkring.pipelines.housekeeping.cost import etl_cost, job_cost, spark_cores
from sparkring.pipelines.job import train_step
from sparkring.pipelines.job.etl_job import describe_job, job_tags
from sparkring.pipelines.job.train_step import record_inputs
from sparkring.pipelines.launch.barrier import launch_options
from sparkring.pipelines.launch.preflight import SlotRequest, check_slots
from sparkring.pipelines.lineage import record as lineage
from sparkring.pipelines.model.pack import pack_model
from sparkring.pipelines.promotion.drift import drift_metrics
from sparkring.pipelines.promotion.gate import open_gate, report_decision
from sparkring.pipelines.promotion.prepare import prepare
from sparkring.pipelines.record.keep import keep_environment, keep_weights
from sparkring.pipelines.report.inputs import ReportInputs
from sparkring.pipelines.run.exit_codes import Exit
from sparkring.pipelines.run.jvm_options import data_bytes
from sparkring.pipelines.run.runs import Others, RunRecord, Runs, Status
from sparkring.pipelines.run.scratch import scratch_folder
from sparkring.pipelines.run.spark import session_ahead
from sparkring.pipelines.tracking.client import client_limits
from sparkring.pipelines.tracking.describe import model_card, registered_note
from sparkring.pipelines.tracking.errors import StoreUnreachable
from sparkring.pipelines.tracking.ops import ModelInfo
from sparkring.pipelines.tracking.params import run_params
from sparkring.pipelines.tracking.tags import DATE, FINGERPRINT, WEIGHTS
from sparkring.pipelines.tracking.tracker import JOB, Tracker, git_commit, run_label
from sparkring.pipelines.validate.folders import DATASETS, JOB_FOLDERS, check_folders
from sparkring.pipelines.validate.recipe import check_against, check_foreseen, check_recipe
from sparkring.pipelines.validate.tables import check_tables
from sparkring.training.model_folder import describe_model, weights_sha256
from sparkring.training.result import SUMMARY, TrainResult

log = logging.getLogger("sparkring")


def run_job(
    resolved: Resolved,
    *,
    etl: bool,
    hooks: JobHooks = NO_HOOKS,
    session: Callable[[], SparkSession] | None = None,
) -> int:
    """Train on the dataset, which is built where `etl` allows, and return the exit code.

    Raises what the parts raise; MLflow's status and run.json are right by then. `session`: of several jobs; None: one
    of this job's own, which starts once the recipe and its tables are checked.
    """
    config = resolved.config
    check_recipe(config)
    check_tables(config, JOB_FOLDERS)
    if session is not None:
        return run_parts(resolved, session, etl=etl, hooks=hooks)
    with session_ahead(config.name, config.spark, config.launch, partial(data_bytes, config)) as session:
        return run_parts(resolved, session, etl=etl, hooks=hooks)


def run_parts(resolved: Resolved, session: Callable[[], SparkSession], *, etl: bool, hooks: JobHooks = NO_HOOKS) -> int:
    """As `run_job`, of a recipe whose layout was checked. `session` is first called when something needs Spark."""
    config, began = resolved.config, time.monotonic()
    sources = hooks.pin(config, session)
    fingerprint = etl_step.wanted_fingerprint(config, sources)
    runs = Runs(config.storage.runs, config.name)
    if not hooks.leased:
        runs.check_free(config, fingerprint)
    found = etl_step.find(config, fingerprint) if etl else etl_step.require(config, fingerprint)
    import_later_parts(config.tracking)
    if found is not None:
        check_against(config, found)
    else:
        check_folders(config, [DATASETS])
        check_foreseen(config, etl_step.foresee(session(), config, sources))
    commit = git_commit(Path(__file__).parent) or ""
    others: Others = "same dataset" if hooks.leased else "any"
    with runs.begin(config, fingerprint, hooks.leased, others) as (record, continued):
        job_id = f"{config.name}/{record.folder}"
        tags = job_tags(config.name, commit, hooks.ds)
        try:
            tracking = config.tracking.named(config.name)
            with Tracker(tracking, job_id, config.name, tags, continued, run_label(hooks.ds)) as tracker:
                lineage.begin(tracker, config.name, resolved, sources.snapshots)
                spark = session()
                timings = {"spark_s": time.monotonic() - began}
                describe_job(tracker, resolved, spark, fingerprint)
                profile = launch_options(config.launch).profile
                check_slots(spark, SlotRequest(config.launch.world, config.launch.min_world, profile))
                if found is None:
                    building = time.monotonic()
                    found = etl_step.build(
                        spark, resolved, sources, commit, tracker, hooks.before_publish, trained=True
                    )
                    timings["etl_s"] = time.monotonic() - building
                    tracker.metrics(JOB, 0, etl_cost(spark, timings["etl_s"]))
                check_against(config, found)
                lineage.record_dataset(tracker, config, found)
                hooks.on_dataset(found)
                record = runs.update(record.folder, mlflow_run_id=known_run_id(tracker, record))
                hooks.on_run(record)
                job = JobContext(resolved, commit, spark, tracker, runs, record, found, hooks.ds, hooks)
                code, result = train_and_report(job, timings, began)
        except BaseException as error:
            stopped = isinstance(error, KeyboardInterrupt | SystemExit)
            note_end(runs, record, "interrupted" if stopped else "failed")
            raise
        log.info("%s", outcome(result, resolved, registered_as(tracking, tracker, result)))
        return code


def import_later_parts(config: TrackingConfig) -> None:
    """Import what a job uses after its dataset is built, seconds of it: now Spark is starting, and nothing else."""
    import sparkring.pipelines.report.report  # noqa: F401

    if config.enabled:
        from sparkring.pipelines.tracking.embedded import import_client

        import_client(config)


def known_run_id(tracker: Tracker, record: RunRecord) -> str | None:
    """Return the job's run in MLflow; where the store is slow, what a continued run has noted earlier."""
    return tracker.run_id(timeout_s=1.0) or record.mlflow_run_id


def train_and_report(job: JobContext, timings: dict[str, float], began: float) -> tuple[Exit, TrainResult]:
    """Everything after the dataset: train, evaluate, register the model, write summary.json and report.html.

    Returns the exit code too. `timings`: seconds of the stages so far; `began`: monotonic time of the job's begin.
    """
    must_beat, tracker = job.config.report.must_beat, job.tracker
    job, prepared = prepare(job)
    keep_environment(job)
    result = prepared.noted(train_step.train(job))
    evaluating = time.monotonic()
    with tracker.part(EVALUATE):
        record_inputs(job, EVALUATE)
        result, held_out = evaluate(job, result)
        unseen = {f"test/unseen/{name}": float(rows) for name, rows in result.unseen.items()}
        tracker.metrics(EVALUATE, result.train.steps, result.test_metrics() | result.group_metrics() | unseen)
        timings |= result.timings | {"evaluate_s": time.monotonic() - evaluating}
        lost = lost_to(result.scores, must_beat, result.missing)
        gate = open_gate(job, result, held_out, lost, prepared)
        job.hooks.before_publish("the model")
        moves = not lost and gate is None and job.hooks.may_promote
        keep_weights(job, publish_model(job, result, alias=job.config.tracking.alias if moves else None))
        if gate is not None:
            job.hooks.before_publish("the alias")
            result = gate.settle()
        version = result.promotion.version if result.promotion is not None else tracker.version(JOB)
        result = replace(result, version=version)
    timings["total_s"] = time.monotonic() - began
    cost = job_cost(spark_cores(job.spark), timings, job.config.launch, result.train)
    result = replace(result, timings=timings, tracking_url=tracker.url(), cost=cost)
    job.hooks.before_publish("the run's result")
    job.folder.put_atomic(SUMMARY, result.to_json())
    from sparkring.pipelines.report.report import write_report  # with matplotlib: see `import_later_parts`

    write_report(tracker, ReportInputs(result, job.dataset.manifest, held_out), job.folder, job.ds)
    spent = {f"time/{name}": value for name, value in timings.items()}
    tracker.metrics(JOB, 0, spent | {f"cost/{name}": value for name, value in cost.items()} | result.test_metrics())
    if (interval := job.resolved.interval) is not None:
        tracker.history(job.config.name, interval.number, interval.start.timestamp(), nightly_values(result))
    run_id = known_run_id(tracker, job.record)  # at first the store may not have answered yet
    job.runs.update(job.record.folder, status="finished", mlflow_run_id=run_id)
    if lost:
        tracker.tags(JOB, {"sparkring.lost": "; ".join(lost)})
    if result.promotion is not None:
        return report_decision(result.promotion), result
    if not lost:
        return Exit.OK, result
    alias = job.config.tracking.alias
    log.error("report.must_beat: %s; %r stays where it was", "; ".join(lost), alias)
    return Exit.QUALITY, result


def nightly_values(result: TrainResult) -> dict[str, float]:
    """What a date adds to the recipe's history: scores on the test rows, drift, steps, seconds and cost."""
    values = result.test_metrics() | drift_metrics(result.promotion.drift if result.promotion else [])
    values |= {f"cost/{name}": value for name, value in result.cost.items()}
    return values | {"time/total_s": result.timings["total_s"], "steps": result.train.steps}


def publish_model(job: JobContext, result: TrainResult, alias: str | None) -> str:
    """Register the model with its signature, features and scores; the sha256 of its weights.

    `alias` is moved to it unless None.
    """
    config, manifest = job.config, job.dataset.manifest
    assert result.train.weights is not None and result.train.exported_step is not None, "training is finished"
    weights = job.folder.at(result.train.weights)
    describe_model(weights, config, manifest)
    sha256 = weights_sha256(weights)
    info = ModelInfo(
        name=f"{config.name}-model",
        step=result.train.exported_step,
        sha256=sha256,
        loader_module="sparkring.pipelines.serving",
        inputs=serving.signature_inputs(config, manifest),
        outputs=serving.signature_outputs(config.model.task, manifest.classes, manifest.label_names),
        registered_model=config.tracking.named(config.name).registered_model,
        alias=alias,
        tags={
            FINGERPRINT: manifest.fingerprint,
            "sparkring.engine": result.train.engine,
            WEIGHTS: sha256,
        }
        | ({DATE: job.ds} if job.ds else {}),
        params=run_params(job.resolved, manifest.fingerprint, leave_out=("etl", "spark")),
        scores=result.test_metrics(),
        dataset=split_name(manifest.name, config.train.test_split or config.train.valid_split),
        fingerprint=manifest.fingerprint,
        about=registered_note(config),
    )
    info = replace(info, card=model_card(result, manifest, [column["name"] for column in info.inputs]))
    with scratch_folder("model") as scratch:
        packed = pack_model(config, job.dataset, weights, scratch)
        job.tracker.model(JOB, packed.data, replace(info, requirements=packed.requirements), packed.code)
    return sha256


def registered_as(config: TrackingConfig, tracker: Tracker, result: TrainResult) -> ModelPlace:
    """The version of the model and its alias, or where it is until it has one. `tracker`: closed."""
    folder = f"{result.run}/{result.train.weights}"
    if not config.enabled:
        return ModelPlace(folder)
    version = tracker.version(JOB, timeout_s=0.0)
    if version is None or tracker.waiting:
        later = "not registered yet: what the store did not take is sent by the next job or `sparkring replay`"
        return ModelPlace(f"{folder}, {later}")
    from sparkring.pipelines.tracking.registry import Registry  # seconds of imports, and done by now

    registry = Registry(config)
    uri = f"models:/{registry.name}/{version}"
    try:
        with client_limits(config):
            holder = registry.with_alias(config.alias)
    except StoreUnreachable:
        return ModelPlace(uri, uri)
    if holder is not None and holder.version == version:
        return ModelPlace(f"{uri}, {config.alias!r} now", uri, has_alias=True)
    return ModelPlace(uri, uri)


def note_end(runs: Runs, record: RunRecord, status: Status) -> None:
    """Store the status of a run that did not finish. A full disk, say, must not hide what ended it."""
    try:
        runs.update(record.folder, status=status)
    except (OSError, StoredError) as error:
        log.error("%s: run.json still says %r, not %r: %s", runs.at(record).uri, record.status, status, error)
