"""Parts are recorded as if their own data ranks had, once, also by a process that takes the place of a dead one."""

from __future__ import annotations

from pathlib import Path

import torch

from sparkring.conf.storage import open_storage
from sparkring.training.data.audit.log import FORMAT, AuditHeader, read_run
from sparkring.training.data.audit.parts import PartsAudit
from sparkring.training.data.batch import Batch, BatchShare

PER_EPOCH = 3


def header(rank: int) -> AuditHeader:
    return AuditHeader(format=FORMAT, attempt=1, rank=rank, size=2, dataset="d", order_state={})


def read(part: BatchShare) -> Batch:
    return Batch({}, 2, 4, 0, ids=torch.tensor([10 * part.clock + part.stream, 1000 + part.clock]), part=part)


def recorded(folder: Path) -> list[tuple[int, int, int]]:
    """(rank, epoch, step), sorted."""
    files = read_run(open_storage(str(folder)))
    return sorted((record.rank, record.epoch, record.step) for _, part in files for record in part)


def test_each_part_is_recorded_under_its_stream(tmp_path: Path) -> None:
    audits = [PartsAudit(open_storage(str(tmp_path)), header(rank)) for rank in range(3)]  # the third is a backup
    for audit, part in zip(
        (0, 2, 1, 2), (BatchShare(0, 0), BatchShare(0, 1), BatchShare(4, 1), BatchShare(4, 0)), strict=True
    ):
        audits[audit].record(*divmod(part.clock, PER_EPOCH), read(part))
    for audit in audits:
        audit.flush()
    assert recorded(tmp_path) == [(0, 0, 0), (0, 1, 1), (1, 0, 0), (1, 1, 1)]
    ids = {(r.rank, r.epoch, r.step): r.ids.tolist() for _, part in read_run(open_storage(str(tmp_path))) for r in part}
    assert ids[1, 1, 1] == [41, 1004]


def test_what_a_dead_process_had_not_recorded_is_recorded_by_the_next_and_nothing_twice(tmp_path: Path) -> None:
    counted = [BatchShare(0, 1), BatchShare(1, 0), BatchShare(2, 1), BatchShare(3, 1)]
    dead = PartsAudit(open_storage(str(tmp_path)), header(2))
    for part in counted[:2]:
        dead.record(*divmod(part.clock, PER_EPOCH), read(part))
    dead.flush()
    dead.record(0, 2, read(counted[2]))  # and is killed
    following = PartsAudit(open_storage(str(tmp_path)), header(2))
    following.record_again(counted, read, PER_EPOCH)
    following.record(1, 1, read(BatchShare(4, 0)))
    following.flush()
    assert recorded(tmp_path) == [(0, 0, 1), (0, 1, 1), (1, 0, 0), (1, 0, 2), (1, 1, 0)]
