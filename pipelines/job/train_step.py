"""The training step of a job: ranks in a barrier stage, their events to the terminal and to MLflow."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cache
from statistics import median
from typing import Any

from pydantic import TypeAdapter

from sparkring.conf.config import RunConfig
from sparkring.conf.load import Resolved
from sparkring.conf.manifest import DatasetManifest
from sparkring.conf.plain_text import count_of
from sparkring.conf.references import module_of
from sparkring.conf.secrets import redacted
from sparkring.conf.storage import Storage
from sparkring.conf.tasks import Family
from sparkring.pipelines.context.context import TRAIN, JobContext, StartPoint
from sparkring.pipelines.context.etl_step import Dataset, split_info
from sparkring.pipelines.evaluation.evaluate import EVALUATE
from sparkring.pipelines.job.outcome import ended_line
from sparkring.pipelines.job.progress import ProgressDisplay
from sparkring.pipelines.launch.recover import (
    Recovery,
    RestartableJob,
    launch_limits,
    restart_policy,
    run_with_recovery,
)
from sparkring.pipelines.model.plan import layout_problems_of, on_world, plan_and_measured
from sparkring.pipelines.run.loss_history import Points, as_history, history_up_to, save_history
from sparkring.pipelines.run.signals import obeying_signals
from sparkring.pipelines.tracking.params import run_params
from sparkring.pipelines.tracking.tags import CLUSTER, ENGINE, MACHINES
from sparkring.pipelines.tracking.tracker import JOB, Tracker
from sparkring.training.checkpoint.catalog import committed
from sparkring.training.checkpoint.layout import CHECKPOINTS
from sparkring.training.launch.control import Control
from sparkring.training.launch.events import OnEvent
from sparkring.training.launch.job import PRELOAD, JobResult, JobSpec
from sparkring.training.launch.messages import (
    AttemptEnded,
    AttemptStarted,
    ChildEvent,
    Event,
    LateLogLines,
    RankMetrics,
    Recovered,
    Stacks,
    Straggler,
)
from sparkring.training.launch.restart import RestartPolicy
from sparkring.training.launch.topology import Child
from sparkring.training.planner import format_rows
from sparkring.training.worker.payload import TrainPayload
from sparkring.training.worker.plan_record import PlanRecord
from sparkring.training.worker.result import FailedAttempt, History, RunIdentity, Trained, WorkerResult

log = logging.getLogger(__name__)
ENTRIES: dict[Family, str] = {
    "net": "sparkring.training.worker.train:train",
    "trees": "sparkring.training.worker.train_trees:train",
}
"""What ranks run."""
SERVER_ENTRY = "sparkring.training.worker.server:serve"
SERVERS = "servers.json"  # artifact: what parameter servers have seen
HOT_IDS = "hot_ids.json"  # artifact: the ids of sparse tables that training used most


@dataclass(frozen=True)
class TrainingWatch:
    """What a sweep does with a trial that trains."""

    # given the step of an evaluation and its metrics; True: training stops there
    falls_behind: Callable[[int, dict[str, float]], bool] = lambda step, metrics: False
    keeps_checkpoints: bool = True  # False: they are deleted when training ends, so MLflow points at none


UNWATCHED = TrainingWatch()


def train(
    job: JobContext, start: StartPoint | None = None, watch: TrainingWatch = UNWATCHED
) -> tuple[Trained, dict[str, float]]:
    """Train, and record in MLflow what was trained on what, and how it went. Raises what `run_ranks` raises.

    Returns the seconds of the stages too. `start`: the trained weights that training starts from, if any.
    """
    config, tracker, key = job.config, job.tracker, job.training_key
    with tracker.part(key):
        for each in (JOB, key):  # the job's own too, so that a list of jobs shows what each was trained on
            record_inputs(job, each)
        resolved = job.on_ranks(config.launch.world).resolved
        tracker.params(key, run_params(resolved, job.dataset.manifest.fingerprint, leave_out=("etl", "spark")))
        events = Events(tracker, ProgressDisplay(), job.training_folder, key)
        point_at_checkpoints(job.training_folder, tracker, key)
        began = time.monotonic()
        launched = run_ranks(job, events, watch)
        train_s = time.monotonic() - began - launched.start_s
        kept = committed(job.training_folder.at(CHECKPOINTS))[0] if watch.keeps_checkpoints else []
        tracker.keep_checkpoints(key, [info.uri for info in kept])
        rank_0 = TypeAdapter(WorkerResult).validate_python(launched.result)
        log.info("%s", ended_line(rank_0, config))
        rows = [] if config.model.is_trees else layout_rows(job, rank_0)
        planned = record_plan(job, rank_0, launched, rows)
        record_tables(tracker, rank_0, key)
        record_servers(tracker, rank_0, key)
        trained = Trained(
            train=rank_0,
            attempts=launched.attempt,
            failed_attempts=events.failed_attempts,
            history=as_history(events.history),
            resumed_from=events.resumed_from,
            per_step_s=per_step_s(launched),
            once_s=once_s(launched),
            predictions=[rank["predictions"] for rank in launched.results if rank["predictions"]],
            plan=format_rows(rows) if rows else "",
            planned=planned,
            start=start.describe(rank_0) if start is not None else "",
            valid_predictions=valid_predictions(launched),
        )
        return trained, {"launch_s": launched.start_s, "train_s": train_s}


def record_layout(job: JobContext, world: int) -> None:
    """Log the layout that was chosen for so many ranks, and record the configuration with it; nothing without."""
    lines = [] if job.plan is None else job.plan.lines_at(world)
    for line in lines:
        log.info("%s", line)
    if lines:
        job.tracker.artifact_json(JOB, job.resolved.as_dict(), "config.json")
        job.tracker.tags(JOB, {f"sparkring.layout.{world}": lines[0]})


def valid_predictions(launched: JobResult) -> list[str]:
    """List the ranks' prediction files of the validation rows; [] if not scored after training."""
    scored = [rank["exported_valid"] for rank in launched.results if rank["exported_valid"] is not None]
    return [each["predictions"] for each in scored if each["predictions"]]


