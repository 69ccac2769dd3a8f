"""Prove that an epoch was every row exactly once, from the records of all ranks.

What the run must have consumed is `Expected`: known from its checkpoint and its dataset's manifest, never from the
records.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sparkring.conf.blocks.data import DataConfig
from sparkring.conf.digest import digest
from sparkring.conf.manifest import DatasetManifest
from sparkring.conf.plain_text import count_of
from sparkring.training.data.audit.log import AuditHeader, StepRecord
from sparkring.training.data.order import ORDER_VERSION, Ints, epoch_ids, make_plan
from sparkring.training.data.resume import OrderState, explain_difference

SHOWN = 5


@dataclass(frozen=True)
class Expected:
    """What a run must have consumed.

    steps: global batches that its newest checkpoint covers. ids: all rows, ascending. epoch_ids(epoch): the rows of an
    epoch in their order, batch after batch of `global_batch`; an epoch is `steps_per_epoch` batches.
    """

    steps: int
    steps_per_epoch: int
    global_batch: int
    ids: Ints
    epoch_ids: Callable[[int], Ints]
    order_state: Mapping[str, Any]

    @property
    def epoch_rows(self) -> int:
        return min(len(self.ids), self.steps_per_epoch * self.global_batch)

    def due_steps(self, epoch: int) -> int:
        """Return how many steps of the epoch the run must have recorded."""
        return max(0, min(self.steps_per_epoch, self.steps - epoch * self.steps_per_epoch))


def expected_rows(state: Mapping[str, Any], steps: int, manifest: DatasetManifest, kept: Ints) -> Expected:
    """Derive from a checkpoint what a run of `steps` steps had to consume.

    `kept`: the row numbers that quarantine and filters leave, ascending. Raises ValueError where the dataset does not
    hold what the order was made of.
    """
    order = OrderState.model_validate(state)
    if order.order_version != ORDER_VERSION:
        raise ValueError(
            f"the run's rows were ordered by version {order.order_version}, this sparkring's is {ORDER_VERSION}"
        )
    counts, first = list[int](), 0
    for file in manifest.files_of(order.split):
        edges = list(itertools.accumulate(file.row_groups, initial=first))
        first = edges[-1]
        if file.path not in order.quarantined:
            counts += np.diff(np.searchsorted(kept, edges)).tolist()
    names = {"lanes", "window_row_groups", "block_rows", "seed", "tail", "shuffle"}
    plan = make_plan(counts, order.global_batch, DataConfig.model_validate(order.model_dump(include=names)))
    if (found := digest(np.diff(plan.group_start).tolist())) != order.row_groups or plan.rows != order.rows:
        raise ValueError(
            f"the run read {count_of(order.rows, 'row')} in row groups {order.row_groups[:12]}..., dataset "
            f"{manifest.name!r} has {plan.rows} in {found[:12]}...: one of the two was changed"
        )
    return Expected(
        steps, plan.epochs.steps, plan.global_batch, kept, lambda epoch: kept[epoch_ids(plan, epoch)], state
    )


@dataclass(frozen=True)
class EpochReport:
    """Which rows of an epoch were consumed. attempts, worlds: of the job, and their numbers of ranks."""

    epoch: int
    steps: int
    rows: int
    attempts: tuple[int, ...]
    worlds: tuple[int, ...]
    complete: bool
    exact: bool  # complete, and every row it had to consume exactly once, in the order's batches


@dataclass(frozen=True)
class AuditReport:
    """The result of an audit.

    `ok`: at least one epoch is complete, every step that the checkpoint covers is recorded and has the order's rows,
    and there are no contradictions. `left_out`: rows of an epoch beyond its whole batches, if the tail is dropped.
    """

    epochs: tuple[EpochReport, ...]
    problems: tuple[str, ...]
    expected_rows: int = 0
    left_out: int = 0

    @property
    def ok(self) -> bool:
        return not self.problems and any(e.exact for e in self.epochs)

    def lines(self) -> list[str]:
        """Format the report as text lines."""
        out = []
        exact = (
            f"each exactly once, {self.left_out} left out by data.tail" if self.left_out else "every row exactly once"
        )
        for e in self.epochs:
            verdict = exact if e.exact else "NOT exact" if e.complete else "not finished"
            out.append(
                f"epoch {e.epoch}: {count_of(e.steps, 'step')}, {e.rows} of {self.expected_rows + self.left_out} rows, "
                f"attempts {list(e.attempts)}, ranks {list(e.worlds)}: {verdict}"
            )
        return [*out, *(f"problem: {p}" for p in self.problems)]


def check_run(
    files: Sequence[tuple[AuditHeader, list[StepRecord]]], expected: Expected, problems: Sequence[str] = ()
) -> AuditReport:
    """Check all files of a run: `check_records`, and that all have the expected order."""
    other = {
        f"attempt {header.attempt}, rank {header.rank} read in another order: {line}"
        for header, _ in files
        for line in explain_difference(expected.order_state, header.order_state)
    }
    return check_records((r for _, records in files for r in records), expected, [*problems, *sorted(other)])


def steps_on_servers(files: Sequence[tuple[AuditHeader, list[StepRecord]]], expected: Expected) -> list[int]:
    """Find the steps before the checkpoint whose last attempt was on parameter servers, ascending."""
    last: dict[int, AuditHeader] = {}
    for header, records in sorted(files, key=lambda file: file[0].attempt):
        last |= {record.epoch * expected.steps_per_epoch + record.step: header for record in records}
    return sorted(step for step, header in last.items() if header.servers and step < expected.steps)


def check_records(records: Iterable[StepRecord], expected: Expected, problems: Sequence[str] = ()) -> AuditReport:
    """Check records against what was expected.

    For each step the last attempt that all its ranks recorded counts; attempts that replayed a step must have seen the
    same rows; each step's rows are those of the order; an epoch's rows are distinct and among `expected.ids`; and no
    step that the checkpoint covers is missing.
    """
    found = list(problems)
    epochs: dict[int, dict[int, dict[int, list[StepRecord]]]] = {}
    for record in records:
        step = epochs.setdefault(record.epoch, {}).setdefault(record.step, {})
        step.setdefault(record.attempt, []).append(record)
    found += _missing("epochs not recorded", epochs, -(-expected.steps // expected.steps_per_epoch))
    reports = []
    for epoch, steps in sorted(epochs.items()):
        wrong: list[str] = []
        counted = {step: _counted_records(f"epoch {epoch}, step {step}", steps[step], wrong) for step in sorted(steps)}
        counted = {step: parts for step, parts in counted.items() if parts}
        later = expected.steps_per_epoch if epoch < max(epochs) else max(counted, default=-1) + 1
        due = min(expected.steps_per_epoch, max(expected.due_steps(epoch), later))
        wrong += _epoch_problems(epoch, counted, expected, due)
        reports.append(_report(epoch, counted, expected, exact=not wrong))
        found += wrong
    left_out = len(expected.ids) - expected.epoch_rows
    return AuditReport(tuple(reports), tuple(found), expected.epoch_rows, left_out)


def _counted_records(name: str, attempts: dict[int, list[StepRecord]], problems: list[str]) -> list[StepRecord]:
    """Pick the records that count for a step.

    They are of the last attempt of which all ranks recorded it; empty where there is no such attempt.
    """
    chosen: list[StepRecord] = []
    for attempt, found in sorted(attempts.items()):
        ranks = [r.rank for r in found]
        if len(set(ranks)) != len(ranks):
            problems.append(f"{name}: a rank of attempt {attempt} recorded it twice")
        if len({r.size for r in found}) > 1 or max(ranks) >= found[0].size:
            problems.append(f"{name}: attempt {attempt} has records of ranks {sorted(ranks)} of worlds that differ")
        if len(set(ranks)) < found[0].size:
            continue  # the attempt ended here
        if chosen and not np.array_equal(_ids(chosen), _ids(found)):
            problems.append(f"{name}: attempt {attempt} consumed other rows than attempt {chosen[0].attempt}")
        chosen = found
    if len({r.global_rows for r in chosen}) > 1:
        problems.append(f"{name}: ranks disagree on the rows of the global batch")
    if chosen and len(_ids(chosen)) != chosen[0].global_rows:
        problems.append(
            f"{name}: ranks consumed {count_of(len(_ids(chosen)), 'row')}, the global batch has {chosen[0].global_rows}"
        )
    return chosen


def _ids(records: Sequence[StepRecord]) -> Ints:
    return np.sort(np.concatenate([r.ids for r in records]))


def _epoch_problems(epoch: int, counted: Mapping[int, list[StepRecord]], expected: Expected, due: int) -> Iterator[str]:
    """List problems of an epoch's counted records; it must have `due` steps."""
    rows = {step: _ids(parts) for step, parts in counted.items()}
    ids = np.sort(np.concatenate([*rows.values(), np.zeros(0, np.int64)]))
    order, batch, last = expected.epoch_ids(epoch), expected.global_batch, expected.epoch_rows
    moved = [
        step
        for step, found in rows.items()
        if not np.array_equal(found, np.sort(order[min(step * batch, last) : min((step + 1) * batch, last)]))
    ]
    for what, wrong in (
        ("rows consumed more than once", np.unique(ids[1:][ids[1:] == ids[:-1]])),
        ("rows that do not exist", ids[~np.isin(ids, expected.ids)]),
        ("steps whose rows are not those the order gives them", moved),
    ):
        if len(wrong):
            yield f"epoch {epoch}: {len(wrong)} {what}, such as {[int(i) for i in wrong[:SHOWN]]}"
    yield from _missing(f"epoch {epoch}: steps missing", counted, due)


def _missing(what: str, found: Collection[int], due: int) -> Iterator[str]:
    """List the numbers of 0..due - 1 that are not among `found`."""
    if (count := due - sum(number < due for number in found)) > 0:
        shown = itertools.islice((number for number in range(due) if number not in found), SHOWN)
        yield f"{what}: {count} of {due}, such as {list(shown)}"


def _report(epoch: int, counted: Mapping[int, list[StepRecord]], expected: Expected, exact: bool) -> EpochReport:
    used = [record for parts in counted.values() for record in parts]
    complete = len(counted) >= expected.steps_per_epoch
    return EpochReport(
        epoch, len(counted), sum(len(r.ids) for r in used), tuple(sorted({r.attempt for r in used})),
        tuple(sorted({r.size for r in used})), complete, complete and exact,
    )  # fmt: skip
