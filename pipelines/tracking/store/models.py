"""A run's models and checkpoints in MLflow: as LoggedModels from MLflow 3 on, as files and tags of the run before.

MLflow 2 knows no LoggedModel. There a model is a folder of its run's artifacts, a checkpoint is a tag of its run.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import mlflow
from mlflow import MlflowClient
from mlflow.entities import Metric
from mlflow.exceptions import MlflowException
from mlflow.tracking._tracking_service.utils import get_default_host_creds
from mlflow.utils.rest_utils import http_request

from sparkring.conf.digest import digest
from sparkring.conf.secrets import redact
from sparkring.pipelines.tracking import ops
from sparkring.pipelines.tracking.errors import StoreUnfit
from sparkring.pipelines.tracking.pointers import CheckpointPointer
from sparkring.pipelines.tracking.store.mlflow_dataset import DIGEST_CHARACTERS

if TYPE_CHECKING:
    from mlflow.models import Model as MlflowModel

IDENTITY = "sparkring.identity"  # tag of a LoggedModel and of a version: hash of its run and content
MODEL_ID = "sparkring.model_id"  # tag of a run
CHECKPOINT_TAG = "sparkring.checkpoint."  # tag of a run of MLflow 2, with a pointer's identity
MODEL_TAG = "sparkring.model."  # tag of a run of MLflow 2, with a model's identity: its files are there
CHECKPOINT = "tags.`sparkring.kind` = 'checkpoint'"
CHECKPOINT_KIND, MODEL_KIND = "sparkring-checkpoint", "sparkring"
PAGE = 100
OLDEST_SERVER = 2  # a registry of 1 knows no aliases


@dataclass(frozen=True)
class StoredModel:
    """A run's model, found or made. `id`: of its LoggedModel, None in MLflow 2; `location`: where its files are."""

    id: str | None
    identity: str
    location: str
    ready: bool  # its files are there
    scored: bool


class Models(Protocol):
    """The models and checkpoints of one experiment's runs."""

    def checkpoint(self, run: str, op: ops.Checkpoint) -> None:
        """Point at a checkpoint's folder, whose files stay where they are. Once: a second time changes nothing."""

    def model(self, run: str, op: ops.Model) -> StoredModel:
        """Find or make the run's model of this content."""

    def described(self, run: str, model: StoredModel) -> MlflowModel:
        """Return MLflow's description of a model whose files will be written."""

    def score(self, run: str, model: StoredModel, op: ops.Model) -> None:
        """Log the scores as the run's, and as the model's where there are LoggedModels."""

    def upload(self, run: str, model: StoredModel, folder: str) -> None:
        """Store the files of the model."""

    def publish(self, run: str, model: StoredModel, step: int) -> None:
        """Show the model, whose files are there, as one that the run has made."""

    def pointers(self, run: str | None = None) -> list[CheckpointPointer]:
        """List all pointers to checkpoints, of one run or of the experiment."""

    def delete_pointer(self, pointer: str) -> None:
        """Delete a pointer by its id; silent where it is gone already."""


def models_of(store: str) -> type[LoggedModels] | type[RunModels]:
    """Return the form of models that both this MLflow and the store's server know.

    Raises StoreUnfit for a server that is older than OLDEST_SERVER.
    """
    server = server_major(store)
    if server is not None and server < OLDEST_SERVER:
        raise StoreUnfit(
            f"{redact(store)} is MLflow {server}, and {OLDEST_SERVER} or newer is needed: upgrade the server"
        )
    known = mlflow_major(mlflow.__version__) if server is None else min(server, mlflow_major(mlflow.__version__))
    return LoggedModels if known >= 3 else RunModels


def mlflow_major(version: str) -> int:
    """Return the first number of a version of MLflow."""
    return int(version.partition(".")[0])


def server_major(store: str) -> int | None:
    """Return the major version of a tracking server; None if unknown, or without a server."""
    if not store.startswith(("http://", "https://")):
        return None
    answer = http_request(get_default_host_creds(store), "/version", "GET", raise_on_status=False)
    found = answer.text.strip()
    return mlflow_major(found) if answer.status_code == 200 and re.fullmatch(r"\d+\.\d[\w.]*", found) else None


