"""Proof that an epoch was every row exactly once: each rank records the ids it consumed, a pure check adds them up.

Records lie in `<folder>/attempt-00001/rank-00000-000000.ids`: one JSON line saying who wrote it, per step five int64
(epoch, step, cursor, real rows of the global batch, n) and n int64 ids. A file appears whole or not at all; the loop
flushes before a checkpoint is committed, so that no step a checkpoint vouches for is missing, and steps recorded after
it are recorded again by the attempt that resumes from it.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from conf.storage import Storage, open_storage
from training.data.batch import Batch
from training.data.order import Ints
from training.data.resume import explain_difference

FORMAT = 1
SHOWN = 5


class AuditLog:
    """One rank's record of one attempt. `rows` of the split, `epoch_samples` of them consumed per epoch."""

    def __init__(
        self, storage: Storage, attempt: int, rank: int, size: int, order_state: Mapping[str, Any],
        rows: int, epoch_samples: int, flush_steps: int = 200,
    ) -> None:  # fmt: skip
        self._storage, self._flush_steps = storage, flush_steps
        self._stem = f"attempt-{attempt:05d}/rank-{rank:05d}"
        self._header = {
            "format": FORMAT, "attempt": attempt, "rank": rank, "size": size, "rows": rows,
            "epoch_samples": epoch_samples, "order_state": dict(order_state),
        }  # fmt: skip
        self._parts: list[Ints] = []
        self._segment = 0

    def record(self, epoch: int, step: int, batch: Batch) -> None:
        """The optimizer has consumed this batch. ValueError where the reader is not in audit mode."""
        if batch.ids is None:
            raise ValueError("the batch carries no ids: set data.audit to true")
        ids = batch.ids if batch.weight is None else batch.ids[batch.weight.cpu() > 0]
        self._parts.append(np.array([epoch, step, batch.cursor, batch.global_rows, len(ids)], np.int64))
        self._parts.append(ids.numpy().astype(np.int64))
        if len(self._parts) >= 2 * self._flush_steps:
            self.flush()

    def flush(self) -> None:
        """Make what was recorded durable; call it before a checkpoint is committed, and at the end."""
        if not self._parts:
            return
        data = json.dumps(self._header).encode() + b"\n" + np.concatenate(self._parts).tobytes()
        self._storage.put_atomic(f"{self._stem}-{self._segment:06d}.ids", data)
        self._segment += 1
        self._parts = []


@dataclass(frozen=True)
class StepRecord:
    """What one rank says of one step."""

    attempt: int
    rank: int
    size: int
    epoch: int
    step: int
    cursor: int
    global_rows: int
    ids: Ints


@dataclass(frozen=True)
class EpochReport:
    epoch: int
    steps: int
    rows: int
    attempts: tuple[int, ...]
    worlds: tuple[int, ...]
    complete: bool
    exact: bool  # complete, and every row it had to consume exactly once


@dataclass(frozen=True)
class AuditReport:
    """`ok`: at least one epoch is complete, every complete one is exact, and nothing contradicts anything."""

    epochs: tuple[EpochReport, ...]
    problems: tuple[str, ...]
    expected_rows: int = 0

    @property
    def ok(self) -> bool:
        return not self.problems and any(e.exact for e in self.epochs)

    def lines(self) -> list[str]:
        """For people."""
        out = []
        for e in self.epochs:
            verdict = "every row exactly once" if e.exact else "NOT exact" if e.complete else "not finished"
            out.append(
                f"epoch {e.epoch}: {e.steps} steps, {e.rows} of {self.expected_rows} rows, "
                f"attempts {list(e.attempts)}, ranks {list(e.worlds)}: {verdict}"
            )
        return [*out, *(f"problem: {p}" for p in self.problems)]


def audit_run(folder: str) -> AuditReport:
    """Read `<folder>` (the audit folder of a run, any storage URI) and check it. ValueError where there is none."""
    storage = open_storage(folder)
    records: list[StepRecord] = []
    headers: list[dict[str, Any]] = []
    for path in storage.list_files():
        if path.endswith(".ids"):
            header, found = read_records(storage.read_bytes(path), path)
            headers.append(header)
            records += found
    if not headers:
        raise ValueError(f"{folder}: no audit records; train with data.audit: true")
    problems = []
    for header in headers[1:]:
        for line in explain_difference(headers[0]["order_state"], header["order_state"]):
            problems.append(f"attempt {header['attempt']}, rank {header['rank']} read in another order: {line}")
    return check_records(records, headers[0]["rows"], headers[0]["epoch_samples"], sorted(set(problems)))


