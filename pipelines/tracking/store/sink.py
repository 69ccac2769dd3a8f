"""The sending of journals to MLflow, from the driver only.

The driver's `Tracker` (tracker.py) appends to a journal on disk and returns at once, so tracking can neither slow nor
stop training. `MlflowSink`, in one thread, applies the journal to the store and keeps trying while a server is away.
What it could not send is sent by the next job on this machine, or by `replay`.
"""

from __future__ import annotations

import inspect
import json
import logging
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlflow import MlflowClient
from mlflow.entities import (
    DatasetInput,
    Experiment,
    InputTag,
    LifecycleStage,
    Metric,
    Param,
    RunTag,
)
from mlflow.exceptions import MlflowException

from sparkring.conf.blocks.tracking import TrackingConfig
from sparkring.conf.errors import error_line
from sparkring.conf.secrets import redact
from sparkring.conf.storage import exclusive
from sparkring.conf.stored import StoredError
from sparkring.pipelines.run.process_id import this_process
from sparkring.pipelines.run.scratch import scratch_folder
from sparkring.pipelines.tracking import ops
from sparkring.pipelines.tracking.client import without_password
from sparkring.pipelines.tracking.describe import (
    experiment_note,
    with_headline,
)
from sparkring.pipelines.tracking.errors import StoreUnfit, StoreUnreachable, TryAgain
from sparkring.pipelines.tracking.journal import Journal, abandoned_journals
from sparkring.pipelines.tracking.points import new_points
from sparkring.pipelines.tracking.run_owner import is_abandoned, open_runs
from sparkring.pipelines.tracking.store.artifact_servers import check_artifact_server
from sparkring.pipelines.tracking.store.embedded import open_client
from sparkring.pipelines.tracking.store.history_run import history_run, log_figure, log_values
from sparkring.pipelines.tracking.store.mlflow_dataset import SparkringDataset
from sparkring.pipelines.tracking.store.models import (
    IDENTITY,
    MODEL_ID,
    Models,
    StoredModel,
    delete_dead_pointers,
    models_of,
)
from sparkring.pipelines.tracking.store.registry import AT_MS, MODEL_VERSION, Registry
from sparkring.pipelines.tracking.store.shown import Shown
from sparkring.pipelines.tracking.tags import HEARTBEAT, JOB, RECIPE
from sparkring.pipelines.tracking.views import NOTE

if TYPE_CHECKING:
    from mlflow.models import Model as MlflowModel

log = logging.getLogger(__name__)
# Error codes of a server that understood and refused; after any other the operation is tried again.
REFUSALS = {
    "INVALID_PARAMETER_VALUE",
    "RESOURCE_ALREADY_EXISTS",
    "RESOURCE_DOES_NOT_EXIST",
    "INVALID_STATE",
    "BAD_REQUEST",
    "RESOURCE_CONFLICT",
    "FEATURE_DISABLED",
    "NOT_IMPLEMENTED",
}
MOST_FAILURES = 8  # of one operation while the store answers: with the pauses between them, three minutes
OURS = (LookupError, TypeError, AttributeError, AssertionError)  # faults in this program: the next try fails as well
NOT_RECORDED = "sparkring.not_recorded"
EXPERIMENT_TAGS = {  # of a new one; the first tells the UI: training runs
    "mlflow.experimentKind": "custom_model_development",
    NOTE: experiment_note(),
}


