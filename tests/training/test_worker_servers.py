"""Whole training jobs on parameter servers: the ring's model at bound 0, else a run that its logs make again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from sparkring.conf.config import RunConfig
from sparkring.conf.manifest import read_manifest
from sparkring.conf.storage import open_storage
from sparkring.pipelines.audit import audit_run
from sparkring.training.launch.group import WorkerGroup
from sparkring.training.launch.local import local_group
from sparkring.training.parameter_server import EVENTS
from sparkring.training.replay_run import ReplayReport, replay_run
from tests.training.test_worker import PRELOAD, Job
from tests.training.test_worker_tables import SETTINGS, TABLE, hashed, rows_of  # noqa: F401

pytestmark = pytest.mark.ranks
SERVED = (*SETTINGS, "data.audit=true", "parallel.servers.per_host=1")


@pytest.fixture(scope="module")
def group() -> Iterator[WorkerGroup]:
    with local_group(3, PRELOAD) as group:
        yield group


@pytest.fixture(scope="module")
def ring(group: WorkerGroup, hashed: Path, tmp_path_factory: pytest.TempPathFactory) -> Job:  # noqa: F811
    return Job(tmp_path_factory.mktemp("ring") / "run", hashed, *SETTINGS).run(group, 2)


def replayed(job: Job) -> ReplayReport:
    """The run once more, from its event logs."""
    torch.set_num_threads(job.result.threads_per_rank)
    config, dataset = RunConfig.model_validate(job.config), open_storage(str(job.table))
    return replay_run(config, dataset, read_manifest(dataset), open_storage(str(job.folder)).at(EVENTS))


def check_whole(job: Job) -> None:
    """Every row once, every push once on every server, and the logs give the same bits."""
    assert (report := audit_run(str(job.folder))).ok, report.lines()
    found = replayed(job)
    assert not found.different and found.clocks == job.result.steps, found.describe()


def test_with_bound_0_the_model_is_the_rings(group: WorkerGroup, ring: Job, hashed: Path, tmp_path: Path) -> None:  # noqa: F811
    job = Job(tmp_path / "run", hashed, *SERVED).run(group, 2)
    assert job.result.engine == "servers" and job.result.finished
    for name, weight in ring.weights().items():
        torch.testing.assert_close(job.weights()[name], weight, rtol=1e-8, atol=1e-10)
    assert np.abs(rows_of(job, tmp_path / "a") - rows_of(ring, tmp_path / "b")).max() < 1e-9
    assert job.result.valid == pytest.approx(ring.result.valid, rel=1e-9)
    assert job.losses == pytest.approx(ring.losses, rel=1e-9)
    assert {k: v for k, v in job.result.tables[TABLE].items() if k != "bytes"} == {
        "rows": 7, "admitted": 7, "evicted": 0
    }  # fmt: skip
    assert job.result.hot_ids == ring.result.hot_ids
    servers = job.result.servers
    assert servers is not None and servers.gaps == {0: servers.applied} and servers.repeated == 0
    check_whole(job)
