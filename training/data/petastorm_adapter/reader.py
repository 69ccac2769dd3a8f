"""Read petastorm's datasets, or plain Parquet through petastorm.

petastorm shards whole row groups (`index % ranks`), so ranks own unequal numbers of rows and the order depends on the
world; with more than one worker the order of row groups is not reproducible, so a resumed epoch skips as many batches,
not the same rows. What this reader adds: every rank takes the same number of steps (the smallest share decides, and
rows left out are logged), batches of exactly the requested size, and the declared dtypes or an error. Schemas of
petastorm's datasets are pickles: read only those you trust.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing
from itertools import islice
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from numpy.random import PCG64, RandomState, SeedSequence

from sparkring.conf.blocks.data import DataConfig
from sparkring.conf.manifest import Column, DatasetManifest
from sparkring.training.data.batch import SAMPLE, Batch, Meter
from sparkring.training.data.decoding.columns import DataError
from sparkring.training.data.epochs import EpochSteps, StepRange
from sparkring.training.data.features.raw import INEXACT_IN_DOUBLE
from sparkring.training.data.features.tensors import TensorSource
from sparkring.training.data.petastorm_adapter.convert import Array, declared_tensor, rebatch, stack_rows, tensor_of
from sparkring.training.data.petastorm_adapter.dataset import (
    equal_steps,
    is_unischema,
    rank_rows,
    row_group_rows,
    rows_per_shard,
)
from sparkring.training.data.request import DataRank
from sparkring.training.data.transfer import to_device

log = logging.getLogger(__name__)


class PetastormReader:
    """A `Reader` through petastorm; ValueError where a rank owns no row group."""

    def __init__(
        self,
        urls: str | Sequence[str],
        columns: Sequence[Column | str] | Sequence[str] | None,
        global_batch: int,
        rank: DataRank | None = None,
        config: DataConfig | None = None,
        manifest: DatasetManifest | None = None,
    ) -> None:
        """Create a reader of a Petastorm dataset.

        Args:
            urls: URL of a folder, or URLs of files.
            columns: columns to read, cast to `Column`s if given as such; None reads all as petastorm returns them. For
                a dataset of ours, names of tensors.
            global_batch: rows of all ranks per step.
            rank: this rank's share; None for a single rank.
            config: seed, shuffle and the petastorm block; None for defaults.
            manifest: manifest of a dataset of ours, to apply its feature state.
        """
        self._rank, config = rank or DataRank(), config or DataConfig()
        self._seed, self._shuffle, self._settings = config.seed, config.shuffle, config.petastorm
        self.meter = Meter()
        self._urls = urls if isinstance(urls, str) else list(urls)
        names = None if columns is None else [c if isinstance(c, str) else c.name for c in columns]
        self._names = None if names is None else [name for name in names if name != SAMPLE]
        self._numbers_samples = SAMPLE in (names or ())
        self._declared = {c.name: c for c in columns or () if isinstance(c, Column)}
        self._tensors = None if manifest is None else TensorSource(manifest, self._names)
        if self._tensors is not None:
            self._names = [c.name for c in self._tensors.stored]
            self._declared = {c.name: c for c in self._tensors.columns}
        self._fingerprint, self._global_batch = "" if manifest is None else manifest.fingerprint, global_batch
        self.is_unischema = is_unischema(self._urls)
        self._rows = rows_per_shard(row_group_rows(self._urls), self._rank.size)
        self.steps_per_epoch = equal_steps(self._rows, global_batch)
        self.epochs = EpochSteps(self.steps_per_epoch * global_batch, global_batch)
        if self.epochs.samples < sum(self._rows) and self._rank.rank == 0:
            log.warning(
                "petastorm shards whole row groups: ranks own %s rows; every rank takes %d steps, "
                "%d of %d rows are left out of every epoch",
                self._rows, self.steps_per_epoch, sum(self._rows) - self.epochs.samples, sum(self._rows),
            )  # fmt: skip

    def order_state(self) -> dict[str, Any]:
        """Return what decides the order, including the world size, on which petastorm's order depends."""
        return {
            "reader": "petastorm",
            "fingerprint": self._fingerprint,
            "urls": self._urls,
            "rows": sum(self._rows),
            "global_batch": self._global_batch,
            "data_size": self._rank.size,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "shuffle_rows": self._settings.shuffle_rows,
        }

    def batches(self, consumed_samples: int = 0, steps: int | None = None) -> Iterator[Batch]:
        ranges = self.epochs.ranges(consumed_samples, steps)
        return to_device(self._on_host(ranges), self._rank.device, self.meter)

    def verify(self) -> None:
        """Do nothing: petastorm knows no hashes of its files."""

    def close(self) -> None:
        """Do nothing: no thread or file outlives an iterator of `batches`."""

    def _on_host(self, ranges: Iterable[StepRange]) -> Iterator[Batch]:
        for steps in ranges:
            yield from self._epoch(steps)

    def _epoch(self, steps: StepRange) -> Iterator[Batch]:
        size = rank_rows(self._global_batch, self._rank.rank, self._rank.size)
        with closing(self._blocks(steps.epoch)) as blocks, closing(rebatch(blocks, size)) as batches:
            began = time.perf_counter()
            for step, columns in enumerate(islice(batches, steps.stop)):
                if step < steps.first:
                    continue
                self.meter.add("data_stall", time.perf_counter() - began)
                rows = len(next(iter(columns.values()))) if columns else 0
                self.meter.count("rows", rows)
                yield self._batch(self.epochs.consumed_after(steps.epoch, step), columns, rows)
                began = time.perf_counter()

    def _batch(self, consumed_samples: int, columns: dict[str, Array], rows: int) -> Batch:
        made: dict[str, Any] = {
            name: declared_tensor(self._declared[name], values) if name in self._declared else tensor_of(name, values)
            for name, values in columns.items()
        }
        masks = [c.mask for c in self._declared.values() if c.mask is not None]
        made |= {mask: torch.ones(rows, dtype=torch.bool) for mask in masks}  # all valid, as nulls are refused
        if self._numbers_samples:
            own_first = self._global_batch * self._rank.rank // self._rank.size
            first = consumed_samples - self._global_batch + own_first
            made[SAMPLE] = torch.arange(first, first + rows)
        return Batch(made, rows, self._global_batch, consumed_samples)

    def _blocks(self, epoch: int) -> Generator[dict[str, Array], None, None]:
        """Yield columns of many rows: row groups, or permuted blocks of `shuffle_rows`."""
        groups, shuffle_rows = self._groups(epoch), self._settings.shuffle_rows
        if not (self._shuffle and shuffle_rows):
            yield from groups
            return
        random = RandomState(PCG64(SeedSequence([self._seed, epoch, self._rank.rank])))
        with closing(rebatch(groups, shuffle_rows)) as blocks:
            for block in blocks:
                order = random.permutation(len(next(iter(block.values()))))
                yield {name: values[order] for name, values in block.items()}

    def _groups(self, epoch: int) -> Iterator[dict[str, Array]]:
        """Yield an epoch's row groups; shuffle reorders them, and the rows inside each."""
        import petastorm

        make = petastorm.make_reader if self.is_unischema else petastorm.make_batch_reader
        size, shuffle = self._rank.size, self._shuffle
        reader = make(
            self._urls,
            schema_fields=self._names,
            reader_pool_type=self._settings.pool,
            workers_count=self._settings.workers,
            num_epochs=1,
            shuffle_row_groups=shuffle,
            shuffle_rows=shuffle,
            seed=self._seed + epoch if shuffle else None,
            cur_shard=self._rank.rank if size > 1 else None,
            shard_count=size if size > 1 else None,
            transform_spec=None if self._tensors is None or not self._tensors.fitted else transform_spec(self._tensors),
        )
        with reader:
            if self.is_unischema:
                yield from stack_rows(reader)
            else:
                yield from (row._asdict() for row in reader)


