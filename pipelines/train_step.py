"""The training step of a job: ranks in a barrier stage, their events to the terminal and to MLflow."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from pyspark.sql import SparkSession

from conf.load import Resolved
from conf.manifest import DatasetManifest
from conf.schema import RunConfig
from conf.secrets import redacted
from conf.storage import Storage
from pipelines.etl_step import Dataset
from pipelines.launch.barrier import stage_options
from pipelines.launch.progress import Progress
from pipelines.launch.recover import run_with_recovery
from pipelines.plan import layout_problems_of
from pipelines.report.figures import History, curves, to_png
from pipelines.signals import obeying_signals
from pipelines.tracking.tracker import Tracker
from training.checkpoint.catalog import committed
from training.data.batch import ONCE
from training.launch.attempt import Control, Limits
from training.launch.elastic import Policy
from training.launch.job import PRELOAD, JobResult, JobSpec

log = logging.getLogger(__name__)
TRAIN = "train"
ENTRY = "training.worker:train"


@dataclass(frozen=True)
class Trained:
    """rank 0's summary, every rank's predictions file, launch seconds, the curves over all attempts of this command,
    and the attempts that failed."""

    summary: dict[str, Any]
    predictions: list[str]
    start_s: float
    attempt: int
    history: dict[str, list[tuple[int, float]]]
    failed_attempts: list[dict[str, Any]] = field(default_factory=list)
    per_step_s: dict[str, float] = field(default_factory=dict)  # rank 0's mean seconds per step by cause
    once_s: dict[str, float] = field(default_factory=dict)  # and what its reader needed to begin


def train(
    spark: SparkSession,
    resolved: Resolved,
    dataset: Dataset,
    run: Storage,
    tracker: Tracker,
    first_attempt: int,
    on_attempt: Callable[[int], None],
) -> Trained:
    """Train to the end, over as many attempts as the policy allows. Raises WorkerFailed, LaunchError; leaves as
    KeyboardInterrupt or SystemExit(143) when told to stop, a checkpoint written first.

    `on_attempt(number)` hears of every launch, so that the number is never used again.
    """
    launch = resolved.config.launch
    control, progress = Control(), Progress()
    events = Events(tracker, progress)

    def make_job(attempt: int, world: int) -> JobSpec:
        on_attempt(attempt)
        return job_spec(resolved, dataset, run)

    with obeying_signals(control, launch.grace_s):
        try:
            result = run_with_recovery(
                spark,
                make_job,
                policy(resolved.config, dataset.manifest),
                events.on_event,
                latest_step=lambda: latest_step(run),
                is_finished=lambda result: bool(result.result["finished"]),
                control=control,
                limits=Limits(launch.start_timeout_s, launch.hang_timeout_s),
                options=stage_options(launch),
                first_attempt=first_attempt,
            )
        finally:
            progress.close()
            for (folder, name), text in sorted(events.texts.items()):
                tracker.artifact(TRAIN, text, name, folder)
    if by_rank := busy_by_rank(result.timings):
        tracker.artifact(TRAIN, to_png(curves(by_rank, "busy seconds per step")), "ranks.png", "figures")
    files = [r["predictions"] for r in result.results if r.get("predictions")]
    history = {name: sorted(points.items()) for name, points in events.history.items()}
    return Trained(
        result.result, files, result.start_s, result.attempt, history, events.failed_attempts, per_step_s(result),
        once_s(result),
    )  # fmt: skip


def per_step_s(result: JobResult) -> dict[str, float]:
    """Mean seconds per step of rank 0 by cause, over the logging windows of the last attempt."""
    windows = [m["values"] for m in result.metrics if "perf/step_s" in m["values"]]
    names = {
        name for values in windows for name in values if name.startswith(("perf/", "data/")) and name.endswith("_s")
    }
    names -= {"perf/rows_per_s"} | {f"data/{name}" for name in ONCE}
    return {n.split("/")[1]: sum(v.get(n, 0.0) for v in windows) / len(windows) for n in sorted(names)}


def once_s(result: JobResult) -> dict[str, float]:
    """Seconds that rank 0's reader needed to begin the last attempt, by cause."""
    every = [m["values"] for m in result.metrics]
    return {n: sum(v.get(f"data/{n}", 0.0) for v in every) for n in ONCE if any(f"data/{n}" in v for v in every)}


def busy_by_rank(timings: dict[str, list[Any]], most: int = 8) -> History:
    """Busy seconds per step over steps, of the `most` slowest ranks. timings: JobResult's columns."""
    series: dict[int, list[tuple[int, float]]] = {}
    for step, rank, busy_s in zip(*(timings.get(name, []) for name in ("step", "rank", "busy_s")), strict=True):
        series.setdefault(rank, []).append((step, busy_s))
    slowest = sorted(series, key=lambda rank: -sum(busy for _, busy in series[rank]))[:most]
    return {f"rank {rank}": series[rank] for rank in sorted(slowest)}


