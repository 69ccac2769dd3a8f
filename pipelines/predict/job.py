"""The job of `sparkring predict`: score the rows of a view, and publish the predictions of an interval whole."""

from __future__ import annotations

import logging
import time
import uuid
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, Observation, SparkSession
from pyspark.sql import functions as F

from sparkring.conf.blocks.predict import CONTRIBUTIONS, PredictConfig
from sparkring.conf.config import RunConfig
from sparkring.conf.digest import digest
from sparkring.conf.load import ConfigError, Resolved
from sparkring.conf.plain_text import count_of
from sparkring.conf.storage import Storage, open_storage
from sparkring.conf.tasks import LabelForm
from sparkring.etl.errors import EtlError
from sparkring.etl.shards.write import worker_uri
from sparkring.etl.spark_platform.application import add_archive, served_folder
from sparkring.etl.spark_platform.jvm import JavaThrew
from sparkring.etl.spark_platform.session import BATCH_ROWS, batches_to_python, build_session
from sparkring.pipelines.lineage import record as lineage
from sparkring.pipelines.predict.model import ScoringModel, get_model, load, pack
from sparkring.pipelines.predict.publish import PredictionFile, PublishedPredictions, check_own, publish, staged
from sparkring.pipelines.predict.rows import PinnedRows, bounded, check_kept, make_rows, pick_columns, pin_rows
from sparkring.pipelines.predict.score import LONG, RESULT_DDL, About, ScoreTask, score_partition
from sparkring.pipelines.run.exit_codes import Exit
from sparkring.pipelines.run.scratch import scratch_folder
from sparkring.pipelines.run.spark import session_on_demand
from sparkring.pipelines.serving import signature_outputs
from sparkring.pipelines.tracking.ops import DatasetInfo
from sparkring.pipelines.tracking.tags import COMMIT
from sparkring.pipelines.tracking.tracker import JOB, Tracker, git_commit
from sparkring.training.model.contributions import TOLERANCE, contribution_problem

log = logging.getLogger("sparkring")


HERE = Path(__file__).parent


@dataclass(frozen=True)
class PredictJob:
    """What is scored by what, all of it found before Spark has anything to do."""

    resolved: Resolved
    block: PredictConfig
    model: ScoringModel
    pinned: PinnedRows
    ds: str | None
    commit: str  # of the code that runs; empty outside of a checkout
    scored_at: datetime = field(default_factory=lambda: datetime.now(UTC))

    @property
    def about(self) -> About:
        model, classes = self.model, self.model.trained.manifest.classes
        is_flag = model.trained.config.model.kind.form is LabelForm.FLAG
        return About(model.name, model.version, self.scored_at, self.ds, classes[-1] if classes and is_flag else "")


@dataclass(frozen=True)
class Scored:
    """What the workers have written, and what Spark counted."""

    files: tuple[PredictionFile, ...]
    rows_in: int
    refused: dict[str, int]
    missed: int = 0  # rows whose contributions do not sum to their raw prediction
    long: int = 0  # rows that were left for later

    @property
    def rows_out(self) -> int:
        return sum(file.rows for file in self.files)