class MlflowSink:
    """Applies one journal to a store. Used from one thread. `config`: with its names filled in."""

    def __init__(self, config: TrackingConfig, journal: Journal):
        assert config.experiment is not None, "TrackingConfig.named gives it a name"
        self.config, self.journal, self._experiment_name = config, journal, config.experiment
        self._client: MlflowClient | None = None
        self._opened_models: Models | None = None
        self._experiment = ""
        self._last: dict[str, dict[str, int]] = {}

    @property
    def runs(self) -> dict[str, str]:
        """Key -> run id; saved with the journal's position."""
        runs: dict[str, str] = self.journal.state["runs"]
        return runs

    def drain(self) -> int:
        """Apply the pending operations; their number.

        Raises StoreUnreachable or TryAgain, with the rest still in the journal; StoredError where it is damaged.
        """
        count = 0
        while pending := self.journal.pending():
            for batch, position in _batches(pending):
                try:
                    self._connect()
                except StoreUnfit:
                    raise
                except Exception as error:
                    raise StoreUnreachable(error_line(error)) from error
                try:
                    self._apply(batch)
                except StoredError:
                    raise
                except OURS as error:  # must not hold up everything behind it
                    log.exception("tracking could not record %s", batch[0].op)
                    self._not_recorded(batch[0], error)
                except Exception as error:  # of the store's client, or of whatever it keeps artifacts with
                    self._check_store(error)
                    self._check_not_deleted(batch[0].key, error)
                    if self._may_pass(error, batch[0].op):
                        raise TryAgain(error_line(error)) from error
                    log.warning("MLflow refused %s: %s", batch[0].op, error_line(error))
                    self._not_recorded(batch[0], error)
                else:
                    self.journal.state["given_up"] = [k for k in self._given_up if k != batch[0].op]
                self.journal.state["failures"] = 0
                self.journal.done(position)
                count += len(batch)
        return count

    @property
    def _given_up(self) -> list[str]:
        """Kinds of operation of which the last one was given up: the next is not waited for as long."""
        kinds: list[str] = self.journal.state.get("given_up", [])
        return kinds

    def _check_store(self, error: Exception) -> None:
        """Raise StoreUnreachable where the store, after this error, does not answer even the simplest request."""
        try:
            self._connect().get_experiment(self._experiment)
        except Exception:
            raise StoreUnreachable(error_line(error)) from error

    def _check_not_deleted(self, key: str, error: Exception) -> None:
        """Raise StoreUnfit where the operation failed because its experiment or run was deleted meanwhile."""
        client, run = self._connect(), self.runs.get(key)
        check_experiment(client.get_experiment(self._experiment))
        if run is None:
            return
        try:
            stage = client.get_run(run).info.lifecycle_stage
        except MlflowException:
            return  # gone for good: nothing can be kept for it
        if stage == LifecycleStage.DELETED:
            raise StoreUnfit(
                f"the run {run} is deleted in MLflow: `mlflow runs restore --run-id {run}`, or delete "
                f"{self.journal.folder}"
            ) from error

    def _may_pass(self, error: Exception, kind: str) -> bool:
        """Return whether to try again: not after a refusal, nor after MOST_FAILURES of one kind alone."""
        if isinstance(error, MlflowException) and error.error_code in REFUSALS:
            return False
        failures = self.journal.state["failures"] = self.journal.state.get("failures", 0) + 1
        if failures < MOST_FAILURES and kind not in self._given_up:
            self.journal.done(self.journal.state["done"])  # a replay continues counting
            return True
        self.journal.state["given_up"] = [*self._given_up, kind]
        return False

    def _not_recorded(self, op: ops.Op, error: Exception) -> None:
        """Record on the run itself what is missing from it: nobody reads the log of a successful job."""
        lost: list[str] = self.journal.state.setdefault("not_recorded", {}).setdefault(op.key, [])
        lost.append(f"{op.label}: {error_line(error)}")
        try:
            self._connect().set_tag(self.runs[op.key], NOT_RECORDED, "; ".join(lost)[:4000])
        except Exception as second:
            log.warning("the run could not be tagged with it either: %s", error_line(second))

    def _connect(self) -> MlflowClient:
        if self._client is None:
            embedded = self.config.uri is None
            # Two processes that open a fresh sqlite store at a time both fail.
            lock = exclusive(Path(self.config.root) / ".create.lock") if embedded else nullcontext()
            client = open_client(self.config)
            form = models_of(self.config.store_uri)
            with lock:
                self._experiment = self._experiment_id(client)
            self._client, self._opened_models = client, form(client, self._experiment)
        return self._client

    @property
    def _models(self) -> Models:
        self._connect()
        assert self._opened_models is not None, "opened with the client"
        return self._opened_models

    @property
    def _shown(self) -> Shown:
        return Shown(self._connect(), self._experiment, self.config.registered_model)

    def _experiment_id(self, client: MlflowClient) -> str:
        name = self._experiment_name
        found = client.get_experiment_by_name(name)
        if found is not None:
            check_experiment(found)
            try:
                check_artifact_server(found.artifact_location, self.config.store_uri)
            except StoredError as error:
                raise StoreUnfit(f"the experiment {name!r}: {error}") from error
            return str(found.experiment_id)
        folder = Path(self.config.root).resolve() / "artifacts" / name
        return str(client.create_experiment(name, None if self.config.uri else folder.as_uri(), EXPERIMENT_TAGS))

    def _apply(self, batch: Sequence[ops.Op]) -> None:
        first = batch[0]
        if first.key not in self.runs and not isinstance(first, ops.StartRun):
            raise MlflowException.invalid_parameter_value(f"the run {first.key!r} was not started")
        if isinstance(first, ops.Metrics):
            self._metrics(first.key, [point for op in batch if isinstance(op, ops.Metrics) for point in op.points])
        else:
            getattr(self, f"_{first.op}")(first)

    # -- operations, named by their `op`

    def _start(self, op: ops.StartRun) -> None:
        client, key = self._connect(), op.key
        parent = self.runs.get(op.parent) if op.parent else None
        if parent is None:
            self._close_abandoned()
            if recipe := op.tags.get(RECIPE):
                self._shown.link(recipe)
        tags = op.tags | {"sparkring.key": key}
        found = self._resumable(op, parent) if op.resume else None
        if found:
            client.update_run(found, status="RUNNING")
            self._shown.forget_failure(found)
            for name, value in tags.items():
                client.set_tag(found, name, value)
        else:
            if parent:
                tags["mlflow.parentRunId"] = parent
            run = client.create_run(self._experiment, int(op.at * 1000), tags, op.name)
            found = run.info.run_id
            self._last[found] = {}
        self.runs[key] = found
        self.journal.state["ended"] = [ended for ended in self.journal.state.get("ended", []) if ended != key]

    def _resumable(self, op: ops.StartRun, parent: str | None) -> str | None:
        """Return the newest run of the same job and key: a part of this job, or an unfinished run.

        A part may have finished before its driver died: it is repeated from what it stored.
        """
        wanted = f"tags.`sparkring.job` = '{op.tags.get('sparkring.job', '')}' and tags.`sparkring.key` = '{op.key}'"
        if parent:
            wanted += f" and tags.`mlflow.parentRunId` = '{parent}'"
        runs = self._connect().search_runs([self._experiment], wanted, order_by=["attributes.start_time DESC"])
        newest = runs[0] if runs else None
        if newest is None or (parent is None and newest.info.status == "FINISHED"):
            return None
        return newest.info.run_id

    def _close_abandoned(self) -> None:
        client, here = self._connect(), this_process()
        for run in client.search_runs([self._experiment], "attributes.status = 'RUNNING'"):
            if run.info.run_id not in self.runs.values() and is_abandoned(run.data.tags, time.time(), here):
                log.warning("run %s was left RUNNING by a process that is gone; closing it", run.info.run_id)
                client.set_tag(run.info.run_id, "sparkring.closed_by", f"{here.host} {here.pid}: its process was gone")
                client.set_terminated(run.info.run_id, "KILLED")

    def _params(self, op: ops.Params) -> None:
        run = self.runs[op.key]
        stored = self._connect().get_run(run)
        known = stored.data.params
        fresh = [Param(k, v) for k, v in op.params.items() if k not in known]
        for start in range(0, len(fresh), 100):
            self._connect().log_batch(run, params=fresh[start : start + 100])
        if changed := sorted(k for k, v in op.params.items() if k in known and known[k] != v):
            self._connect().set_tag(run, "sparkring.params_changed_on_resume", ", ".join(changed)[:4000])
        if op.key == JOB and RECIPE in stored.data.tags:
            self._shown.name_by_changes(stored, {**op.params, **known})

    def _metrics(self, key: str, points: list[tuple[str, float, int, int]]) -> None:
        run = self.runs[key]
        if run not in self._last:
            self._last[run] = self._logged_steps(run)
        fresh = new_points(points, self._last[run])
        try:
            for start in range(0, len(fresh), 1000):
                self._connect().log_batch(
                    run, metrics=[Metric(n, v, t, s) for n, v, s, t in fresh[start : start + 1000]]
                )
        except Exception:
            del self._last[run]  # some may have arrived: ask the store before trying again
            raise

    def _logged_steps(self, run: str) -> dict[str, int]:
        client = self._connect()
        names = client.get_run(run).data.metrics
        return {name: max(point.step for point in client.get_metric_history(run, name)) for name in names}

    def _tags(self, op: ops.Tags) -> None:
        tags = [RunTag(name, value) for name, value in op.tags.items()]
        for start in range(0, len(tags), 100):
            self._connect().log_batch(self.runs[op.key], tags=tags[start : start + 100])

    def _history(self, op: ops.History) -> None:
        client = self._connect()
        log_values(client, history_run(client, self._experiment, op.recipe), op)
        self._shown.dates(op)

    def _history_figure(self, op: ops.HistoryFigure) -> None:
        client = self._connect()
        log_figure(client, history_run(client, self._experiment, op.recipe), op, self.journal.file(op.file))

    def _dataset(self, op: ops.DatasetUse) -> None:
        entry = DatasetInput(SparkringDataset(op)._to_mlflow_entity(), [InputTag("mlflow.data.context", op.context)])
        self._connect().log_inputs(self.runs[op.key], [entry])

    def _artifact(self, op: ops.Artifact) -> None:
        path, folder = self.journal.file(op.file), op.folder
        if path.is_dir():
            self._connect().log_artifacts(self.runs[op.key], str(path), f"{folder}/{path.name}".lstrip("/"))
        else:
            self._connect().log_artifact(self.runs[op.key], str(path), folder or None)

    def _checkpoint(self, op: ops.Checkpoint) -> None:
        self._models.checkpoint(self.runs[op.key], op)

    def _keep_checkpoints(self, op: ops.KeepCheckpoints) -> None:
        delete_dead_pointers(self._models, self.runs[op.key], op.uris)

    def _model(self, op: ops.Model) -> None:
        client, models, run = self._connect(), self._models, self.runs[op.key]
        model = models.model(run, op)
        if op.scores and not model.scored:
            models.score(run, model, op)
            self._last.pop(run, None)  # the store knows more steps now
        if not model.ready:
            with scratch_folder("store") as scratch:
                target = str(scratch / "model")
                code = None if op.code is None else self.journal.file(op.code)
                _save_pyfunc(target, self.journal.file(op.file), code, op, models.described(run, model))
                models.upload(run, model, target)
        models.publish(run, model, op.step)
        if model.id is not None:
            client.set_tag(run, MODEL_ID, model.id)
        self._shown.runs(client.get_run(run), op)
        if name := op.registered_model:
            self._register(name, model, op)

    def _register(self, name: str, model: StoredModel, op: ops.Model) -> None:
        """Register one version for the model, and move the alias to it.

        Unless the alias is on the model of a later job: a journal may be sent long after its job.
        """
        client, run, at_ms = self._connect(), self.runs[op.key], int(op.at * 1000)
        try:
            client.create_registered_model(name, description=op.about or None)
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
            if op.about and not client.get_registered_model(name).description:
                client.update_registered_model(name, op.about)
        tags = {IDENTITY: model.identity, AT_MS: str(at_ms)}
        for version in client.search_model_versions(f"run_id = '{run}'"):
            if version.name == name and version.tags.get(IDENTITY) == tags[IDENTITY]:
                break
        else:  # not `models:/<id>`: the embedded registry would look that up in the process-wide store
            linked: dict[str, Any] = {} if model.id is None else {"model_id": model.id}
            version = client.create_model_version(name, model.location, run, op.tags | tags, **linked)
        number = str(version.version)
        client.set_tag(run, MODEL_VERSION, f"models:/{name}/{number}")
        if op.card:
            self._shown.card(run, op, version)
        self.journal.state.setdefault("versions", {})[op.key] = number
        if op.alias is not None and (ours := self._registry(name).version(number)):
            refusal = self._registry(name).move(op.alias, ours, None)
            if refusal is not None:
                log.warning("%s version %s: %s", name, number, refusal.why)
                client.set_tag(run, "sparkring.alias_not_moved", refusal.why)

    def _registry(self, name: str) -> Registry:
        return Registry(self.config.model_copy(update={"registered_model": name}), self._connect())

    def _promote(self, op: ops.Promote) -> None:
        tags = self._registry(op.registered_model).apply(op, self.runs[op.key])
        client, link = self._connect(), tags[NOTE].partition(")")[0]
        for run in {self.runs[op.key], self.runs.get(JOB, self.runs[op.key])}:
            note = with_headline(client.get_run(run).data.tags.get(NOTE, ""), tags[NOTE], link)
            for name, value in (tags | {NOTE: note}).items():
                client.set_tag(run, name, value[:4500])

    def _lineage_job(self, op: ops.LineageJob) -> None:
        """Ignore: this operation is for OpenLineage."""

    _lineage_data = _lineage_job

    def _lost(self, op: ops.Lost) -> None:
        """Record what the driver could not even copy."""
        self._not_recorded(op, OSError(op.why))

    def _end(self, op: ops.End) -> None:
        client, run = self._connect(), self.runs[op.key]
        client.set_terminated(run, op.status, int(op.at * 1000))
        if HEARTBEAT in client.get_run(run).data.tags:
            client.delete_tag(run, HEARTBEAT)  # it says nothing of a run that has ended
        if op.error:
            self._shown.failure(run, op.error)
        self.journal.state.setdefault("ended", []).append(op.key)

    def url(self, key: str) -> str | None:
        """Return the run's URL for a browser; None for the embedded store, which `mlflow ui` serves."""
        store = self.config.store_uri
        if key not in self.runs or not store.startswith("http"):
            return None
        return f"{without_password(store)}/#/experiments/{self._experiment}/runs/{self.runs[key]}"

    def heartbeat(self) -> None:
        """Write a sign of life into every open run: another host judges each run by its own."""
        if self._client is not None:
            for run in open_runs(self.runs, self.journal.state.get("ended", [])):
                self._client.set_tag(run, HEARTBEAT, f"{time.time():.0f}")

    def end_left(self, status: str) -> None:
        """Close the runs whose end is not in the journal: their driver died before writing it."""
        for run in open_runs(self.runs, self.journal.state.get("ended", [])):
            self._connect().set_terminated(run, status)
        self.journal.state["ended"] = [*self.runs]  # a journal that waits for its events must not close them again
        self.journal.done(self.journal.state["done"])


