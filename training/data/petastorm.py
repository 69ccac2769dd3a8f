"""The adapter to petastorm, the one module that imports it: its datasets behind our reader protocol.

What is petastorm's stays so: it shards whole row groups (`index % ranks`), so ranks own unequal numbers of rows and the
order depends on the world; with more than one worker the order of row groups is not reproducible, so a resumed epoch
skips as many batches, not the same rows. What we add: every rank takes the same number of steps (the smallest share
decides, and what is left over is said), batches of exactly the asked size, and the declared dtypes or an error.
Schemas of Petastorm datasets are pickles: read only those you trust.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

import numpy as np
import torch
from numpy.random import PCG64, RandomState, SeedSequence
from numpy.typing import NDArray

from conf.manifest import Column, DatasetManifest
from conf.storage import Storage
from training.data import petastorm_compat
from training.data.batch import SAMPLE, Batch, Meter, Ragged
from training.data.columns import DataError, numpy_dtype
from training.data.order import epochs_of
from training.data.transfer import to_device

log = logging.getLogger(__name__)
Array = NDArray[Any]


@dataclass(frozen=True)
class PetastormSettings:
    """pool, workers: petastorm's. shuffle_rows: rows permuted together in blocks, beyond the shuffle of row groups and
    of the rows inside each; 0: no more than that. shuffle false: stored order as far as the workers keep it."""

    pool: Literal["thread", "process", "dummy"] = "thread"
    workers: int = 2
    seed: int = 0
    shuffle: bool = True
    shuffle_rows: int = 0


class PetastormReader:
    """A `Reader` over a Petastorm dataset: `urls` is a folder's URL, or the URLs of files. `columns`: what to read, and
    as what where they are `Column`s; None takes what petastorm gives. Raises ValueError where a rank owns no row group.
    """

    def __init__(
        self,
        urls: str | Sequence[str],
        columns: Sequence[Column | str] | Sequence[str] | None,
        global_batch: int,
        data_rank: int = 0,
        data_size: int = 1,
        settings: PetastormSettings | None = None,
        device: torch.device | None = None,
        fingerprint: str = "",
    ) -> None:
        self.settings = settings or PetastormSettings()
        self.meter = Meter()
        self._urls = urls if isinstance(urls, str) else list(urls)
        names = None if columns is None else [c if isinstance(c, str) else c.name for c in columns]
        self._names = None if names is None else [name for name in names if name != SAMPLE]
        self._numbers_samples = SAMPLE in (names or ())
        self._declared = {c.name: c for c in columns or () if isinstance(c, Column)}
        self._rank, self._size, self._device, self._fingerprint = data_rank, data_size, device, fingerprint
        self._global_batch = global_batch
        self.is_unischema = is_unischema(self._urls)
        self._rows = rows_per_shard(row_group_rows(self._urls), data_size)
        self.steps_per_epoch = equal_steps(self._rows, global_batch)
        self._say()

    def _say(self) -> None:
        used = self.steps_per_epoch * self._global_batch
        if used < sum(self._rows) and self._rank == 0:
            log.warning(
                "petastorm shards whole row groups: ranks own %s rows; every rank takes %d steps, "
                "%d of %d rows are left out of every epoch",
                self._rows, self.steps_per_epoch, sum(self._rows) - used, sum(self._rows),
            )  # fmt: skip

    def order_state(self) -> dict[str, Any]:
        """The world is among it: petastorm's order depends on it."""
        s = self.settings
        return {
            "reader": "petastorm",
            "fingerprint": self._fingerprint,
            "urls": self._urls,
            "rows": sum(self._rows),
            "global_batch": self._global_batch,
            "data_size": self._size,
            "seed": s.seed,
            "shuffle": s.shuffle,
            "shuffle_rows": s.shuffle_rows,
        }

    def locate(self, cursor: int) -> tuple[int, int]:
        epoch, rest = divmod(cursor, self.steps_per_epoch * self._global_batch)
        return epoch, rest // self._global_batch

    def batches(self, epoch: int, start_step: int = 0, steps: int | None = None) -> Iterator[Batch]:
        runs = epochs_of(epoch, start_step, steps, self.steps_per_epoch)
        return to_device(self._on_host(runs), self._device, self.meter)

    def verify(self) -> None:
        """Nothing: petastorm knows no hashes of its files, and finds what does not decode when it comes to it."""

    def close(self) -> None:
        """Nothing outlives an iterator of `batches`."""

    def _on_host(self, runs: Iterable[tuple[int, int, int]]) -> Iterator[Batch]:
        for run in runs:
            yield from self._epoch(*run)

    def _epoch(self, epoch: int, start_step: int, end_step: int) -> Iterator[Batch]:
        size = _share(self._global_batch, self._rank, self._size)
        with closing(self._blocks(epoch)) as blocks, closing(_rebatched(blocks, size)) as batches:
            began = time.perf_counter()
            for step, columns in enumerate(islice(batches, end_step)):
                if step < start_step:
                    continue
                self.meter.add("data_stall", time.perf_counter() - began)
                rows = len(next(iter(columns.values()))) if columns else 0
                self.meter.count("rows", rows)
                yield self._batch(epoch, step, columns, rows)
                began = time.perf_counter()

    def _batch(self, epoch: int, step: int, columns: dict[str, Any], rows: int) -> Batch:
        made = {name: self._tensor(name, values) for name, values in columns.items()}
        masks = [c.mask for c in self._declared.values() if c.mask is not None]
        made |= {mask: torch.ones(rows, dtype=torch.bool) for mask in masks}  # nulls are refused: none is there
        cursor = (epoch * self.steps_per_epoch + step + 1) * self._global_batch
        if self._numbers_samples:
            first = cursor - self._global_batch + self._global_batch * self._rank // self._size
            made[SAMPLE] = torch.arange(first, first + rows)
        return Batch(made, rows, self._global_batch, cursor)

    def _tensor(self, name: str, values: Array | list[Any]) -> torch.Tensor | Ragged | list[Any]:
        column = self._declared.get(name)
        made = tensor_of(name, values)
        if column is None or not isinstance(made, torch.Tensor):
            return (
                made if len(values) or column is None else torch.zeros((0, *column.shape), dtype=_torch_dtype(column))
            )
        wanted = _torch_dtype(column)
        if made.is_floating_point() and not wanted.is_floating_point:
            raise DataError(
                f"column {name!r} is declared {column.dtype}, petastorm gives {made.dtype}: it turns "
                "integers with nulls into floats; fill or drop the nulls, or use reader: native"
            )
        return made.to(wanted).reshape(len(made), *column.shape)

    def _blocks(self, epoch: int) -> Generator[dict[str, Array], None, None]:
        """Columns of many rows at a time: row groups, or blocks of `shuffle_rows` rows permuted."""
        groups = self._groups(epoch)
        if not (self.settings.shuffle and self.settings.shuffle_rows):
            yield from groups
            return
        random = RandomState(PCG64(SeedSequence([self.settings.seed, epoch, self._rank])))
        with closing(_rebatched(groups, self.settings.shuffle_rows)) as blocks:
            for block in blocks:
                order = random.permutation(len(next(iter(block.values()))))
                yield {name: values[order] for name, values in block.items()}

    def _groups(self, epoch: int) -> Iterator[dict[str, Array]]:
        import petastorm

        s = self.settings
        make = petastorm.make_reader if self.is_unischema else petastorm.make_batch_reader
        shards = {"cur_shard": self._rank, "shard_count": self._size} if self._size > 1 else {}
        reader = make(
            self._urls, schema_fields=self._names, reader_pool_type=s.pool, workers_count=s.workers, num_epochs=1,
            shuffle_row_groups=s.shuffle, shuffle_rows=s.shuffle, seed=s.seed + epoch if s.shuffle else None, **shards,
        )  # fmt: skip
        with reader:
            if self.is_unischema:
                yield from _stacked(reader)
            else:
                yield from (row._asdict() for row in reader)