class LoggedModels:
    """MLflow 3: a LoggedModel each; a checkpoint's has no files."""

    def __init__(self, client: MlflowClient, experiment: str) -> None:
        self._client, self._experiment = client, experiment

    def checkpoint(self, run: str, op: ops.Checkpoint) -> None:
        params = {name: str(getattr(op, name)) for name in ("uri", "step", "bytes", "world", "metric")}
        tags = {"sparkring.kind": "checkpoint", "sparkring.uri": op.uri}
        model = self._made(run, CHECKPOINT_KIND, op.uri, f"checkpoint-step-{op.step}", tags, params)
        self.publish(run, model, op.step)

    def model(self, run: str, op: ops.Model) -> StoredModel:
        return self._made(run, MODEL_KIND, op.sha256, op.name, op.tags, op.params)

    def _made(self, run: str, kind: str, content: str, name: str, tags: ops.Texts, params: ops.Texts) -> StoredModel:
        """Find or create the LoggedModel of this content: one of an earlier try, or of a job that this one continues.

        Args:
            run: id of its run.
            kind: model type of MLflow.
            content: identifies the model within its run and kind.
            name: name shown by MLflow.
            tags: tags of a new model.
            params: parameters of a new model.
        """
        identity = identity_of(run, kind, content)
        found = self._client.search_logged_models([self._experiment], f"tags.`{IDENTITY}` = '{identity}'")
        tags = tags | {IDENTITY: identity}
        model = found[0] if found else self._client.create_logged_model(self._experiment, name, run, tags, params, kind)
        ready, scored = str(model.status) == "READY", bool(model.metrics)
        return StoredModel(model.model_id, identity, model.artifact_location, ready, scored)

    def described(self, run: str, model: StoredModel) -> MlflowModel:
        from mlflow.models import Model  # with pyfunc: seconds

        return Model(run_id=run, model_id=model.id)

    def score(self, run: str, model: StoredModel, op: ops.Model) -> None:
        at_ms, fingerprint = int(op.at * 1000), op.fingerprint[:DIGEST_CHARACTERS]
        points = [
            Metric(name, value, at_ms, op.step, model.id, op.dataset or None, fingerprint or None)
            for name, value in op.scores.items()
        ]
        self._client.log_batch(run, metrics=points)

    def upload(self, run: str, model: StoredModel, folder: str) -> None:
        self._client.log_model_artifacts(str(model.id), folder)

    def publish(self, run: str, model: StoredModel, step: int) -> None:
        from mlflow.entities import LoggedModelOutput  # MLflow 2 has none

        outputs = self._client.get_run(run).outputs
        if model.id not in [output.model_id for output in (outputs.model_outputs if outputs else [])]:
            self._client.log_outputs(run, [LoggedModelOutput(str(model.id), step)])
        self._client.finalize_logged_model(str(model.id), "READY")

    def pointers(self, run: str | None = None) -> list[CheckpointPointer]:
        condition = CHECKPOINT if run is None else f"{CHECKPOINT} and source_run_id = '{run}'"
        ids = [self._experiment]
        models = pages(lambda token: self._client.search_logged_models(ids, condition, page_token=token))
        return [CheckpointPointer(m.model_id, m.name, m.tags.get("sparkring.uri", "")) for m in models]

    def delete_pointer(self, pointer: str) -> None:
        with _silent_if_gone():
            self._client.delete_logged_model(pointer)


class RunModels:
    """MLflow 2: a model is a folder of its run's artifacts, a pointer to a checkpoint is a tag of its run."""

    def __init__(self, client: MlflowClient, experiment: str) -> None:
        self._client, self._experiment = client, experiment

    def checkpoint(self, run: str, op: ops.Checkpoint) -> None:
        tag = CHECKPOINT_TAG + identity_of(run, CHECKPOINT_KIND, op.uri)
        self._client.set_tag(run, tag, json.dumps({"name": f"checkpoint-step-{op.step}", "uri": op.uri}))

    def model(self, run: str, op: ops.Model) -> StoredModel:
        identity = identity_of(run, MODEL_KIND, op.sha256)
        found = self._client.get_run(run)
        location = f"{found.info.artifact_uri}/{_folder(identity)}"
        ready, scored = MODEL_TAG + identity in found.data.tags, op.scores.keys() <= found.data.metrics.keys()
        return StoredModel(None, identity, location, ready, scored)

    def described(self, run: str, model: StoredModel) -> MlflowModel:
        from mlflow.models import Model  # with pyfunc: seconds

        return Model(run_id=run, artifact_path=_folder(model.identity))

    def score(self, run: str, model: StoredModel, op: ops.Model) -> None:
        at_ms = int(op.at * 1000)
        points = [Metric(name, value, at_ms, op.step) for name, value in op.scores.items()]
        self._client.log_batch(run, metrics=points)

    def upload(self, run: str, model: StoredModel, folder: str) -> None:
        self._client.log_artifacts(run, folder, _folder(model.identity))

    def publish(self, run: str, model: StoredModel, step: int) -> None:
        self._client.set_tag(run, MODEL_TAG + model.identity, f"step {step}")

    def pointers(self, run: str | None = None) -> list[CheckpointPointer]:
        runs = [self._client.get_run(run)] if run else pages(self._search_runs)
        return [
            CheckpointPointer(f"{found.info.run_id}/{tag}", **json.loads(value))
            for found in runs
            for tag, value in found.data.tags.items()
            if tag.startswith(CHECKPOINT_TAG)
        ]

    def _search_runs(self, token: str | None) -> Any:
        return self._client.search_runs([self._experiment], max_results=PAGE, page_token=token)

    def delete_pointer(self, pointer: str) -> None:
        run, _, tag = pointer.partition("/")
        with _silent_if_gone():
            self._client.delete_tag(run, tag)


def delete_dead_pointers(models: Models, run: str, kept: list[str]) -> int:
    """Delete a run's pointers to checkpoints other than those `kept` (URIs); their number."""
    dead = [pointer.id for pointer in models.pointers(run) if pointer.uri not in kept]
    for pointer in dead:
        models.delete_pointer(pointer)
    return len(dead)


def identity_of(run: str, kind: str, content: str) -> str:
    """Return the hash that identifies a model or a checkpoint of a run, so that none is made twice."""
    return digest([run, kind, content])


def pages(search: Callable[[str | None], Any]) -> Iterator[Any]:
    """Yield all results of a paged search."""
    token: str | None = None
    while True:
        page = search(token)
        yield from page
        token = page.token
        if not token:
            return


def _folder(identity: str) -> str:
    return f"model-{identity[:12]}"


@contextmanager
def _silent_if_gone() -> Iterator[None]:
    """Ignore MLflow's answer that what is to be deleted does not exist."""
    try:
        yield
    except MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise
