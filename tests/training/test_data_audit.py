"""The audit proves what is true and finds what is not; the cursor's settings are compared by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from conf.manifest import DatasetManifest
from conf.storage import open_storage
from training.data.audit import AuditLog, StepRecord, audit_run, check_records, read_records
from training.data.reader import ParquetReader, ReaderSettings
from training.data.resume import explain_difference

MakeDataset = Callable[..., DatasetManifest]


class Run:
    """A training run without a model: attempts read, record and are cut off where the test says."""

    def __init__(self, folder: Path, manifest: DatasetManifest) -> None:
        self.folder, self.manifest, self.attempts = folder, manifest, 0

    def attempt(self, size: int, epoch: int, start: int, steps: int, lost: int = 0, **how: Any) -> None:
        """Every rank consumes `steps` steps; the last rank loses its records of the last `lost` of them."""
        self.attempts += 1
        for rank in range(size):
            settings = ReaderSettings(**{"lanes": 8, "seed": 1, "tail": "pad", "audit": True} | how)
            reader = ParquetReader(
                open_storage(str(self.folder)), self.manifest, "train", None, 20, rank, size, settings
            )
            log = AuditLog(
                open_storage(str(self.folder / "audit")), self.attempts, rank, size, reader.order_state(),
                reader.plan.rows, reader.plan.epoch_samples, flush_steps=3,
            )  # fmt: skip
            mine = steps - (lost if rank == size - 1 else 0)
            first = epoch * reader.steps_per_epoch + start
            for step, batch in zip(range(first, first + mine), reader.batches(epoch, start, steps), strict=False):
                log.record(*divmod(step, reader.steps_per_epoch), batch)
            log.flush()
            reader.close()

    def report(self) -> Any:
        return audit_run(str(self.folder / "audit"))

    def records(self) -> list[StepRecord]:
        files = sorted((self.folder / "audit").rglob("*.ids"))
        return [record for f in files for record in read_records(f.read_bytes(), f.name)[1]]


@pytest.fixture
def run(make_dataset: MakeDataset, tmp_path: Path) -> Run:
    return Run(tmp_path, make_dataset(tmp_path, [[30] * 6, [15]]))  # 195 rows, 10 steps


def test_two_whole_epochs_are_proven(run: Run) -> None:
    run.attempt(2, 0, 0, 10)
    run.attempt(2, 1, 0, 10)
    report = run.report()
    assert report.ok and [(e.rows, e.exact) for e in report.epochs] == [(195, True), (195, True)]
    assert "every row exactly once" in report.lines()[0]


def test_attempts_that_read_on_into_the_next_epoch_are_proven(run: Run) -> None:
    run.attempt(2, 0, 0, 14)
    run.attempt(3, 1, 4, 6)
    report = run.report()
    assert report.ok and [e.exact for e in report.epochs] == [True, True]


def test_crashes_and_changed_worlds_are_proven(run: Run) -> None:
    run.attempt(3, 0, 0, 7, lost=2)  # dies in step 7; the last rank's records of 5 and 6 are lost
    run.attempt(2, 0, 4, 3)  # resumes from a checkpoint after 4, with two ranks, dies again
    run.attempt(5, 0, 6, 4)  # and with five
    report = run.report()
    assert report.ok, report.lines()
    assert report.epochs[0].attempts == (1, 2, 3) and report.epochs[0].worlds == (2, 3, 5)


def test_an_epoch_that_is_not_over_is_not_called_proven(run: Run) -> None:
    run.attempt(2, 0, 0, 9)
    report = run.report()
    assert not report.ok and not report.epochs[0].complete and "not finished" in report.lines()[0]


def test_steps_nobody_recorded_are_found(run: Run) -> None:
    run.attempt(2, 0, 0, 4)
    run.attempt(2, 0, 6, 4)  # resumed too late
    report = run.report()
    assert not report.ok and "2 steps missing, such as [4, 5]" in " ".join(report.problems)


def test_another_order_after_a_restart_is_found(run: Run) -> None:
    run.attempt(2, 0, 0, 6)
    run.attempt(2, 0, 4, 6, seed=2)
    problems = " ".join(run.report().problems)
    assert "seed: 1 in the checkpoint, 2 now" in problems
    assert "attempt 2 consumed other rows than attempt 1" in problems and "more than once" in problems


def test_single_spoilt_records_are_found(run: Run) -> None:
    run.attempt(2, 0, 0, 10)
    good = run.records()
    assert check_records(good, 195, 195).ok
    twice = good[3].ids.copy()
    twice[0] = good[4].ids[0]
    spoilt = {
        "rows consumed more than once": replace(good[3], ids=twice),
        "rows that do not exist": replace(good[3], ids=good[3].ids + 500),
        "ranks consumed": replace(good[3], ids=good[3].ids[:-1]),
        "ranks disagree": replace(good[3], cursor=good[3].cursor + 1),
        "recorded it twice": good[2],
    }
    for message, record in spoilt.items():
        report = check_records([*good[:3], record, *good[4:]], 195, 195)
        assert not report.ok and message in " ".join(report.problems), message


def test_no_records_and_no_ids_say_what_to_do(run: Run, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"train with data.audit: true"):
        audit_run(str(tmp_path / "nothing"))
    with pytest.raises(ValueError, match=r"set data.audit to true"):
        run.attempt(1, 0, 0, 1, audit=False)


def test_what_differs_is_named(make_dataset: MakeDataset, tmp_path: Path) -> None:
    manifest = make_dataset(tmp_path, [[30]])

    def state(rank: int = 0, size: int = 1, gb: int = 10, **how: Any) -> dict[str, Any]:
        reader = ParquetReader(
            open_storage(str(tmp_path)), manifest, "train", None, gb, rank, size, ReaderSettings(**how)
        )
        reader.close()
        return reader.order_state()

    assert (
        explain_difference(state(), state(1, 3, threads=7, max_bytes=10**8, ahead=5, chunk_bytes=1, audit=True)) == []
    )
    assert explain_difference(state(), state(seed=4, lanes=3)) == [
        "lanes: 10 in the checkpoint, 3 now",
        "seed: 0 in the checkpoint, 4 now",
        "window_row_groups: 6 in the checkpoint, 21 now",
    ]
    assert "global_batch: 10 in the checkpoint, 15 now (another global batch)" in explain_difference(
        state(), state(gb=15)
    )
    assert explain_difference({"mix": [{"seed": 1}, {"seed": 2}]}, {"mix": [{"seed": 1}, {"seed": 3}]}) == [
        "mix.1.seed: 2 in the checkpoint, 3 now"
    ]
