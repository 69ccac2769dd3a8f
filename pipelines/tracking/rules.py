"""Decisions of tracking, without MLflow: what is a parameter, which points are new, whose run is dead."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from sparkring.conf.blocks.tracking import TrackingConfig
from sparkring.conf.secrets import redacted
from sparkring.pipelines.run.process_id import ProcessId, is_running

PARAM_CHARACTERS = 6000  # MLflow's limits
KEY_CHARACTERS = 250
HEARTBEAT_S = 30.0
STALE_S = 600.0
JOB = "job"  # key of the parent run
PLUMBING = {"perf", "data", "launch", "time", "cost"}  # first words of metrics


class StoreUnreachable(RuntimeError):
    """The tracking store does not answer."""


class StoreUnfit(StoreUnreachable):
    """The store answers, but cannot take the job until somebody does what the message says. Nothing is dropped."""


class TryAgain(RuntimeError):
    """The store answers, but an operation failed that may yet succeed."""


@dataclass(frozen=True)
class AliasedModel:
    """A registered version that has an alias. `job`: `<recipe>/<run folder>` that made it; empty where not known."""

    model: str
    alias: str
    job: str
    fingerprint: str  # of the dataset


@dataclass(frozen=True)
class CheckpointPointer:
    """A LoggedModel that points at a checkpoint's folder."""

    model_id: str
    name: str
    uri: str


