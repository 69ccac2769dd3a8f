"""A date while its job runs: how it is run, its ledger entry, and the end of a process that lost its lease."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NoReturn

from sparkring.conf.load import Resolved
from sparkring.conf.schedule.block import ScheduleConfig
from sparkring.conf.secrets import redact
from sparkring.pipelines.run.exit_codes import Exit
from sparkring.pipelines.schedule.errors import LeaseLost
from sparkring.pipelines.schedule.lease import Lease
from sparkring.pipelines.schedule.ledger import DateRecord, Ledger


@dataclass(frozen=True)
class DateOptions:
    """How a date is run.

    `rerun`: although it is done. `train`: on its dataset. `promote`: its model may get the alias. `in_time`: it is
    tonight's job, which can be late. `exit_of`: the exit code of an error.
    """

    exit_of: Callable[[BaseException], Exit]
    rerun: bool = False
    train: bool = True
    promote: bool = True
    in_time: bool = True


@dataclass
class DateJob:
    """A date while its job runs: its ledger entry, and the leases under which it is written."""

    resolved: Resolved
    options: DateOptions
    ledger: Ledger
    record: DateRecord
    leases: tuple[Lease, ...] = field(default=())

    @property
    def schedule(self) -> ScheduleConfig:
        schedule = self.resolved.config.schedule
        assert schedule is not None, "a recipe with a date has a schedule"
        return schedule

    def check(self, what: str) -> None:
        """End this process where a lease was lost: whatever it did next would mix with another's work."""
        for lease in self.leases:
            try:
                lease.check(what)
            except LeaseLost as error:
                stop_at_once(str(error), self.record)

    def update(self, **changes: Any) -> None:
        self.check("the entry of the date")
        self.record = self.ledger.write(replace(self.record, **changes))


def outcome_line(record: DateRecord, status: str, code: int, error: BaseException | None = None) -> str:
    """Return the JSON object, in one line, that tells a scheduler the outcome of a date."""
    shown = asdict(record)
    keys = ("run", "dataset", "fingerprint", "attempts", "late", "scores", "promotion", "mlflow_url", "model_version")
    return json.dumps(
        {"ds": record.ds, "status": status, "exit_code": int(code)}
        | {key: shown[key] for key in keys}
        | {"error": record.error if error is None else redact(str(error) or type(error).__name__)}
    )


def stop_at_once(why: str, record: DateRecord) -> NoReturn:
    """End this process without another write: not even of what `finally` would write. Its ranks end with it."""
    for stream, text in (
        (sys.stderr, f"sparkring: {redact(why)}"),
        (sys.stdout, outcome_line(record, "try_later", Exit.TRY_LATER, LeaseLost(why))),
    ):
        with suppress(OSError, ValueError):  # nobody reads it any more
            stream.write(text + "\n")
            stream.flush()
    os._exit(Exit.TRY_LATER)
