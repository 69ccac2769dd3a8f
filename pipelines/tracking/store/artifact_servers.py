"""Which servers MLflow's artifacts may be at: they are sent the reader's MLflow credentials.

Whoever may write to a registry or tracking server names any URI as the place of a model, a run or an experiment, and
MLflow sends the user name, password or token of its own server to whatever server that is.
"""

from __future__ import annotations

from urllib.parse import urlsplit

from mlflow.store.artifact.artifact_repository_registry import _artifact_repository_registry as by_scheme
from mlflow.store.artifact.http_artifact_repo import HttpArtifactRepository
from mlflow.store.artifact.mlflow_artifacts_repo import MlflowArtifactsRepository
from mlflow.tracking import get_tracking_uri

from sparkring.conf.secrets import redact
from sparkring.conf.storage import TRUSTED, is_trusted
from sparkring.conf.stored import StoredError

PORTS = {"http": 80, "https": 443}


class _HttpArtifacts(HttpArtifactRepository):
    """MLflow's own, of servers that may have its credentials."""

    def __init__(self, artifact_uri: str, tracking_uri: str | None = None, registry_uri: str | None = None) -> None:
        check_artifact_server(artifact_uri, tracking_uri or get_tracking_uri())
        super().__init__(artifact_uri, tracking_uri=tracking_uri, registry_uri=registry_uri)


class _ServedArtifacts(MlflowArtifactsRepository):
    """As above, of URIs that may leave the server out."""

    def __init__(self, artifact_uri: str, tracking_uri: str | None = None, registry_uri: str | None = None) -> None:
        check_artifact_server(artifact_uri, tracking_uri or get_tracking_uri())
        super().__init__(artifact_uri, tracking_uri=tracking_uri, registry_uri=registry_uri)


def guard_artifacts() -> None:
    """Make MLflow, in this process, open artifacts at no other servers; also those behind `runs:` and `models:`."""
    for scheme in ("http", "https"):
        by_scheme.register(scheme, _HttpArtifacts)
    by_scheme.register("mlflow-artifacts", _ServedArtifacts)


def check_artifact_server(uri: str, tracking_uri: str) -> None:
    """Raise StoredError for artifacts at another server than the tracking server and those that the user allows."""
    server = server_of(uri, tracking_uri)
    if server is None or server == server_of(tracking_uri, tracking_uri):
        return
    name = server[1] if server[2] is None else f"{server[1]}:{server[2]}"
    if not is_trusted(name):
        raise StoredError(
            f"{redact(uri)}: MLflow names the server {name}, which is not that of tracking.uri, and would be "
            f"sent this machine's MLflow credentials; if you trust it, set {TRUSTED}={name}"
        )


def server_of(uri: str, tracking_uri: str) -> tuple[str, str, int | None] | None:
    """Return scheme, host and port of artifacts; None for storage without MLflow's credentials."""
    parts, tracking = urlsplit(uri), urlsplit(tracking_uri)
    if parts.scheme == "mlflow-artifacts":
        parts = parts._replace(scheme=tracking.scheme, netloc=parts.netloc or tracking.netloc)
    if parts.scheme not in PORTS:
        return None
    try:
        port = parts.port or PORTS[parts.scheme]
    except ValueError:  # out of range
        port = None
    return parts.scheme, (parts.hostname or "").lower(), port