def run_predict(resolved: Resolved, ds: str | None = None) -> int:
    """Score, publish and record; returns the exit code. `ds`: the start of the data interval, or None.

    Raises ConfigError without a `predict` block, StoredError for a model that is missing, EtlError for rows.
    """
    config = resolved.config
    if config.predict is None:
        raise ConfigError(config.name, ["predict: the recipe has no such block; add predict.rows and predict.to"])
    target = predictions_folder(config.predict, ds)
    check_own(target)
    with ExitStack() as held:
        scratch = held.enter_context(scratch_folder("predict"))
        model = get_model(config, config.predict, scratch)
        check_contributions(config, model)
        needed = load(model.folder).raw_columns
        task, manifest = model.trained.config.model.task, model.trained.manifest
        made = [column["name"] for column in signature_outputs(task, manifest.classes, manifest.label_names)]
        check_kept(config.predict, [*made, *(CONTRIBUTIONS if config.predict.contributions else ())])
        staging = held.enter_context(staged(target))
        session = held.enter_context(session_on_demand(config.name, config.spark, config.launch))
        job = PredictJob(resolved, config.predict, model, pin_rows(config, session), ds, git_commit(HERE) or "")
        tags = {COMMIT: job.commit, "sparkring.model_version": model.uri}
        name, job_id = f"predict {ds}" if ds else "predict", digest([resolved.digest, "predict", ds])[:16]
        with Tracker(config.tracking.named(config.name), job_id, name, tags) as tracker:
            lineage.begin(tracker, f"{config.name}.predict", resolved, job.pinned.snapshots)
            lineage.record_model(tracker, model.uri, model.name, model.version)
            describe_job(tracker, job)
            began = time.monotonic()
            scored = score(build_session(session(), config.spark.settings()), job, needed, staging)
            publish(target, staging, describe_predictions(job, scored, tracker.run_id(timeout_s=1.0)))
            record_scores(tracker, scored, time.monotonic() - began)
            lineage.record_predictions(tracker, job.block.to, [(file.rows, file.bytes) for file in scored.files])
    refused = sum(scored.refused.values())
    log.info("%d rows scored by %s, %d refused: %s", scored.rows_out, model.uri, refused, target.uri)
    if scored.missed:
        log.warning(
            "%d of %d rows have contributions that miss the raw prediction by more than %g of their size",
            scored.missed,
            scored.rows_out,
            TOLERANCE,
        )
    return Exit.OK


def check_contributions(config: RunConfig, model: ScoringModel) -> None:
    """Raise ConfigError where contributions are wanted of a model that has none."""
    assert config.predict is not None
    if not config.predict.contributions:
        return
    problem = contribution_problem(model.trained.config, model.trained.manifest)
    if problem is not None:
        raise ConfigError(config.name, [f"predict.contributions: {model.uri}: {problem}; set it to false"])


def predictions_folder(block: PredictConfig, ds: str | None) -> Storage:
    """Return the folder that one scoring replaces."""
    folder = open_storage(block.to)
    return folder if ds is None else folder.at(f"day={ds}")


def score(spark: SparkSession, job: PredictJob, needed: list[str], staging: Storage) -> Scored:
    """Score the job's rows into files of `staging`. EtlError for whatever the user must correct.

    `spark`: a session of a build's kind; `needed`: raw columns of the model.
    """
    try:
        rows = make_rows(spark, job.resolved.config, job.block, job.pinned)
        columns = pick_columns(job.block, rows.columns, needed)
        # An executor that starts later fetches it too, so it stays as long as the session, in PySpark's own folder.
        archive = pack(job.model.folder, served_folder(spark))
        add_archive(spark, archive)
        task = ScoreTask(
            archive=archive.name,
            root_uri=worker_uri(staging),
            version=uuid.uuid4().hex,
            keep=tuple(job.block.keep),
            about=job.about,
            absent=columns.absent,
            contributions=job.block.contributions,
        )
        sent = rows.select(*(F.col(f"`{name}`") for name in columns.sent))
        scored = score_bounded(spark, sent, task, job.block.rows)
    except (PySparkException, JavaThrew):
        job.pinned.check_unchanged()  # a file that has gone is why Spark could not continue
        raise
    job.pinned.check_unchanged()  # the fingerprints, taken before the rows were read, must still be theirs
    return scored


def score_bounded(spark: SparkSession, rows: DataFrame, task: ScoreTask, name: str) -> Scored:
    """Score rows, those with long texts after the others, so that no batch of any takes much memory."""
    some = bounded(rows)
    if some is None:
        return run_tasks(rows, task, name)
    spark.conf.set(BATCH_ROWS, str(some.batch_rows))
    with batches_to_python(spark, some.row_bytes):
        scored = run_tasks(some.rows, task, name)
    if not scored.long or some.long is None:
        return scored
    more = run_tasks(some.long, task, name)
    if more.rows_in != scored.long:
        raise RuntimeError(f"{scored.long} rows have long texts, {more.rows_in} of them were read again")
    refused = dict(Counter(scored.refused) + Counter(more.refused))
    files = tuple(sorted((*scored.files, *more.files), key=path_of))
    return Scored(files, scored.rows_in, refused, scored.missed + more.missed)


