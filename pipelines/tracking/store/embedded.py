"""Open the store; an embedded one that was moved or copied with its project gets the paths of where it is now.

MLflow keeps whole paths: of each experiment's artifacts, and below it those of runs, models and versions. Whatever is
in the folder of before is another project's, or gone.
"""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from mlflow import MlflowClient

from sparkring.conf.blocks.tracking import TrackingConfig
from sparkring.conf.storage import exclusive
from sparkring.pipelines.tracking.store.artifact_servers import guard_artifacts

log = logging.getLogger(__name__)
# Columns of MLflow 3 that hold whole paths.
PATHS = {
    "experiments": ("artifact_location",),
    "runs": ("artifact_uri",),
    "logged_models": ("artifact_location",),
    "model_versions": ("source", "storage_location"),
}


def open_client(config: TrackingConfig) -> MlflowClient:
    """Create MLflow's client of the store of `config`, which has its names filled in."""
    guard_artifacts()
    if config.uri is not None:
        return MlflowClient(config.uri, registry_uri=config.uri)
    import mlflow.store.db.utils  # of an embedded store alone

    root = Path(config.root)
    root.mkdir(parents=True, exist_ok=True)
    # It would make a second folder, of escapes, for a path with `?`, `#` or `%`. Older MLflow has no such function.
    mlflow.store.db.utils._make_parent_dirs_if_sqlite = lambda db_uri: None
    with exclusive(root / ".create.lock"):  # two processes that open a fresh store at a time both fail
        if (root / "mlflow.db").exists():
            _relocate(root / "mlflow.db", f"{(root.resolve() / 'artifacts').as_uri()}/")
        with _own_logging():
            client = MlflowClient(config.store_uri, registry_uri=config.store_uri)
            client.search_registered_models(max_results=1)  # opens the registry's store
        return client


@contextmanager
def _own_logging() -> Iterator[None]:
    """Keep the program's logging: MLflow before 3.8 sets up its own whenever it opens a database."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    try:
        yield
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)


def _relocate(database: Path, artifacts: str) -> None:
    """Rewrite every path below the former folder of artifacts to `artifacts`, which ends with a slash."""
    with closing(sqlite3.connect(database, timeout=30.0)) as store:
        tables = {row[0] for row in store.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        if "experiments" not in tables:  # it is being made
            return
        places = [place for (place,) in store.execute("SELECT artifact_location FROM experiments") if place]
        for before in {found for place in places if (found := folder_of(place)) and found != artifacts}:
            with store:
                for table in PATHS.keys() & tables:
                    for column in {row[1] for row in store.execute(f"PRAGMA table_info({table})")} & {*PATHS[table]}:
                        store.execute(
                            f"UPDATE {table} SET {column} = ? || substr({column}, ?) WHERE substr({column}, 1, ?) = ?",
                            (artifacts, len(before) + 1, len(before), before),
                        )
            log.warning("%s was moved or copied: its artifacts are now in %s, not in %s", database, artifacts, before)


def folder_of(place: str) -> str | None:
    """Return the artifact folder directly above an experiment's location, in this package's form."""
    folder, _, name = place.rstrip("/").rpartition("/")
    return f"{folder}/" if name and folder.startswith("file:///") and folder.endswith("/artifacts") else None
