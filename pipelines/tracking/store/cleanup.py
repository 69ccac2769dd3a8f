"""What MLflow says must be kept, and the deleting of its pointers to checkpoints that are gone."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

from mlflow import MlflowClient
from mlflow.exceptions import MlflowException

from sparkring.conf.blocks.tracking import TrackingConfig
from sparkring.conf.errors import error_line
from sparkring.conf.secrets import redact
from sparkring.pipelines.run.process_id import this_process
from sparkring.pipelines.tracking.errors import StoreUnreachable
from sparkring.pipelines.tracking.pointers import AliasedModel, CheckpointPointer
from sparkring.pipelines.tracking.run_owner import is_abandoned
from sparkring.pipelines.tracking.store.embedded import open_client
from sparkring.pipelines.tracking.store.models import PAGE, Models, models_of, pages
from sparkring.pipelines.tracking.tags import FINGERPRINT

log = logging.getLogger(__name__)
KEEP_TAG = "sparkring.keep"


class Cleanup:
    """One recipe's experiment. Every call raises StoreUnreachable where the store does not answer."""

    def __init__(self, config: TrackingConfig, knows_runs: bool) -> None:
        """Open the store. Nothing is made: a store that is not there is an error where runs were tracked in it.

        Args:
            config: with its names filled in (TrackingConfig.named).
            knows_runs: whether some run of the recipe was tracked.
        """
        self.config = config
        self._client: MlflowClient | None = None
        self._experiment: str | None = None
        where = redact(config.store_uri)
        embedded = config.uri is None
        if not embedded or (Path(config.root) / "mlflow.db").exists():
            with _answering(where):
                self._client = open_client(config)
                found = self._client.get_experiment_by_name(str(config.experiment))
                self._experiment = None if found is None else str(found.experiment_id)
        if self._experiment is None and knows_runs:
            raise StoreUnreachable(
                f"{where} has no experiment {config.experiment!r}, in which runs of this recipe were tracked; "
                "set tracking.uri, tracking.root and tracking.experiment as they were for those runs"
            )

    def aliases(self) -> list[AliasedModel]:
        """List every aliased version of every registered model that one of our jobs made."""
        if self._client is None:
            return []
        client, found = self._client, list[AliasedModel]()
        with _answering(redact(self.config.store_uri)):
            for model in pages(lambda token: client.search_registered_models(max_results=PAGE, page_token=token)):
                aliases = client.get_registered_model(model.name).aliases  # a search may return none
                for alias, number in sorted(aliases.items()):
                    version = client.get_model_version(model.name, str(number))
                    fingerprint = version.tags.get(FINGERPRINT, "")
                    if fingerprint:
                        found.append(AliasedModel(model.name, alias, self._job_of(version.run_id), fingerprint))
        return found

    def _job_of(self, run_id: str | None) -> str:
        assert self._client is not None
        if not run_id:
            return ""
        try:
            return str(self._client.get_run(run_id).data.tags.get("sparkring.job", ""))
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            return ""

    def tagged_jobs(self) -> list[str]:
        """List the jobs of runs that have the tag KEEP_TAG, with any value but `false`."""
        runs = self._search(f"tags.`{KEEP_TAG}` LIKE '%'")
        kept = [run.data.tags for run in runs if run.data.tags[KEEP_TAG].lower() != "false"]
        return sorted({tags["sparkring.job"] for tags in kept if "sparkring.job" in tags})

    def live_jobs(self) -> dict[str, str]:
        """Map running jobs to their dataset's fingerprint; "" until recorded."""
        now, here = time.time(), this_process()
        runs = [run.data.tags for run in self._search("attributes.status = 'RUNNING'")]
        jobs = [tags for tags in runs if "mlflow.parentRunId" not in tags and "sparkring.job" in tags]
        live = [tags for tags in jobs if not is_abandoned(tags, now, here)]
        return {tags["sparkring.job"]: tags.get(FINGERPRINT, "") for tags in live}

    def pointers(self) -> list[CheckpointPointer]:
        """List all pointers to checkpoints in the experiment."""
        if self._experiment is None:
            return []
        with _answering(redact(self.config.store_uri)):
            return self._models.pointers()

    def delete_pointer(self, pointer: str) -> None:
        """Delete a pointer by its id; silent where it is gone already."""
        with _answering(redact(self.config.store_uri)):
            self._models.delete_pointer(pointer)

    @cached_property
    def _models(self) -> Models:
        """Opened once: a server is asked for its version."""
        assert self._client is not None and self._experiment is not None, "pointers come from a store"
        return models_of(self.config.store_uri)(self._client, self._experiment)

    def _search(self, condition: str) -> list[Any]:
        if self._client is None or self._experiment is None:
            return []
        client, ids = self._client, [self._experiment]
        with _answering(redact(self.config.store_uri)):
            return list(pages(lambda token: client.search_runs(ids, condition, max_results=PAGE, page_token=token)))


@contextmanager
def _answering(where: str) -> Iterator[None]:
    """Turn whatever the store's client raises into StoreUnreachable, which names the store."""
    try:
        yield
    except StoreUnreachable:
        raise
    except Exception as error:  # of the client, of HTTP, of a database driver
        raise StoreUnreachable(f"{where}: {error_line(error)}") from error