def _save_pyfunc(target: str, data: Path, code: Path | None, op: ops.Model, model: MlflowModel) -> None:
    """Save an MLflow model folder without pickles and inferred requirements.

    Args:
        target: folder to write.
        data: files from which `op.loader_module` makes a predictor.
        code: folder of the modules that travel with the model.
        op: signature, loader and requirements.
        model: run and LoggedModel of the model.
    """
    import mlflow.pyfunc  # two seconds, and only a job that ends well needs it
    from mlflow.models import ModelSignature  # with pyfunc
    from mlflow.types import Schema  # with pyfunc

    outputs = Schema.from_json(json.dumps(op.outputs)) if op.outputs else None
    signature = ModelSignature(Schema.from_json(json.dumps(op.inputs)), outputs) if op.inputs else None
    with warnings.catch_warnings():
        # It asks for an example to check the signature with; ours comes from the manifest.
        warnings.filterwarnings("ignore", message=".*An input example was not provided")
        # Unwrapped: older MLflow would afterwards open a store of its own for traces, in ./mlruns.
        inspect.unwrap(mlflow.pyfunc.save_model)(
            path=target,
            loader_module=op.loader_module,
            data_path=str(data),
            code_paths=None if code is None else [str(path) for path in sorted(code.iterdir())],
            mlflow_model=model,
            signature=signature,
            pip_requirements=op.requirements or [f"mlflow=={mlflow.__version__}"],
        )