def identity(job: JobContext) -> RunIdentity:
    """Identify the job's run."""
    dataset, resolved = job.dataset, job.resolved
    return RunIdentity(
        name=resolved.config.name,
        run=job.folder.uri,
        dataset=dataset.folder.uri,
        fingerprint=dataset.manifest.fingerprint,
        parts=[part.interval for part in dataset.manifest.parts],
        written_parts=list(dataset.written_parts),
        config=resolved.as_dict(),
        origins=resolved.origins,
        config_digest=resolved.digest,
        commit=job.commit,
    )


def record_inputs(job: JobContext, key: str) -> None:
    """Record the splits that the run `key` reads: the job's all, those of a part's own."""
    train, splits = job.config.train, job.dataset.manifest.splits
    contexts = {"train": "training", train.valid_split: "validation", train.test_split: "testing"}
    for split, context in contexts.items():
        is_read = key == JOB or (context == "testing") == (key == EVALUATE)
        if split is not None and split in splits and is_read:
            job.tracker.dataset(key, split_info(job.dataset, split), context)


def layout_rows(job: JobContext, rank_0: WorkerResult) -> list[dict[str, Any]]:
    """Return the table of predicted and measured memory and bytes, and track it."""
    config = on_world(job.on_ranks(rank_0.world).config, rank_0.world)
    rows = plan_and_measured(config, job.dataset.manifest, rank_0.measured)
    job.tracker.artifact(job.training_key, format_rows(rows) + "\n", "plan.txt")
    return rows


def record_plan(
    job: JobContext, rank_0: WorkerResult, launched: JobResult, rows: list[dict[str, Any]]
) -> PlanRecord | None:
    """Record predicted and measured costs on the job's cluster; None without a cluster.

    Args:
        job: job that was trained.
        rank_0: result of rank 0 in the last attempt.
        launched: results of the same attempt.
        rows: table of the layout.
    """
    found = None if job.plan is None else job.plan.record_at(rank_0.world)
    if found is None:
        return None
    peak = next((row for row in rows if row["quantity"] == "peak_bytes"), {})
    windows = [m.timing.step_s for m in launched.metrics if m.timing is not None]
    found = replace(
        found,
        predicted_peak=peak.get("predicted"),
        measured_peak=peak.get("measured") or None,
        measured_step_s=(median(windows) or None) if windows else None,
    )
    job.tracker.metrics(JOB, rank_0.steps, found.metrics())
    job.tracker.tags(JOB, {CLUSTER: found.cluster, MACHINES: found.machines})
    return found


