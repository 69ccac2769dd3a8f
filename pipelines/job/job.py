"""One job from end to end, attended or not: dataset, training, evaluation, model, report.

What `sparkring run` and `sparkring train` call. Every job is one parent run in MLflow with a child for each part. A job
stopped by a signal leaves a checkpoint and the signal's exit code; the same command continues from there, in the same
MLflow run.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from sparkring.conf.blocks.tracking import TrackingConfig
from sparkring.conf.config import RunConfig
from sparkring.conf.load import ConfigError, Resolved
from sparkring.conf.stored import StoredError
from sparkring.etl.spark_platform.application import application_id
from sparkring.pipelines import serving
from sparkring.pipelines.context import etl_step
from sparkring.pipelines.context.context import PERSONAL, JobContext, Publication
from sparkring.pipelines.context.etl_step import Dataset, split_name
from sparkring.pipelines.evaluation.baselines.baseline import import_library
from sparkring.pipelines.evaluation.evaluate import EVALUATE, HeldOut, evaluate, has_alias, reasons_against
from sparkring.pipelines.housekeeping.cost import etl_cost, job_cost, spark_cores
from sparkring.pipelines.job.etl_job import describe_job, job_tags
from sparkring.pipelines.job.families import train_best
from sparkring.pipelines.job.outcome import ModelPlace, outcome, suggested_commands
from sparkring.pipelines.job.train_step import identity, record_inputs
from sparkring.pipelines.lineage import record as lineage
from sparkring.pipelines.lineage.keep import keep_environment, keep_weights
from sparkring.pipelines.model.launch_plan import planning
from sparkring.pipelines.model.pack import pack_model
from sparkring.pipelines.promotion.drift import drift_metrics
from sparkring.pipelines.promotion.gate import Candidate, open_gate, report_decision
from sparkring.pipelines.promotion.prepare import prepare
from sparkring.pipelines.report.inputs import ReportInputs
from sparkring.pipelines.run.exit_codes import RESULT_LOG, Exit
from sparkring.pipelines.run.runs import Others, RunRecord, Runs, Status
from sparkring.pipelines.run.scratch import scratch_folder
from sparkring.pipelines.tracking.client import client_limits
from sparkring.pipelines.tracking.describe import model_card, registered_note
from sparkring.pipelines.tracking.errors import StoreUnreachable
from sparkring.pipelines.tracking.ops import ModelInfo
from sparkring.pipelines.tracking.params import run_params
from sparkring.pipelines.tracking.tags import DATE, ENGINE, FINGERPRINT, WEIGHTS
from sparkring.pipelines.tracking.tracker import JOB, Tracker, git_commit, run_label
from sparkring.pipelines.validate.folders import DATASETS, JOB_FOLDERS, check_folders
from sparkring.pipelines.validate.recipe import block_problems, check_against, check_foreseen, check_recipe
from sparkring.pipelines.validate.tables import check_tables
from sparkring.training.launch.host.processes import usable_cores
from sparkring.training.model.folder import describe_model, weights_sha256, write_digests
from sparkring.training.worker.result import SUMMARY, DriftFinding, Published, Spent, Trained, TrainResult

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from sparkring.pipelines.launch.recover import Platform
    from sparkring.pipelines.run.spark import JobSession

log = logging.getLogger("sparkring")
results = logging.getLogger(RESULT_LOG)


def run_job(
    resolved: Resolved,
    *,
    etl: bool,
    publication: Publication = PERSONAL,
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
        return run_parts(resolved, session, etl=etl, publication=publication)
    from sparkring.pipelines.run.jvm_options import data_bytes
    from sparkring.pipelines.run.spark import session_ahead

    with session_ahead(config.name, config.spark, config.launch, partial(data_bytes, config)) as session:
        return run_parts(resolved, session, etl=etl, publication=publication)


def run_parts(
    resolved: Resolved, session: Callable[[], SparkSession], *, etl: bool, publication: Publication = PERSONAL
) -> int:
    """Run a recipe with a checked layout, like `run_job`. `session` is called when Spark is needed."""
    from sparkring.pipelines.launch.barrier import launch_options
    from sparkring.pipelines.launch.preflight import SlotRequest, check_slots, check_workers, fixed_settings
    from sparkring.pipelines.run.spark import JobSession

    config, began = resolved.config, time.monotonic()
    if config.launch.is_without_spark:
        raise ConfigError(
            config.name, [f"launch.on = {config.launch.on!r}: only `sparkring train` does that; set it to spark"]
        )
    sources = publication.pin(config, session)
    fingerprint = etl_step.wanted_fingerprint(config, sources)
    runs = Runs(config.storage.runs, config.name)
    if not publication.leased:
        runs.check_free(config, fingerprint)
    found = etl_step.find(config, fingerprint) if etl else etl_step.require(config, fingerprint)
    import_later_parts(config.tracking)
    if found is not None:
        check_against(config, found)
    else:
        check_folders(config, [DATASETS])
        check_foreseen(config, etl_step.foresee(session(), config, sources))
    with begun_run(resolved, runs, fingerprint, publication) as run:
        lineage.begin(run.tracker, config.name, resolved, sources.snapshots)
        spark = session()
        timings = {"spark_s": time.monotonic() - began}
        describe_job(run.tracker, resolved, spark, fingerprint)
        options = launch_options(config.launch)
        request = SlotRequest(config.launch.world, config.launch.min_world, options.profile, options.room_wait_s)
        is_replaceable = isinstance(session, JobSession) and session.is_replaceable
        fixed = fixed_settings(spark, request) if is_replaceable else {}
        if not fixed:
            check_slots(spark, request)
        if found is None:
            check_workers(spark)
            building = time.monotonic()
            with imported_meanwhile():
                found = etl_step.build(
                    spark, resolved, sources, run.commit, run.tracker, publication.check, trained=True
                )
            timings["etl_s"] = time.monotonic() - building
            run.tracker.metrics(JOB, 0, etl_cost(spark, timings["etl_s"]))
            check_against(config, found)
        if fixed:
            assert isinstance(session, JobSession), "others are not replaced"
            spark = second_application(run.tracker, session, fixed)
            check_slots(spark, request)
        code, result = train_and_publish(run.job_on(found, spark), timings, began)
    results.info(
        "%s", outcome(result, resolved, registered_as(config.tracking.named(config.name), run.tracker, result))
    )
    return code


def second_application(tracker: Tracker, session: JobSession, settings: Mapping[str, str]) -> SparkSession:
    """Continue in an application whose executors stay: Spark runs no barrier stage in an elastic one."""
    words = " ".join(f"--conf {key}={value}" for key, value in settings.items())
    log.info(
        "spark.dynamicAllocation.enabled = true: Spark runs no barrier stage in such an application; training runs in "
        "a second one, with %s",
        words,
    )
    first = application_id(session())
    spark = session.replaced(settings)
    tracker.tags(JOB, {"sparkring.application_id": f"{first}, {application_id(spark)}"})
    return spark


def check_without_spark(config: RunConfig) -> Dataset:
    """Find the dataset; raise what is wrong with it or the recipe, before hosts are waited for."""
    check_recipe(config)
    check_tables(config, JOB_FOLDERS)
    found = etl_step.given(config)
    check_against(config, found)
    return found


def run_on_platform(resolved: Resolved, found: Dataset, platform: Platform) -> int:
    """Train without Spark on the dataset that `check_without_spark` has found, and return the exit code.

    Raises what the parts raise.
    """
    config, began = resolved.config, time.monotonic()
    fingerprint, runs = found.manifest.fingerprint, Runs(config.storage.runs, config.name)
    runs.check_free(config, fingerprint)
    import_later_parts(config.tracking)
    with begun_run(resolved, runs, fingerprint) as run:
        lineage.begin(run.tracker, config.name, resolved, {})
        describe_job(run.tracker, resolved, None, fingerprint)
        code, result = train_and_publish(run.job_on(found, None, platform), {}, began)
    results.info(
        "%s", outcome(result, resolved, registered_as(config.tracking.named(config.name), run.tracker, result))
    )
    return code


@dataclass(frozen=True)
class BegunRun:
    """A run of which nothing is done yet."""

    resolved: Resolved
    commit: str  # of the code that runs; empty outside of a checkout
    tracker: Tracker
    runs: Runs
    record: RunRecord
    publication: Publication

    def job_on(self, dataset: Dataset, spark: SparkSession | None, platform: Platform | None = None) -> JobContext:
        """Record the dataset and the run in MLflow, and give the job from there on."""
        lineage.record_dataset(self.tracker, self.resolved.config, dataset)
        self.publication.on_dataset(dataset)
        run_id = known_run_id(self.tracker, self.record)
        record = self.runs.update(self.record.folder, mlflow_run_id=run_id)
        self.publication.on_run(record)
        return JobContext(
            self.resolved,
            self.commit,
            spark,
            self.tracker,
            self.runs,
            record,
            dataset,
            self.publication,
            platform=platform,
        )


@contextmanager
def begun_run(
    resolved: Resolved, runs: Runs, fingerprint: str, publication: Publication = PERSONAL
) -> Iterator[BegunRun]:
    """Begin the job's run, or continue with an unfinished one; where the block fails, its status says so."""
    config, commit = resolved.config, git_commit(Path(__file__).parent) or ""
    others: Others = "same dataset" if publication.leased else "any"
    with runs.begin(config, fingerprint, publication.leased, others) as (record, continued):
        job_id = f"{config.name}/{record.folder}"
        tags = job_tags(config.name, commit, publication.ds)
        tracking = config.tracking.named(config.name)
        try:
            with Tracker(tracking, job_id, config.name, tags, continued, run_label(publication.ds)) as tracker:
                yield BegunRun(resolved, commit, tracker, runs, record, publication)
        except BaseException as error:
            stopped = isinstance(error, KeyboardInterrupt | SystemExit)
            note_end(runs, record, "interrupted" if stopped else "failed")
            raise