def read_records(data: bytes, path: str) -> tuple[dict[str, Any], list[StepRecord]]:
    """One file's header and records; ValueError for a newer format."""
    line, _, body = data.partition(b"\n")
    header = json.loads(line)
    if header["format"] > FORMAT:
        raise ValueError(f"{path}: audit format {header['format']} is newer than {FORMAT}; upgrade sparkring")
    numbers, at, records = np.frombuffer(body, np.int64), 0, []
    while at < len(numbers):
        epoch, step, cursor, global_rows, count = numbers[at : at + 5].tolist()
        ids = numbers[at + 5 : at + 5 + count]
        records.append(
            StepRecord(header["attempt"], header["rank"], header["size"], epoch, step, cursor, global_rows, ids)
        )
        at += 5 + count
    return header, records


def check_records(
    records: Iterable[StepRecord], rows: int, epoch_samples: int, problems: Sequence[str] = ()
) -> AuditReport:
    """The proof. For each step the last attempt that all its ranks recorded counts; attempts that replayed a step must
    have seen the same rows; the steps of an epoch must consume `epoch_samples` different rows of 0..rows - 1."""
    said = list(problems)
    steps: dict[tuple[int, int], dict[int, list[StepRecord]]] = {}
    for record in records:
        steps.setdefault((record.epoch, record.step), {}).setdefault(record.attempt, []).append(record)
    counted = {key: _agreed(key, attempts, said) for key, attempts in sorted(steps.items())}
    epochs = []
    for epoch in sorted({e for e, _ in counted}):
        parts = {step: found for (e, step), found in counted.items() if e == epoch and found}
        epochs.append(_epoch(epoch, parts, rows, epoch_samples, said))
    for earlier, later in itertools.pairwise(epochs):
        if not earlier.complete:
            said.append(
                f"epoch {later.epoch} was begun, but epoch {earlier.epoch} has {earlier.rows} of {epoch_samples} rows"
            )
    return AuditReport(tuple(epochs), tuple(said), epoch_samples)


def _agreed(key: tuple[int, int], attempts: dict[int, list[StepRecord]], said: list[str]) -> list[StepRecord]:
    """The records that count for a step; empty where no attempt's ranks all recorded it."""
    name = f"epoch {key[0]}, step {key[1]}"
    chosen: list[StepRecord] = []
    for attempt, found in sorted(attempts.items()):
        ranks = [r.rank for r in found]
        if len(set(ranks)) != len(ranks):
            said.append(f"{name}: a rank of attempt {attempt} recorded it twice")
        if len(set(ranks)) < found[0].size:
            continue  # the attempt ended here
        if chosen and not np.array_equal(_ids(chosen), _ids(found)):
            said.append(f"{name}: attempt {attempt} consumed other rows than attempt {chosen[0].attempt}")
        chosen = found
    if chosen and len({(r.cursor, r.global_rows) for r in chosen}) > 1:
        said.append(f"{name}: ranks disagree on cursor or rows of the global batch")
    if chosen and len(_ids(chosen)) != chosen[0].global_rows:
        said.append(f"{name}: ranks consumed {len(_ids(chosen))} rows, the global batch has {chosen[0].global_rows}")
    return chosen


def _ids(records: Sequence[StepRecord]) -> Ints:
    return np.sort(np.concatenate([r.ids for r in records]))


def _epoch(
    epoch: int, parts: dict[int, list[StepRecord]], rows: int, epoch_samples: int, said: list[str]
) -> EpochReport:
    ids = np.sort(np.concatenate([_ids(found) for found in parts.values()])) if parts else np.zeros(0, np.int64)
    repeated = np.unique(ids[1:][ids[1:] == ids[:-1]])
    outside = ids[(ids < 0) | (ids >= rows)]
    gaps = sorted(set(range(max(parts, default=-1) + 1)) - set(parts))
    for what, found in (
        ("rows consumed more than once", repeated),
        ("rows that do not exist", outside),
        ("steps missing", gaps),
    ):
        if len(found):
            said.append(f"epoch {epoch}: {len(found)} {what}, such as {[int(i) for i in found[:SHOWN]]}")
    complete = len(ids) >= epoch_samples
    exact = len(ids) == epoch_samples and not (len(repeated) or len(outside) or gaps)
    if len(ids) > epoch_samples:
        said.append(f"epoch {epoch}: {len(ids)} rows consumed, an epoch has {epoch_samples}")
    used = [r for found in parts.values() for r in found]
    return EpochReport(
        epoch, len(parts), len(ids), tuple(sorted({r.attempt for r in used})), tuple(sorted({r.size for r in used})),
        complete, exact,
    )  # fmt: skip