def job_spec(resolved: Resolved, dataset: Dataset, run: Storage) -> JobSpec:
    payload = {
        "config": resolved.as_dict(),
        "config_digest": resolved.digest,
        "dataset": dataset.folder.uri,
        "run": run.uri,
    }
    engine, timeout_s = resolved.config.parallel.engine, resolved.config.launch.collective_timeout_s
    # Our own code too: a retry starts seconds sooner.
    preload = (*(("torch",) if engine == "torch" else PRELOAD), ENTRY.partition(":")[0])
    return JobSpec(ENTRY, payload, preload=preload, collective_timeout_s=timeout_s)


def policy(config: RunConfig, manifest: DatasetManifest | None = None) -> Policy:
    """How far recovery may go. Worlds the layout refuses (a fixed dp, a shard that does not divide it) are passed
    over."""
    launch, parallel = config.launch, config.parallel
    fixed = [max(size, 1) for size in (parallel.pp, parallel.tp, parallel.cp)]
    return Policy(
        launch.world,
        launch.min_world,
        launch.max_attempts,
        launch.backoff_s,
        launch.max_backoff_s,
        multiple_of=math.prod(fixed),
        fits=cache(lambda world: not layout_problems_of(on_world(config, world), manifest)),
    )


def on_world(config: RunConfig, world: int) -> RunConfig:
    return config.model_copy(update={"launch": config.launch.model_copy(update={"world": world})})


def latest_step(run: Storage) -> int | None:
    """Step of the newest committed checkpoint."""
    good, _ = committed(run.at("checkpoints"))
    return good[-1].step if good else None


class Events:
    """The launcher's events, told to whoever shows or records them. Only rank 0's metrics are the run's."""

    def __init__(self, tracker: Tracker, progress: Progress) -> None:
        self.tracker, self.progress = tracker, progress
        self.failed_attempts: list[dict[str, Any]] = []
        self.texts: dict[tuple[str, str], str] = {}  # artifacts by folder and name
        self.history: dict[
            str, dict[int, float]
        ] = {}  # losses and validation metrics; a replayed step replaces its own

    def on_event(self, event: dict[str, Any]) -> None:
        self.progress.on_event(event)
        kind = event["kind"]
        if kind == "metrics" and event["rank"] == 0:
            self.tracker.metrics(TRAIN, event["step"], event["values"])
            for name, value in event["values"].items():
                if name == "train/loss" or name.startswith("valid/"):
                    self.history.setdefault(name, {})[event["step"]] = value
        elif kind == "event" and event["rank"] == 0:
            self._about(event["event"], event["data"])
        elif kind == "started":
            self.tracker.metrics(
                TRAIN, event["attempt"], {"launch/start_s": event["start_s"], "launch/world": event["world"]}
            )
        elif kind == "stacks":
            self.texts["stacks", self._file_of(event)] = event["text"]
        elif kind == "late_log":
            self.texts["late_output", self._file_of(event)] = "\n".join(event["lines"]) + "\n"
        elif kind == "straggler":
            self.tracker.tags(TRAIN, {"sparkring.straggler": f"rank {event['rank']} on {event['host']}"})
        elif kind == "attempt_ended":
            self._attempt_ended(event)
        elif kind == "recovered":
            self.failed_attempts[-1]["recover_s"] = event["recover_s"]
            self.tracker.metrics(TRAIN, event["attempt"], {"launch/recover_s": event["recover_s"]})

    @staticmethod
    def _file_of(event: dict[str, Any]) -> str:
        return f"attempt-{event['attempt']}-rank-{event['rank']}.txt"

    def _attempt_ended(self, event: dict[str, Any]) -> None:
        names = ("attempt", "world", "cause", "words", "step", "steps_lost", "decision", "next_world")
        self.failed_attempts.append(redacted({name: event[name] for name in names}))
        number = event["attempt"]
        self.tracker.metrics(TRAIN, number, {"launch/steps_lost": float(event["steps_lost"])})
        self.tracker.tags(
            TRAIN,
            {
                f"sparkring.attempt.{number}": f"{event['cause']} on {event['world']} ranks: {event['words']}; "
                f"{event['decision']}: {event['why']}"
            },
        )

    def _about(self, what: str, data: dict[str, Any]) -> None:
        if what == "ring":
            self.tracker.tags(TRAIN, {"sparkring.engine": data["engine"], "sparkring.world": data["world"]})
        elif what == "checkpoint":
            pointer = {key: data[key] for key in ("step", "uri", "bytes", "world", "metric")}
            self.tracker.checkpoint(TRAIN, **pointer)
        elif what == "resumed":
            self.tracker.tags(TRAIN, {"sparkring.resumed_from_step": data["step"]})