def flat_values(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten a nested configuration to `a.b.c` -> value; lists stay whole."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        name = f"{prefix}{key}"
        flat |= flat_values(value, f"{name}.") if isinstance(value, Mapping) and value else {name: value}
    return flat


def flat_params(values: Mapping[str, Any]) -> dict[str, str]:
    """Flatten a nested configuration to `a.b.c` -> text: redacted, lists as JSON, cut to MLflow's limits.

    Redacted here, where a number behind `n_token` is still a number and not a text.
    """
    flat: dict[str, str] = {}
    for name, value in flat_values(values).items():
        shown = redacted(value, name)
        text = shown if isinstance(shown, str) else json.dumps(shown, default=str)
        flat[name[:KEY_CHARACTERS]] = text if len(text) <= PARAM_CHARACTERS else text[: PARAM_CHARACTERS - 3] + "..."
    return flat


def shown_name(metric: str) -> str:
    """The metric's name in MLflow: what is not about the model is a system metric, which has a tab of its own there."""
    return f"system/{metric}" if metric.partition("/")[0] in PLUMBING else metric


def split_finite(values: Mapping[str, float]) -> tuple[dict[str, float], list[str]]:
    """The values MLflow can hold, and the names of those that are NaN or infinite (it stores inf as 1.8e308)."""
    finite = {name: float(value) for name, value in values.items() if math.isfinite(value)}
    return finite, sorted(values.keys() - finite.keys())


def new_points(
    points: Iterable[tuple[str, float, int, int]], last: dict[str, int]
) -> list[tuple[str, float, int, int]]:
    """The points (name, value, step, time in ms) beyond the last step of their name; `last` is updated.

    After a resume the steps since the checkpoint come a second time: they are the same numbers, logged already.
    """
    fresh = []
    for point in points:
        name, _, step, _ = point
        if step > last.get(name, -1):
            last[name] = step
            fresh.append(point)
    return fresh


def open_runs(runs: Mapping[str, str], ended: Iterable[str]) -> list[str]:
    """Ids of the runs (key -> id) whose end has not been recorded."""
    over = set(ended)
    return [run for key, run in runs.items() if key not in over]


def end_status(error: BaseException | None) -> str:
    """MLflow's status for how a job ended: Ctrl-C and SIGTERM (as `SystemExit(143)`) are KILLED, not FAILED."""
    if error is None or (isinstance(error, SystemExit) and error.code in (None, 0)):
        return "FINISHED"
    if isinstance(error, KeyboardInterrupt | GeneratorExit):
        return "KILLED"
    if isinstance(error, SystemExit) and error.code in (128 + 2, 128 + 15):
        return "KILLED"
    return "FAILED"


PROCESS, HEARTBEAT = "sparkring.process", "sparkring.heartbeat"  # tags of a run
OLDER = ("host", "pid", "start_ticks")


def process_tags(process: ProcessId, now: float) -> dict[str, str]:
    """Tags of a run that name the process it belongs to."""
    return {
        PROCESS: f"{process.host} {process.pid} {process.start_ticks}",
        HEARTBEAT: f"{now:.0f}",
    }


def is_abandoned(tags: Mapping[str, str], now: float, here: ProcessId) -> bool:
    """Whether a RUNNING run's process is gone.

    Where `here` can see the process, by looking; elsewhere by a heartbeat older than STALE_S. A run whose tags are not
    ours, or were changed, is left alone.
    """
    try:
        # runs of an older sparkring have three tags
        host, *owner = tags[PROCESS].split() if PROCESS in tags else [tags[f"sparkring.{name}"] for name in OLDER]
        pid, ticks, heartbeat = (int(number) for number in (*owner, tags[HEARTBEAT]))
    except (KeyError, ValueError):
        return False
    running = is_running(ProcessId(host, pid, ticks), here)
    return now - heartbeat > STALE_S if running is None else not running


@dataclass(frozen=True)
class Version:
    """A version of a registered model."""

    name: str
    version: str
    at_ms: int  # when its job registered it, however late that was sent
    date: str | None = None  # start of its job's data interval, as ISO text
    source: str = ""  # URI of its files
    tags: Mapping[str, str] = field(default_factory=dict, compare=False)


DECISION, REASON = "sparkring.decision", "sparkring.reason"  # tags of a version and of a job's run
NO_CHAMPION = "none"  # what a model was judged against where no version had the alias
DATE = "sparkring.date"  # tag of a version and of a job's run
ERROR = "sparkring.error"  # tag of a run that failed: the first line of why
COMMIT = "sparkring.commit"  # tag of a job's run
FINGERPRINT = "sparkring.fingerprint"  # tag of a job's run and of a version: of the dataset
RECIPE = "sparkring.recipe"  # tag of a job's run
HISTORY = "sparkring.history"  # tag of the run with one point per date: the recipe
WEIGHTS = "sparkring.weights_sha256"  # tag of a version


@dataclass(frozen=True)
class Refusal:
    """Why an alias does not move. older: its version is of a later date, or of a later job."""

    why: str
    older: bool


def refuse_move(alias: str, current: Version | None, ours: Version, judged_against: str | None) -> Refusal | None:
    """Decide whether an alias may move from `current` to `ours`; None: it may.

    It moves forward only: by the date of the data where both have one, else by the time of registration. And only from
    the version that ours was judged against (NO_CHAMPION: from none), where there was one; None: it was not judged.
    """
    if current is not None and current.version != ours.version:
        if current.date is not None and ours.date is not None and current.date != ours.date:
            if current.date > ours.date:
                return Refusal(f"{alias} stays on version {current.version}, of the later date {current.date}", True)
        elif current.at_ms > ours.at_ms:
            younger_s = (current.at_ms - ours.at_ms) / 1000
            return Refusal(f"{alias} stays on version {current.version}, {younger_s:.0f} s younger", True)
    has = NO_CHAMPION if current is None else current.version
    if judged_against is not None and has not in (judged_against, ours.version):
        return Refusal(f"{alias} is on version {has} now, and the model was judged against {judged_against}", False)
    return None


def without_password(uri: str) -> str:
    """The URI without user and password."""
    parts = urlsplit(uri)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2])).rstrip("/") if parts.netloc else uri


@contextmanager
def client_limits(config: TrackingConfig) -> Iterator[None]:
    """Limit MLflow's requests inside the block, and leave out its progress bars; values the user has set stay.

    Its client reads them from the environment only; the defaults (120 s, 7 retries) would stall a job.
    """
    limits = {
        "MLFLOW_HTTP_REQUEST_TIMEOUT": str(config.request_timeout_s),
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": str(config.request_retries),
        "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
        "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    }
    before = {name: os.environ.get(name) for name in limits}
    os.environ.update({name: value for name, value in limits.items() if before[name] is None})
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
