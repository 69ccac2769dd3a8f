"""Train a run on parameter servers again, in one process and one thread, from its event logs.

See docs/explanation/asynchronous.md. What the run evaluated and saved does not matter: weights change by pushes alone,
and these are computed again, from the rows of the dataset and from the weights as they were at the pulls.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from sparkring.conf.blocks.parallel import ParallelConfig
from sparkring.conf.config import RunConfig
from sparkring.conf.manifest import DatasetManifest
from sparkring.conf.plain_text import count_of
from sparkring.conf.rank_info import RankInfo
from sparkring.conf.storage import Storage, open_storage
from sparkring.training.data.batch import Batch, Reader
from sparkring.training.data.request import DataRank, ReadRequest
from sparkring.training.loop.fit import total_steps
from sparkring.training.loop.optim.build import build_optimizer
from sparkring.training.model.folder import open_tables
from sparkring.training.model.prepare import prepare_model
from sparkring.training.model.recipe_model import build_model, start_model
from sparkring.training.models.initial import InitialModel, eager_model
from sparkring.training.parallel.mesh import Mesh
from sparkring.training.parallel.model_parallel.placement import make_placement
from sparkring.training.parallel.process_groups import RankContext
from sparkring.training.parallel.servers.link import ServerLink
from sparkring.training.parallel.servers.strategy import ServersStrategy
from sparkring.training.servers.client import Client, Gradient, Pulled
from sparkring.training.servers.local import LocalServers
from sparkring.training.servers.replay import Try, Workers, replay
from sparkring.training.servers.segments import Segment, check_all_there, read_segments
from sparkring.training.tables.hashing import Ids
from sparkring.training.worker.agreement import seed_everything
from sparkring.training.worker.splits import make_weighted_reader
from sparkring.training.worker.train import learning_rate_schedule, optimizer_factory, table_settings

CPU = torch.device("cpu")
KEPT = 64  # batches of a rank: servers ahead of others in a replay ask for the next ones, backup workers for late ones


@dataclass(frozen=True)
class ReplayReport:
    """What was made again. digests: of each server at the end of the last segment; `different`: those that are not."""

    clocks: int
    pushes: int
    segments: int
    digests: tuple[str, ...]
    different: tuple[str, ...]

    def describe(self) -> str:
        """Describe the result in one line, plus one line per server with a difference."""
        counts = f"{self.clocks} steps, {self.pushes} pushes, {self.segments} segments: "
        if self.different:
            return "\n".join([f"{counts}DIFFERENT", *self.different])
        return (
            f"{counts}the same bits on {count_of(len(self.digests), 'server')}: "
            f"{' '.join(each[:16] for each in self.digests)}"
        )


def replay_run(
    config: RunConfig,
    dataset: Storage,
    manifest: DatasetManifest,
    events: Storage,
    steps: int,
    on_segment: Callable[[Segment], None] = lambda segment: None,
) -> ReplayReport:
    """Replay all segments and compare the servers' content after each. ValueError if impossible.

    Args:
        config: configuration of the run.
        dataset: dataset that it was trained on.
        manifest: manifest of the dataset.
        events: the run's folder of event logs.
        steps: number of steps of the run.
        on_segment: called after each segment.
    """
    if config.optim.schedule == "plateau":
        raise ValueError(
            "optim.schedule = 'plateau': rates came from evaluations, which are not in the logs, so the run cannot be "
            "replayed"
        )
    segments = read_segments(events)
    check_all_there(segments, steps, events.uri)
    with _Replayer(config, dataset, manifest) as replayer:
        found = [replayer.run(segment, on_segment) for segment in segments]
    pushes = sum(len(log.events) for segment in segments for log in segment.logs)
    different = tuple(line for _, lines in found for line in lines)
    return ReplayReport(segments[-1].end, pushes, len(segments), found[-1][0], different)


class _Replayer:
    """Ranks of one segment after the other."""

    def __init__(self, config: RunConfig, dataset: Storage, manifest: DatasetManifest) -> None:
        self.config, self.dataset, self.manifest = config, dataset, manifest
        self.strategy: ServersStrategy | None = None
        self.servers: LocalServers | None = None
        self.readers: list[Reader] = []
        self.attempt: int | None = None
        self.lr_at: Callable[[int], float] = lambda clock: 0.0

    def __enter__(self) -> _Replayer:
        return self

    def __exit__(self, *error: object) -> None:
        self._close_readers()

    def _close_readers(self) -> None:
        for reader in self.readers:
            reader.close()
        self.readers = []

    def run(self, segment: Segment, on_segment: Callable[[Segment], None]) -> tuple[tuple[str, ...], list[str]]:
        """Replay a segment. Returns the digests, and a line for each server whose digest is another."""
        workers, count = segment.logs[0].header.workers, len(segment.logs)
        if segment.attempt != self.attempt:
            self._begin_attempt(segment, workers, count)
        assert self.servers is not None
        batches = [_Batches(reader, segment.begin, segment.end) for reader in self.readers]
        replay(self.servers.shards, segment.logs, _Ranks(self._strategy, batches, self.lr_at).functions())
        digests = tuple(shard.digest() for shard in self.servers.shards)
        on_segment(segment)
        return digests, [
            f"server {number}, after {segment.end} steps: {digest} where the run had {log.header.digest}"
            for number, (digest, log) in enumerate(zip(digests, segment.logs, strict=True))
            if digest != log.header.digest
        ]

    @property
    def _strategy(self) -> ServersStrategy:
        assert self.strategy is not None
        return self.strategy

    def _begin_attempt(self, segment: Segment, workers: int, count: int) -> None:
        before = self.servers
        fresh = LocalServers(count, workers, lambda named: build_optimizer(named, self.config.optim))
        header = segment.logs[0].header
        made_with = {"bound": header.bound, "damp": header.damp, "max_lag": None}  # what was rejected is not made again
        servers = self.config.parallel.servers.model_copy(update=made_with)
        parallel = self.config.parallel.model_copy(update={"servers": servers})
        self.strategy, columns = self._prepared(fresh, parallel, workers, before is None)
        self.servers = fresh if before is None else before.moved(count, fresh.definition)
        self.servers.begin(segment.begin)
        self.attempt = segment.attempt
        self._close_readers()
        weight = self.manifest.weight
        names = [*columns, *([weight["column"]] if weight is not None else [])]
        request = ReadRequest(self.dataset, self.manifest, "train", names, self.config.train.global_batch)
        self.readers = _open_all(self.config, request, workers)
        steps = total_steps(self.config.train, self.readers[0].steps_per_epoch)
        self.lr_at = learning_rate_schedule(self.config, steps)

    def _prepared(
        self, servers: LocalServers, parallel: ParallelConfig, workers: int, first: bool
    ) -> tuple[ServersStrategy, list[str]]:
        """Make a strategy on these servers with the run's initial weights; also return its columns."""
        config, manifest = self.config, self.manifest
        seed_everything(config.train.seed)
        made = start_model(config, manifest)
        initial = made if isinstance(made, InitialModel) else eager_model(build_model(config, manifest), str(made))
        model = prepare_model(initial, config, manifest, continued=not first, gather=lambda mine: [mine], rank=0)
        context = RankContext(parallel, Mesh(), RankInfo(), CPU)
        link = ServerLink(cast(Client, servers), 0, workers)
        strategy = ServersStrategy(
            context, make_placement(context), config.optim.clip_norm, link, table_settings(config)
        )
        strategy.prepare(model.initial, model.task, optimizer_factory(config.optim))
        if config.warm_start is not None and config.warm_start.model is not None and strategy.tables and first:
            dims = {name: held.table.spec.dim for name, held in strategy.tables.tables.items()}
            tables = open_tables(open_storage(config.warm_start.model), dims)
            for number, name in enumerate(dims):
                for shard in servers.shards:
                    for ids, rows in tables[name].content(shard.own_buckets):
                        servers.begin_table(number, ids, rows)
        return strategy, model.columns.read


