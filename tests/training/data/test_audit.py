"""The audit proves what is true and finds what is not."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkring.conf.blocks.data import DataConfig
from sparkring.conf.manifest import DatasetManifest
from sparkring.conf.storage import open_storage
from sparkring.training.data.audit.check import (
    AuditReport,
    Expected,
    check_records,
    check_run,
    expected_rows,
    steps_on_servers,
)
from sparkring.training.data.audit.log import FORMAT, AuditHeader, AuditLog, StepRecord, read_records, read_run
from sparkring.training.data.reader import ParquetReader
from sparkring.training.data.request import DataRank, ReadRequest
from sparkring.training.data.source import FileSource

MakeDataset = Callable[..., DatasetManifest]


class Run:
    """A training run without a model: attempts read, record and are cut off where the test says."""

    def __init__(self, folder: Path, manifest: DatasetManifest) -> None:
        self.folder, self.manifest, self.attempts = folder, manifest, 0
        self.how: dict[str, Any] = {"lanes": 8, "seed": 1, "tail": "pad", "audit": True}

    def reader(self, rank: int = 0, size: int = 1, **how: Any) -> ParquetReader:
        request = ReadRequest(open_storage(str(self.folder)), self.manifest, "train", None, 20)
        return ParquetReader(request, DataRank(rank, size), DataConfig(**self.how | how))

    def attempt(
        self, size: int, epoch: int, start: int, steps: int, lost: int = 0, servers: int = 0, **how: Any
    ) -> None:
        """Every rank consumes `steps` steps; the last rank loses its records of the last `lost` of them."""
        self.attempts += 1
        for rank in range(size):
            reader = self.reader(rank, size, **how)
            header = AuditHeader(
                format=FORMAT,
                attempt=self.attempts,
                rank=rank,
                size=size,
                dataset=str(self.folder),
                order_state=reader.order_state(),
                servers=servers,
            )
            log = AuditLog(open_storage(str(self.folder / "audit")), header, flush_steps=3)
            mine = steps - (lost if rank == size - 1 else 0)
            first = epoch * reader.steps_per_epoch + start
            batches = reader.batches(epoch * reader.epochs.samples + start * 20, steps)
            for step, batch in zip(range(first, first + mine), batches, strict=False):
                log.record(*divmod(step, reader.steps_per_epoch), batch)
            log.flush()
            reader.close()

    def expected(self, steps: int) -> Expected:
        with closing(self.reader()) as reader:
            return expected_rows(reader.order_state(), steps, self.manifest, np.arange(reader.plan.rows))

    def report(self, steps: int) -> AuditReport:
        """Where the newest checkpoint is of `steps`."""
        return check_run(read_run(open_storage(str(self.folder / "audit"))), self.expected(steps))

    def records(self) -> list[StepRecord]:
        return [record for _, records in read_run(open_storage(str(self.folder / "audit"))) for record in records]


@pytest.fixture
def run(make_dataset: MakeDataset, tmp_path: Path) -> Run:
    return Run(tmp_path, make_dataset(tmp_path, [[30] * 6, [15]]))  # 195 rows, 10 steps


def test_steps_on_servers_are_those_whose_last_attempt_had_some(run: Run) -> None:
    run.attempt(2, 0, 0, 5, servers=2)
    run.attempt(1, 0, 3, 4)  # from the checkpoint of step 3
    run.attempt(2, 0, 7, 3, servers=1)
    run.attempt(2, 1, 0, 2, servers=1)
    files = read_run(open_storage(str(run.folder / "audit")))
    assert steps_on_servers(files, run.expected(11)) == [0, 1, 2, 7, 8, 9, 10], "step 11 has no checkpoint yet"


def test_two_whole_epochs_are_proven(run: Run) -> None:
    run.attempt(2, 0, 0, 10)
    run.attempt(2, 1, 0, 10)
    report = run.report(20)
    assert report.ok and [(e.rows, e.exact) for e in report.epochs] == [(195, True), (195, True)]
    assert "every row exactly once" in report.lines()[0]


def test_attempts_that_read_on_into_the_next_epoch_are_proven(run: Run) -> None:
    run.attempt(2, 0, 0, 14)
    run.attempt(3, 1, 4, 6)
    report = run.report(20)
    assert report.ok and [e.exact for e in report.epochs] == [True, True]


def test_crashes_and_changed_worlds_are_proven(run: Run) -> None:
    run.attempt(3, 0, 0, 7, lost=2)  # dies in step 7; the last rank's records of 5 and 6 are lost
    run.attempt(2, 0, 4, 3)  # resumes from a checkpoint after 4, with two ranks, dies again
    run.attempt(5, 0, 6, 4)  # and with five
    report = run.report(10)
    assert report.ok, report.lines()
    assert report.epochs[0].attempts == (1, 2, 3) and report.epochs[0].worlds == (2, 3, 5)


def test_an_epoch_that_is_not_over_is_not_called_proven(run: Run) -> None:
    run.attempt(2, 0, 0, 9)
    report = run.report(9)
    assert not report.ok and not report.epochs[0].complete and "not finished" in report.lines()[0]


def test_steps_nobody_recorded_are_found(run: Run) -> None:
    run.attempt(2, 0, 0, 4)
    run.attempt(2, 0, 6, 4)  # resumed too late
    report = run.report(10)
    assert not report.ok and "steps missing: 2 of 10, such as [4, 5]" in " ".join(report.problems)


def test_another_order_after_a_restart_is_found(run: Run) -> None:
    run.attempt(2, 0, 0, 6)
    run.attempt(2, 0, 4, 6, seed=2)
    problems = " ".join(run.report(10).problems)
    assert "seed: 1 in the checkpoint, 2 now" in problems
    assert "attempt 2 consumed other rows than attempt 1" in problems and "more than once" in problems


def test_a_reader_that_decodes_one_row_group_twice_and_another_never_is_found(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its plan is right and its batches have the right sizes: only what was decoded says so."""
    read = FileSource.read
    monkeypatch.setattr(FileSource, "read", lambda self, group: read(self, 2 if group == 4 else group))
    run.attempt(2, 0, 0, 10)
    report = run.report(10)
    assert not report.ok and not report.epochs[0].exact
    assert "epoch 0: 30 rows consumed more than once, such as [60, 61, 62, 63, 64]" in report.problems