def _stacked(rows: Iterator[Any], at_once: int = 256) -> Iterator[dict[str, Array]]:
    """Rows (named tuples of arrays) as columns, some at a time."""
    while part := [row._asdict() for row in islice(rows, at_once)]:
        yield {name: _as_column([row[name] for row in part]) for name in part[0]}


def _as_column(values: list[Any]) -> Array:
    """(n, ...) where all rows have one shape, else (n,) objects."""
    arrays = [np.asarray(v) for v in values]
    if len({(a.shape, a.dtype.kind in "OSU") for a in arrays}) == 1 and arrays[0].dtype.kind not in "OSU":
        return np.stack(arrays)
    out = np.empty(len(values), object)
    out[:] = values
    return out


def _rebatched(blocks: Iterator[dict[str, Array]], rows: int) -> Generator[dict[str, Array], None, None]:
    """Blocks of exactly `rows` rows; the last may be shorter."""
    held: list[dict[str, Array]] = []
    count = 0
    for block in blocks:
        held.append(block)
        count += len(next(iter(block.values())))
        if rows and count >= rows:
            joined = {name: np.concatenate([b[name] for b in held]) for name in block}
            for at in range(0, count - rows + 1, rows):
                yield {name: values[at : at + rows] for name, values in joined.items()}
            rest = count % rows
            held = [{name: values[count - rest :] for name, values in joined.items()}] if rest else []
            count = rest
    if count and rows:
        yield {name: np.concatenate([b[name] for b in held]) for name in held[0]}


