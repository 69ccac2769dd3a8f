"""What a rank records of the rows it consumed is what is read back."""

from __future__ import annotations

from pathlib import Path

import torch

from sparkring.conf.storage import open_storage
from sparkring.training.data.audit.log import FORMAT, AuditHeader, AuditLog, read_run
from sparkring.training.data.batch import Batch


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
