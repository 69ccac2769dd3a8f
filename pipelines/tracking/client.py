"""How MLflow's client calls the store."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit, urlunsplit

from sparkring.conf.blocks.tracking import TrackingConfig


def without_password(uri: str) -> str:
    """Remove user and password from the URI."""
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
        "MLFLOW_UV_AUTO_DETECT": "false",  # it would run `uv` by the files of the working directory
    }
    before = {name: os.environ.get(name) for name in limits}
    os.environ.update({name: value for name, value in limits.items() if before[name] is None})
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
