"""A registry names where artifacts are; MLflow's credentials go to no server that only it names."""

from __future__ import annotations

import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

from sparkring.conf.blocks.tracking import TrackingConfig
from sparkring.conf.storage import TRUSTED
from sparkring.conf.stored import StoredError
from sparkring.pipelines.cli.reproduce import find_run
from sparkring.pipelines.lineage import show as lineage
from sparkring.pipelines.tracking import ops
from sparkring.pipelines.tracking.errors import StoreUnfit
from sparkring.pipelines.tracking.journal import Journal
from sparkring.pipelines.tracking.store.artifact_servers import check_artifact_server
from sparkring.pipelines.tracking.store.embedded import open_client
from sparkring.pipelines.tracking.store.fetch import copy_model, find_model
from sparkring.pipelines.tracking.store.registry import Registry
from sparkring.pipelines.tracking.store.sink import MlflowSink
from tests.helpers.servers import answering

OURS = "https://mlflow.example:5000"


@pytest.mark.parametrize(
    ("uri", "tracking_uri"),
    [
        ("http://evil.example/m", OURS),
        ("https://mlflow.example:5001/api/2.0/mlflow-artifacts/artifacts/1", OURS),
        ("http://mlflow.example:5000/m", OURS),  # in plain text
        ("https://mlflow.example.evil:5000/m", OURS),
        ("https://mlflow.example:5000@evil.example/m", OURS),
        ("mlflow-artifacts://evil.example/m", OURS),
        ("mlflow-artifacts://evil.example:5000/m", OURS),
        ("http://evil.example:99999/m", OURS),
        ("http://127.0.0.1:1/m", "sqlite:////tmp/mlflow.db"),
    ],
)
def test_artifacts_at_another_server_are_refused(uri: str, tracking_uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    open_client(TrackingConfig(uri=OURS))
    for check in (check_artifact_server, get_artifact_repository):
        with pytest.raises(StoredError, match=r"MLflow names the server .*SPARKRING_TRUSTED_SERVERS="):
            check(uri, tracking_uri)
    monkeypatch.setenv(TRUSTED, "evil.example, mlflow.example:5001,mlflow.example,mlflow.example.evil:5000,127.0.0.1:1")
    check_artifact_server(uri, tracking_uri)


@pytest.mark.parametrize(
    "uri",
    [
        f"{OURS}/api/2.0/mlflow-artifacts/artifacts/1/2",
        "HTTPS://MLflow.example:5000/m",
        "mlflow-artifacts:/1/2/artifacts",
        "mlflow-artifacts://mlflow.example:5000/1/2",
        "s3://bucket/1/2",
        "file:///data/mlflow/artifacts",
    ],
)
def test_artifacts_of_the_tracking_server_and_of_storage_are_opened(uri: str) -> None:
    check_artifact_server(uri, OURS)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, list[str | None]]]:
    """The address of a stranger's server, and the credentials that it has been sent."""
    seen: list[str | None] = []

    class Stranger(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            seen.append(self.headers["Authorization"])
            self.send_error(404)

        do_PUT = do_GET

        def log_message(self, *_: object) -> None:
            return None

    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "secret")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    server = ThreadingHTTPServer(("127.0.0.1", 0), Stranger)
    with answering(server):
        yield f"http://127.0.0.1:{server.server_port}", seen


@pytest.mark.parametrize("way", ["model", "run of the model"])
def test_a_registered_model_of_others_sends_no_credentials_anywhere(
    way: str, asked: tuple[str, list[str | None]], tmp_path: Path
) -> None:
    server, seen = asked
    config = TrackingConfig(root=str(tmp_path)).named("flights")
    tmp_path.mkdir(exist_ok=True)
    client = open_client(config)
    experiment = client.create_experiment("elsewhere", f"{server}/x")
    run = client.create_run(experiment).info.run_id
    source = f"{server}/api/2.0/mlflow-artifacts/artifacts/m" if way == "model" else f"runs:/{run}/m"
    client.create_registered_model("flights")
    client.create_model_version("flights", source, run)
    with pytest.raises(StoredError, match=r"MLflow names the server 127\.0\.0\.1:"):
        copy_model(config, find_model(config, "models:/flights/1"), tmp_path / "copied")
    registry = Registry(config, client)
    version = registry.version("1")
    assert version is not None
    with pytest.raises(StoredError, match=r"MLflow names the server 127\.0\.0\.1:"):
        registry.fetch(version, tmp_path / "fetched")
    assert seen == []


def test_the_run_folders_of_a_registered_model_are_on_no_server_that_only_mlflow_names(tmp_path: Path) -> None:
    config = TrackingConfig(root=str(tmp_path)).named("flights")
    client = open_client(config)
    run = client.create_run(client.create_experiment("flights")).info.run_id
    client.create_registered_model("flights")
    client.create_model_version("flights", str(tmp_path), run)
    client.log_param(run, "storage.runs", "s3://b/runs?endpoint_override=evil.example:9000")
    client.log_param(run, "name", "flights")
    for command in (lineage.trace, find_run):
        with pytest.raises(StoredError, match=r"the server https://evil\.example:9000 is named in sqlite:"):
            command("models:/flights/1", config)


def test_an_experiment_of_others_is_sent_no_artifacts(asked: tuple[str, list[str | None]], tmp_path: Path) -> None:
    server, seen = asked
    config = TrackingConfig(root=str(tmp_path)).named("flights")
    open_client(config).create_experiment("flights", f"{server}/x")
    journal = Journal.create(tmp_path / "buffer", "job")
    journal.append(ops.Tags(at=0.0, key="job", tags={}))
    with pytest.raises(StoreUnfit, match=r"the experiment .flights.: .*MLflow names the server 127\.0\.0\.1:"):
        MlflowSink(config, journal).drain()
    journal.close(delete=True)
    assert seen == []


@pytest.mark.parametrize("data", ["../../secrets", "/etc", "", 3, None])
def test_a_registered_model_of_others_names_no_folder_outside_its_own(data: object, tmp_path: Path) -> None:
    config = TrackingConfig(root=str(tmp_path / "mlflow")).named("flights")
    (tmp_path / "mlflow").mkdir()
    (tmp_path / "m").mkdir()
    (tmp_path / "m/MLmodel").write_text(json.dumps({"flavors": {"python_function": {"data": data}}}))
    client = open_client(config)
    client.create_registered_model("flights")
    client.create_model_version("flights", str(tmp_path / "m"))
    with pytest.raises(StoredError, match=r"^models:/flights/1: .*/m: MLmodel"):
        copy_model(config, find_model(config, "models:/flights/1"), tmp_path / "copied")