def run_tasks(rows: DataFrame, task: ScoreTask, name: str) -> Scored:
    """Score in Spark's tasks; `name` is of the view. Spark counts the rows that go in, the workers what comes out."""
    seen, counts = Observation(), [F.count(F.lit(1)).alias("rows")]
    if LONG in rows.columns:
        counts.append(F.count_if(F.col(LONG)).alias("long"))
    found = rows.observe(seen, *counts).mapInArrow(partial(score_partition, task), RESULT_DDL).collect()
    if problems := [row["problem"] for row in found if row["problem"] is not None]:
        raise EtlError(f"predict.rows = {name!r}: {problems[0]}")
    files = [PredictionFile(row["path"], row["rows"], row["bytes"], row["sha256"]) for row in found]
    refused: Counter[str] = Counter()
    for row in found:
        refused.update(row["refused"])
    rows_in, long = int(seen.get["rows"]), int(seen.get.get("long", 0))
    missed = sum(row["missed"] for row in found)
    scored = Scored(tuple(sorted(files, key=path_of)), rows_in, dict(refused), missed, long)
    if not scored.rows_in:
        raise EtlError(f"predict.rows = {name!r}: has no rows; nothing is replaced")
    if rows_in != scored.rows_out + refused.total() + long:
        raise RuntimeError(
            f"{count_of(rows_in, 'row was')} read, {scored.rows_out} scored, {refused.total()} refused and {long} left "
            "for later"
        )
    return scored


def path_of(file: PredictionFile) -> str:
    return file.path


def describe_predictions(job: PredictJob, scored: Scored, mlflow_run_id: str | None) -> PublishedPredictions:
    """Return the content of `_predictions.json`."""
    model = job.model
    return PublishedPredictions(
        interval=job.ds,
        scored_at=job.about.scored_at.isoformat(),
        model=model.uri,
        model_name=model.name,
        model_version=model.version,
        model_run_id=model.run_id,
        weights_sha256=model.weights_sha256,
        mlflow_run_id=mlflow_run_id,
        config_digest=job.resolved.digest,
        commit=job.commit,
        rows=job.block.rows,
        sources=job.pinned.fingerprints,
        rows_in=scored.rows_in,
        rows_out=scored.rows_out,
        refused=scored.refused,
        missed=scored.missed,
        files=scored.files,
    )


def describe_job(tracker: Tracker, job: PredictJob) -> None:
    """Record the configuration, the model, and each source as an input of the run."""
    about = {"sparkring.config_digest": job.resolved.digest, "sparkring.weights_sha256": job.model.weights_sha256}
    tracker.tags(JOB, about | ({"sparkring.date": job.ds} if job.ds else {}))
    tracker.params(JOB, {"predict": job.block.model_dump(mode="json")})
    tracker.artifact_json(JOB, job.resolved.as_dict(), "config.json")
    for source in job.pinned.snapshots:
        where = source.lineage()
        info = DatasetInfo(
            name=source.name,
            uri=str(where.get("path") or where.get("table") or source.key),
            fingerprint=source.fingerprint,
            profile={key: where[key] for key in ("files", "bytes") if isinstance(where.get(key), int)},
            schema=[],
        )
        tracker.dataset(JOB, info, "scoring")


def record_scores(tracker: Tracker, scored: Scored, seconds_s: float) -> None:
    """Record counts and speed in MLflow. `seconds_s`: from Spark's first task to the published folder."""
    counts = {"rows/in": scored.rows_in, "rows/out": scored.rows_out} | {
        f"rows/refused_{name}": rows for name, rows in scored.refused.items()
    }
    if scored.missed:
        counts["rows/contributions_missed"] = scored.missed
    speed = {"time/score_s": seconds_s, "perf/rows_per_s": scored.rows_in / seconds_s}
    tracker.metrics(JOB, 0, {name: float(value) for name, value in (counts | speed).items()})