def tensor_of(name: str, values: Array | list[Any]) -> torch.Tensor | Ragged | list[Any]:
    """A column of petastorm's as a tensor, `Ragged` for lists of unequal length, or a list for strings and bytes.
    DataError for a null, which no tensor can hold."""
    array = values if isinstance(values, np.ndarray) else _as_column(values)
    kind = array.dtype.kind
    if kind == "M":  # dates and timestamps: microseconds, as everywhere here
        return torch.from_numpy(array.astype("datetime64[us]").astype(np.int64))
    if kind == "u" and array.dtype.itemsize > 1:
        return torch.from_numpy(array.astype(np.int64))
    if kind not in "OSU":
        return torch.from_numpy(np.ascontiguousarray(array))
    if any(v is None for v in array):
        raise DataError(
            f"column {name!r} holds nulls, which petastorm cannot give to torch; fill them, or use reader: native"
        )
    rows = list(array)
    if rows and all(isinstance(v, np.ndarray) and v.dtype.kind not in "OSU" for v in rows):
        if len({v.shape for v in rows}) == 1:
            return torch.from_numpy(np.stack(rows))
        offsets = np.concatenate(([0], np.cumsum([len(v) for v in rows])))
        return Ragged(torch.from_numpy(np.concatenate(rows)), (torch.from_numpy(offsets),))
    if rows and all(hasattr(v, "as_tuple") for v in rows):  # decimal.Decimal
        return torch.tensor([float(v) for v in rows], dtype=torch.float64)
    return [str(v) if kind == "U" else v for v in rows]


def _torch_dtype(column: Column) -> torch.dtype:
    return torch.from_numpy(np.zeros(0, numpy_dtype(column))).dtype


def _share(global_batch: int, rank: int, size: int) -> int:
    """A rank's rows of every whole global batch; ranks differ by at most one."""
    return global_batch * (rank + 1) // size - global_batch * rank // size


def rows_per_shard(group_rows: Sequence[int], size: int) -> list[int]:
    """Rows of each shard as petastorm deals them: row group i to shard i % size. ValueError where a shard gets none."""
    if len(group_rows) < size:
        raise ValueError(
            f"the dataset has {len(group_rows)} row groups for {size} ranks, and petastorm shards whole row groups; "
            "write smaller row groups, use fewer ranks, or reader: native, which has no such limit"
        )
    return [sum(group_rows[rank::size]) for rank in range(size)]


def equal_steps(shard_rows: Sequence[int], global_batch: int) -> int:
    """Steps every rank takes: as many as the smallest shard fills."""
    size = len(shard_rows)
    shares = [_share(global_batch, rank, size) for rank in range(size)]
    if min(shares) < 1:
        raise ValueError(f"global batch {global_batch} is smaller than the {size} ranks it is divided among")
    steps = min(rows // share for rows, share in zip(shard_rows, shares, strict=True))
    if steps < 1:
        raise ValueError(
            f"ranks own {list(shard_rows)} rows, one of them not a single batch of {global_batch}; lower the batch"
        )
    return steps


def _dataset(urls: str | Sequence[str]) -> petastorm_compat.ParquetDataset:
    from petastorm.fs_utils import get_filesystem_and_path_or_paths

    fs, paths = get_filesystem_and_path_or_paths(urls)
    return petastorm_compat.ParquetDataset(paths, filesystem=fs)


def row_group_rows(urls: str | Sequence[str]) -> list[int]:
    """Rows of every row group in the order in which petastorm numbers them."""
    from petastorm.etl.dataset_metadata import load_row_groups

    footers: dict[str, Any] = {}
    rows = []
    for piece in load_row_groups(_dataset(urls)):
        if piece.path not in footers:
            footers[piece.path] = piece.get_metadata()
        rows.append(footers[piece.path].row_group(piece.row_group).num_rows)
    return rows


def is_unischema(urls: str | Sequence[str]) -> bool:
    """Whether the dataset was written by petastorm (then its rows are decoded by codecs) or is plain Parquet."""
    from petastorm.etl.dataset_metadata import PetastormMetadataError, get_schema

    try:
        get_schema(_dataset(urls))
    except PetastormMetadataError:
        return False
    return True


def urls_of(storage: Storage, manifest: DatasetManifest, split: str) -> list[str]:
    """A split's files as petastorm wants them. ValueError for storage it is not given here."""
    if not storage.is_local:
        raise ValueError(
            f"{storage.uri}: reader petastorm reads a job's own dataset from local storage; give data.petastorm.url"
        )
    return [f"file://{storage.path(file.path)}" for file in manifest.files_of(split)]


def materialize(spark: Any, url: str, schema: Any, row_group_mb: int | None = None) -> Any:
    """petastorm's `materialize_dataset`: a context in which the caller's Spark job writes Parquet to `url`."""
    from petastorm.etl.dataset_metadata import materialize_dataset

    return materialize_dataset(spark, url, schema, row_group_mb)


def encode_row(schema: Any, row: dict[str, Any]) -> Any:
    """A dict of numpy values -> a Spark row by the schema's codecs."""
    from petastorm.unischema import dict_to_spark_row

    return dict_to_spark_row(schema, row)


def unischema(name: str, fields: Sequence[tuple[str, Any, tuple[int | None, ...], Any, bool]]) -> Any:
    """A petastorm schema of (name, numpy type, shape, codec or None, nullable) fields."""
    from petastorm.unischema import Unischema, UnischemaField

    return Unischema(name, [UnischemaField(*field) for field in fields])