def record_tables(tracker: Tracker, rank_0: WorkerResult, key: str = TRAIN) -> None:
    """Record what the model's sparse tables hold, and the ids that were used most; nothing without tables."""
    if rank_0.tables:
        tracker.metrics(key, rank_0.steps, rank_0.table_metrics())
        uses = {name: asdict(hot) for name, hot in rank_0.hot_ids.items()}
        tracker.artifact_json(key, uses, HOT_IDS)


def record_servers(tracker: Tracker, rank_0: WorkerResult, key: str = TRAIN) -> None:
    """Record what parameter servers have seen, with histograms of clock gap and version lag; nothing without them."""
    if rank_0.servers is not None:
        tracker.metrics(key, rank_0.steps, rank_0.servers.metrics())
        tracker.artifact_json(key, asdict(rank_0.servers), SERVERS)


def point_at_checkpoints(run: Storage, tracker: Tracker, key: str = TRAIN) -> None:
    """Record the checkpoints that a run has: ranks may have finished one after a kill of the driver."""
    for info in committed(run.at(CHECKPOINTS))[0]:
        tracker.checkpoint(key, info.step, info.uri, info.bytes, info.world, info.metric)


def run_ranks(job: JobContext, events: Events, watch: TrainingWatch) -> JobResult:
    """Train to the end, over as many attempts as the policy allows.

    Raises WorkerFailed and LaunchError; leaves as KeyboardInterrupt or SystemExit(143) after a signal, a checkpoint
    written first.
    """
    launch, control, run = job.config.launch, Control(), job.training_folder

    laid_out: list[int] = []  # worlds of the attempts so far

    def make_job(attempt: int, world: int) -> JobSpec:
        job.count_attempt(attempt)
        on_ranks = job.on_ranks(world)
        if laid_out[-1:] != [world]:
            record_layout(on_ranks, world)
            laid_out.append(world)
        return job_spec(on_ranks.resolved, job.dataset, run, is_compared=job.family is not None)

    def on_event(event: Event) -> None:
        events.on_event(event)
        if isinstance(event, RankMetrics) and event.rank == 0 and _falls_behind(watch, event):
            control.stop()

    restartable = RestartableJob(
        make_job,
        policy(job.config, job.dataset.manifest, lambda world: job.on_ranks(world).config),
        latest_step=lambda: latest_step(run),
        is_finished=lambda result: bool(result.result["finished"]),
        first_attempt=job.record.attempts + 1,
    )
    with going_on_said(run, job.family), obeying_signals(control, launch.grace_s):
        try:
            launched = attempt_until_done(job, restartable, on_event, control)
        finally:
            events.close()
    if by_rank := busy_by_rank(launched.timings):
        from sparkring.pipelines.report.figures import curves, to_png  # with matplotlib, which nothing before needs

        job.tracker.artifact(job.training_key, to_png(curves(by_rank, "busy seconds per step")), "ranks.png", "figures")
    return launched


def attempt_until_done(job: JobContext, restartable: RestartableJob, on_event: OnEvent, control: Control) -> JobResult:
    """Run the attempts where the job's ranks run."""
    if job.platform is not None:
        return Recovery(job.platform, restartable, on_event, control, launch_limits(job.config.launch)).run()
    from sparkring.pipelines.launch.barrier import launch_options

    assert job.spark is not None, "a job without Spark has a platform"
    return run_with_recovery(job.spark, restartable, on_event, control, launch_options(job.config.launch))