def _batches(pending: list[tuple[ops.Op, int]]) -> Iterator[tuple[list[ops.Op], int]]:
    """Group neighboring metrics of one run, everything else alone; each group with the position after it."""
    group: list[ops.Op] = []
    end = 0
    for op, position in pending:
        if group and not (op.op == group[0].op == "metrics" and op.key == group[0].key):
            yield group, end
            group = []
        group.append(op)
        end = position
    if group:
        yield group, end


def check_experiment(found: Experiment) -> None:
    """Raise StoreUnfit for an experiment that is deleted: MLflow refuses all that is sent to it."""
    if found.lifecycle_stage == LifecycleStage.DELETED:
        raise StoreUnfit(
            f"the experiment {found.name!r} is deleted in MLflow: "
            f"`mlflow experiments restore -x {found.experiment_id}`, or set tracking.experiment to another name"
        )


def replay(config: TrackingConfig) -> tuple[int, int]:
    """Send what dead jobs on this machine left in their journals: (journals finished, operations applied).

    A journal whose end is missing belonged to a killed driver: its runs are closed as KILLED. One with OpenLineage
    events stays until those are sent too. A damaged journal is set aside, and one whose store is away stays; neither
    holds up the others. Raises StoreUnreachable after those are sent, with a line for each store that is away.
    """
    finished = count = 0
    away: dict[str, Exception] = {}
    for journal in abandoned_journals(Path(config.root)):
        delete, store = False, ""
        try:
            destination = dict(journal.state.get("settings", {}))
            sink = MlflowSink(config.model_copy(update=destination), journal)
            store = sink.config.store_uri
            if store not in away:
                applied = sink.drain()
                sink.end_left("KILLED")
                delete = "openlineage" not in destination  # its events go next (openlineage/send.py)
                count, finished = count + applied, finished + (delete or applied > 0)
        except StoreUnreachable as error:
            away[store] = error
        except (TryAgain, MlflowException) as error:
            log.warning("%s could not be sent and stays for the next job: %s", journal.folder, error_line(error))
        except StoredError as error:
            log.warning("%s is damaged (%s) and set aside; others are sent", journal.set_aside(), error_line(error))
        finally:
            journal.close(delete)
    if away:
        lines = (f"{redact(store)} cannot be reached, its journals stay: {error}" for store, error in away.items())
        raise StoreUnreachable("\n".join(lines))
    return finished, count


def import_client(config: TrackingConfig) -> None:
    """Import what the first call of the store would import besides this module."""
    if config.uri is None:
        import mlflow.store.tracking.sqlalchemy_store  # of an embedded store alone # noqa: F401
