"""The reader of trainings alone, for a script of your own: `sparkring.data.open(...)`; without Spark and MLflow.

The rows of global batch s depend on the dataset, the settings, the epoch and s alone, so a script continues exactly
where it was, on more or fewer ranks too.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed
from pydantic import ValidationError

from sparkring.conf.blocks.data import DataConfig
from sparkring.conf.load import problem_line
from sparkring.conf.manifest import read_manifest
from sparkring.conf.plain_text import count_of
from sparkring.conf.storage import open_storage
from sparkring.training.data.batch import Batch
from sparkring.training.data.build import make_reader
from sparkring.training.data.request import AllGather, DataRank, ReadRequest, gather_alone
from sparkring.training.data.resume import explain_difference

__all__ = ["Batch", "DataReader", "open"]


class DataReader:
    """One split of a dataset, as one of `world` ranks sees it; a context manager that closes its files.

    Iterating gives the rest of the epoch that has started, and then the next one. `state_dict` is that of the batches
    that were given out: a loader that reads ahead of the training must not be put around it.
    """

    def __init__(self, request: ReadRequest, rank: DataRank, config: DataConfig):
        self._reader = make_reader(config, request, rank)
        # Closes it at the end of a script too: a thread that Python ends while it reads may abort the process
        self._close = weakref.finalize(self, self._reader.close)
        self._consumed = 0

    def __enter__(self) -> DataReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __len__(self) -> int:
        """Return the global batches per epoch; the same on every rank."""
        return self._reader.steps_per_epoch

    def __iter__(self) -> Iterator[Batch]:
        return self.batches()

    def __getitem__(self, index: object) -> Batch:
        raise TypeError(
            "a DataReader gives whole batches in order, and reads ahead itself: iterate over it, without a DataLoader"
        )

    @property
    def consumed_samples(self) -> int:
        """Rows of all ranks since the run began, by the last batch that was given out."""
        return self._consumed

    @property
    def epoch(self) -> int:
        """The epoch that the next batch is of, from 0."""
        return self._consumed // self._reader.epochs.samples

    def batches(self, from_sample: int | None = None, steps: int | None = None) -> Iterator[Batch]:
        """Read this rank's share of the next global batches.

        `from_sample`: rows of all ranks that were consumed before; None: continue. `steps`: how many batches, across
        epochs; None: the rest of the epoch.
        """
        if not self._close.alive:
            raise ValueError("the reader is closed; open the dataset again, and go on by load_state_dict")
        self._consumed = self._consumed if from_sample is None else from_sample
        for batch in self._reader.batches(self._consumed, steps):
            self._consumed = batch.consumed_samples
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """Return the run's position and reading order; JSON-able, and the same on every rank."""
        return {"consumed_samples": self._consumed, "order": dict(self._reader.order_state())}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state, on any number of ranks.

        ValueError names each setting by which this reader would continue in another order.
        """
        if missing := {"consumed_samples", "order"} - set(state if isinstance(state, Mapping) else ()):
            raise ValueError(f"state: has no {' and no '.join(sorted(missing))}; give what state_dict() has returned")
        if differences := explain_difference(state["order"], self._reader.order_state()):
            raise ValueError(
                f"the state is of another order of rows: {'; '.join(differences)}; open the dataset with the settings "
                "that the state was taken with"
            )
        self._consumed = int(state["consumed_samples"])

    def close(self) -> None:
        self._close()


def open(
    uri: str | os.PathLike[str],
    split: str = "train",
    *,
    rank: int = 0,
    world: int = 1,
    global_batch: int,
    columns: Sequence[str] | None = None,
    device: torch.device | str | None = None,
    **settings: Any,
) -> DataReader:
    """Open a split of a dataset that `sparkring etl` has built.

    ManifestError without a dataset. ValueError for settings that allow no batch.

    Args:
        uri: folder of the dataset, local or in an object store.
        split: name of the split.
        rank: number of this process.
        world: processes that share each global batch.
        global_batch: rows of all ranks in a step.
        columns: names of tensors to read; None for all.
        device: device of the batches, such as "cuda:0"; None keeps them on the host.
        settings: keys of a recipe's `data` block, such as shuffle=False, seed=1 or filters=[["x", ">", 0]].
    """
    try:
        config = DataConfig.model_validate(settings)
    except ValidationError as error:
        lines = [problem_line(each, settings, {}, DataConfig) for each in error.errors()]
        raise ValueError("\n".join(lines)) from None
    if not 0 <= rank < world:
        raise ValueError(
            f"rank = {rank}: world = {count_of(world, 'process is')} numbered from 0; give each a number below that"
        )
    if 0 < global_batch < world:
        raise ValueError(
            f"global_batch = {global_batch}: world = {world} processes share its rows, and some would have none"
        )
    uri = os.fspath(uri)
    storage = open_storage(uri)
    manifest = read_manifest(storage)
    if split not in manifest.splits:
        raise ValueError(f"split = {split!r}: {uri} has the splits {sorted(manifest.splits)}")
    device = None if device is None else torch.device(device)
    request = ReadRequest(storage, manifest, split, columns, global_batch)
    gather = gather_of(world) if config.filters or config.on_corrupt == "quarantine" else gather_alone
    return DataReader(request, DataRank(rank, world, device, gather), config)


def gather_of(world: int) -> AllGather:
    """Return how ranks agree on the rows that filters and quarantine leave."""
    if world == 1:
        return gather_alone
    if not torch.distributed.is_initialized() or torch.distributed.get_world_size() != world:
        raise ValueError(
            f"world = {world}: filters and on_corrupt=quarantine ask the other ranks; call "
            "torch.distributed.init_process_group for as many ranks before"
        )

    def gather(value: Any) -> list[Any]:
        found = [None] * world
        torch.distributed.all_gather_object(found, value)
        return found

    return gather
