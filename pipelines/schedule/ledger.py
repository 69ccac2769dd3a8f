"""The ledger of a recipe's dates: one entry per date, never a high-water mark.

    <storage.runs>/<name>/dates/<ds>/state.json      DateRecord

A date that comes late, or is run again, changes its own entry alone. Entries are written by the command that holds the
date's lease.
"""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, Literal

from sparkring.conf.storage import Storage, open_storage
from sparkring.conf.stored import CLOSED, Count, FolderName, Label, StoredError, read, up_to

log = logging.getLogger(__name__)
STATE = "state.json"
DATES = "dates"  # folder below a recipe's runs
DateStatus = Literal["running", "succeeded", "built", "failed", "interrupted"]
"""`built`: the dataset of the date is there, and nothing was trained on it (`backfill --train last|none`)."""


@dataclass(frozen=True, kw_only=True)
class DateRecord:
    """The fields of state.json: what a date's last job read, made, scored and promoted. Times are UTC, ISO 8601."""

    __pydantic_config__ = CLOSED

    ds: FolderName  # start of the data interval
    status: DateStatus
    attempts: Count = 0  # jobs started for the date
    started_at: str = ""  # of the last job
    finished_at: str = ""  # "": it runs, or was killed
    exit_code: int | None = None  # of the last job that ended
    error: str = ""  # its message
    late: bool = False  # ended after schedule.deadline
    epoch: Count = 0  # of the lease under which this was written

    # What it read
    fingerprint: str = ""  # of the dataset
    parts: dict[FolderName, Label] = field(default_factory=dict)  # interval -> fingerprint; {} without intervals
    parts_digest: str = ""  # of all that decides day partitions, but for one interval's content of the sources

    # What it made
    dataset: str | None = None  # URI of its folder
    run: FolderName | None = None  # folder below <storage.runs>/<name>
    mlflow_run_id: str | None = None
    mlflow_url: str | None = None
    model_version: str | None = None  # in the registry; None: not known when the job ended

    # What it scored and promoted
    scores: dict[str, dict[str, float]] = field(default_factory=dict)  # as in summary.json: the model, baselines
    promotion: dict[str, Any] | None = None  # as in summary.json; None: nothing was decided
    family: str = ""  # of the model, where the job trained both

    format: Annotated[int, up_to(1)] = 1

    def to_json(self) -> bytes:
        return (json.dumps(asdict(self), indent=1) + "\n").encode()


class Ledger:
    """The entries of one recipe's dates."""

    def __init__(self, runs_uri: str, name: str) -> None:
        """Open the ledger. `runs_uri`: storage.runs; `name`: name of the recipe."""
        self.storage: Storage = open_storage(runs_uri).at(name).at(DATES)

    def read(self, ds: str) -> DateRecord | None:
        """Read the entry of a date, or None. StoredError if it is damaged or of another date."""
        if not self.storage.exists(f"{ds}/{STATE}"):
            return None
        try:
            record = read(DateRecord, self.storage, f"{ds}/{STATE}")
            if record.ds != ds:
                raise StoredError(f"{self.storage.uri}/{ds}/{STATE}: is of the date {record.ds!r}")
        except StoredError as error:
            raise StoredError(f"{error}; or delete this file: the date is then one without an entry") from None
        return record

    def write(self, record: DateRecord) -> DateRecord:
        self.storage.put_atomic(f"{record.ds}/{STATE}", record.to_json())
        return record

    def restore(self, ds: str, before: DateRecord | None) -> None:
        """Make the entry of a date what it was before a job; `before`: None where it had none."""
        if before is None:
            self.storage.delete(f"{ds}/{STATE}")
        else:
            self.write(before)

    def dates(self) -> list[str]:
        """List the dates that have an entry, oldest first."""
        return [ds for ds in self.storage.list_folders() if self.storage.exists(f"{ds}/{STATE}")]

    def records(self) -> list[DateRecord]:
        """List all entries, oldest date first. An unreadable one is skipped with a warning."""
        found = []
        for ds in self.dates():
            try:
                if (record := self.read(ds)) is not None:
                    found.append(record)
            except StoredError as error:
                log.warning("%s; this date is passed over", error)
        return found