class _Batches:
    """One rank's batches of a segment, by step; the last ones are kept."""

    def __init__(self, reader: Reader, begin: int, end: int) -> None:
        self._batches: Iterator[Batch] = reader.batches(reader.epochs.consumed_at(begin), end - begin)
        self._next = begin
        self._kept: dict[int, Batch] = {}

    def at(self, clock: int) -> Batch:
        while self._next <= clock:
            self._kept[self._next] = next(self._batches)
            self._kept.pop(self._next - KEPT, None)
            self._next += 1
        return self._kept[clock]


class _Ranks:
    """What ranks compute, all by one strategy: a rank's gradient depends on its number, its step and what it pulled."""

    def __init__(self, strategy: ServersStrategy, batches: Sequence[_Batches], lr_at: Callable[[int], float]) -> None:
        self.strategy, self.batches, self.lr_at = strategy, batches, lr_at

    def functions(self) -> Workers:
        return Workers(self.ids, self.gradient, self.factor)

    def ids(self, worker: int, clock: int) -> list[Ids]:
        return self.strategy.distinct_ids(self.batches[worker].at(clock))

    def gradient(self, one: Try, pulled: Pulled) -> Gradient:
        batch = self.batches[one.worker].at(one.clock)
        self.strategy.rank, self.strategy.link.clock = one.worker, one.clock
        self.strategy.compute(batch, pulled, self.strategy.distinct_ids(batch))
        gradient, _ = self.strategy.gradient(self.lr_at(one.clock if one.step is None else one.step))
        self.strategy.prepared.optimizer.zero_grad(set_to_none=True)
        return gradient

    def factor(self, squares: float, finite: bool) -> float:
        return self.strategy.settled_factor(squares**0.5 if finite else float("nan"))


def _open_all(config: RunConfig, request: ReadRequest, ranks: int) -> list[Reader]:
    """Open every rank's share of the training split; each in a thread, since they may ask each other."""
    barrier, answers = threading.Barrier(ranks), [None] * ranks
    found: dict[int, Reader] = {}
    errors: list[BaseException] = []

    def open_one(rank: int) -> None:
        def gather(value: Any) -> list[Any]:
            answers[rank] = value
            barrier.wait()
            every = list(answers)
            barrier.wait()
            return every

        try:
            data_rank = DataRank(rank, ranks, CPU, gather)
            found[rank] = make_weighted_reader(config.data, request, data_rank, evaluation=False)
        except BaseException as error:
            errors.append(error)
            barrier.abort()

    threads = [threading.Thread(target=open_one, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [found[rank] for rank in range(ranks)]