@contextmanager
def going_on_said(run: Storage, family: Family | None = None) -> Iterator[None]:
    """Log, if a signal ends the block, where the same command continues, and in which training."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        step = latest_step(run)
        where = f"at the checkpoint of step {step}" if step is not None else "at step 0: there is no checkpoint yet"
        log.warning("stopped; the same command continues %s%s", "" if family is None else f"with the {family}, ", where)
        raise


def _falls_behind(watch: TrainingWatch, event: RankMetrics) -> bool:
    valid = {name: value for name, value in event.values.items() if name.startswith("valid/")}
    return bool(valid) and watch.falls_behind(event.step, valid)


def per_step_s(result: JobResult) -> dict[str, float]:
    """Average rank 0's seconds per step by cause, over the logging windows of the last attempt."""
    windows = [m.timing for m in result.metrics if m.timing is not None]
    sums_s = summed(window.reader_s for window in windows) | summed(window.loop_s for window in windows)
    return {cause: total_s / len(windows) for cause, total_s in sums_s.items()}


def once_s(result: JobResult) -> dict[str, float]:
    """Return the seconds rank 0's reader needed to start the last attempt, by cause."""
    return summed(m.timing.once_s for m in result.metrics if m.timing is not None)


def summed(seconds: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Add up seconds by cause, sorted by cause."""
    total_s: dict[str, float] = {}
    for by_cause in seconds:
        for cause, spent_s in by_cause.items():
            total_s[cause] = total_s.get(cause, 0.0) + spent_s
    return dict(sorted(total_s.items()))


def busy_by_rank(timings: dict[str, list[Any]], most: int = 8) -> History:
    """Return busy seconds per step of the `most` slowest ranks. `timings`: JobResult's columns."""
    series: dict[int, list[tuple[int, float]]] = {}
    for step, rank, busy_s in zip(*(timings.get(name, []) for name in ("step", "rank", "busy_s")), strict=True):
        series.setdefault(rank, []).append((step, busy_s))
    slowest = sorted(series, key=lambda rank: -sum(busy for _, busy in series[rank]))[:most]
    return {f"rank {rank}": series[rank] for rank in sorted(slowest)}


def job_spec(resolved: Resolved, dataset: Dataset, run: Storage, is_compared: bool = False) -> JobSpec:
    """Specify what every rank runs: the entry of its model family, with the configuration.

    Args:
        resolved: configuration of one family.
        dataset: dataset to train on.
        run: folder of the training.
        is_compared: whether its model is compared with another family's on the validation rows.
    """
    payload = TrainPayload(
        config=resolved.as_dict(),
        config_digest=resolved.digest,
        dataset=dataset.folder.uri,
        run=run.uri,
        is_compared=is_compared,
    )
    parallel, timeout_s = resolved.config.parallel, resolved.config.launch.collective_timeout_s
    servers = parallel.servers.per_host
    (family,) = resolved.config.model.families
    return JobSpec(
        ENTRIES[family],
        payload.to_json(),
        preload=preload_of(resolved.config),
        collective_timeout_s=timeout_s,
        servers_per_host=servers,
        server_entry=SERVER_ENTRY,
        replaceable_ranks=servers > 0,
    )


def preload_of(config: RunConfig) -> tuple[str, ...]:
    """List the modules that fork servers import before forking the ranks of all families."""
    servers, is_trees = config.parallel.servers.per_host, config.model.is_trees
    # Our own code is preloaded too: a retry starts seconds sooner.
    ring = ("torch",) if config.parallel.engine == "torch" or servers or is_trees else PRELOAD
    # torch's first optimizer imports dynamo: seconds, which a rank or its replacement would spend after it was forked.
    optimizer = () if is_trees else ("torch._dynamo",)
    entries = [ENTRIES[family] for family in config.model.families]
    return (*ring, *optimizer, *map(module_of, [*entries, SERVER_ENTRY] if servers else entries))


def policy(
    config: RunConfig,
    manifest: DatasetManifest | None = None,
    on_ranks: Callable[[int], RunConfig] | None = None,
) -> RestartPolicy:
    """Return how far recovery may go, skipping worlds the layout refuses (a fixed dp, indivisible shards).

    `on_ranks`: configuration for a number of ranks, whose layout may be planned; None: `config`'s.
    """
    launch, parallel = config.launch, config.parallel
    fixed = [max(size, 1) for size in (parallel.pp, parallel.tp, parallel.cp)]
    of_ranks = on_ranks or (lambda world: config)
    fits = cache(lambda world: not layout_problems_of(on_world(of_ranks(world), world), manifest))
    return restart_policy(launch, math.prod(fixed), fits)


def latest_step(run: Storage) -> int | None:
    """Return the step of the newest committed checkpoint."""
    good, _ = committed(run.at(CHECKPOINTS))
    return good[-1].step if good else None


class Events:
    """Receives the launcher's events: shows them, tracks them, and keeps what the result needs of them.

    Only rank 0's metrics are the run's.
    """

    def __init__(self, tracker: Tracker, progress: ProgressDisplay, run: Storage, key: str = TRAIN) -> None:
        """Record a training. `run`: its folder; `key`: key of its run in MLflow."""
        self.tracker, self.progress, self.run, self.key = tracker, progress, run, key
        self.failed_attempts: list[FailedAttempt] = []
        self.texts: dict[tuple[str, str], str] = {}  # artifacts by folder and name
        self.resumed_from: int | None = None  # step that an earlier command had reached
        self.history: Points = {}  # losses and validation metrics; a replayed step replaces its own

    def on_event(self, event: Event) -> None:
        self.progress.on_event(event)
        match event:
            case RankMetrics(rank=0):
                self.tracker.metrics(self.key, event.step, event.values)
                for name, value in event.values.items():
                    if name == "train/loss" or name.startswith("valid/"):
                        self.history.setdefault(name, {})[event.step] = value
            case ChildEvent(child=Child("rank", 0)):
                self._rank_event(event.name, event.data)
            case AttemptStarted():
                values = {"launch/start_s": event.start_s, "launch/world": float(event.world)}
                self.tracker.metrics(self.key, event.attempt, values)
            case Stacks():
                self.texts["stacks", f"attempt-{event.attempt}-rank-{event.rank}.txt"] = event.text
            case LateLogLines():
                file = f"attempt-{event.attempt}-rank-{event.rank}.txt"
                self.texts["late_output", file] = "\n".join(event.lines) + "\n"
            case Straggler():
                self.tracker.tags(self.key, {"sparkring.straggler": f"rank {event.rank} on {event.host}"})
            case AttemptEnded():
                self._attempt_ended(event)
            case Recovered():
                self.failed_attempts[-1].recover_s = event.recover_s
                self.tracker.metrics(self.key, event.attempt, {"launch/recover_s": event.recover_s})

    def close(self) -> None:
        """End the progress line, and store the curves so far, the ranks' stacks and late output."""
        self.progress.close()
        save_history(self.run, self.history)
        for (folder, name), text in sorted(self.texts.items()):
            self.tracker.artifact(self.key, text, name, folder)

    def _attempt_ended(self, event: AttemptEnded) -> None:
        values = {name: value for name, value in asdict(event).items() if name not in ("words", "why")}
        self.failed_attempts.append(FailedAttempt(**redacted(values | {"message": event.words})))
        self.tracker.metrics(self.key, event.attempt, {"launch/steps_lost": float(event.steps_lost)})
        words = f"{event.cause} on {count_of(event.world, 'rank')}: {event.words}; {event.decision}: {event.why}"
        self.tracker.tags(self.key, {f"sparkring.attempt.{event.attempt}": words})

    def _rank_event(self, kind: str, data: dict[str, Any]) -> None:
        if kind == "ring":
            self.tracker.tags(self.key, {ENGINE: data["engine"], "sparkring.world": data["world"]})
        elif kind == "checkpoint":
            pointer = {key: data[key] for key in ("step", "uri", "bytes", "world", "metric")}
            self.tracker.checkpoint(self.key, **pointer)
            save_history(self.run, self.history)
        elif kind == "resumed":
            if not self.history:  # else an attempt of this command had started before
                self.resumed_from = data["step"]
                self.history = history_up_to(self.run, data["step"])
            self.tracker.tags(self.key, {"sparkring.resumed_from_step": data["step"]})
