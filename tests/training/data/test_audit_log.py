"""What a rank records of the rows it consumed is what is read back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest
import torch

from sparkring.conf.storage import open_storage
from sparkring.training.data.audit.log import FORMAT, AuditHeader, AuditLog, read_run
from sparkring.training.data.batch import Batch, Reader
from sparkring.training.data.epochs import EpochSteps


def test_records_are_read_back_without_the_padding(tmp_path: Path) -> None:
    storage = open_storage(str(tmp_path))
    header = AuditHeader(format=FORMAT, attempt=2, rank=1, size=3, dataset="d", order_state={"seed": 1})
    log = AuditLog(storage, header, flush_steps=2)
    for step in range(3):
        real = torch.tensor([True, True, False]) if step == 2 else None
        weight = torch.tensor([0.0, 1.0, 0.0])  # a row that counts for nothing is consumed all the same
        log.record(4, step, Batch({}, 3, 8, 0, weight, torch.tensor([10 * step, 7, 5]), real))
    assert len(storage.list_files()) == 1  # two steps; the third is not durable yet
    log.flush()
    log.flush()  # nothing new: no file
    files = read_run(storage)
    assert len(files) == 2 and {found.model_dump_json() for found, _ in files} == {header.model_dump_json()}
    records = [record for _, part in files for record in part]
    assert [(r.attempt, r.rank, r.size, r.epoch, r.step, r.global_rows) for r in records] == [
        (2, 1, 3, 4, s, 8) for s in range(3)
    ]
    assert [r.ids.tolist() for r in records] == [[0, 7, 5], [10, 7, 5], [20, 7]]


class Steps:
    """A reader whose batch of step s has the row s, two steps an epoch."""

    steps_per_epoch, epochs = 2, EpochSteps(4, 2)

    def batches(self, consumed_samples: int, steps: int) -> Iterator[Batch]:
        first = consumed_samples // 2
        return (Batch({}, 1, 2, 0, ids=torch.tensor([step])) for step in range(first, first + steps))


@pytest.mark.parametrize("before", [0, 3])
def test_steps_that_a_dead_process_made_and_did_not_record_are_recorded_once(tmp_path: Path, before: int) -> None:
    storage, reader = open_storage(str(tmp_path)), cast(Reader, Steps())
    header = AuditHeader(format=FORMAT, attempt=1, rank=0, size=2, dataset="d", order_state={})
    dead = AuditLog(storage, header)
    dead.record_steps(reader, 2, 2 + before)
    dead.flush()
    following = AuditLog(storage, header)
    following.record_steps(reader, 2, 6)
    following.flush()
    records = sorted((r.epoch, r.step, r.ids.tolist()) for _, part in read_run(storage) for r in part)
    assert records == [(1, 0, [2]), (1, 1, [3]), (2, 0, [4]), (2, 1, [5])]
