"""Records the ids of the rows that a rank has consumed, and reads such records back.

The ids are the row numbers stored in the shards, decoded with the values, so a reader that decodes one row group twice
and another never records just that. Records are stored in `<folder>/attempt-00001/rank-00000-000000.ids`: one JSON line
(`AuditHeader`), then per step four int64 (epoch, step, real rows of the global batch, n) and n int64 ids. A file
appears whole or not at all; the loop flushes before a checkpoint is committed, so that no step that a checkpoint covers
is missing, and steps recorded after it are recorded again by the attempt that resumes from it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field

from sparkring.conf.plain_text import count_of
from sparkring.conf.storage import Storage
from sparkring.conf.stored import Count, Stored, parse
from sparkring.training.data.batch import Batch, Reader
from sparkring.training.data.order import Ints

FORMAT = 3
NUMBERS = 4  # before a step's ids


class AuditHeader(Stored):
    """The first line of a file of records.

    It names who wrote the file, the dataset (URI), and the order in which it was read. `servers`: parameter servers
    of the attempt.
    """

    format: Literal[3]
    attempt: Count
    rank: Count
    size: Annotated[int, Field(ge=1)]
    dataset: str
    order_state: dict[str, Any]
    servers: Count = 0


class AuditLog:
    """One rank's record of one attempt."""

    def __init__(self, storage: Storage, header: AuditHeader, flush_steps: int = 200, by: int | None = None) -> None:
        """Open a log. `by`: the rank that writes, if it is not the header's (parts.py)."""
        self._storage, self._header, self._flush_steps = storage, header, flush_steps
        writer = "" if by is None else f"-by-{by:05d}"
        self._stem = f"attempt-{header.attempt:05d}/rank-{header.rank:05d}{writer}"
        self._parts: list[Ints] = []  # per step, its four numbers and its ids
        self._segment = 0

    def record(self, epoch: int, step: int, batch: Batch) -> None:
        """Record a batch that the optimizer has consumed."""
        if batch.ids is None:
            raise ValueError("the batch carries no ids: set data.audit to true")
        ids = batch.ids[batch.real_rows()]
        self._parts.append(np.array([epoch, step, batch.global_rows, len(ids)], np.int64))
        self._parts.append(ids.numpy().astype(np.int64))
        if len(self._parts) >= 2 * self._flush_steps:
            self.flush()

    def take_over(self) -> list[StepRecord]:
        """Continue the files of a process of this rank that died in this attempt; return what they record."""
        own = sorted(path for path in self._storage.list_files() if path.startswith(f"{self._stem}-"))
        self._segment = len(own)
        found = (read_records(self._storage.read_bytes(path), f"{self._storage.uri}/{path}") for path in own)
        return [record for _, records in found for record in records]

    def record_steps(self, reader: Reader, begun: int, step: int) -> None:
        """Record the steps that a process of this rank, which died in this attempt, had made and not recorded.

        Args:
            reader: reader of the training split.
            begun: steps done when the attempt began.
            step: steps done by the process that died.
        """
        recorded, per_epoch = self.take_over(), reader.steps_per_epoch
        first = recorded[-1].epoch * per_epoch + recorded[-1].step + 1 if recorded else begun
        batches = reader.batches(reader.epochs.consumed_at(first), max(step - first, 0))
        for number, batch in enumerate(batches, first):
            self.record(*divmod(number, per_epoch), batch)

    def flush(self) -> None:
        """Write what was recorded; due before a checkpoint is committed, and at the end."""
        if not self._parts:
            return
        data = self._header.model_dump_json().encode() + b"\n" + np.concatenate(self._parts).tobytes()
        self._storage.put_atomic(f"{self._stem}-{self._segment:06d}.ids", data)
        self._segment += 1
        self._parts = []


@dataclass(frozen=True)
class StepRecord:
    """What one rank recorded of one step."""

    attempt: int
    rank: int
    size: int
    epoch: int
    step: int
    global_rows: int
    ids: Ints


def read_run(storage: Storage) -> list[tuple[AuditHeader, list[StepRecord]]]:
    """Read all files of an audit folder; ValueError for an empty or damaged one."""
    paths = [path for path in storage.list_files() if path.endswith(".ids")]
    if not paths:
        raise ValueError(f"{storage.uri}: no audit records; train with data.audit: true")
    return [read_records(storage.read_bytes(path), f"{storage.uri}/{path}") for path in paths]


def read_records(data: bytes, path: str) -> tuple[AuditHeader, list[StepRecord]]:
    """Read one file's header and records.

    ValueError naming `path` for another format, or records that are cut or changed. Takes memory and time in proportion
    to `data`, for any content.
    """
    line, _, body = data.partition(b"\n")
    header = parse(AuditHeader, line, f"{path}, first line")
    if len(body) % 8:
        raise ValueError(
            f"{path}: {count_of(len(body), 'byte')} of records, not a multiple of 8: the file was cut or changed"
        )
    numbers, at, records = np.frombuffer(body, np.int64), 0, list[StepRecord]()
    while at < len(numbers):
        epoch, step, global_rows, count = [*numbers[at : at + NUMBERS].tolist(), *[-1] * NUMBERS][:NUMBERS]
        end = at + NUMBERS + count
        if min(epoch, step, global_rows, count) < 0 or end > len(numbers):
            raise ValueError(f"{path}: record {len(records)}, of {count_of(count, 'id')}, is cut or changed")
        ids = numbers[at + NUMBERS : end]
        records.append(StepRecord(header.attempt, header.rank, header.size, epoch, step, global_rows, ids))
        at = end
    return header, records
