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
from sparkring.training.data.batch import BatchShare, Reader
from sparkring.training.data.build import make_reader
from sparkring.training.data.parts import PartsReader
from sparkring.training.data.request import AllGather, DataRank, ReadRequest, gather_alone
from sparkring.training.data.weights import WeightedReader
from sparkring.training.launch.host.rank import WorkerContext
from sparkring.training.loop.fit import next_meeting
from sparkring.training.parallel.servers.backup import BackupStrategy
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

    def open(self, split: str, training: bool) -> Reader:
        """Open this rank's share of a split. Evaluation reads every row once, in stored order."""
        reader = self._open_parts() if training else None
        self._opened.append(reader or self._open_share(self.config.data, split, training))
        return self._opened[-1]

    def _open_parts(self) -> Reader | None:
        """Open what reads the parts that this rank is given; None where no rank is a backup."""
        strategy, config, data = self.strategy, self.config, self.config.data
        if not isinstance(strategy, BackupStrategy):
            return None
        checked = data.model_copy(update={"verify": "off"})  # by the ranks whose own these are

        def take(step: int) -> BatchShare | None:
            cut = self.ctx.next_cut()
            return strategy.take(next_meeting(step, own.steps_per_epoch, config.train, config.checkpoint, cut))

        def open_stream(stream: int) -> Reader:
            return self._open_share(checked, "train", True, stream)

        stream = strategy.data_rank % strategy.parts
        own = self._open_share(data, "train", True, stream)
        return PartsReader(own, stream, open_stream, take)

    def _open_share(self, data: DataConfig, split: str, training: bool, stream: int | None = None) -> Reader:
        """Open a share of a split.

        Args:
            data: how it is read.
            split: which.
            training: else every row comes once, in stored order.
            stream: of the parts of training; None: this rank's share.
        """
        config, strategy, world = self.config, self.strategy, self.ctx.world_size
        asks_others = data.on_corrupt == "quarantine" or bool(data.filters)
        together = asks_others and world > 1
        gather = data_gather(strategy, self.ctx, config.checkpoint.timeout_s) if together else gather_alone
        rows = self.manifest.splits[split].rows
        batch = config.train.global_batch if training else config.evaluation_batch(rows)
        weight = self.manifest.weight
        names = [*self.columns, *([weight["column"]] if weight is not None else [])]
        request = ReadRequest(self.dataset, self.manifest, split, names, batch)
        number, size = (strategy.data_rank, strategy.data_size) if stream is None else (stream, strategy.parts)
        rank = DataRank(number, size, self.device, gather, self.ctx.on_progress)
        return make_weighted_reader(data, request, rank, evaluation=not training)

    def close(self) -> None:
        for reader in self._opened:
            reader.close()


def make_weighted_reader(config: DataConfig, request: ReadRequest, rank: DataRank, evaluation: bool) -> Reader:
    """Open one rank's share of a split, whose rows weigh what the dataset says.

    Args:
        config: how it is read.
        request: what is read, the dataset's weight included.
        rank: by whom.
        evaluation: every row once, in stored order.
    """
    reader, weight = make_reader(config, request, rank, evaluation=evaluation), request.manifest.weight
    return reader if weight is None else WeightedReader(reader, weight["column"], weight["mean"])


def data_gather(strategy: Ranks, ctx: WorkerContext, timeout_s: float) -> AllGather:
    """All-gather of JSON values between data ranks: one answer per data rank, in their order."""
    everyone = peers(strategy, ctx, timeout_s)

    def gather(value: Any) -> list[Any]:
        answers = everyone.gather(json.dumps([strategy.data_rank, value]).encode())
        by_rank = dict(json.loads(answer) for answer in answers)
        return [by_rank[rank] for rank in range(strategy.data_size)]

    return gather


def left_out(reader: Reader) -> list[str]:
    """Files of the dataset that all ranks leave out as damaged: the driver compares what is made of the others."""
    files: list[str] = reader.order_state().get("quarantined", [])  # a mix and petastorm have other files
    return files
