"""Sharded, asynchronous checkpoints on any storage, which appear whole or not at all.

    step-<N>/COMMIT.json                           written last, by rank 0: the generation, the hash of every file
    step-<N>/<generation>/rank-00000.safetensors   the boxes of tensors that rank 0 wrote
    step-<N>/<generation>/rank-00000.json          rank 0's random state
    step-<N>/<generation>/index.json               where each tensor's boxes lie, and the values that are no tensors
    step-<N>/<generation>/trainer.json             step, cursor, schedule, ...: what the loop gave, and versions

A generation is one attempt to write a step; a half-written one is never named by a marker, so never read. No rename
is needed. After CheckFreq (Mohan 2021, https://www.usenix.org/conference/fast21/presentation/mohan): training waits
for the copy to host memory only, the rest is written behind it, one at a time. docs/checkpoints.md: reading by hand.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import itertools
import json
import logging
import platform
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import torch
from pydantic import AfterValidator
from torch.distributed.checkpoint.planner import WriteItemType

from conf.storage import CHUNK_BYTES, Storage
from conf.stored import Stored, read
from training.checkpoint.catalog import (
    MARKER,
    CheckpointInfo,
    committed,
    damaged,
    encode_marker,
    leftovers,
    parse_marker,
)
from training.checkpoint.format import (
    DTYPE_NAMES,
    CheckpointError,
    Chunk,
    decode_value,
    encode_value,
    layout,
    raw_bytes,
    read_rows,
    to_json,
    write_stream,
)
from training.checkpoint.peers import Peers, solo
from training.checkpoint.plan import (
    Index,
    JsonSavePlanner,
    build_index,
    decode_plan,
    encode_plan,
    fill_state,
    mismatch,
    read_index,
)
from training.checkpoint.policy import Retention, best_step, expendable
from training.checkpoint.rng import capture_rng, checked_rng, restore_rng
from training.waiting import waits_for_ranks

log = logging.getLogger(__name__)
LOOK_S = 1.0  # at how far the writing thread is, while training waits for it


@dataclass(frozen=True)
class Restored:
    """What came back beside the tensors. `rank_state` is None when the world changed."""

    trainer: dict[str, Any]
    rank_state: dict[str, Any] | None


@dataclass
class SaveTimes:
    """Seconds of the last save. `stall_s` is what training lost: waiting for the save before, planning and the copy."""

    stall_s: float = 0.0
    waited_s: float = 0.0
    copy_s: float = 0.0
    write_s: float = 0.0


@dataclass
class _Staged:
    chunks: list[tuple[Chunk, torch.Tensor, list[int]]] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)


class Checkpointer:
    """Writes and reads the checkpoints below one folder; every method but `times` and `close` is called by all ranks.

    `on_commit(info)` runs on rank 0, in the writing thread, once a checkpoint can be loaded. `tick(words)` is called by
    the thread that trains while it waits for files that are hashed, read or written: with other words each time, and
    only when that has got further. The storage must be seen by every rank. Raises CheckpointError when rank 0 may not
    write there.
    """

    def __init__(
        self,
        storage: Storage,
        peers: Peers | None = None,
        keep: Retention | None = None,
        asynchronous: bool = True,
        on_commit: Callable[[CheckpointInfo], None] | None = None,
        tick: Callable[[str], None] = lambda words: None,
    ):
        self.storage, self.peers, self.keep = storage, peers or solo(), keep or Retention()
        self.asynchronous, self.on_commit, self.tick = asynchronous, on_commit, tick
        self._done = 0  # pieces the writing thread has behind it: written, seen or deleted; only grows
        self.times = SaveTimes()
        self._buffers: dict[tuple[str, tuple[int, ...]], torch.Tensor] = {}
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._damaged: set[int] = set()  # steps whose files failed their hashes; the next good save deletes them
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
    ) -> None:
        """Copy `state` to host memory and write it behind training; raises the error of the save before this one.

        `state`: nested dicts and lists of tensors, DTensors and plain values. A plain tensor of the same name on
        several ranks is taken to be the same tensor, and stored once. `trainer`: the loop's own plain values, the same
        on all ranks; `rank_state`: plain values of this rank alone, beside its random state.
        """
        began = time.monotonic()
        self.wait()
        waited = time.monotonic()
        planner = JsonSavePlanner()

        def plan() -> dict[str, Any]:
            planner.set_up_planner(state, is_coordinator=self.peers.rank == 0)
            offer: dict[str, Any] = {
                "step": step,
                "generation": f"{time.strftime('%Y%m%dT%H%M%S')}-{uuid.uuid4().hex[:8]}",
            }
            return offer | encode_plan(planner.create_local_plan())

        offers = self.peers.together(f"planning the checkpoint of step {step}", plan)
        if len({offer["step"] for offer in offers}) > 1:
            raise CheckpointError(f"the ranks are at different steps: {[offer['step'] for offer in offers]}")
        plans, metadata = planner.create_global_plan([decode_plan(offer) for offer in offers])
        mine = planner.finish_plan(plans[self.peers.rank])
        own = {"rng": capture_rng(), "state": rank_state}
        job = _Job(step, offers[0]["generation"], metric, dict(metadata.planner_data), trainer, own)
        failure: Exception | None = None
        staged, copying = _Staged(), time.monotonic()
        try:
            staged = self._stage(planner, mine.items)
            job = job.frozen()
        except Exception as error:  # told to the other ranks when the parts are counted
            failure = error
        self.times = SaveTimes(waited_s=waited - began, copy_s=time.monotonic() - copying)
        self.times.stall_s = time.monotonic() - began
        self._start(job, staged, failure)
        if not self.asynchronous:
            self.wait()

    def _stage(self, planner: JsonSavePlanner, items: list[Any]) -> _Staged:
        """Copy what this rank writes into host buffers kept from save to save (pinned for CUDA)."""
        staged = _Staged()
        on_cuda = False
        for item in items:
            data = planner.resolve_data(item)
            if item.type == WriteItemType.BYTE_IO:
                staged.values[item.index.fqn] = json.loads(data.getvalue())  # type: ignore[union-attr]
                continue
            assert isinstance(data, torch.Tensor)
            box = item.tensor_data.chunk
            chunk = Chunk(item.index.fqn, data.dtype, tuple(box.offsets), tuple(box.sizes))
            buffer = self._buffers.get((chunk.fqn, chunk.offsets))
            if buffer is None or buffer.shape != data.shape or buffer.dtype != data.dtype:
                buffer = torch.empty(data.shape, dtype=data.dtype, pin_memory=data.is_cuda)
                self._buffers[(chunk.fqn, chunk.offsets)] = buffer
            buffer.copy_(data.detach(), non_blocking=data.is_cuda)
            on_cuda |= data.is_cuda
            staged.chunks.append((chunk, buffer, list(item.tensor_data.size)))
        if on_cuda:
            torch.cuda.synchronize()
        return staged

    def _start(self, job: _Job, staged: _Staged, failure: Exception | None) -> None:
        def write_behind() -> None:
            began = time.monotonic()
            try:
                self._write(job, staged, failure)
            except BaseException as error:  # surfaces at the next save or wait
                self._error = error
            self.times.write_s = time.monotonic() - began

        self._thread = threading.Thread(target=write_behind, name=f"checkpoint-{job.step}", daemon=True)
        self._thread.start()

    def _write(self, job: _Job, staged: _Staged, failure: Exception | None) -> None:
        """Phase one: every rank's part, and all ranks hear whether all succeeded. Phase two: the marker."""

        def part() -> dict[str, Any]:
            if failure is not None:
                raise failure
            return self._write_part(job, staged)

        parts = self.peers.together(f"writing the checkpoint of step {job.step}", part)

        def commit() -> None:
            if self.peers.rank == 0:
                self._commit(job, parts)

        self.peers.together(f"committing the checkpoint of step {job.step}", commit)

    def _write_part(self, job: _Job, staged: _Staged) -> dict[str, Any]:
        name = f"{job.generation}/rank-{self.peers.rank:05d}"
        folder = self.storage.at(f"step-{job.step}")
        header, placed = layout([(chunk, shape) for chunk, _, shape in staged.chunks], f"{name}.safetensors")
        parts: list[bytes | memoryview] = [header, *(raw_bytes(tensor) for _, tensor, _ in staged.chunks)]
        files = {f"{name}.safetensors": write_stream(folder, f"{name}.safetensors", self._counted(parts))}
        files[f"{name}.json"] = write_stream(folder, f"{name}.json", [to_json(job.own)])
        rows = [
            {"fqn": c.fqn, "dtype": DTYPE_NAMES[c.dtype], "shape": shape, "name": c.name(shape), "file": c.file,
             "offsets": list(c.offsets), "sizes": list(c.sizes), "begin": c.begin, "end": c.end}
            for c, (_, _, shape) in zip(placed, staged.chunks, strict=True)
        ]  # fmt: skip
        return {"files": files, "chunks": rows, "values": staged.values}

    def _counted(self, parts: Iterable[bytes | memoryview]) -> Iterator[bytes | memoryview]:
        """The parts in pieces, each counted when it has been written."""
        for part in parts:
            for start in range(0, len(part), CHUNK_BYTES):
                piece = part[start : start + CHUNK_BYTES]
                yield piece
                self._done += 1

    def _commit(self, job: _Job, parts: list[dict[str, Any]]) -> None:
        folder = self.storage.at(f"step-{job.step}")
        files = {path: info for part in parts for path, info in part["files"].items()}
        for path, info in files.items():
            if folder.size_bytes(path) != info["bytes"]:
                raise CheckpointError(
                    f"{folder.uri}/{path}: not seen by rank 0; checkpoints need a storage all hosts share"
                )
            self._done += 1
        shared = {"index.json": build_index(parts, job.paths), "trainer.json": job.trainer}
        for name, value in shared.items():
            path = f"{job.generation}/{name}"
            files[path] = write_stream(folder, path, [to_json(value)])
        marker = encode_marker(job.step, job.generation, self.peers.world, job.metric, files)
        folder.put_atomic(MARKER, marker)
        info = parse_marker(marker, folder.uri)
        log.info("checkpoint of step %d committed: %s, %d bytes", job.step, info.uri, info.bytes)
        self._clean(job)
        try:
            if self.on_commit is not None:
                self.on_commit(info)
        except Exception as error:  # the checkpoint is good whatever becomes of the news of it
            log.warning("the checkpoint of step %d could not be announced: %s", job.step, error)

    def _clean(self, job: _Job) -> None:
        """Delete what retention lets go and what earlier, killed saves left; failing to is no failure of the save."""
        try:
            good, _ = committed(self.storage)
            self._damaged.discard(job.step)
            whole = [(info.step, info.metric) for info in good if info.step not in self._damaged]
            gone = [step for step in expendable(whole, self.keep) if step != job.step] + sorted(self._damaged)
            for step in gone:
                self.storage.delete(f"step-{step}/{MARKER}")  # first, so that no reader meets half a checkpoint
                self.storage.delete(f"step-{step}")
                self._done += 1
            kept = {f"step-{info.step}": info.generation for info in good if info.step not in gone}
            for path in leftovers(self.storage.list_files(), kept):
                self.storage.delete(path)
        except Exception as error:
            log.warning("old checkpoints in %s could not be deleted: %s", self.storage.uri, error)

    @waits_for_ranks  # the save before is whole when all ranks have written their parts
    def wait(self) -> None:
        """Until nothing is being written; raises CheckpointError if that failed on any rank."""
        if self._thread is not None:
            told = self._done
            while self._thread.is_alive():
                self._thread.join(LOOK_S)
                if self._done != told:  # else it may hang, and must look so
                    told = self._done
                    self.tick(f"{self._thread.name}: piece {told}")
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

    # -- loading

    def latest(self, verify: bool = True) -> CheckpointInfo | None:
        """The newest checkpoint whose every file has the hash its marker says; None where there is none.

        All ranks agree on it and share the hashing. One that fails is skipped, with a warning that says why.
        """
        return self._first_good(lambda good: sorted(good, key=lambda info: -info.step), verify)

    def best(self, mode: Literal["min", "max"] = "min", verify: bool = True) -> CheckpointInfo | None:
        """The checkpoint of the best metric; the next best where that one fails its hashes."""

        def ranked(good: list[CheckpointInfo]) -> list[CheckpointInfo]:
            left, order = {info.step: info for info in good}, []
            while (step := best_step([(i.step, i.metric) for i in left.values()], mode)) is not None:
                order.append(left.pop(step))
            return order

        return self._first_good(ranked, verify)

    def _first_good(
        self, order: Callable[[list[CheckpointInfo]], list[CheckpointInfo]], verify: bool
    ) -> CheckpointInfo | None:
        self.wait()

        def look() -> list[list[Any]] | None:
            if self.peers.rank != 0:
                return None
            good, bad = committed(self.storage)
            return [list(bad.values()), [vars(info) for info in order(good)]]

        bad, rows = self.peers.together(f"looking for checkpoints in {self.storage.uri}", look)[0]
        skipped: list[str] = bad
        chosen = None
        for info in [CheckpointInfo(**row) for row in rows]:
            problems = self._verify(info) if verify else []
            if not problems:
                chosen = info
                break
            self._damaged.add(info.step)
            skipped.append(f"step-{info.step}: {'; '.join(problems)}")
        for reason in skipped if self.peers.rank == 0 else ():
            log.warning("checkpoint skipped: %s", reason)
        return CheckpointInfo(**(vars(chosen) | {"skipped": tuple(skipped)})) if chosen else None

    def _verify(self, info: CheckpointInfo) -> list[str]:
        """What is wrong with its files; each rank hashes its share of them."""
        folder, pieces = self.storage.at(f"step-{info.step}"), itertools.count(1)

        def tick() -> None:
            self.tick(f"verify step-{info.step}: piece {next(pieces)}")

        def check() -> list[str]:
            share = sorted(info.files)[self.peers.rank :: self.peers.world]
            return [problem for path in share if (problem := damaged(folder, path, info.files[path], tick))]

        answers = self.peers.together(f"verifying the checkpoint of step {info.step}", check)
        return [problem for answer in answers for problem in answer]

    def load(
        self,
        info: CheckpointInfo,
        state: dict[str, Any],
        random_state: bool = True,
        check: Callable[[dict[str, Any]], Any] = lambda trainer: None,
    ) -> Restored:
        """Fill `state` in place, whatever world and layout wrote it; restores this rank's random state if the world is
        the same. `check(trainer)` raises where the loop could not go on from these values. Raises CheckpointError with
        what is damaged, and the names that are missing, unexpected or misshapen, before touching any.
        """
        folder, have = self.storage.at(f"step-{info.step}"), _shapes(state)
        opened: list[tuple[Index, TrainerFile, RankFile | None]] = []

        def open_files() -> list[str]:
            index, trainer = read_index(folder, info.generation, info.files), f"{info.generation}/trainer.json"
            own = f"{info.generation}/rank-{self.peers.rank:05d}.json"
            opened.append(
                (
                    index,
                    read(TrainerFile, folder, trainer),
                    read(RankFile, folder, own) if info.world == self.peers.world else None,
                )
            )
            check(opened[0][1].trainer)
            return sorted(have)

        names = self.peers.together(f"opening {info.uri}", open_files)
        ((index, trainer, own),) = opened
        everyone = {name for answer in names for name in answer}

        def compare() -> None:
            if problems := mismatch(have, index, everyone):
                raise CheckpointError("the checkpoint is of another model: " + "; ".join(problems))

        self.peers.together(f"loading {info.uri}", compare)
        pieces = itertools.count(1)

        def read_box(chunk: Any, start: Sequence[int], lengths: Sequence[int]) -> torch.Tensor:
            self.tick(f"load box {next(pieces)} of step-{info.step}")
            return read_rows(folder, chunk, start, lengths)

        self.peers.together(f"loading {info.uri}", lambda: fill_state(state, index, read_box))
        if own is None:
            return Restored(trainer.trainer, None)
        if random_state:
            restore_rng(own.rng)
        return Restored(trainer.trainer, own.state)


