"""MLflow's UI on the embedded store, and where a recipe's pages are in it."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

from sparkring.conf.blocks.tracking import TrackingConfig
from sparkring.conf.secrets import redact
from sparkring.pipelines.tracking.store.embedded import open_client
from sparkring.pipelines.tracking.views import VIEW, links, nights_key, runs_key, runs_page, undated_links
from sparkring.training.launch.host.processes import adopt_orphans, end_descendants

log = logging.getLogger(__name__)
WITHOUT_CONSUMERS = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}  # seven processes for jobs of its own


def pages(config: TrackingConfig, recipe: str) -> dict[str, str]:
    """Return pages of a recipe in the embedded store, by name, as paths on the server; {} before its first run.

    `config`: with its names filled in.
    """
    if not (Path(config.root) / "mlflow.db").exists():
        return {}
    experiment = open_client(config).get_experiment_by_name(str(config.experiment))
    if experiment is None:
        return {}
    if VIEW + nights_key(recipe) in experiment.tags:
        return links(recipe, experiment.experiment_id, config.registered_model or recipe)
    if VIEW + runs_key(recipe) in experiment.tags:
        return undated_links(recipe, experiment.experiment_id, config.registered_model or recipe)
    return {"runs": runs_page(experiment.experiment_id)}


def serve_ui(config: TrackingConfig, recipe: str, port: int) -> int:
    """Serve MLflow's UI on the embedded store until interrupted; for a server, log where its own UI is.

    To be called from the main thread of a process that serves nothing else: all its descendants end with the UI.
    `config`: with its names filled in; `recipe`: whose pages are logged.
    """
    store_uri = config.store_uri
    if store_uri.startswith("http"):
        log.info("the tracking server has its own UI: %s", redact(store_uri))
        return 0
    here = store_uri if config.uri is not None else "sqlite:///mlflow.db"  # in its folder: MLflow makes one of escapes
    command = [sys.executable, "-m", "mlflow", "ui", "--backend-store-uri", here, "--port", str(port)]
    log.info("MLflow UI of %s: http://127.0.0.1:%d (end it with Ctrl-C)", store_uri, port)
    for name, path in pages(config, recipe).items():
        log.info("%s of %s: http://127.0.0.1:%d/%s", name, recipe, port, path)
    Path(config.root).mkdir(parents=True, exist_ok=True)  # older MLflow does not make it
    # MLflow starts servers of its own, which would outlive it and hold the port.
    adopt_orphans()
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        # In a folder of ours: the working directory's files may be another's, and gunicorn runs its gunicorn.conf.py.
        folder = config.root if config.uri is None else None  # which may be relative to it
        environment = WITHOUT_CONSUMERS | os.environ | {"PYTHONSAFEPATH": "1"}
        return subprocess.call([*command, "--workers", "1"], env=environment, cwd=folder)
    finally:
        signal.signal(signal.SIGTERM, before)
        end_descendants()
