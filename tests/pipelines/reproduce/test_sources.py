"""A run is trained again from its sources: of the version that was read, on a dataset that is built and compared."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import deltalake
import pyarrow as pa
import pytest

from sparkring.conf.blocks.tracking import TrackingConfig
from sparkring.conf.config import RunConfig
from sparkring.conf.load import Resolved
from sparkring.conf.stored import StoredError
from sparkring.pipelines.cli.reproduce import Request, reproduce
from sparkring.pipelines.job.job import run_job
from sparkring.pipelines.run.exit_codes import Exit
from sparkring.pipelines.run.runs import Runs

pytestmark = pytest.mark.spark


def rows(first: int) -> pa.Table:
    numbers = range(first, first + 300)
    return pa.table(
        {"key": [*numbers], "x": [float(n % 7) for n in numbers], "y": pa.array([n % 2 for n in numbers], pa.int8())}
    )


def no_session() -> Any:
    raise AssertionError("nothing may be started")


@dataclass
class Place:
    """A Delta table, and a finished run on the dataset of its first version."""

    folder: Path
    config: RunConfig
    shown: list[str] = field(default_factory=list)

    @property
    def run(self) -> str:
        runs = Runs(self.config.storage.runs, self.config.name)
        return runs.at(runs.records()[0]).uri

    @property
    def dataset(self) -> Path:
        (folder,) = (self.folder / "datasets").glob("delta-*")
        return folder

    def again(self, session: Any, dry_run: bool = False) -> Exit:
        self.shown.clear()
        request = Request(self.run, "bits", "sources", dry_run)
        return reproduce(request, TrackingConfig(enabled=False), self.shown.append, session)


@pytest.fixture(scope="module")
def place(spark: Any, tmp_path_factory: pytest.TempPathFactory) -> Place:
    folder = tmp_path_factory.mktemp("sources")
    deltalake.write_deltalake(str(folder / "table"), rows(0))
    etl = {
        "sources": {"t": {"format": "delta", "path": str(folder / "table")}},
        "rows": "t",
        "key": ["key"],
        "split": {"kind": "hash", "shares": {"train": 0.7, "valid": 0.15, "test": 0.15}},
        "features": {"x": {"kind": "numeric"}},
        "keep": ["y"],
    }
    config = RunConfig.model_validate(
        {
            "name": "delta",
            "etl": etl,
            "storage": {"runs": str(folder / "runs"), "datasets": str(folder / "datasets")},
            "model": {"label": "y", "args": {"width": 4, "blocks": 1, "bumps": 2}},
            "train": {"epochs": 2, "global_batch": 40, "threads_per_rank": 1},
            "parallel": {"engine": "torch"},
            "launch": {"world": 1},
            "tracking": {"enabled": False},
            "report": {"baselines": False, "must_beat_guess": False},
        }
    )
    assert run_job(Resolved(config, {}), etl=True, session=lambda: spark) == Exit.OK
    deltalake.write_deltalake(str(folder / "table"), rows(1000), mode="append")  # the next night
    return Place(folder, config)


def test_the_dataset_is_built_again_of_the_version_that_was_read(place: Place, spark: Any) -> None:
    assert place.again(lambda: spark) == Exit.OK
    assert place.shown[0] == "nothing differs from what the run keeps"
    assert any(line.startswith("dataset built again: its content is equal (") for line in place.shown)
    assert place.shown[-1].startswith("reproduced: bits are equal; ")
    assert [*(place.folder / "runs/reproduced").glob("*")] == [] and len([*place.dataset.parent.iterdir()]) == 1


def test_without_its_dataset_what_is_built_is_compared_before_training(place: Place, spark: Any) -> None:
    dataset, aside = place.dataset, place.folder / "aside"
    shutil.move(dataset, aside)
    try:
        with pytest.raises(StoredError, match=r"built from the sources, its content is .*; nothing was trained"):
            place.again(lambda: spark)
        assert place.shown[0].endswith(
            " -> not there; so sources are read as they are now; what is built is compared before training"
        )
        assert not [*(place.folder / "runs/reproduced").glob("*/delta/*/summary.json")]
    finally:
        shutil.move(aside, dataset)


def test_a_source_that_is_another_is_named_before_anything_starts(place: Place, tmp_path: Path) -> None:
    assert place.again(no_session, dry_run=True) == Exit.OK
    assert place.shown[-1].startswith("would build its dataset and train it again, on 1 rank,")
    table = place.folder / "table"
    shutil.copytree(table, tmp_path / "table")
    shutil.rmtree(table / "_delta_log")
    try:
        with pytest.raises(StoredError, match=r"nothing was trained, --check bits: source t: as read -> gone"):
            place.again(no_session)
    finally:
        shutil.copytree(tmp_path / "table/_delta_log", table / "_delta_log")


def test_a_run_that_was_given_its_dataset_has_no_sources(place: Place, spark: Any, tmp_path: Path) -> None:
    storage = place.config.storage.model_copy(update={"runs": str(tmp_path)})
    given = place.config.model_copy(update={"etl": None, "dataset": str(place.dataset), "storage": storage})
    assert run_job(Resolved(given, {}), etl=False, session=lambda: spark) == Exit.OK
    with pytest.raises(StoredError, match="--from sources: the run was given its dataset"):
        Place(place.folder, given).again(no_session)
