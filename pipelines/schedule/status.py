"""What became of a recipe's last dates, and whether the newest success is too old: `sparkring status`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from itertools import groupby

from sparkring.conf.blocks.promote import MODEL
from sparkring.conf.plain_text import count_of, score_text
from sparkring.conf.schedule.block import ScheduleConfig
from sparkring.conf.schedule.dates import between, dates_since_begin, last_ended, moved
from sparkring.pipelines.run.exit_codes import Exit
from sparkring.pipelines.schedule.ledger import DateRecord, Ledger

STALE = Exit.BUG  # exit code of `status`: the newest success is too old
SCORES_SHOWN = 3


@dataclass(frozen=True)
class Status:
    """`records`: of the last dates that should be done, None where a date has no entry.

    `newest`: the last date that succeeded; `age_s`: since its job ended; both None where none did.
    """

    records: dict[str, DateRecord | None]
    newest: str | None
    age_s: float | None

    def is_stale(self, max_age_s: float | None) -> bool:
        """Return whether the newest success is older than that, or missing."""
        return max_age_s is not None and (self.age_s is None or self.age_s > max_age_s)


def status_of(schedule: ScheduleConfig, records: Sequence[DateRecord], last: int, now: datetime) -> Status:
    """Return the state of the last ended dates; if none has an entry, of the last dates that do."""
    newest_due = last_ended(schedule, now)
    before_it = max(0, dates_since_begin(schedule, newest_due))
    first = max(moved(schedule, newest_due, -min(last - 1, before_it)), schedule.begin)
    known = {record.ds: record for record in records}
    shown = {ds: known.get(ds) for ds in between(schedule, first, newest_due)}
    if not any(shown.values()):  # as after a backfill of old dates
        shown = {ds: known.get(ds) for ds in sorted(known)[-last:]} | shown
    succeeded = [record for record in records if record.status == "succeeded"]
    if not succeeded:
        return Status(shown, None, None)
    newest = max(succeeded, key=lambda record: record.ds)
    # A host whose clock is behind that of the job sees an end in the future: that is not old.
    age_s = max(0.0, (now - datetime.fromisoformat(newest.finished_at)).total_seconds())
    return Status(shown, newest.ds, age_s)


def table(records: Mapping[str, DateRecord | None]) -> list[str]:
    """List one line per date; one for several missing dates in a row."""
    lines = list[str]()
    for is_missing, group in groupby(records, key=lambda ds: records[ds] is None):
        dates = list(group)
        if is_missing and len(dates) > 2:
            lines.append(f"{dates[0]} to {dates[-1]}  missing, {count_of(len(dates), 'date')}")
        else:
            lines += [line(ds, records[ds]) for ds in dates]
    return lines


def line(ds: str, record: DateRecord | None) -> str:
    if record is None:
        return f"{ds}  missing"
    scores = list(record.scores.get(MODEL, {}).items())[:SCORES_SHOWN]
    words = [f"{ds}  {record.status:<11}", f"attempts {record.attempts}"]
    words += [] if record.exit_code is None else [f"exit {record.exit_code}"]
    words += ["late"] if record.late else []
    words += [record.family] if record.family else []
    words += [f"{name} {score_text(value)}" for name, value in scores]
    words += [str(record.promotion.get("decision", ""))] if record.promotion else []
    words += [record.error.splitlines()[0]] if record.error else []
    return "  ".join(words)


def as_json(status: Status, is_stale: bool) -> str:
    dates = {ds: None if record is None else asdict(record) for ds, record in status.records.items()}
    return json.dumps({"newest": status.newest, "age_s": status.age_s, "stale": is_stale, "dates": dates})


def status_text(
    schedule: ScheduleConfig, ledger: Ledger, last: int, max_age_s: float | None, as_object: bool
) -> tuple[int, str]:
    """Describe the last dates: exit code, STALE if the newest success is too old, and text.

    Args:
        schedule: schedule of the recipe.
        ledger: ledger of the recipe.
        last: number of dates to show.
        max_age_s: largest age of the newest success; None for any age.
        as_object: one JSON object, for programs.
    """
    status = status_of(schedule, ledger.records(), last, datetime.now(UTC))
    is_stale = status.is_stale(max_age_s)
    code = STALE if is_stale else Exit.OK
    if as_object:
        return code, as_json(status, is_stale)
    ended = "no date has succeeded" if status.age_s is None else f"{status.newest} ended {status.age_s:.0f} s ago"
    limit = f", more than {max_age_s:.0f} s" if is_stale and status.age_s is not None else ""
    return code, "\n".join([*table(status.records), ended + limit])
