"""Reads one rank's part of every global batch: row groups decoded in threads, gathered once, handed out as views."""

from __future__ import annotations

import itertools
import logging
import time
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import numpy as np
import torch

from conf.manifest import ROW_NUMBER, Column, DataFile, DatasetManifest, digest
from conf.storage import Storage
from training.data.batch import SAMPLE, Batch, Meter
from training.data.collate import Collator, batch_of
from training.data.columns import DataError, is_fixed, row_bytes
from training.data.engine import Engine, Timing, chunk_ends
from training.data.order import (
    ORDER_VERSION,
    Ints,
    OrderSettings,
    Plan,
    Tail,
    epochs_of,
    group_order,
    lanes_of_rank,
    make_plan,
)  # fmt: skip
from training.data.pool import Pool
from training.data.prefetch import Prefetcher
from training.data.select import Selection, Tick, everything, unheard
from training.data.source import Decoded, FileSource, Opener, unlisted_files
from training.data.spare import Spare
from training.data.transfer import to_device

log = logging.getLogger(__name__)
MIB = 1 << 20
Span = tuple[int, Ints]
"""An epoch, and ascending edges (n + 1,) between its samples: n batches."""


@dataclass(frozen=True)
class ReaderSettings:
    """How a split is ordered (first five, see `OrderSettings`) and read (the rest, which never changes the batches).

    max_bytes bounds the decoded row groups a rank holds; for columns of unequal rows it is estimated from file sizes.
    ahead: row groups decoded before they are needed (None: a quarter of those in use).
    """

    lanes: int = 64
    window_row_groups: int | None = None
    seed: int = 0
    tail: Tail = "drop"
    shuffle: bool = True
    threads: int = 2
    max_bytes: int = 2048 * MIB
    chunk_bytes: int = 8 * MIB
    ahead: int | None = None
    verify: Literal["hash", "size", "off"] = "hash"
    audit: bool = False
    decoders: dict[str, str] = field(default_factory=dict)

    @property
    def order(self) -> OrderSettings:
        return OrderSettings(self.lanes, self.window_row_groups, self.seed, self.tail, self.shuffle)


