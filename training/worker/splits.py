"""Open a rank's share of the dataset's splits."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from sparkring.conf.blocks.data import DataConfig
from sparkring.conf.config import RunConfig
from sparkring.conf.manifest import DatasetManifest
from sparkring.conf.storage import Storage
from sparkring.training.data.batch import Reader
from sparkring.training.data.build import make_reader
from sparkring.training.data.request import AllGather, DataRank, ReadRequest, gather_alone
from sparkring.training.data.weights import WeightedReader
from sparkring.training.launch.host.rank import WorkerContext
from sparkring.training.loop.fit import next_meeting
from sparkring.training.parallel.strategy import Ranks
from sparkring.training.worker.agreement import peers


@dataclass(frozen=True)
class Splits:
    """The splits of one dataset, as one rank reads them. columns: that it reads, without the rows' weight."""

    ctx: WorkerContext
    config: RunConfig
    dataset: Storage
    manifest: DatasetManifest
    strategy: Ranks
    device: torch.device
    columns: Sequence[str]
    _opened: list[Reader] = field(default_factory=list)

    def open_training(self) -> Reader:
        """Open what this rank trains on."""
        config = self.config

        def open_share(stream: int, streams: int, verified: bool = True) -> Reader:
            data = config.data if verified else config.data.model_copy(update={"verify": "off"})
            request = self._request("train", config.train.global_batch)
            return make_weighted_reader(data, request, self._data_rank(stream, streams), evaluation=False)

        def meets_at(step: int, steps_per_epoch: int) -> int:
            return next_meeting(step, steps_per_epoch, config.train, config.checkpoint, self.ctx.next_cut())

        self._opened.append(self.strategy.open_training(open_share, meets_at))
        return self._opened[-1]

    def open(self, split: str) -> Reader:
        """Open this rank's share of a split to evaluate: every row once, in stored order."""
        request = self._request(split, self.config.evaluation_batch(self.manifest.splits[split].rows))
        rank = self._data_rank(self.strategy.data_rank, self.strategy.data_size)
        self._opened.append(make_weighted_reader(self.config.data, request, rank, evaluation=True))
        return self._opened[-1]

    def _request(self, split: str, batch: int) -> ReadRequest:
        weight = self.manifest.weight
        names = [*self.columns, *([weight["column"]] if weight is not None else [])]
        return ReadRequest(self.dataset, self.manifest, split, names, batch)

    def _data_rank(self, number: int, size: int) -> DataRank:
        asks_others = self.config.data.on_corrupt == "quarantine" or bool(self.config.data.filters)
        together = asks_others and self.ctx.world_size > 1
        timeout_s = self.config.checkpoint.timeout_s
        gather = data_gather(self.strategy, self.ctx, timeout_s) if together else gather_alone
        return DataRank(number, size, self.device, gather, self.ctx.on_progress)

    def close(self) -> None:
        for reader in self._opened:
            reader.close()


def make_weighted_reader(config: DataConfig, request: ReadRequest, rank: DataRank, evaluation: bool) -> Reader:
    """Open one rank's share of a split, with the row weights of the dataset.

    Args:
        config: settings of the reader.
        request: request, including the dataset's weight column.
        rank: rank that reads.
        evaluation: whether to read every row once, in stored order.
    """
    reader, weight = make_reader(config, request, rank, evaluation=evaluation), request.manifest.weight
    return reader if weight is None else WeightedReader(reader, weight["column"], weight["mean"])


def data_gather(strategy: Ranks, ctx: WorkerContext, timeout_s: float) -> AllGather:
    """Make an all-gather of JSON values over data ranks: one answer per data rank, in rank order."""
    everyone = peers(strategy, ctx, timeout_s)

    def gather(value: Any) -> list[Any]:
        answers = everyone.gather(json.dumps([strategy.data_rank, value]).encode())
        by_rank = dict(json.loads(answer) for answer in answers)
        return [by_rank[rank] for rank in range(strategy.data_size)]

    return gather


def left_out(reader: Reader) -> list[str]:
    """List damaged files that all ranks leave out, so that the driver can compare the others."""
    files: list[str] = reader.order_state().get("quarantined", [])  # a mix and petastorm have other files
    return files
