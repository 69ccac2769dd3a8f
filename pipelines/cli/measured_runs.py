"""`sparkring plan calibrate`: steps of finished jobs, and what each of them does, to fit a cluster to."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass

from sparkring.conf.blocks.tracking import TrackingConfig
from sparkring.conf.clusters.cluster import Cluster
from sparkring.conf.errors import first_line
from sparkring.conf.manifest import read_manifest
from sparkring.conf.plain_text import count_of
from sparkring.conf.storage import check_stored, open_storage
from sparkring.conf.stored import StoredError
from sparkring.pipelines.lineage.show import run_of
from sparkring.pipelines.model.layouts import traced_recipe
from sparkring.pipelines.tracking.client import client_limits
from sparkring.training.parallel.mesh import resolve_mesh
from sparkring.training.planner.search import LayoutCosts
from sparkring.training.planner.timing.step_time import StepCounts
from sparkring.training.worker.result import read_result

log = logging.getLogger(__name__)
OTHER_MACHINES, GONE, UNTRACED = "of other machines", "whose folder or dataset is gone", "whose model cannot be traced"


@dataclass(frozen=True)
class JobStep:
    """The step of a job, as a fit looks at it."""

    counts: StepCounts
    step_s: float
    global_batch: int
    tokens: int = 1  # of a row: rows are compared

    @property
    def dp(self) -> int:
        return self.counts.mesh.dp

    @property
    def devices(self) -> int:
        return self.counts.mesh.world


@dataclass(frozen=True)
class JobSteps:
    """Steps of jobs on a cluster's machines. left_out: reason -> jobs that are not among them."""

    steps: list[JobStep]
    left_out: dict[str, int]

    def describe(self) -> str:
        """Describe in a line how many jobs were found and which were left out."""
        rest = "".join(f"; left out: {count} {why}" for why, count in self.left_out.items())
        return f"{count_of(len(self.steps), 'job')}{rest}"


def job_steps(tracking: TrackingConfig, experiment: str | None, cluster: Cluster) -> JobSteps:
    """Collect the measured steps of jobs on a cluster's machines. StoredError, or StoreUnreachable.

    `experiment`: name of the experiment; None for all.
    """
    from sparkring.pipelines.tracking.store.measured_jobs import measured_jobs  # MLflow: seconds

    steps, left_out = list[JobStep](), Counter[str]()
    with client_limits(tracking):
        found = measured_jobs(tracking, experiment)
    for each in found:
        if each.machines != cluster.machines:
            left_out[OTHER_MACHINES] += 1
            continue
        try:
            check_stored(each.job.runs_uri, tracking.store_uri)
            folder = run_of(each.job)
            if folder is None:
                raise StoredError(f"{each.job.job}: its run folder is gone")
            steps.append(step_of(folder.uri, each.step_s, cluster))
        except (StoredError, OSError) as error:
            left_out[GONE] += 1
            log.info("%s: left out: %s", each.job.job, first_line(error))
        except ValueError as error:
            left_out[UNTRACED] += 1
            log.info("%s: left out: %s", each.job.job, first_line(error))
    return JobSteps(steps, dict(left_out))


def step_of(run: str, step_s: float, cluster: Cluster) -> JobStep:
    """Count the work of a finished run's step, from its configuration and its dataset's manifest."""
    result = read_result(open_storage(run))
    config, manifest = result.run_config(), read_manifest(open_storage(result.dataset))
    mesh = resolve_mesh(config.parallel, result.train.world)
    costs = LayoutCosts(traced_recipe(config, manifest), cluster)
    return JobStep(costs.layout(config.parallel, mesh).counts, step_s, config.train.global_batch)
