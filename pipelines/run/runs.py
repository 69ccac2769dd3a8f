"""Run folders: checkpoints, predictions, weights and report of one training, found again by the same command.

    <runs>/<name>/<UTC time>-<digest>/run.json      what the run is and how far it came
                                      checkpoints/ predictions/ model/ report.html summary.json
                                      history.json

A run that did not finish is continued by the next command for the same training on the same dataset, with any world and
any strategy that gives the same weights; a finished one never is. Where something that decides the model differs, a new
run begins, and the log names what differs; with checkpoint.allow_other_order the unfinished run is continued, but for a
trial of a sweep, or a date, which takes no other's run.

Two commands do not take one run: on a local disk its lock is held until the command ends. Object stores have no such
lock: there the owner's process is looked for, on the same host only, and users must not give the same command on two
hosts at a time.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from sparkring.conf.blocks.parallel import ParallelConfig
from sparkring.conf.config import RunConfig
from sparkring.conf.digest import digest
from sparkring.conf.storage import Storage, exclusive, lock_file, open_storage, unlock
from sparkring.conf.stored import CLOSED, Count, FolderName, Label, Sha256, StoredError, read, up_to
from sparkring.pipelines.run.process_id import ProcessId, is_running, this_process
from sparkring.training.launch.failure import LaunchError

log = logging.getLogger(__name__)
RUN_FILE = "run.json"
SHOWN = 8  # differences between two trainings
Status = Literal["running", "finished", "failed", "interrupted"]
Others = Literal["any", "same dataset", "none"]  # runs of another training


@dataclass(frozen=True)
class RunRecord:
    """The fields of run.json."""

    __pydantic_config__ = CLOSED

    folder: FolderName  # below storage.runs
    status: Status
    training_digest: Sha256
    fingerprint: Label
    mlflow_run_id: Label | None
    host: Label  # with pid and start_ticks: the ProcessId of the last command that had it
    pid: Count
    start_ticks: Count
    attempts: Count = 0  # launches so far, over all commands
    settings: dict[Label, str] = field(default_factory=dict)  # of the training, each as JSON: see training_settings
    format: Annotated[int, up_to(1)] = 1

    def to_json(self) -> bytes:
        return (json.dumps(asdict(self), indent=1) + "\n").encode()


def training_digest(config: RunConfig) -> str:
    """Hash everything that decides the model: two commands with an equal hash are the same training."""
    return digest({"name": config.name} | training_settings(config))


def training_settings(config: RunConfig) -> dict[str, Any]:
    """Collect what decides the model.

    Left out is what decides only where or how fast it is computed, or who looks on: world, Spark, tracking, hooks, and
    every strategy that gives the weights of one process.
    """
    train = config.train.model_dump(mode="json", exclude={"threads_per_rank", "device", "log_every_steps", "hooks"})
    blocks = {name: getattr(config, name).model_dump(mode="json") for name in ("data", "model", "optim")}
    for after_training in ("blend", "calibrate"):
        del blocks["model"][after_training]
    for cosmetic in ("cache", "threads", "ahead", "max_bytes", "chunk_bytes", "verify"):
        blocks["data"].pop(cosmetic, None)
    if "trees" in config.model.families:
        blocks["trees"] = config.trees.model_dump(mode="json", exclude={"memory_share"})
    else:
        del blocks["model"]["family"]  # which runs of networks were stored without
    if tables := config.tables.model_dump(mode="json", exclude_defaults=True):
        blocks["tables"] = tables
    if config.warm_start is not None:
        blocks["warm_start"] = config.warm_start.model_dump(mode="json")
    if parallel := inexact_settings(config.parallel):
        blocks["parallel"] = parallel
    return {"train": train} | blocks


def inexact_settings(parallel: ParallelConfig) -> dict[str, Any]:
    """Collect the settings of a strategy that give other weights than one process in the model's own dtype."""
    found: dict[str, Any] = {}
    if parallel.precision != "fp32":
        found["precision"] = parallel.precision
    if parallel.compress.codec != "none":
        found["compress"] = parallel.compress.model_dump(mode="json")
    if parallel.averaging.kind != "none":
        found["averaging"] = parallel.averaging.model_dump(mode="json")
    if not parallel.sync_batch_norm:  # then each rank normalizes by its own rows, so the world decides
        found["sync_batch_norm"] = False
    if parallel.servers.per_host and parallel.servers.bound != 0:
        found["servers"] = parallel.servers.model_dump(mode="json", exclude={"per_host", "backup"})
    return found