def test_a_reader_that_serves_another_epochs_batches_is_found(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every row once, and yet not the run that was asked for."""
    batches = ParquetReader.batches
    monkeypatch.setattr(ParquetReader, "batches", lambda self, consumed, *n: batches(self, consumed + 195, *n))
    run.attempt(2, 0, 0, 10)
    assert "10 steps whose rows are not those the order gives them" in " ".join(run.report(10).problems)


def test_what_the_checkpoint_vouches_for_must_be_recorded(run: Run) -> None:
    """Records of whole epochs that are gone, or of one rank, leave nothing that contradicts what is left."""
    for epoch in (0, 1, 2):
        run.attempt(2, epoch, 0, 10)
    assert run.report(30).ok
    every = read_run(open_storage(str(run.folder / "audit")))
    for epoch in (0, 1, 2):
        left = [(h, [r for r in records if r.epoch != epoch]) for h, records in every]
        problems = check_run(left, run.expected(30)).problems
        assert any("0, 1, 2" in p or "epochs not recorded" in p or "steps missing" in p for p in problems), problems
    for rank in (0, 1):
        left = [(h, records) for h, records in every if (h.attempt, h.rank) != (2, rank)]
        assert "epoch 1: steps missing: 10 of 10, such as [0, 1, 2, 3, 4]" in check_run(left, run.expected(30)).problems
    assert not run.report(31).ok and "epochs not recorded: 1 of 4, such as [3]" in run.report(31).problems


def test_single_spoilt_records_are_found(run: Run) -> None:
    run.attempt(2, 0, 0, 10)
    good, expected = run.records(), run.expected(10)
    assert check_records(good, expected).ok
    twice = good[3].ids.copy()
    twice[0] = good[4].ids[0]
    spoilt = {
        "rows consumed more than once": replace(good[3], ids=twice),
        "rows that do not exist": replace(good[3], ids=good[3].ids + 500),
        "ranks consumed": replace(good[3], ids=good[3].ids[:-1]),
        "ranks disagree": replace(good[3], global_rows=good[3].global_rows + 1),
        "recorded it twice": good[2],
        "of worlds that differ": replace(good[3], size=3),
        "steps missing": replace(good[3], step=2**40),
        "steps missing: 1 of 10": replace(good[3], epoch=2**40),
    }
    for message, record in spoilt.items():
        report = check_records([*good[:3], record, *good[4:]], expected)
        assert not report.ok and message in " ".join(report.problems), (message, report.problems)


def test_ids_swapped_between_two_steps_are_found(run: Run) -> None:
    run.attempt(1, 0, 0, 10)
    good, expected = run.records(), run.expected(10)
    first, second = good[3].ids.copy(), good[7].ids.copy()
    first[0], second[0] = second[0], first[0]
    swapped = [*good[:3], replace(good[3], ids=first), *good[4:7], replace(good[7], ids=second), *good[8:]]
    assert "2 steps whose rows are not those the order gives them, such as [3, 7]" in " ".join(
        check_records(swapped, expected).problems
    )


def test_a_header_that_says_other_rows_is_found(run: Run) -> None:
    run.attempt(2, 0, 0, 10)
    (header, records), *rest = read_run(open_storage(str(run.folder / "audit")))
    spoilt = header.model_copy(update={"order_state": header.order_state | {"rows": 190}})
    report = check_run([(spoilt, records), *rest], run.expected(10))
    assert not report.ok and "rows: 195 in the checkpoint, 190 now" in report.problems[0]
    state = run.reader().order_state()
    with pytest.raises(ValueError, match=r"190 rows .* has 195"):
        expected_rows(state | {"rows": 190}, 10, run.manifest, np.arange(195))
    with pytest.raises(ValueError, match="one of the two was changed"):
        expected_rows(state, 10, run.manifest, np.arange(194))


def test_damaged_files_are_named_in_bounded_time_and_memory(run: Run) -> None:
    run.attempt(1, 0, 0, 3)
    (path,) = (run.folder / "audit").rglob("*.ids")
    line, _, body = path.read_bytes().partition(b"\n")
    numbers = np.frombuffer(body, np.int64)

    def spoiled(at: int, value: int) -> bytes:
        copy = numbers.copy()
        copy[at] = value
        return copy.tobytes()

    assert numbers[3] == 20
    for changed in (
        body[:-1], body[:-8], body + bytes(8), spoiled(3, -1), spoiled(3, -5), spoiled(3, -(2**63)), spoiled(3, 2**62),
        spoiled(1, -1), spoiled(0, -(2**40)),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"a\.ids: .*cut or changed"):
            read_records(line + b"\n" + changed, "a.ids")
    for first in (b"", b"{", b"[" * 100_000, b"{}", line.replace(b'"format":3', b'"format":4'), b"\xff" * 50):
        with pytest.raises(ValueError, match=r"a\.ids, first line: "):
            read_records(first + b"\n" + body, "a.ids")
    for at, value in ((0, 2**62), (1, 2**62), (2, 2**62), (4, 2**62), (4, -(2**62))):
        _, records = read_records(line + b"\n" + spoiled(at, value), "a.ids")
        assert not check_records(records, run.expected(3)).ok
    assert not check_records(run.records(), run.expected(2**62)).ok


@given(st.integers(0, 2**31), st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), max_size=8))
@settings(max_examples=200)
def test_whatever_bytes_a_file_has_it_is_read_or_refused_by_name(
    run: Run, cut: int, flips: list[tuple[int, int]]
) -> None:
    if not run.attempts:
        run.attempt(1, 0, 0, 3)
    data = bytearray(next((run.folder / "audit").rglob("*.ids")).read_bytes())
    for at, value in flips:
        data[at % len(data)] = value
    try:
        _, records = read_records(bytes(data[: cut % (2 * len(data))]), "a.ids")
    except ValueError as error:
        assert str(error).startswith("a.ids")
        return
    assert isinstance(check_records(records, run.expected(3)), AuditReport)


def test_no_records_and_no_ids_say_what_to_do(run: Run, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"train with data.audit: true"):
        read_run(open_storage(str(tmp_path / "nothing")))
    with pytest.raises(ValueError, match=r"set data.audit to true"):
        run.attempt(1, 0, 0, 1, audit=False)