def import_later_parts(config: TrackingConfig) -> None:
    """Import what a job uses after its dataset is built, seconds of it: now Spark is starting, and nothing else."""
    import sparkring.pipelines.report.report  # noqa: F401

    if config.enabled:
        from sparkring.pipelines.tracking.store.sink import import_client

        import_client(config)


@contextmanager
def imported_meanwhile() -> Iterator[None]:
    """Import, in a thread, what a job uses once it has trained, while Spark works and this process waits for it."""
    with ThreadPoolExecutor(1, "imports") as thread:
        thread.submit(import_for_evaluation)  # an error is raised again where the module is used
        yield


def import_for_evaluation() -> None:
    """Import the library of the baselines, and what torch imports at its first operation on the meta device."""
    import_library()

    torch.zeros(1, device="meta").add(1)


def known_run_id(tracker: Tracker, record: RunRecord) -> str | None:
    """Return the job's run in MLflow; where the store is slow, what a continued run has noted earlier."""
    return tracker.run_id(timeout_s=1.0) or record.mlflow_run_id


def train_and_publish(job: JobContext, timings: dict[str, float], began: float) -> tuple[Exit, TrainResult]:
    """Train, evaluate, register the model, write summary.json and report.html.

    Returns the exit code too. `timings`: seconds of the stages so far; `began`: monotonic start of the job.
    """
    with planning(job.config, job.dataset.manifest, block_problems) as plan:
        job, prepared = prepare(replace(job, plan=plan))
        keep_environment(job)
        job, trained, seconds = train_best(job, prepared.start)
    job = job.on_ranks(trained.train.world)
    evaluating = time.monotonic()
    with job.tracker.part(EVALUATE):
        candidate = judge_on_test_rows(job, trained)
        timings |= seconds | {"evaluate_s": time.monotonic() - evaluating}
        published = publish(job, candidate, prepared.drift)
    timings["total_s"] = time.monotonic() - began
    cores = usable_cores() if job.spark is None else spark_cores(job.spark)
    cost = job_cost(cores, timings, job.config.launch, trained.train)
    spent = Spent(timings=timings, etl=job.dataset.seconds, cost=cost)
    result = TrainResult.of(identity(job), trained, candidate.evaluated, published, spent)
    result = replace(result, suggested=suggested_commands(result, job.resolved, published_as(job.config, result)))
    report(job, result, candidate.held_out)
    return conclude(job, result, candidate.lost), result