def flattened(settings: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Flatten nested settings to JSON values by dotted key."""
    found: dict[str, str] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping) and value:
            found |= flattened(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = json.dumps(value, sort_keys=True)
    return found


def changes(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    """List `key: old -> new` for each setting that differs; a key that one side lacks is `unset` there."""
    keys = sorted(before.keys() | after.keys())
    pairs = [(key, before.get(key, "unset"), after.get(key, "unset")) for key in keys]
    return [f"{key}: {old} -> {new}" for key, old, new in pairs if old != new]


class Runs:
    """The run folders of one recipe."""

    def __init__(self, uri: str, name: str) -> None:
        self.storage: Storage = open_storage(uri).at(name)

    def records(self) -> list[RunRecord]:
        """List the runs, oldest first. An unreadable one is skipped with a warning."""
        found = []
        for folder in self.storage.list_folders():
            if self.storage.exists(f"{folder}/{RUN_FILE}"):
                try:
                    found.append(self.read(folder))
                except StoredError as error:
                    log.warning("%s; this run is passed over", error)
        return found

    @contextmanager
    def begin(
        self, config: RunConfig, fingerprint: str, skip_taken: bool = False, others: Others = "any"
    ) -> Iterator[tuple[RunRecord, bool]]:
        """Take the newest unfinished run of the same training and dataset, else a new one, for the block.

        Yields (record, continued). RunTaken names the process of another command that has the run; with `skip_taken`
        that run is left to it.

        Args:
            config: configuration of the training.
            fingerprint: fingerprint of its dataset.
            skip_taken: skip runs that other commands have.
            others: which runs of another training checkpoint.allow_other_order may continue.
        """
        with ExitStack() as held:
            with self._alone():
                chosen = self._choose(config, fingerprint, held, skip_taken, others)
            yield chosen

    def check_free(self, config: RunConfig, fingerprint: str) -> None:
        """Raise RunTaken if `begin` would find its run held by another command. Writes nothing."""
        if not config.checkpoint.resume:
            return
        same, _ = self._unfinished(training_digest(config), fingerprint)
        if not same:  # the lock below would make the folder
            return
        with ExitStack() as held, self._alone():
            if not self._hold(same[0], this_process(), held):
                raise self._taken(same[0])

    def _taken(self, record: RunRecord) -> RunTaken:
        return RunTaken(
            f"{self.storage.at(record.folder).uri}: the same run is being trained by process {record.pid}; "
            "wait for it, or set checkpoint.resume=false to train another beside it"
        )

    def _alone(self) -> AbstractContextManager[None]:
        """Lock, so that one command at a time looks for its run; on local disks only, see above."""
        return exclusive(Path(self.storage.path(".lock"))) if self.storage.is_local else nullcontext()

    def _choose(
        self, config: RunConfig, fingerprint: str, held: ExitStack, skip_taken: bool, others: Others
    ) -> tuple[RunRecord, bool]:
        """Choose as `begin` does, while no other command looks for a run.

        Args:
            config: resolved configuration of the run.
            fingerprint: fingerprint of the dataset.
            held: takes the lock of the chosen run.
            skip_taken: skip runs that another command is training; else they are an error.
            others: which unfinished runs of another training may be continued, if the recipe allows any.
        """
        wanted, here = training_digest(config), this_process()
        settings = flattened(training_settings(config))
        mine = {"training_digest": wanted, "fingerprint": fingerprint, "settings": settings, **asdict(here)}
        if config.checkpoint.resume:
            same, rest = self._unfinished(wanted, fingerprint)
            chosen = self._take_same(same, here, held, skip_taken)
            if chosen is None and not same:
                allowed = [
                    r for r in rest if others == "any" or (others == "same dataset" and r.fingerprint == fingerprint)
                ]
                chosen = self._take_other(
                    allowed, here, held, settings, fingerprint, config.checkpoint.allow_other_order
                )
            if chosen is not None:
                self.storage.sweep(chosen.folder)
                return self.write(replace(chosen, status="running", **mine)), True
        stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
        folder = f"{stamp}-{wanted[:8]}"
        while self.storage.exists(folder):
            folder += "x"
        record = self.write(RunRecord(folder, "running", mlflow_run_id=None, **mine))
        self._hold(record, here, held)
        return record, False

    def _unfinished(self, wanted: str, fingerprint: str) -> tuple[list[RunRecord], list[RunRecord]]:
        """List runs since the same training last finished, newest first: of that training, and of others."""
        same: list[RunRecord] = []
        rest: list[RunRecord] = []
        for record in reversed(self.records()):
            is_same = (record.training_digest, record.fingerprint) == (wanted, fingerprint)
            if record.status != "finished":
                (same if is_same else rest).append(record)
            elif is_same:
                break
        return same, rest

    def _take_same(
        self, runs: Sequence[RunRecord], here: ProcessId, held: ExitStack, skip_taken: bool
    ) -> RunRecord | None:
        for record in runs:
            if self._hold(record, here, held):
                return record
            if not skip_taken:
                raise self._taken(record)
        return None

    def _take_other(
        self,
        runs: Sequence[RunRecord],
        here: ProcessId,
        held: ExitStack,
        settings: Mapping[str, str],
        fingerprint: str,
        is_allowed: bool,
    ) -> RunRecord | None:
        """Take, or only name if that is not allowed, the first of these runs that no command is training.

        Args:
            runs: unfinished runs of another training, newest first.
            here: identity of this process.
            held: takes the lock of the taken run.
            settings: settings of this training, as a run keeps them.
            fingerprint: fingerprint of its dataset.
            is_allowed: value of checkpoint.allow_other_order.
        """
        with ExitStack() as looking:
            other = next((r for r in runs if self._hold(r, here, held if is_allowed else looking)), None)
        if other is None:
            return None
        why = "; ".join(_why_another(other, settings, fingerprint)[:SHOWN])
        if is_allowed:
            log.warning("run %s is continued, since checkpoint.allow_other_order is set: %s", other.folder, why)
            return other
        log.info(
            "a new run begins at step 0. The unfinished run %s is another training: %s. "
            "checkpoint.allow_other_order=true continues it all the same",
            other.folder,
            why,
        )
        return None

    def _hold(self, record: RunRecord, here: ProcessId, held: ExitStack) -> bool:
        """Take the run until `held` is closed; False where another command has it."""
        if not self.storage.is_local:
            owner = ProcessId(record.host, record.pid, record.start_ticks)
            return owner == here or record.status != "running" or not is_running(owner, here)
        lock = lock_file(Path(self.storage.path(f"{record.folder}/.lock")))
        if lock is not None:
            held.callback(unlock, lock)
        return lock is not None

    def read(self, folder: str) -> RunRecord:
        """Read run.json. StoredError where it is damaged, of a newer version or of another folder."""
        record = read(RunRecord, self.storage, f"{folder}/{RUN_FILE}")
        if record.folder != folder:
            raise StoredError(f"{self.storage.uri}/{folder}/{RUN_FILE}: is of the folder {record.folder!r}")
        return record

    def write(self, record: RunRecord) -> RunRecord:
        self.storage.put_atomic(f"{record.folder}/{RUN_FILE}", record.to_json())
        return record

    def update(self, folder: str, **changes: Any) -> RunRecord:
        """Change these fields of run.json as it is now: an older copy would undo what was counted since."""
        return self.write(replace(self.read(folder), **changes))

    def at(self, record: RunRecord) -> Storage:
        return self.storage.at(record.folder)


def _why_another(record: RunRecord, settings: Mapping[str, str], fingerprint: str) -> list[str]:
    """Describe the settings in which an earlier run differs, and whether its dataset does."""
    dataset = [] if record.fingerprint == fingerprint else ["the dataset is another one"]
    if not record.settings:
        return [*dataset, "its settings were not recorded"]
    return dataset + changes(record.settings, settings)


class RunTaken(LaunchError):
    """Another live process is training the same run."""
