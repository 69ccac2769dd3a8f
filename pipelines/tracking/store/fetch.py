"""Registered models, looked up and copied to this machine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import mlflow.artifacts
from mlflow import MlflowClient
from mlflow.entities.model_registry import ModelVersion
from mlflow.exceptions import MlflowException

from sparkring.conf.blocks.predict import REGISTERED
from sparkring.conf.blocks.tracking import TrackingConfig
from sparkring.conf.errors import error_line, first_line
from sparkring.conf.secrets import redact
from sparkring.conf.storage import check_stored
from sparkring.conf.stored import StoredError
from sparkring.pipelines.tracking.errors import StoreUnreachable
from sparkring.pipelines.tracking.mlmodel import read_mlmodel
from sparkring.pipelines.tracking.store.embedded import open_client

MISSING = {"RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"}  # the second: of an alias that is not set
T = TypeVar("T")


@dataclass(frozen=True)
class RegisteredModel:
    """A version of a registered model, and where its files can be had."""

    uri: str  # models:/<name>/<version>
    name: str
    version: str
    run_id: str
    source: str
    aliases: tuple[str, ...]
    tags: dict[str, str]
    created_ms: int


def find_model(tracking: TrackingConfig, uri: str) -> RegisteredModel:
    """Look up `models:/<name>@<alias>` or `models:/<name>/<version>`.

    StoredError if it does not exist, StoreUnreachable if the registry does not answer.
    """
    if tracking.uri is None and not (Path(tracking.root) / "mlflow.db").exists():
        raise StoredError(f"{uri}: no model: {tracking.root} holds no registry yet (tracking.root); train first")
    client, wanted = _client(tracking), REGISTERED.fullmatch(uri)
    assert wanted is not None, uri
    name, alias, number = wanted["name"], wanted["alias"], wanted["version"]

    def version() -> ModelVersion:
        return client.get_model_version_by_alias(name, alias) if alias else client.get_model_version(name, number)

    found = _asked(tracking, uri, version)
    registered = _asked(tracking, uri, lambda: client.get_registered_model(found.name))
    aliases = sorted(alias for alias, version in registered.aliases.items() if str(version) == str(found.version))
    return RegisteredModel(
        uri=f"models:/{found.name}/{found.version}",
        name=found.name,
        version=str(found.version),
        run_id=found.run_id or "",
        source=client.get_model_version_download_uri(found.name, found.version),
        aliases=tuple(aliases),
        tags=dict(found.tags),
        created_ms=int(found.creation_timestamp),
    )


@dataclass(frozen=True)
class RegisteredBy:
    """The job that registered a model: the id of its run, its own name (recipe/folder), and where run folders are."""

    run_id: str
    job: str
    runs_uri: str
    recipe: str


def find_job(tracking: TrackingConfig, model: RegisteredModel) -> RegisteredBy | None:
    """Look up the job that registered a model; None where MLflow no longer has its run.

    StoredError where its run folders are on a server that only MLflow names.
    """
    client = _client(tracking)
    try:
        run = client.get_run(model.run_id)
        parent = client.get_run(run.data.tags.get("mlflow.parentRunId", model.run_id))
        runs_uri, recipe = parent.data.params["storage.runs"], parent.data.params["name"]
    except (MlflowException, KeyError):
        return None
    try:
        check_stored(runs_uri, tracking.store_uri)
    except ValueError as error:
        raise StoredError(f"{model.uri}: the run folders of its job: {error}") from error
    return RegisteredBy(parent.info.run_id, parent.data.tags.get("sparkring.job", ""), runs_uri, recipe)


def copy_model(tracking: TrackingConfig, model: RegisteredModel, target: Path) -> Path:
    """Copy the model's files below `target`; returns the model folder, as training/model/folder.py describes it."""

    def download() -> str:
        target.mkdir(parents=True, exist_ok=True)
        return mlflow.artifacts.download_artifacts(
            artifact_uri=model.source, dst_path=str(target), tracking_uri=tracking.store_uri
        )

    folder = Path(_asked(tracking, model.uri, download))
    return folder / read_mlmodel(folder, f"{model.uri}: {redact(model.source)}")["data"]


def _client(tracking: TrackingConfig) -> MlflowClient:
    return open_client(tracking)


def _asked(tracking: TrackingConfig, uri: str, question: Callable[[], T]) -> T:
    """Return the store's answer, converting its errors to ours."""
    try:
        return question()
    except MlflowException as error:
        if error.error_code in MISSING:
            raise StoredError(f"{uri}: no such model in {redact(tracking.store_uri)}: {first_line(error)}") from error
        raise StoreUnreachable(f"{redact(tracking.store_uri)}: {error_line(error)}") from error
    except OSError as error:
        raise StoredError(f"{uri}: its files cannot be read: {error}") from error