def judge_on_test_rows(job: JobContext, trained: Trained) -> Candidate:
    """Score model and baselines on the test rows, record that, and find baselines the model lost to."""
    record_inputs(job, EVALUATE)
    evaluated, held_out = evaluate(job, trained)
    unseen = {f"test/unseen/{name}": float(rows) for name, rows in evaluated.unseen.items()}
    scores = evaluated.test_metrics() | evaluated.group_metrics()
    job.tracker.metrics(EVALUATE, trained.train.steps, scores | unseen)
    if evaluated.importance:
        job.tracker.artifact_json(EVALUATE, evaluated.importance_table(), "importance.json")
    if evaluated.cautions:
        job.tracker.tags(JOB, {"sparkring.cautions": "; ".join(evaluated.cautions)})
    lost = reasons_against(evaluated, job.config.report)
    return Candidate(trained, evaluated, held_out, lost)


def publish(job: JobContext, candidate: Candidate, drift: list[DriftFinding]) -> Published:
    """Register the model, and move the alias to it where baselines, gates and drift allow that."""
    gate, publication = open_gate(job, candidate, drift), job.publication
    publication.check("the model")
    moves = not candidate.lost and gate is None and publication.may_promote
    keep_weights(job, register_model(job, candidate, alias=job.config.tracking.alias if moves else None))
    promotion = None
    if gate is not None:
        publication.check("the alias")
        promotion = gate.settle()
    version = promotion.version if promotion is not None else job.tracker.version(JOB)
    return Published(version=version, promotion=promotion, tracking_url=job.tracker.url())