class TrainerFile(Stored):
    """trainer.json: what the loop gave."""

    trainer: Annotated[dict[str, Any], AfterValidator(decode_value)]
    versions: dict[str, str]


class RankFile(Stored):
    """rank-00000.json: what belongs to one rank."""

    rng: Annotated[Any, AfterValidator(decode_value), AfterValidator(checked_rng)]
    state: Annotated[dict[str, Any] | None, AfterValidator(decode_value)]


@dataclass(frozen=True)
class _Job:
    step: int
    generation: str
    metric: float | None
    paths: dict[str, tuple[Any, ...]]
    trainer: dict[str, Any]
    own: dict[str, Any]

    def frozen(self) -> _Job:
        """The same with its plain values turned into JSON now, before training changes them."""
        trainer = {"trainer": encode_value(self.trainer, "trainer"), "versions": _versions()}
        metric = None if self.metric is None else float(self.metric)
        return _Job(self.step, self.generation, metric, self.paths, trainer, encode_value(self.own, "rank_state"))


def _versions() -> dict[str, str]:
    versions = {"torch": str(torch.__version__), "python": platform.python_version()}
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):  # run from a source tree
        versions["sparkring"] = importlib.metadata.version("sparkring")
    return versions


def _shapes(state: dict[str, Any]) -> dict[str, list[int] | None]:
    """Flat names -> global shape, None for values, as they are named in the index."""
    from torch.distributed.checkpoint._nested_dict import flatten_state_dict

    flat, _ = flatten_state_dict(state)
    return {name: list(value.shape) if isinstance(value, torch.Tensor) else None for name, value in flat.items()}