class ParquetReader:
    """One split of one dataset, as one data rank sees it. `batches` may be called again and again, one at a time.

    Raises ValueError for settings no plan can meet, DataError (a ValueError) for data that is not what the manifest
    says; both before the first batch wherever that can be known.
    """

    def __init__(
        self,
        storage: Storage,
        manifest: DatasetManifest,
        split: str,
        columns: Sequence[str] | None,
        global_batch: int,
        data_rank: int = 0,
        data_size: int = 1,
        settings: ReaderSettings | None = None,
        device: torch.device | None = None,
        opener: Opener | None = None,
        decoded: Decoded | None = None,
        selection: Selection | None = None,
        tick: Tick = unheard,
    ) -> None:
        self.settings = settings or ReaderSettings()
        self.meter = Meter()
        self._storage, self._manifest, self._split, self._device = storage, manifest, split, device
        self._tick = tick
        self._columns = read_columns(manifest, columns, self.settings.audit)
        self._numbers_samples = SAMPLE in (columns or ())
        self.selection = selection or everything(manifest.files_of(split))
        self._files = self.selection.files
        self.plan = make_plan(self.selection.group_rows, global_batch, self.settings.order)
        self.steps_per_epoch = self.plan.steps_per_epoch
        self._lanes = lanes_of_rank(self.plan, data_rank, data_size)
        self._source = FileSource(
            storage, self._files, self._columns, opener, self.selection.keep, decoded, self.settings.verify != "hash"
        )
        self._collator = Collator(self._columns, self.settings.decoders)
        self._row_bytes = _row_bytes(self._columns, self._files)
        self._ahead, self._slots = self._checked_memory()
        self._executor = ThreadPoolExecutor(max(1, self.settings.threads), thread_name_prefix="sparkring-decode")
        self._pool: Pool | None = None
        self._spare = Spare()
        self._running: Prefetcher[_Chunk] | None = None
        self._verified = self.settings.verify == "off"

    def order_state(self) -> dict[str, Any]:
        """What decides the order of global batches; see `training.data.resume.explain_difference`."""
        plan = self.plan
        return {
            "order_version": ORDER_VERSION,
            "fingerprint": self._manifest.fingerprint,
            "split": self._split,
            "rows": plan.rows,
            "row_groups": digest(np.diff(plan.group_start).tolist()),
            "global_batch": plan.global_batch,
            "lanes": plan.lanes,
            "window_row_groups": plan.window,
            "seed": plan.seed,
            "tail": plan.tail,
            "shuffle": plan.shuffle,
            "filters": [list(condition) for condition in self.selection.conditions],
            "quarantined": [path for path, _, _ in self.selection.quarantined],
        }

    def batches(self, epoch: int, start_step: int = 0, steps: int | None = None) -> Iterator[Batch]:
        """This rank's part of `steps` global batches, start_step, ... of `epoch` and on into the epochs after it (None:
        those left of this one), on the reader's device. The next epoch is decoded ahead while this one is served."""
        runs = epochs_of(epoch, start_step, steps, self.steps_per_epoch)
        spans = ((e, np.arange(a, b + 1, dtype=np.int64) * self.plan.global_batch) for e, a, b in runs)
        return to_device(self.serve(spans), self._device, self.meter)

    def locate(self, cursor: int) -> tuple[int, int]:
        """(epoch, next step) after `cursor` samples; ValueError where no step ends there."""
        return self.plan.locate(cursor)

    def serve(self, spans: Iterable[Span]) -> Generator[Batch, None, None]:
        """This rank's rows of samples [edges[i], edges[i + 1]) of each span's epoch, on the host; samples past the last
        row are padding. For those who cut batches themselves (see mix.py); `batches` is the usual way."""
        if self._running is not None:
            raise RuntimeError("the reader's previous epoch is still being read; exhaust or close its iterator first")
        self.verify()
        return self._on_host(spans)

    def verify(self) -> None:
        """Check the files this rank's lanes lie in (all ranks together: every file) once, before anything is read."""
        if self._verified:
            return
        began = time.perf_counter()
        mine = self._own_files()
        for content in (False, True) if self.settings.verify == "hash" else (False,):
            # cheap first: a truncated file is named before gigabytes are hashed
            checked = self._executor.map(partial(self._source.opener.check, content=content), mine)
            for file, _ in zip(mine, checked, strict=True):
                self._tick(f"{'hashed' if content else 'found'} {file.path}")
        if self._lanes and self._lanes[0] == 0 and (extra := unlisted_files(self._storage, self._manifest.files)):
            log.warning(
                "%s: %d Parquet files are not in the manifest and are ignored, such as %s",
                self._storage.uri,
                len(extra),
                extra[0],
            )
        self._verified = True
        self.meter.add("verify", time.perf_counter() - began)

    def close(self) -> None:
        """End the threads; an epoch being read ends with them."""
        if self._running is not None:
            self._running.close()
            self._running = None
        self._executor.shutdown(wait=True, cancel_futures=True)

    def _own_files(self) -> list[DataFile]:
        if not self._lanes:
            return []
        plan = self.plan
        begin, end = plan.lane_start[self._lanes.start], plan.lane_start[self._lanes.stop]
        first = np.searchsorted(plan.group_start, begin, side="right") - 1
        last = np.searchsorted(plan.group_start, end, side="left")
        return [self._files[i] for i in sorted({self._source.place(int(g))[0] for g in plan.groups[first:last]})]

    def _checked_memory(self) -> tuple[int, int]:
        """(row groups to decode ahead, the most to hold: between two epochs windows of both); ValueError where even
        those of one exceed max_bytes."""
        group_bytes = int(np.diff(self.plan.group_start).max()) * self._row_bytes
        one_each = len(self._lanes) * self.plan.window
        in_use = min(
            2 * one_each, len(self.plan.groups)
        )  # a gather may reach from one window into the next in every lane
        most = self.settings.max_bytes // max(1, group_bytes)
        spare = most - in_use
        if spare < 1:
            raise ValueError(
                f"{in_use} row groups may be in use at once ({len(self._lanes)} lanes x {self.plan.window}, of up to "
                f"{group_bytes / MIB:.1f} MiB), which exceeds data.max_bytes = {self.settings.max_bytes}; "
                "lower data.lanes or data.window_row_groups, raise data.max_bytes, or write smaller row groups"
            )
        wanted = (
            self.settings.ahead if self.settings.ahead is not None else max(self.settings.threads + 1, one_each // 4)
        )
        ahead = max(1, min(wanted, spare))
        return ahead, min(most, 2 * one_each + ahead)

    def _on_host(self, spans: Iterable[Span]) -> Generator[Batch, None, None]:
        if self._running is not None:  # two iterators made before either was begun
            raise RuntimeError("the reader's previous epoch is still being read; exhaust or close its iterator first")
        called = time.perf_counter()
        first = True
        self._running = Prefetcher(self._chunks(spans), depth=1)
        try:
            while True:
                waiting = time.perf_counter()
                chunk = next(self._running, None)
                self.meter.add("data_stall", time.perf_counter() - waiting)
                if chunk is None:
                    return
                for name, seconds in chunk.timing.items():
                    self.meter.add(name, seconds)
                self._count(chunk)
                for batch in chunk.batches:
                    if first:
                        self.meter.add("first_batch", time.perf_counter() - called)
                        first = False
                    self.meter.count("rows", batch.rows)
                    yield batch
                del chunk, batch  # so that the thread that made them drops them
        finally:
            if self._running is not None:
                self._running.close()
                self._running = None

    def _count(self, chunk: _Chunk) -> None:
        self.meter.count("row_groups", chunk.decoded)
        for kept in (self._source.opener, self._source.decoded):
            for name, amount in ({} if kept is None else kept.take_counts()).items():
                self.meter.count(name, amount)

    def _chunks(self, spans: Iterable[Span]) -> Generator[_Chunk, None, None]:
        engines: deque[Engine] = deque()
        todo = (span for span in spans if len(span[1]) > 1)
        first = 1  # step gathered alone, so that it comes soon; from the second span on there is no hurry
        try:
            for (epoch, edges), following in with_next(todo):
                if not engines:
                    engines.append(self._engine(epoch, edges))
                if following is not None:
                    engines.append(self._engine(*following))
                    engines[0].follower = engines[1]
                most = self._most_steps(edges)
                for begin, end in chunk_ends(len(edges) - 1, min(first, most), most):
                    yield self._chunk(engines[0], epoch, edges[begin : end + 1].tolist())
                engines.popleft().close()
                first = most
        finally:
            for engine in engines:
                engine.close()

    def _most_steps(self, edges: Ints) -> int:
        """How many steps of this span make a chunk."""
        row_bytes = self._row_bytes + self._collator.decoded_row_bytes
        step_bytes = row_bytes * (edges[-1] - edges[0]) / (len(edges) - 1) * len(self._lanes) / self.plan.lanes
        return max(1, int(self.settings.chunk_bytes / max(1, step_bytes)))

    def _engine(self, epoch: int, edges: Ints) -> Engine:
        if self._pool is None:
            slot_rows = int(np.diff(self.plan.group_start).max())
            self._pool = Pool(self._columns, self._slots, slot_rows)
        return Engine(
            self.plan, epoch, int(edges[0]), int(edges[-1]), self._lanes, self._pool, self._load, self._executor,
            self._ahead,
        )  # fmt: skip

    def _load(self, epoch: int, group: int, slot: int) -> Timing:
        assert self._pool is not None
        index = int(self.plan.groups[group])
        table, read_s, decode_s = self._source.read(index)
        began = time.perf_counter()
        try:
            order = group_order(self.plan, epoch, group, self._lanes)
            if len(order) != table.num_rows:
                raise DataError(f"{table.num_rows} rows are left by the filters, the plan was made for {len(order)}")
            self._pool.put(slot, table, order)
        except ValueError as error:
            raise type(error)(f"{self._source.describe(index)}: {error}") from error
        return {"read": read_s, "decode": decode_s, "shuffle": time.perf_counter() - began}

    def _chunk(self, engine: Engine, epoch: int, edges: list[int]) -> _Chunk:
        """The batches between these edges: one gather, then views of it."""
        plan, pool = self.plan, self._pool
        assert pool is not None
        positions = engine.positions(edges[0], edges[-1])
        began = time.perf_counter()
        gathered = pool.gather(positions, self._spare)
        engine.done(min(edges[-1], plan.rows))
        shuffled = time.perf_counter()
        weight = _weights(engine, plan, edges) if edges[-1] > plan.rows else None
        sizes = [engine.count(a, b) for a, b in itertools.pairwise(edges)]
        parts = self._collator.split(gathered, sizes, self._executor, self._spare)
        if self._numbers_samples:
            before = epoch * plan.global_batch * -(-plan.rows // plan.global_batch)
            numbers = torch.from_numpy(engine.samples(edges[0], edges[-1]) + before)
            for part, own in zip(parts, numbers.split(sizes), strict=True):
                part[SAMPLE] = own
        batches = [
            batch_of(part, rows, min(end, plan.rows) - begin, epoch * plan.epoch_samples + min(end, plan.rows))
            for (begin, end), part, rows in zip(itertools.pairwise(edges), parts, sizes, strict=True)
        ]
        if weight is not None:
            batches[-1] = replace(batches[-1], weight=weight[len(weight) - sizes[-1] :])
        placed = engine.timing.get("shuffle", 0.0)
        timing = engine.timing | {"shuffle": placed + shuffled - began, "collate": time.perf_counter() - shuffled}
        chunk = _Chunk(batches, timing, engine.decoded)
        engine.timing, engine.decoded = {}, 0
        return chunk


def read_columns(manifest: DatasetManifest, names: Sequence[str] | None, audit: bool) -> tuple[Column, ...]:
    """What is decoded: the named columns (None: all), and in audit mode the row numbers."""
    named = manifest.columns if names is None else tuple(manifest.column(name) for name in names if name != SAMPLE)
    return (*named, Column(name=ROW_NUMBER, dtype="int64")) if audit else named


def with_next(spans: Iterable[Span]) -> Iterator[tuple[Span, Span | None]]:
    """Each span with the one after it."""
    spans = iter(spans)
    span = next(spans, None)
    while span is not None:
        following = next(spans, None)
        yield span, following
        span = following


@dataclass(frozen=True)
class _Chunk:
    batches: list[Batch]
    timing: Timing
    decoded: int


def _weights(engine: Engine, plan: Plan, edges: Sequence[int]) -> torch.Tensor:
    """(rows,) float32 of the last global batch's rows of this rank: 1 for rows, 0 for padding."""
    samples = engine.samples(edges[-2], edges[-1])
    return torch.from_numpy((samples < plan.rows).astype(np.float32))


def _row_bytes(columns: Sequence[Column], files: Sequence[DataFile]) -> int:
    """Bytes of one decoded row: exact for fixed columns, at most the stored bytes per row x 2 for the others."""
    fixed = sum(row_bytes(c) for c in columns if is_fixed(c))
    if all(is_fixed(c) for c in columns):
        return max(1, fixed)
    rows = max(1, sum(f.rows for f in files))
    return max(1, fixed + 2 * sum(f.bytes for f in files) // rows)