def report(job: JobContext, result: TrainResult, held_out: HeldOut | None) -> None:
    """Write the result to the run folder, and it and the report to MLflow."""
    tracker = job.tracker
    job.publication.check("the run's result")
    job.folder.put_atomic(SUMMARY, result.to_json())
    from sparkring.pipelines.report.report import write_report  # with matplotlib: see `import_later_parts`

    write_report(tracker, ReportInputs(result, job.dataset.manifest, held_out), job.folder, job.ds)
    spent = {f"time/{name}": value for name, value in result.timings.items()}
    cost = {f"cost/{name}": value for name, value in result.cost.items()}
    tracker.metrics(JOB, 0, spent | cost | result.test_metrics())
    if (interval := job.resolved.interval) is not None:
        tracker.history(job.config.name, interval.number, interval.start.timestamp(), nightly_values(result))
    run_id = known_run_id(tracker, job.record)  # at first the store may not have answered yet
    job.runs.update(job.record.folder, status="finished", mlflow_run_id=run_id)


def conclude(job: JobContext, result: TrainResult, lost: list[str]) -> Exit:
    """Log a model that is not good enough; return the exit code. `lost`: a line for each baseline that is better."""
    if lost:
        job.tracker.tags(JOB, {"sparkring.lost": "; ".join(lost)})
    if result.promotion is not None:
        return report_decision(result.promotion)
    if not lost:
        return Exit.OK
    log.error("not promoted: %s; %r stays where it was", "; ".join(lost), job.config.tracking.alias)
    return Exit.QUALITY


def nightly_values(result: TrainResult) -> dict[str, float]:
    """Return a date's values for the recipe's history: test scores, drift, steps, seconds and cost."""
    values = result.test_metrics() | drift_metrics(result.promotion.drift if result.promotion else [])
    values |= {f"cost/{name}": value for name, value in result.cost.items()}
    return values | {"time/total_s": result.timings["total_s"], "steps": result.train.steps}


def register_model(job: JobContext, candidate: Candidate, alias: str | None) -> str:
    """Register the model with its signature, features and scores; the sha256 of its weights.

    `alias` is moved to it unless None.
    """
    config, manifest = job.config, job.dataset.manifest
    train, evaluated = candidate.trained.train, candidate.evaluated
    assert train.weights is not None and train.exported_step is not None, "training is finished"
    weights = job.folder.at(train.weights)
    describe_model(weights, config, manifest)
    sha256 = weights_sha256(weights, write_digests(weights))
    info = ModelInfo(
        name=f"{config.name}-model",
        step=train.exported_step,
        sha256=sha256,
        loader_module="sparkring.pipelines.serving",
        inputs=serving.signature_inputs(config, manifest),
        outputs=serving.signature_outputs(config.model.task, manifest.classes, manifest.label_names),
        registered_model=config.tracking.named(config.name).registered_model,
        alias=alias,
        tags={
            FINGERPRINT: manifest.fingerprint,
            ENGINE: train.engine,
            WEIGHTS: sha256,
        }
        | ({DATE: job.ds} if job.ds else {}),
        params=run_params(job.resolved, manifest.fingerprint, leave_out=("etl", "spark")),
        scores=evaluated.test_metrics(),
        dataset=split_name(manifest.name, config.train.test_split or config.train.valid_split),
        fingerprint=manifest.fingerprint,
        about=registered_note(config),
    )
    card = model_card(identity(job), evaluated, manifest, [column["name"] for column in info.inputs])
    with scratch_folder("model") as scratch:
        packed = pack_model(config, job.dataset, weights, scratch)
        job.tracker.model(JOB, packed.data, replace(info, card=card, requirements=packed.requirements), packed.code)
    return sha256


def published_as(config: RunConfig, result: TrainResult) -> ModelPlace:
    """Return the model's place as far as known when the report is written."""
    folder = f"{result.run}/{result.train.weights}"
    name = config.tracking.named(config.name).registered_model
    uri = f"models:/{name}/{result.version}" if config.tracking.enabled and result.version else ""
    return ModelPlace(uri or folder, uri, has_alias(config, result))


def registered_as(config: TrackingConfig, tracker: Tracker, result: TrainResult) -> ModelPlace:
    """Return the model's version and alias, or its folder until registered. `tracker`: closed."""
    folder = f"{result.run}/{result.train.weights}"
    if not config.enabled:
        return ModelPlace(folder)
    version = tracker.version(JOB, timeout_s=0.0)
    if version is None or tracker.waiting:
        later = "not registered yet: what the store did not take is sent by the next job or `sparkring replay`"
        return ModelPlace(f"{folder}, {later}")
    from sparkring.pipelines.tracking.store.registry import Registry  # seconds of imports, and done by now

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
