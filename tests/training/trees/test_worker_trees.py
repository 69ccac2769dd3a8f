"""Whole trainings of trees without Spark: worlds, kills and resumption."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sparkring.training.launch.group import WorkerGroup
from tests.training.test_worker import Job, write_table

pytestmark = pytest.mark.ranks
ENTRY = "sparkring.training.worker.train_trees:train"


class TreesJob(Job):
    def __init__(self, folder: Path, table: Path, *words: str) -> None:
        always = ("model.family=trees", "data.audit=false", "model.args={}", "train.dtype=float32")
        super().__init__(folder, table, *always, *words)

    def run(self, group: WorkerGroup, world: int, attempt: int = 1, **options: Any) -> Job:  # type: ignore[override]
        return super().run(group, world, attempt, entry=ENTRY, **options)

    @property
    def bits(self) -> bytes:
        return (self.folder / "model/trees.ubj").read_bytes()


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_table(tmp_path_factory.mktemp("table"))


@pytest.mark.parametrize("world", [1, 2, 3])
def test_it_learns(group: WorkerGroup, table: Path, tmp_path: Path, world: int) -> None:
    job = TreesJob(tmp_path / "run", table).run(group, world)
    print(job.result)
    print(job.losses, job.valid)
    assert 0
