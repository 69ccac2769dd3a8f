"""The native reader: decodes row groups in threads, and serves views of them."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import chain, pairwise
from typing import Any

import numpy as np
import torch

from sparkring.conf.blocks.data import MIB, DataConfig
from sparkring.conf.digest import digest
from sparkring.conf.manifest import ROW_NUMBER, Column, DataFile, DatasetManifest
from sparkring.conf.plain_text import count_of
from sparkring.training.data.batch import SAMPLE, Batch, Meter
from sparkring.training.data.decoding.buffers import BufferPool
from sparkring.training.data.decoding.cells import make_decoders
from sparkring.training.data.decoding.collate import Collator
from sparkring.training.data.decoding.columns import DataError, is_fixed, row_bytes
from sparkring.training.data.decoding.pool import GROUP_PAGES, PagePool
from sparkring.training.data.engine import Engine, PlacedPiece
from sparkring.training.data.epochs import EpochSpan
from sparkring.training.data.features.tensors import TensorSource
from sparkring.training.data.files import FileOpener, unlisted_files
from sparkring.training.data.held import HeldRows, chunk_bytes, page_count
from sparkring.training.data.order import ORDER_VERSION, RankOrder, make_plan
from sparkring.training.data.prefetch import Prefetcher
from sparkring.training.data.request import DataRank, ReadRequest
from sparkring.training.data.resume import OrderState
from sparkring.training.data.select import Selection, select_all
from sparkring.training.data.source import FileSource
from sparkring.training.data.transfer import to_device

log = logging.getLogger(__name__)


class ParquetReader:
    """One split of one dataset, as one data rank sees it.

    `batches` may be called again and again, one at a time. Raises ValueError for settings that fit no plan, DataError
    (a ValueError) for data that is not what the manifest says; both before the first batch wherever that can be known.
    """

    def __init__(
        self,
        request: ReadRequest,
        rank: DataRank | None = None,
        config: DataConfig | None = None,
        opener: FileOpener | None = None,
        selection: Selection | None = None,
    ) -> None:
        """Create a reader of one rank.

        Args:
            request: split, columns and global batch to read.
            rank: this rank's share; None for a single rank.
            config: order, memory, threads and decoders; None for defaults.
            opener: opens files; None reads them where they are stored.
            selection: intact files and filtered rows; None selects the whole split.
        """
        rank, config = rank or DataRank(), config or DataConfig()
        self.meter = Meter()
        self._request, self._rank, self._config = request, rank, config
        self._tensors = tensor_source(request.manifest, request.columns, config.audit)
        self._columns = self._tensors.columns
        self._numbers_samples = SAMPLE in (request.columns or ())
        self.selection = selection or select_all(request.manifest.files_of(request.split))
        self.plan = make_plan(self.selection.group_rows, request.global_batch, config)
        self.epochs = self.plan.epochs
        self.steps_per_epoch = self.epochs.steps
        self._order = RankOrder(self.plan, rank.rank, rank.size)
        opener = opener or FileOpener(request.files_folder)
        states = request.manifest.features.get("features", [])
        decoders = make_decoders(states, [column.name for column in self._columns], config.decoders)
        self._threads = decode_threads(config, bool(decoders))
        self._source = FileSource(opener, self.selection, self._tensors.stored, config.verify != "hash")
        self._row_bytes = _row_bytes(self._columns, self.selection.files)
        self._page_rows, self._ahead, self._pages = self._plan_memory()
        self._executor = ThreadPoolExecutor(self._threads, thread_name_prefix="sparkring-decode")
        self._buffers = BufferPool()
        self._collator = Collator(self._columns, decoders, self._executor, self._buffers)
        self._pool: PagePool | None = None
        self._running: Prefetcher[_Chunk] | None = None
        self._verified = config.verify == "off"

    def order_state(self) -> dict[str, Any]:
        """Return what decides the order of global batches; see `sparkring.training.data.resume`."""
        plan, config = self.plan, self.plan.config
        return OrderState(
            order_version=ORDER_VERSION,
            fingerprint=self._request.manifest.fingerprint,
            split=self._request.split,
            rows=plan.rows,
            row_groups=digest(np.diff(plan.group_start).tolist()),
            global_batch=plan.global_batch,
            lanes=plan.lanes,
            window_row_groups=plan.window,
            block_rows=plan.block,
            seed=config.seed,
            tail=config.tail,
            shuffle=config.shuffle,
            filters=list(self.selection.conditions),
            quarantined=[path for path, _, _ in self.selection.quarantined],
        ).model_dump(mode="json")

    def batches(self, consumed_samples: int = 0, steps: int | None = None) -> Iterator[Batch]:
        """Read this rank's share of the next `steps` global batches.

        None: of the rest of the epoch. The next epoch is decoded ahead while this one is served.
        """
        spans = (
            EpochSpan(epoch, np.arange(first, stop + 1, dtype=np.int64) * self.plan.global_batch)
            for epoch, first, stop in self.epochs.ranges(consumed_samples, steps)
        )
        return to_device(self.serve(spans), self._rank.device, self.meter)

    def serve(self, spans: Iterable[EpochSpan]) -> Generator[Batch, None, None]:
        """Serve this rank's rows of each span's batches, on the host.

        Samples past an epoch's last row are padding. For readers that cut batches themselves (mix.py).
        """
        self._check_idle()
        self.verify()
        return self._on_host(spans)

    def verify(self) -> None:
        """Check the files this rank's lanes are in, once; all ranks check every file."""
        if self._verified:
            return
        began = time.perf_counter()
        files = self._own_files()
        # All lengths before the first hash: a truncated file is named before gigabytes are read.
        for content in (False, True) if self._config.verify == "hash" else (False,):
            checked = self._executor.map(partial(self._source.opener.check, content=content), files)
            for file, _ in zip(files, checked, strict=True):
                self._rank.on_progress(f"{'hashed' if content else 'found'} {file.path}")
        storage = self._request.storage
        manifest = self._request.manifest
        first = min(manifest.splits, key=lambda name: name != "train")  # one reader says it, not that of each split
        speaks = 0 in self._order.lanes and self._request.split == first
        if speaks and (extra := unlisted_files(storage, manifest.files)):
            log.warning(
                "%s: %d Parquet files are not in the manifest and are ignored, such as %s",
                storage.uri, len(extra), extra[0],
            )  # fmt: skip
        self._verified = True
        self.meter.add("verify", time.perf_counter() - began)

    def most_held(self) -> HeldRows:
        """Predict what it holds at most, over all epochs; rows of unequal length by what they take as stored."""
        order, plan = self._order, self.plan
        lane_rows = np.diff(plan.lane_start)[order.lanes.start : order.lanes.stop].tolist()
        step_bytes = self._chunk_row_bytes * plan.global_batch * len(order.lanes) / plan.lanes
        most_steps = max(1, int(self._config.chunk_bytes / max(1, step_bytes)))
        ahead_rows = self._ahead * plan.window * int(np.diff(plan.group_start).max())
        pages = min(self._pages, page_count(lane_rows, self._page_rows, ahead_rows))
        return HeldRows(
            chunk_bytes(self.steps_per_epoch, most_steps, step_bytes), pages * self._page_rows * self._row_bytes
        )

    def held(self) -> HeldRows:
        """Measure what it holds now, memory that will be used again included."""
        return HeldRows(self._buffers.bytes, 0 if self._pool is None else self._pool.used_rows * self._row_bytes)

    def close(self) -> None:
        """End the threads, and with them an epoch that is being read."""
        self._end_epoch()
        self._executor.shutdown(wait=True, cancel_futures=True)

    def _check_idle(self) -> None:
        if self._running is not None:
            raise RuntimeError("the reader's previous epoch is still being read; exhaust or close its iterator first")

    def _end_epoch(self) -> None:
        if self._running is not None:
            self._running.close()
            self._running = None

    def _own_files(self) -> list[DataFile]:
        files = (self._source.locate(group)[0] for group in self._order.row_groups().tolist())
        return list({file.path: file for file in files}.values())

    def _plan_memory(self) -> tuple[int, int, int]:
        """Decide the rows of a page, how many windows to decode ahead, and the most pages to plan for.

        ValueError where the row groups that may be in use at once exceed max_bytes.
        """
        config, lanes, plan = self._config, len(self._order.lanes), self.plan
        group_rows = int(np.diff(plan.group_start).max())
        # An odd number of blocks: lanes' pages a power of two apart would share cache sets when all are read at once.
        page_rows = (-(-group_rows // (GROUP_PAGES * plan.block)) | 1) * plan.block
        # A gather may reach from one window into the next in every lane.
        in_use = min(2 * lanes * plan.window, len(plan.groups))
        most = config.max_bytes // (group_rows * self._row_bytes)
        if in_use >= most:
            raise ValueError(
                f"{in_use} row groups may be in use at once ({lanes} lanes x {plan.window}, of up to "
                f"{group_rows * self._row_bytes / MIB:.1f} MiB), which exceeds data.max_bytes = {config.max_bytes}; "
                "lower data.lanes or data.window_row_groups, raise data.max_bytes, or write smaller row groups"
            )
        ahead = min(config.ahead or self._threads, most - in_use)
        # A lane's first and last page may hold few rows.
        pages = (in_use + ahead * plan.window) * -(-group_rows // page_rows) + 2 * lanes
        return page_rows, ahead, min(pages, config.max_bytes // (page_rows * self._row_bytes))

    def _on_host(self, spans: Iterable[EpochSpan]) -> Generator[Batch, None, None]:
        self._check_idle()  # two iterators may be made before either is started
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
                self.meter.absorb(chunk.meter)
                self._count_cached()
                for batch in chunk.batches:
                    if first:
                        self.meter.add("first_batch", time.perf_counter() - called)
                        first = False
                    self.meter.count("rows", batch.rows)
                    yield batch
                del chunk, batch  # so that the thread that made them drops them
        finally:
            self._end_epoch()

    def _count_cached(self) -> None:
        for name, amount in self._source.opener.take_counts().items():
            self.meter.count(name, amount)

    def _chunks(self, spans: Iterable[EpochSpan]) -> Generator[_Chunk, None, None]:
        engines: deque[Engine] = deque()
        todo = (span for span in spans if len(span.edges) > 1)
        size = 1  # steps in a chunk: the first is gathered alone, so that it comes soon
        try:
            for span, following in pairwise(chain(todo, [None])):
                assert span is not None
                if not engines:
                    engines.append(self._engine(span))
                if following is not None:
                    engines.append(self._engine(following))
                    engines[0].next_engine = engines[1]
                begin, most = 0, self._most_steps(span)
                while begin < len(span.edges) - 1:
                    size = min(size, most)
                    yield self._chunk(engines[0], EpochSpan(span.epoch, span.edges[begin : begin + size + 1]))
                    begin, size = begin + size, 2 * size
                engines.popleft().close()
                size = most  # there is no hurry any more
        finally:
            for engine in engines:
                engine.close()

    def _most_steps(self, span: EpochSpan) -> int:
        """Return how many steps of this span make a chunk of `chunk_bytes`."""
        step_rows = (span.edges[-1] - span.edges[0]) / (len(span.edges) - 1) * len(self._order.lanes) / self.plan.lanes
        return max(1, int(self._config.chunk_bytes / max(1, self._chunk_row_bytes * step_rows)))

    @property
    def _chunk_row_bytes(self) -> int:
        return self._row_bytes + self._collator.decoded_row_bytes

    def _engine(self, span: EpochSpan) -> Engine:
        if self._pool is None:
            self._pool = PagePool(self._columns, self._pages, self._page_rows)
        return Engine(self._order, span, self._pool, self._submit, self._ahead)

    def _submit(self, group: int, key: int, landings: Sequence[PlacedPiece]) -> Future[Meter]:
        return self._executor.submit(self._load, group, key, landings)

    def _load(self, group: int, key: int, landings: Sequence[PlacedPiece]) -> Meter:
        """Decode a row group into the pool, in a thread; group: an index into plan.groups."""
        assert self._pool is not None
        index = int(self.plan.groups[group])
        table, read_s, decode_s = self._source.read(index)
        began = time.perf_counter()
        try:
            planned = int(self.plan.group_start[group + 1] - self.plan.group_start[group])
            if table.num_rows != planned:
                raise DataError(
                    f"{count_of(table.num_rows, 'row is')} left by the filters, the plan was made for {planned}"
                )
            to = [(each.lane.piece_rows(group, each.start, each.stop), each.places) for each in landings]
            self._pool.put(key, self._tensors.made(table), to)
        except ValueError as error:
            raise type(error)(f"{self._source.describe(index)}: {error}") from error
        return Meter({"read": read_s, "decode": decode_s, "shuffle": time.perf_counter() - began})

    def _chunk(self, engine: Engine, span: EpochSpan) -> _Chunk:
        """Make the batches of this span: one gather, then views of it."""
        assert self._pool is not None
        plan, order, edges = self.plan, self._order, span.edges.tolist()
        places = engine.positions(edges[0], edges[-1])
        began = time.perf_counter()
        gathered = self._pool.gather(places, self._buffers)
        engine.release(min(edges[-1], plan.rows))
        shuffled = time.perf_counter()
        sizes = [order.count(a, b) for a, b in pairwise(edges)]
        parts = self._collator.split(gathered, sizes)
        if self._numbers_samples:
            before = span.epoch * plan.global_batch * -(-plan.rows // plan.global_batch)
            numbers = torch.from_numpy(order.samples(edges[0], edges[-1]) + before)
            for part, own in zip(parts, numbers.split(sizes), strict=True):
                part[SAMPLE] = own
        batches = []
        for (begin, end), part, rows in zip(pairwise(edges), parts, sizes, strict=True):
            real_end, real = min(end, plan.rows), None
            if end > plan.rows:  # padded
                real = torch.from_numpy(order.samples(begin, end) < plan.rows)
            consumed = span.epoch * self.epochs.samples + real_end
            ids = part.pop(ROW_NUMBER, None)
            weight = None if real is None else real.float()
            batches.append(Batch(part, rows, real_end - begin, consumed, weight, ids, real))
        meter, engine.meter = engine.meter, Meter()
        meter.add("shuffle", shuffled - began)
        meter.add("collate", time.perf_counter() - shuffled)
        return _Chunk(batches, meter)


@dataclass(frozen=True)
class _Chunk:
    batches: list[Batch]
    meter: Meter


def decode_threads(config: DataConfig, decodes_cells: bool) -> int:
    """Return the number of decoding threads; images get two by default, because they take most of the time."""
    return config.threads or (2 if decodes_cells else 1)


def tensor_source(manifest: DatasetManifest, names: Sequence[str] | None, audit: bool) -> TensorSource:
    """Return the wanted tensors (None: all), plus row numbers in audit mode; the reader numbers samples."""
    return TensorSource(manifest, None if names is None else [name for name in names if name != SAMPLE], audit)


def _row_bytes(columns: Sequence[Column], files: Sequence[DataFile]) -> int:
    """Estimate the bytes of one decoded row; ragged columns count twice their stored bytes."""
    fixed = sum(row_bytes(c) for c in columns if is_fixed(c))
    if all(is_fixed(c) for c in columns):
        return max(1, fixed)
    rows = max(1, sum(f.rows for f in files))
    return max(1, fixed + 2 * sum(f.bytes for f in files) // rows)
