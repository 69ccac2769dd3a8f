"""The driver's side of tracking: what a job records while it runs.

Every call returns at once and writes to the journal; a thread sends the journal to MLflow. None raises because of the
store, nor because of the journal's disk: only the constructor, which makes the journal before anything else is done.

A job is one parent run with a child for each of its parts (`etl`, `train`, `evaluate`), found by their keys.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from sparkring.conf.blocks.tracking import TrackingConfig
from sparkring.conf.schedule.dates import DataInterval
from sparkring.conf.secrets import redact, redacted
from sparkring.pipelines.run.process_id import this_process
from sparkring.pipelines.tracking import ops
from sparkring.pipelines.tracking.checkout import git_commit, git_remote, source_tags
from sparkring.pipelines.tracking.client import client_limits
from sparkring.pipelines.tracking.errors import StoreUnfit, StoreUnreachable
from sparkring.pipelines.tracking.journal import Journal
from sparkring.pipelines.tracking.openlineage.driver import EVENTS_WAIT_S, PARENT, check_installed, failure, parent_of
from sparkring.pipelines.tracking.params import flat_params
from sparkring.pipelines.tracking.points import shown_name, split_finite
from sparkring.pipelines.tracking.run_owner import HEARTBEAT_S, end_status, process_tags
from sparkring.pipelines.tracking.system_metrics import SystemSampler
from sparkring.pipelines.tracking.tags import COMMIT, JOB
from sparkring.training.worker.result import Promotion

if TYPE_CHECKING:
    from sparkring.pipelines.tracking.openlineage.send import EventSender
    from sparkring.pipelines.tracking.store.sink import MlflowSink

__all__ = ["JOB", "Tracker", "git_commit"]
log = logging.getLogger(__name__)
LONGEST_PAUSE_S = 60.0


class Tracker:
    """Records one job. A context manager: the way the block is left decides the run's status."""

    def __init__(
        self,
        config: TrackingConfig,
        job: str,
        name: str,
        tags: Mapping[str, str] | None = None,
        resume: bool = False,
        label: str = "",
    ):
        """Make the journal, and start the thread that sends it.

        Args:
            config: configuration with its names filled in (TrackingConfig.named).
            job: identifies the work, say the digest of its configuration.
            name: name of the parent run, without the label.
            tags: tags of the parent run.
            resume: continue an unfinished run of the same `job`, and its child runs.
            label: ends the name of every run: a date, or the time of the start (`run_label`).
        """
        self.config, self.job, self.label, self.resume = config, job, label, resume
        self._source = source_tags(sys.argv, (tags or {}).get(COMMIT, ""))
        self._open: list[str] = []
        self._ended: set[str] = set()
        self._nonfinite: dict[tuple[str, str], int] = {}
        self._stop, self._wake = threading.Event(), threading.Event()
        self._down_since: float | None = None
        self._unfit = ""  # what must be done before the store takes the job
        self.waiting = 0  # operations that the store had not taken when this was closed
        self._limits = ExitStack()
        self._sink: MlflowSink | None = None
        self._journal: Journal | None = None
        self._thread = threading.Thread(target=self._run, name="tracking", daemon=True)
        self._events: EventSender | None = None
        if not config.enabled:
            return
        check_installed(config)
        self._limits.enter_context(client_limits(config))
        self._journal = Journal.create(Path(config.root), name)
        destination = ops.Destination(experiment=str(config.experiment), uri=config.uri)
        if config.openlineage is not None:
            destination["openlineage"] = config.openlineage
        self._journal.state["settings"] = destination
        self._journal.done(0)
        self._start(JOB, f"{name} {label}".rstrip(), None, dict(tags or {}))
        self._thread.start()

    def __enter__(self) -> Tracker:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close(error)

    # -- runs

    @contextmanager
    def part(self, key: str, tags: Mapping[str, str] | None = None) -> Iterator[None]:
        """Start a child run that ends as the block does."""
        self._start(key, f"{key} {self.label}".rstrip(), JOB, dict(tags or {}))
        try:
            yield
        except BaseException as error:
            self._end(key, end_status(error), failure(error))
            raise
        self._end(key, "FINISHED")

    def _start(self, key: str, name: str, parent: str | None, tags: dict[str, str]) -> None:
        now = time.time()
        tags = {
            **self._source,
            **self.config.tags,
            **tags,
            **process_tags(this_process(), now),
            "sparkring.job": self.job,
        }
        self._open.append(key)
        self._put(ops.StartRun, key, name=name, parent=parent, tags=texts_of(tags), resume=self.resume)

    def _end(self, key: str, status: str, error: str = "") -> None:
        if key in self._open:
            self._open.remove(key)
            self._ended.add(key)
            counts = {f"sparkring.not_finite.{n}": str(c) for (k, n), c in self._nonfinite.items() if k == key}
            if counts:
                self._put(ops.Tags, key, tags=counts)
            self._put(ops.End, key, status=status, error=error)

    # -- what is recorded

    def params(self, key: str, values: Mapping[str, Any]) -> None:
        """Record nested values as `a.b.c`. On resume the first values stay; names of changed ones become a tag.

        Of a recipe, those of `run_params`: every list of runs carries all their parameters.
        """
        self._put(ops.Params, key, params=flat_params(values))

    def metrics(self, key: str, step: int, values: Mapping[str, float], time_s: float | None = None) -> None:
        """Record values of a step, units in the names (`step_s`), which MLflow shows as `shown_name` says.

        NaN and infinities are only counted, in a tag.
        """
        finite, others = split_finite({shown_name(name): value for name, value in values.items()})
        for name in others:
            self._nonfinite[(key, name)] = self._nonfinite.get((key, name), 0) + 1
        now_ms = int((time_s or time.time()) * 1000)
        if finite:
            self._put(ops.Metrics, key, points=[[name, value, step, now_ms] for name, value in finite.items()])

    def history(self, recipe: str, number: int, begins: float, values: Mapping[str, float]) -> None:
        """Record a date's values in the recipe's history run, which is made once. NaN and infinities are left out.

        Args:
            recipe: name of the recipe.
            number: number of the date's interval since 1970: the step of the points.
            begins: start of the interval, seconds since 1970: the time of the points.
            values: values by metric.
        """
        self._put(ops.History, JOB, recipe=recipe, number=number, begins=begins, values=split_finite(values)[0])

    def history_figure(self, recipe: str, step: int, name: str, png: bytes) -> None:
        """Record a figure of a date in the recipe's history run: one `name` is an image with a slider over the dates.

        Args:
            recipe: name of the recipe.
            step: dates since the schedule's start.
            name: name of the figure, such as `test/calibration`: MLflow shows it in the section `test`.
            png: content of the file.
        """
        file = f"{name.rpartition('/')[2]}.png"
        self._put_file(ops.HistoryFigure, JOB, png, file, recipe=recipe, step=step, name=name)

    def tags(self, key: str, tags: Mapping[str, Any]) -> None:
        self._put(ops.Tags, key, tags=texts_of(tags))

    def dataset(self, key: str, info: ops.DatasetInfo, context: str) -> None:
        """Record a dataset the run has used; `context` such as "training"."""
        self._put(ops.DatasetUse, key, **vars(info), context=context)

    def artifact(self, key: str, source: Path | bytes | str, name: str, folder: str = "") -> None:
        """Store a file or folder (Path), or the content itself, as `folder/name`. It is copied now.

        Only a str is redacted, as prose.
        """
        content = redact(source).encode(errors="replace") if isinstance(source, str) else source
        self._put_file(ops.Artifact, key, content, name, folder=folder)

    def artifact_json(self, key: str, content: Any, name: str, path: str = "") -> None:
        """Store an artifact of JSON. `path`: keys of the recipe above `content`, for `redacted`."""
        self.artifact(key, json.dumps(redacted(content, path), indent=1).encode(), name)

    def checkpoint(self, key: str, step: int, uri: str, bytes: int, world: int, metric: float | None = None) -> None:
        """Record a committed checkpoint, as a pointer to its shards.

        Args:
            key: key of the run.
            step: step at which it was written.
            uri: URI of its folder.
            bytes: bytes of all its files.
            world: ranks that wrote it.
            metric: value of the best metric, if written right after an evaluation.
        """
        self._put(ops.Checkpoint, key, step=step, uri=uri, bytes=bytes, world=world, metric=str(metric))

    def keep_checkpoints(self, key: str, uris: list[str]) -> None:
        """Delete the run's pointers to checkpoints other than these, whose shards retention has deleted."""
        self._put(ops.KeepCheckpoints, key, uris=uris)

    def model(self, key: str, folder: Path, info: ops.ModelInfo, code: Path | None = None) -> None:
        """Record the final model: `mlflow.pyfunc.load_model` gives its predictor.

        Args:
            key: key of the run.
            folder: input of `info.loader_module._load_pyfunc(folder)`. It is copied now, as `code` is.
            info: name, signature, requirements.
            code: modules that travel with it; None if it is loaded where they are installed.
        """
        texts = {"tags": texts_of(info.tags), "params": flat_params(info.params)}
        scores = split_finite(info.scores)[0]  # an AUC of test rows of one class is NaN
        copied = self._copied(key, code, "code") if code is not None else None
        self._put_file(ops.Model, key, folder, "data", **(vars(info) | texts | {"scores": scores, "code": copied}))

    def promote(
        self, key: str, registered_model: str, alias: str, promotion: Promotion, judged_against: str | None
    ) -> None:
        """Record the decision on the version that the run `key` has registered.

        Args:
            key: key of the run.
            registered_model: name of the model.
            alias: alias for the version if it is promoted.
            promotion: the decision and its reasons.
            judged_against: champion it was compared with, see `refuse_move`.
        """
        reason = "; ".join(promotion.reasons)[:4000]
        self._put(
            ops.Promote,
            key,
            registered_model=registered_model,
            alias=alias,
            decision=promotion.decision,
            reason=reason,
            judged_against=judged_against,
        )

    # -- what OpenLineage events name; nothing without `openlineage`

    def begin_lineage(self, name: str, interval: DataInterval | None, inputs: Iterable[ops.LineageDataset]) -> None:
        """Record the job for its first lineage event.

        Args:
            name: name of the job, for all its runs.
            interval: data interval of the date, if any.
            inputs: inputs known before anything is done.
        """
        if self.config.openlineage is not None:
            nominal = None if interval is None else [interval.start.isoformat(), interval.end.isoformat()]
            self._put(
                ops.LineageJob,
                JOB,
                namespace=self.config.openlineage,
                name=name,
                nominal=nominal,
                parent=parent_of(os.environ.get(PARENT, "")),
                code_url=git_remote(Path(__file__).parent),
                inputs=list(inputs),
            )

    def lineage(self, inputs: Iterable[ops.LineageDataset] = (), outputs: Iterable[ops.LineageDataset] = ()) -> None:
        """Record datasets that the job has read or made."""
        if self.config.openlineage is not None:
            self._put(ops.LineageData, JOB, inputs=list(inputs), outputs=list(outputs))

    # -- sending

    def _put(self, kind: type[ops.Op], key: str, **fields: Any) -> None:
        """Append an operation of this kind, redacted."""
        if self._journal is None:
            return
        if key not in self._open and kind not in (ops.End, ops.Tags):
            if key in self._ended:
                log.warning("%s for the run %r came after its end and is not recorded", kind.op, key)
                return
            raise KeyError(f"no open run {key!r}; open: {self._open}")
        # flat_params has redacted params already, when it still knew texts from numbers
        shown = {name: value if name == "params" else redacted(value) for name, value in fields.items()}
        self._journal.append(kind(key=key, at=time.time(), **shown))

    def _put_file(
        self,
        kind: type[ops.Artifact | ops.HistoryFigure | ops.Model],
        key: str,
        source: Path | bytes,
        file_name: str,
        **fields: Any,
    ) -> None:
        """Copy `source` into the journal as `file_name`, and append an operation with it.

        Args:
            kind: type of the operation.
            key: key of the run.
            source: path of a file or folder, or the content.
            file_name: name of the copy.
            fields: further fields of the operation.
        """
        if (copy := self._copied(key, source, file_name, kind.op)) is not None:
            self._put(kind, key, file=copy, **fields)

    def _copied(self, key: str, source: Path | bytes, file_name: str, what: str = "model") -> str | None:
        """Copy `source` into the journal; its path there. None where that is not possible, which is recorded."""
        if self._journal is None:
            return None
        try:
            return self._journal.add_file(source, file_name)
        except OSError as error:
            log.error("%s %r is not tracked, it could not be copied: %s", what, file_name, error)
            self._put(ops.Lost, key, what=f"{what} {file_name}", why=str(error))
            return None

    def _run(self) -> None:
        """Send the journal until `close`, with growing pauses while the store is away."""
        assert self._journal is not None, "the thread is started where tracking is enabled"
        sampler, sampled, beat, pause_s = SystemSampler(), time.monotonic(), time.monotonic(), 0.0
        from sparkring.pipelines.tracking.store.sink import MlflowSink  # takes seconds; in this thread no one waits

        sink = self._sink = MlflowSink(self.config, self._journal)
        send_left_behind(self.config)
        if self.config.openlineage is not None:
            from sparkring.pipelines.tracking.openlineage.send import EventSender

            self._events = EventSender(self.config, self._journal)  # after MLflow's part of what was left
        while True:
            stopping = self._stop.is_set()
            try:
                sink.drain()
                pause_s = 0.0
                self._up()
                if time.monotonic() - beat >= HEARTBEAT_S:
                    beat = time.monotonic()
                    sink.heartbeat()
            except Exception as error:
                self._down(error, self._journal)
                pause_s = min(max(2 * pause_s, self.config.flush_every_s), LONGEST_PAUSE_S)
            if stopping:
                return
            sample_now = time.monotonic() - sampled >= self.config.system_metrics_every_s
            if self.config.system_metrics and sample_now and JOB in self._open:
                sampled = time.monotonic()
                self.metrics(JOB, int(time.time()), sampler.sample())
            self._wake.wait(pause_s or self.config.flush_every_s)
            self._wake.clear()

    def _down(self, error: Exception, journal: Journal) -> None:
        self._unfit = str(error) if isinstance(error, StoreUnfit) else ""
        if self._down_since is None:
            self._down_since = time.monotonic()
            store, away = redact(self.config.store_uri), isinstance(error, StoreUnreachable)
            how = "cannot be reached" if away else "does not take what is sent"
            how = "cannot take this job" if isinstance(error, StoreUnfit) else how
            log.warning("%s %s (%s); tracking goes to %s", store, how, error, journal.folder)

    def _up(self) -> None:
        self._unfit = ""
        if self._down_since is not None:
            log.info("the tracking store answers again after %.0f s", time.monotonic() - self._down_since)
            self._down_since = None

    def flush(self, timeout_s: float = 30.0) -> bool:
        """Wait until everything recorded so far is in the store; False if it is not by then."""
        journal = self._journal
        return journal is None or self._wait(lambda: not journal.pending(1), timeout_s)

    def settled(self, timeout_s: float = 600.0, away_s: float = 15.0) -> bool:
        """Wait until everything recorded so far is in the store, however large; False if the store is away.

        Args:
            timeout_s: seconds after which it returns False in any case.
            away_s: seconds to wait for a store that takes nothing.
        """
        began = time.monotonic()
        while not self.flush(min(away_s, timeout_s) / 5):
            waited_s = time.monotonic() - began
            if waited_s > timeout_s or (self._down_since is not None and waited_s > away_s):
                return False
        return True

    def run_id(self, key: str = JOB, timeout_s: float = 60.0) -> str | None:
        """Return the run's id, None while the store cannot be reached."""
        self._wait(lambda: self._sink is not None and key in self._sink.runs, timeout_s)
        return self._sink.runs.get(key) if self._sink else None

    def version(self, key: str, timeout_s: float = 10.0) -> str | None:
        """Return the model version that the run `key` has registered; None until the store answers."""
        if self._journal is None:
            return None
        state = self._journal.state
        self._wait(lambda: key in state.get("versions", {}) or self._down_since is not None, timeout_s)
        return state.get("versions", {}).get(key)

    def _wait(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        """Wake the sender until the condition holds; False after `timeout_s`, or if the sender has ended."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > deadline or not self._thread.is_alive():
                return False
            self._wake.set()
            time.sleep(0.02)
        return True

    def url(self, key: str = JOB) -> str | None:
        """Return the run's URL for a browser; None for the embedded store, and while a server is away."""
        return self._sink.url(key) if self._sink else None

    def close(self, error: BaseException | None = None, timeout_s: float = 60.0) -> None:
        """End every open run with the status `error` means; wait for the store at most `timeout_s`."""
        if self._journal is None or self._stop.is_set():
            return
        deadline = time.monotonic() + timeout_s
        for key in reversed(list(self._open)):
            self._end(key, end_status(error), failure(error))
        self._stop.set()
        self._wake.set()
        self._thread.join(timeout_s)
        self.waiting = left = len(self._journal.pending(10_000))
        if left:
            until = f"; no job can send them until: {self._unfit}" if self._unfit else " for the next job or replay"
            log.warning("%d tracking operations wait in %s%s", left, self._journal.folder, until)
        wait_s = min(EVENTS_WAIT_S, max(deadline - time.monotonic(), 0.0))
        sent = self.config.openlineage is None or (self._events is not None and self._events.close(wait_s))
        if not sent:
            log.warning("OpenLineage events wait in %s for the next job or replay", self._journal.folder)
        hangs = self._thread.is_alive() or (self._events is not None and self._events.is_alive)
        if not hangs:  # else a sender still reads it; the lock goes with the process
            self._journal.close(delete=sent and not left)
        if not self._thread.is_alive():
            self._limits.close()


def send_left_behind(config: TrackingConfig) -> None:
    """Send what earlier jobs left on disk, where their stores answer. Never raises: the next job may send it."""
    if not config.enabled or not any((Path(config.root) / "buffer").glob("*/")):
        return
    from sparkring.pipelines.tracking.store.sink import replay  # seconds of imports

    try:
        with client_limits(config):
            journals, operations = replay(config)
        if journals:
            log.info("sent %d tracking operations that %d earlier jobs had left on disk", operations, journals)
    except Exception as error:
        log.warning("what earlier jobs had left on disk waits for the next one: %s", error)


def run_label(ds: str | None) -> str:
    """Return the label of a run in a list: the job's date, else the minute it starts, UTC."""
    return ds or time.strftime("%Y-%m-%d %H:%M", time.gmtime())


def texts_of(values: Mapping[str, Any]) -> dict[str, str]:
    """Convert tags to the form that MLflow stores."""
    return {str(name): str(value)[:4000] for name, value in values.items()}
