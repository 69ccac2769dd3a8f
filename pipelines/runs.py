"""Run folders: where one training keeps its checkpoints, predictions and weights; the same command finds it again.

    <runs>/<name>/<UTC time>-<digest>/run.json      what the run is and how far it came
                                      checkpoints/ predictions/ model/ report.html summary.json

A run that did not finish is continued by the next command that asks for the same training on the same dataset, whatever
its world; one that finished never is. Two commands do not take one run: on one host the process that has it is known by
its pid and start time, and on a local disk a lock is held while a run is chosen. Object stores have no such lock, and
processes of other hosts cannot be asked: there, the same command twice at a time is the user's to avoid.
"""

from __future__ import annotations

import json
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import psutil

from conf.manifest import digest
from conf.schema import RunConfig
from conf.storage import Storage, open_storage
from training.failure import LaunchError
from training.tracking_buffer import exclusive
from training.tracking_rules import Owner, this_process

Status = Literal["running", "finished", "failed", "interrupted"]


@dataclass(frozen=True)
class RunRecord:
    folder: str  # below storage.runs
    status: Status
    training_digest: str
    fingerprint: str
    mlflow_run_id: str | None
    host: str  # and its boot, as in Owner
    pid: int
    pid_started: float = 0.0  # tells a reused pid from the real one
    attempts: int = 0  # launches so far, over all commands

    def to_json(self) -> bytes:
        return (json.dumps(asdict(self), indent=1) + "\n").encode()


def training_digest(config: RunConfig) -> str:
    """What makes two commands the same training: everything that decides the model, nothing that decides where or how
    fast it is computed (world, strategy, Spark, tracking)."""
    train = config.train.model_dump(mode="json", exclude={"threads_per_rank", "device", "log_every_steps"})
    blocks = {name: getattr(config, name).model_dump(mode="json") for name in ("data", "model", "optim")}
    for cosmetic in ("cache", "threads", "ahead", "max_bytes", "chunk_bytes", "verify"):
        blocks["data"].pop(cosmetic, None)
    return digest({"name": config.name, "train": train} | blocks)


class Runs:
    """The run folders of one recipe."""

    def __init__(self, uri: str, name: str) -> None:
        self.storage: Storage = open_storage(uri).at(name)

    def records(self) -> list[RunRecord]:
        """Oldest first."""
        folders = self.storage.list_folders()
        return [self.read(folder) for folder in folders if self.storage.exists(f"{folder}/run.json")]

    def begin(self, config: RunConfig, fingerprint: str) -> tuple[RunRecord, bool]:
        """(record, continued): the newest unfinished run of the same training on the same dataset, else a new one.

        A run whose process still lives on this host is not taken: RunTaken names it.
        """
        with self._alone():
            return self._begin(config, fingerprint)

    def _alone(self) -> AbstractContextManager[None]:
        """One command at a time looks for its run; on a local disk only, see above."""
        return exclusive(Path(self.storage.path(".lock"))) if self.storage.is_local else nullcontext()

    def _begin(self, config: RunConfig, fingerprint: str) -> tuple[RunRecord, bool]:
        wanted, owner = training_digest(config), this_process()
        me: dict[str, Any] = {"host": owner.host, "pid": owner.pid, "pid_started": owner.started}
        if config.checkpoint.resume:
            for record in reversed(self.records()):
                if (record.training_digest, record.fingerprint) != (wanted, fingerprint):
                    continue
                if record.status == "finished":
                    break
                if record.status == "running" and is_held(record, owner, started_at(record.pid)):
                    raise RunTaken(
                        f"{self.storage.at(record.folder).uri}: the same run is being trained by process {record.pid}; "
                        "wait for it, or set checkpoint.resume=false to train another beside it"
                    )
                return self.write(replace(record, status="running", **me)), True
        stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
        folder = f"{stamp}-{wanted[:8]}"
        taken = {record.folder for record in self.records()}
        while folder in taken:
            folder += "x"
        return self.write(RunRecord(folder, "running", wanted, fingerprint, None, **me)), False

    def read(self, folder: str) -> RunRecord:
        return RunRecord(**json.loads(self.storage.read_bytes(f"{folder}/run.json")))

    def write(self, record: RunRecord) -> RunRecord:
        self.storage.put_atomic(f"{record.folder}/run.json", record.to_json())
        return record

    def update(self, folder: str, **changes: Any) -> RunRecord:
        """Change these fields of the record as it is now. run.json alone holds it: to write an older copy would undo
        what was counted since."""
        return self.write(replace(self.read(folder), **changes))

    def at(self, record: RunRecord) -> Storage:
        return self.storage.at(record.folder)


class RunTaken(LaunchError):
    """Another live process is training this very run."""


def is_held(record: RunRecord, here: Owner, started: float | None) -> bool:
    """Whether the recorded process lives and is not this one. `started`: when the process that has its pid now was
    started, None where there is none. Other hosts, and this one before a reboot, cannot be asked: not held."""
    if started is None or record.host != here.host or record.pid == here.pid:
        return False
    return abs(started - record.pid_started) <= 1.0


def started_at(pid: int) -> float | None:
    """When the process with this pid was started; None where there is none."""
    try:
        return float(psutil.Process(pid).create_time())
    except psutil.NoSuchProcess:
        return None
