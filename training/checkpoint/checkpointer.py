"""Sharded, asynchronous checkpoints on any storage, which appear whole or not at all.

Files and their names: layout.py. After CheckFreq (Mohan 2021,
https://www.usenix.org/conference/fast21/presentation/mohan): training waits for the copy to host memory only, the rest
is written behind it, one at a time. docs/explanation/checkpoints.md: reading by hand.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal

import torch

from sparkring.conf.storage import Storage
from sparkring.conf.stored import read
from sparkring.training.checkpoint.catalog import CheckpointInfo, committed, damage
from sparkring.training.checkpoint.dcp import (
    JsonSavePlanner,
    decode_plan,
    encode_plan,
    fill_state,
    mismatch,
    read_index,
    state_shapes,
    stored_shapes,
)
from sparkring.training.checkpoint.format import CheckpointError, Chunk, encode_value, read_rows
from sparkring.training.checkpoint.layout import Index, RankFile, TrainerFile, rank_file, step_folder, trainer_file
from sparkring.training.checkpoint.peers import Peers, solo
from sparkring.training.checkpoint.policy import Retention, ranked_steps
from sparkring.training.checkpoint.rng import capture_rng, restore_rng
from sparkring.training.checkpoint.snapshot import HostBuffers, Snapshot, library_versions
from sparkring.training.checkpoint.table_files import open_tables
from sparkring.training.checkpoint.weights import WeightsTensor
from sparkring.training.checkpoint.writer import CheckpointWriter
from sparkring.training.waiting import waits_for_ranks

log = logging.getLogger(__name__)
TableCopy = Callable[[int], Mapping[str, torch.Tensor]]
Check = Callable[[dict[str, Any], Mapping[str, Sequence[Mapping[str, WeightsTensor]]]], Any]
NO_TABLES: Mapping[str, TableCopy] = MappingProxyType({})
ROUNDS_OF_SAVE = 3  # times that all ranks agree: on the plan, on what is written, on the commit
POLL_S = 1.0  # how often the progress of the writing thread is looked at, while training waits for it


@dataclass(frozen=True)
class Restored:
    """What `load` returns besides the tensors. `rank_state` is None when the world changed."""

    trainer: dict[str, Any]
    rank_state: dict[str, Any] | None


@dataclass
class SaveTimes:
    """Seconds of the last save. `stall_s` is what training lost: waiting for the save before, planning and the copy."""

    stall_s: float = 0.0
    waited_s: float = 0.0
    copy_s: float = 0.0
    write_s: float = 0.0


class Checkpointer:
    """Writes and reads the checkpoints below one folder; every method but `close` is called by all ranks."""

    def __init__(
        self,
        storage: Storage,
        peers: Peers | None = None,
        keep: Retention | None = None,
        asynchronous: bool = True,
        on_commit: Callable[[CheckpointInfo], None] = lambda info: None,
        on_progress: Callable[[str], None] = lambda text: None,
        check: Check = lambda trainer, tables: None,
    ) -> None:
        """Open the folder. Raises CheckpointError when rank 0 may not write there.

        Args:
            storage: the folder; every rank must see the same one.
            peers: how the ranks agree; None: a single process.
            keep: which checkpoints stay after a save.
            asynchronous: write behind training; else `save` returns when all is written.
            on_commit: called on rank 0, in the writing thread, once a checkpoint can be loaded.
            on_progress: called by the training thread while it waits for files to be hashed, read or written, with
                another text each time and only after real progress, so that a stuck storage looks stuck.
            check: given a checkpoint's trainer values and the files of some of its tables, raises ValueError where
                training could not continue from them. `latest` and `best` pass over such a checkpoint.
        """
        self._check = check
        self.storage, self.peers = storage, peers or solo()
        self.asynchronous, self.on_progress = asynchronous, on_progress
        self.times = SaveTimes()
        self._writer = CheckpointWriter(storage, self.peers, keep or Retention(), on_commit)
        self._buffers = HostBuffers()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self.peers.together(f"opening {storage.uri}", self._probe)

    def _probe(self) -> None:
        if self.peers.rank == 0:
            self.storage.put_atomic(".probe", b"")
            self.storage.delete(".probe")

    # -- saving

    def save(
        self,
        step: int,
        state: dict[str, Any],
        trainer: dict[str, Any],
        metric: float | None = None,
        rank_state: dict[str, Any] | None = None,
        tables: Mapping[str, TableCopy] = NO_TABLES,
    ) -> None:
        """Copy `state` to host memory and write it behind training; raises the error of the save before this one.

        Args:
            step: number of the step; the same on all ranks.
            state: nested dicts and lists of tensors, DTensors and plain values. A plain tensor of the same name on
                several ranks is taken to be the same tensor, and stored once.
            trainer: the loop's own plain values, the same on all ranks.
            metric: what `best` and retention compare; None: never the best.
            rank_state: plain values of this rank alone, stored next to its random state.
            tables: functions that copy this rank's shard of each table to named tensors, called once the save before
                is written: one copy at a time is in memory. They are given how many bytes the changes since the last
                call may have; with more, or a negative number, they copy all.
        """
        began = time.monotonic()
        self.wait()
        waited = time.monotonic()
        planner = JsonSavePlanner()

        def plan() -> dict[str, Any]:
            planner.set_up_planner(state, is_coordinator=self.peers.rank == 0)
            generation = f"{time.strftime('%Y%m%dT%H%M%S')}-{uuid.uuid4().hex[:8]}"  # rank 0's is taken
            return {"step": step, "generation": generation} | encode_plan(planner.create_local_plan())

        offers = self.peers.together(f"planning the checkpoint of step {step}", plan)
        if len({offer["step"] for offer in offers}) > 1:
            raise CheckpointError(f"the ranks are at different steps: {[offer['step'] for offer in offers]}")
        plans, metadata = planner.create_global_plan([decode_plan(offer) for offer in offers])
        mine = planner.finish_plan(plans[self.peers.rank])
        copying = time.monotonic()
        snapshot: Snapshot | Exception
        try:
            chunks, values = self._buffers.copy(planner, mine.items)
            snapshot = Snapshot(
                step=step,
                generation=offers[0]["generation"],
                metric=None if metric is None else float(metric),
                chunks=chunks,
                values=values,
                paths=dict(metadata.planner_data),
                trainer={"trainer": encode_value(trainer, "trainer"), "versions": library_versions()},
                rank=encode_value({"rng": capture_rng(), "state": rank_state}, "rank_state"),
                tables={name: copy(self._writer.most_increment_bytes(name)) for name, copy in tables.items()},
            )
        except Exception as error:  # the other ranks learn of it when the shards are counted
            snapshot = error
        now = time.monotonic()
        self.times = SaveTimes(waited_s=waited - began, copy_s=now - copying, stall_s=now - began)
        self._start(step, snapshot)
        if not self.asynchronous:
            self.wait()

    def _start(self, step: int, snapshot: Snapshot | Exception) -> None:
        def write_behind() -> None:
            began = time.monotonic()
            try:
                self._writer.write(step, snapshot)
            except BaseException as error:  # raised by the next save or wait
                self._error = error
            self.times.write_s = time.monotonic() - began

        self._thread = threading.Thread(target=write_behind, name=f"checkpoint-{step}", daemon=True)
        self._thread.start()

    @waits_for_ranks  # a save is complete when all ranks have written their shards
    def wait(self) -> None:
        """Wait until nothing is being written; raises CheckpointError if that failed on any rank."""
        if self._thread is not None:
            seen = self._writer.progress
            while self._thread.is_alive():
                self._thread.join(POLL_S)
                if self._writer.progress != seen:  # else it may hang, and must look so
                    seen = self._writer.progress
                    self.on_progress(f"{self._thread.name}: piece {seen}")
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def close(self) -> None:
        """Wait for the last save, without raising: its error is logged."""
        try:
            self.wait()
        except Exception as error:
            log.error("the last checkpoint was not written: %s", error)
        self._buffers.clear()

    # -- finding

    def latest(self, verify: bool = True) -> CheckpointInfo | None:
        """Find the newest checkpoint that can be loaded; None if none is undamaged.

        Its every file has the hash that its marker says, and can be read. All ranks agree on it and share the reading.
        One that fails is skipped, with a warning that says why. Where none can be read it is the newest whose hashes
        are right. `verify`: hash the files too.
        """
        return self._first_good(lambda good: good[::-1], verify)

    def hold(self, info: CheckpointInfo) -> None:
        """Keep a checkpoint while this process saves others, whatever retention says."""
        self._writer.held = info.step

    def best(self, mode: Literal["min", "max"] = "min", verify: bool = True) -> CheckpointInfo | None:
        """Find the checkpoint of the best metric; the next best where that one cannot be loaded."""

        def ranked(good: list[CheckpointInfo]) -> list[CheckpointInfo]:
            by_step = {info.step: info for info in good}
            return [by_step[step] for step in ranked_steps([(i.step, i.metric) for i in good], mode)]

        return self._first_good(ranked, verify)

    def _first_good(
        self, order: Callable[[list[CheckpointInfo]], list[CheckpointInfo]], verify: bool
    ) -> CheckpointInfo | None:
        """Return the first of `order(committed checkpoints, by step)` whose files are whole."""
        self.wait()

        def look() -> list[list[Any]] | None:
            if self.peers.rank != 0:
                return None
            good, bad = committed(self.storage)
            return [list(bad.values()), [vars(info) for info in order(good)]]

        skipped, rows = self.peers.together(f"looking for checkpoints in {self.storage.uri}", look)[0]
        unreadable: list[CheckpointInfo] = []
        for info in (CheckpointInfo(**row) for row in rows):
            if not (problems := self._verify(info) if verify else []):
                if not (problems := self._unreadable(info)):
                    return self._found(info, skipped)
                unreadable.append(info)
            self._writer.damaged.add(info.step)
            skipped.append(f"step-{info.step}: {'; '.join(problems)}")
        # All hashes are right, but none can be read: the newest, so that loading fails and says why, instead of a
        # training that starts again from step 0.
        return self._found(unreadable[0] if unreadable else None, skipped)

    def _found(self, info: CheckpointInfo | None, skipped: Sequence[str]) -> CheckpointInfo | None:
        for reason in skipped if self.peers.rank == 0 else ():
            log.warning("checkpoint skipped: %s", reason)
        return None if info is None else replace(info, skipped=tuple(skipped))

    def _verify(self, info: CheckpointInfo) -> list[str]:
        """List what is wrong with the files of a checkpoint; each rank hashes its share of them."""
        folder, pieces = self.storage.at(step_folder(info.step)), itertools.count(1)

        def on_piece() -> None:
            self.on_progress(f"verify step-{info.step}: piece {next(pieces)}")

        def check() -> list[str]:
            every = [(folder, path, want) for path, want in sorted(info.files.items())]
            every += [(self.storage, path, want) for path, want in sorted(info.needs.items())]
            share = every[self.peers.rank :: self.peers.world]
            return [problem for place, path, want in share if (problem := damage(place, path, want, on_piece))]

        answers = self.peers.together(f"verifying the checkpoint of step {info.step}", check)
        return [problem for answer in answers for problem in answer]

    def _unreadable(self, info: CheckpointInfo) -> list[str]:
        """List why a checkpoint cannot be loaded, though its files may be as they were written."""
        folder, peers = self.storage.at(step_folder(info.step)), self.peers

        def check() -> list[str]:
            try:
                read_index(folder, info.generation, info.files)
                trainer = read(TrainerFile, folder, trainer_file(info.generation)).trainer
                for rank in range(peers.rank, info.world, peers.world):
                    read(RankFile, folder, rank_file(info.generation, rank))
                tables = open_tables(self.storage, info)
                self._check(trainer, {name: tables[name] for name in sorted(tables)[peers.rank :: peers.world]})
            except (ValueError, LookupError, CheckpointError, FileNotFoundError) as error:
                return [f"{type(error).__name__}: {error}"]
            return []

        return sorted(
            {p for each in peers.together(f"opening the checkpoint of step {info.step}", check) for p in each}
        )

    # -- loading

    def shapes(self, info: CheckpointInfo) -> dict[str, list[int] | None]:
        """Return global shapes by full names in a checkpoint; None for non-tensor values. Collective."""
        opened: list[Index] = []

        def read_shapes() -> None:
            folder = self.storage.at(step_folder(info.step))
            opened.append(read_index(folder, info.generation, info.files))

        self.peers.together(f"opening {info.uri}", read_shapes)
        return stored_shapes(opened[0])

    def tables(self, info: CheckpointInfo) -> dict[str, list[dict[str, WeightsTensor]]]:
        """Open the files of tables: all ranks' shards by table, whose tensors are read when they are asked for."""
        found: list[dict[str, list[dict[str, WeightsTensor]]]] = []
        self.peers.together(f"opening tables of {info.uri}", lambda: found.append(open_tables(self.storage, info)))
        return found[0]

    def load(
        self,
        info: CheckpointInfo,
        state: dict[str, Any],
        random_state: bool = True,
        check: Callable[[dict[str, Any]], Any] = lambda trainer: None,
    ) -> Restored:
        """Fill `state` in place, whatever world and layout wrote it.

        This rank's random state is restored too if the world is the same and `random_state` is set. `check(trainer)`
        raises where the loop could not continue from these values. Raises CheckpointError with what is damaged, and the
        names that are missing, unexpected or of another shape, before anything is changed.
        """
        folder, have = self.storage.at(step_folder(info.step)), state_shapes(state)
        opened: list[tuple[Index, TrainerFile, RankFile | None]] = []

        def open_files() -> list[str]:
            index = read_index(folder, info.generation, info.files)
            trainer = read(TrainerFile, folder, trainer_file(info.generation))
            own = rank_file(info.generation, self.peers.rank)
            opened.append((index, trainer, read(RankFile, folder, own) if info.world == self.peers.world else None))
            check(trainer.trainer)
            return sorted(have)

        names = self.peers.together(f"opening {info.uri}", open_files)
        ((index, trainer, own),) = opened

        def compare() -> None:
            if problems := mismatch(have, index, {name for answer in names for name in answer}):
                raise CheckpointError("the checkpoint is of another model: " + "; ".join(problems))

        self.peers.together(f"loading {info.uri}", compare)
        boxes = itertools.count(1)

        def read_box(chunk: Chunk, start: Sequence[int], lengths: Sequence[int]) -> torch.Tensor:
            self.on_progress(f"load box {next(boxes)} of step-{info.step}")
            return read_rows(folder, chunk, start, lengths)

        self.peers.together(f"loading {info.uri}", lambda: fill_state(state, index, read_box))
        if own is None:
            return Restored(trainer.trainer, None)
        if random_state:
            restore_rng(own.rng)
        return Restored(trainer.trainer, own.state)