def transform_spec(tensors: TensorSource) -> Any:
    """Apply the feature state in petastorm's workers: what they hand on has no nulls, which it makes texts of."""
    from petastorm.transform import TransformSpec

    plain, made = [c.name for c in tensors.plain], {c.name for c in tensors.columns}

    def transformed(frame: Any) -> Any:
        table = pa.table({c.name: as_stored(c, frame[c.name]) for c in tensors.inputs})
        return frame[plain].assign(**{c.name: values for c, values, _ in tensors.fitted_of(table)})

    return TransformSpec(
        transformed,
        edit_fields=[(c.name, np.dtype(c.dtype).type, (), False) for c in tensors.fitted],
        removed_fields=[c.name for c in tensors.stored if c.name not in made],
    )


def as_stored(column: Column, values: Any) -> pa.Array:
    """Convert a pandas column to its stored type. DataError if nulls made inexact floats of whole numbers."""
    if column.dtype == "string":
        return pa.array(values, pa.string(), from_pandas=True)
    if np.dtype(column.dtype).kind == "i" and values.dtype.kind == "f" and (values.abs() >= INEXACT_IN_DOUBLE).any():
        raise DataError(
            f"column {column.name!r} holds nulls and numbers beyond 2^53, of which petastorm makes other ones; "
            "use reader: native"
        )
    stored = pa.date32() if column.logical == "date" else pa.from_numpy_dtype(np.dtype(column.dtype))
    return pa.array(values, stored, from_pandas=True)
