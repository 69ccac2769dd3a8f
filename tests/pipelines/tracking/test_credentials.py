from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from pydantic import ValidationError

from sparkring.conf.blocks.tracking import TrackingConfig
from sparkring.training.launch.host.fork_server import ForkServer


def test_ranks_are_started_without_the_drivers_credentials() -> None:
    names = ("MLFLOW_TRACKING_TOKEN", "MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD", "OPENLINEAGE_API_KEY")
    names += ("OPENLINEAGE__TRANSPORT__AUTH",)
    server = ForkServer([], {**os.environ, **dict.fromkeys(names, "s3cret"), "KEPT": "yes"})
    try:
        while not (environment := Path(f"/proc/{server._process.pid}/environ").read_bytes()):
            time.sleep(0.01)  # forked, and not yet what it will run
        assert b"KEPT=yes" in environment and b"s3cret" not in environment
    finally:
        server.close()


@pytest.mark.parametrize("alias", ["latest", "v3", "two words", ""])
def test_aliases_mlflow_keeps_are_refused(alias: str) -> None:
    with pytest.raises(ValidationError):
        TrackingConfig(alias=alias)
