"""Jobs whose steps were measured next to a prediction, as MLflow has them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mlflow.entities import Run

from sparkring.conf.blocks.tracking import TrackingConfig
from sparkring.conf.errors import error_line
from sparkring.conf.secrets import redact
from sparkring.conf.stored import StoredError
from sparkring.pipelines.tracking.errors import StoreUnreachable
from sparkring.pipelines.tracking.store.embedded import open_client
from sparkring.pipelines.tracking.store.fetch import RegisteredBy
from sparkring.pipelines.tracking.store.models import pages
from sparkring.pipelines.tracking.tags import MACHINES

MEASURED = "plan/measured_step_s"
PAGE = 200  # runs


@dataclass(frozen=True)
class MeasuredJob:
    """A job, the machines that its steps were predicted on, and what they took."""

    job: RegisteredBy
    machines: str
    step_s: float


def measured_jobs(tracking: TrackingConfig, experiment: str | None) -> list[MeasuredJob]:
    """List the finished jobs of an experiment (None: all) with measured steps; StoredError if missing.

    StoreUnreachable if MLflow does not answer.
    """
    if tracking.uri is None and not (Path(tracking.root) / "mlflow.db").exists():
        raise StoredError(f"{tracking.root} holds no store of MLflow yet (tracking.root); train first")
    try:
        return list(_found(tracking, experiment))
    except StoredError:
        raise
    except Exception as error:  # of the client, of HTTP, of a database driver
        raise StoreUnreachable(f"{redact(tracking.store_uri)}: {error_line(error)}") from error


def _found(tracking: TrackingConfig, experiment: str | None) -> Iterator[MeasuredJob]:
    client = open_client(tracking)
    known = {each.name: each.experiment_id for each in pages(lambda token: client.search_experiments(page_token=token))}
    if experiment is not None and experiment not in known:
        names = ", ".join(sorted(known))
        raise StoredError(
            f"--experiment {experiment}: no such experiment in {redact(tracking.store_uri)}; there: {names}"
        )
    ids = [known[experiment]] if experiment is not None else [*known.values()]
    wanted = f"metrics.`{MEASURED}` > 0 and attributes.status = 'FINISHED'"
    for run in pages(lambda token: client.search_runs(ids, wanted, max_results=PAGE, page_token=token)):
        if "storage.runs" in run.data.params and "name" in run.data.params:
            yield _job(run)


def _job(run: Run) -> MeasuredJob:
    params, tags = run.data.params, run.data.tags
    job = RegisteredBy(run.info.run_id, tags.get("sparkring.job", ""), params["storage.runs"], params["name"])
    return MeasuredJob(job, tags.get(MACHINES, ""), run.data.metrics[MEASURED])
