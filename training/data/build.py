"""The door of the data path: the `data` block of a recipe in, a `Reader` out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch

from conf.manifest import DatasetManifest, read_manifest
from conf.schema_data import CacheConfig, DataConfig, MixConfig
from conf.storage import Storage, open_storage
from training.data.batch import SAMPLE, Reader
from training.data.cache import CachedFiles, DecodedGroups, DiskCache
from training.data.mix import MixedReader, make_mix
from training.data.reader import ParquetReader, ReaderSettings, read_columns
from training.data.select import (
    AllGather,
    Condition,
    Tick,
    alone,
    everything,
    filtered,
    quarantine,
    unheard,
)
from training.data.source import Direct, Opener


@dataclass(frozen=True)
class Seat:
    """Where this rank sits: which part of every global batch it reads, of how many, onto which device, how it asks the
    other data ranks (an all-gather of JSON-able values; only quarantine and filters do, before the plan), and how it
    says that it makes progress while it goes through whole files."""

    rank: int
    size: int
    device: torch.device | None
    gather: AllGather
    tick: Tick


@dataclass(frozen=True)
class Wanted:
    """What is read of which dataset, in global batches of how many rows; `columns` None: all of them."""

    storage: Storage
    manifest: DatasetManifest
    split: str
    columns: Sequence[str] | None
    global_batch: int


def reader_settings(config: DataConfig) -> ReaderSettings:
    """The keys of `data` that are the reader's own; both call them by the same names."""
    return ReaderSettings(**{f.name: getattr(config, f.name) for f in fields(ReaderSettings)})


def make_reader(
    config: DataConfig,
    storage: Storage,
    manifest: DatasetManifest,
    split: str,
    columns: Sequence[str] | None,
    global_batch: int,
    data_rank: int = 0,
    data_size: int = 1,
    device: torch.device | None = None,
    evaluation: bool = False,
    gather: AllGather = alone,
    tick: Tick = unheard,
) -> Reader:
    """The reader a recipe asks for. `evaluation`: every row once, unshuffled, the last batch padded, always native: of
    the job's own dataset, for neither a mix nor petastorm's shards have every row once.

    Collective where config.on_corrupt is quarantine or config.filters is not empty: every data rank calls it, and
    `gather` asks them all.
    """
    seat = Seat(data_rank, data_size, device, gather, tick)
    wanted = Wanted(storage, manifest, split, columns, global_batch)
    settings = reader_settings(config)
    if evaluation:
        settings = replace(settings, shuffle=False, tail="pad", audit=True)
    elif config.reader == "petastorm":
        return _petastorm(config, wanted, seat)
    elif config.mix is not None:
        return _mixed(config, config.mix, settings, columns, global_batch, seat)
    return _one(config, wanted, settings, seat)


def _one(config: DataConfig, wanted: Wanted, settings: ReaderSettings, seat: Seat) -> ParquetReader:
    storage, manifest = wanted.storage, wanted.manifest
    files = manifest.files_of(wanted.split)
    opener = _opener(config.cache, storage, manifest)
    if config.on_corrupt == "quarantine":
        chosen = quarantine(files, opener, seat.rank, seat.size, seat.gather, seat.tick)
        settings = replace(settings, verify="size")
    else:
        chosen = everything(files)
    conditions: list[Condition] = list(config.filters)
    chosen = filtered(chosen, manifest, conditions, opener, seat.rank, seat.size, seat.gather, seat.tick)
    decoded = None
    if config.cache.decoded is not None:
        cache = DiskCache(config.cache.decoded, config.cache.decoded_max_bytes, [f.sha256 for f in manifest.files])
        names = [column.name for column in read_columns(manifest, wanted.columns, settings.audit)]
        decoded = DecodedGroups(cache, names, conditions)
    return ParquetReader(
        storage, manifest, wanted.split, wanted.columns, wanted.global_batch, seat.rank, seat.size, settings,
        seat.device, opener, decoded, chosen, seat.tick,
    )  # fmt: skip


def _petastorm(config: DataConfig, wanted: Wanted, seat: Seat) -> Reader:
    from training.data.petastorm import PetastormReader, PetastormSettings, urls_of

    how, manifest = config.petastorm, wanted.manifest
    own = how.url is None
    names = [c.name for c in manifest.columns] if wanted.columns is None else list(wanted.columns)
    known = {c.name: c for c in manifest.columns}
    return PetastormReader(
        urls_of(wanted.storage, manifest, wanted.split) if how.url is None else how.url,
        [known.get(name, name) for name in names] if own or set(names) <= set(known) | {SAMPLE} else names,
        wanted.global_batch,
        seat.rank,
        seat.size,
        PetastormSettings(how.pool, how.workers, config.seed, config.shuffle, how.shuffle_rows),
        seat.device,
        manifest.fingerprint if own else "",
    )


def _opener(config: CacheConfig, storage: Storage, manifest: DatasetManifest) -> Opener:
    if config.files is None:
        return Direct(storage)
    return CachedFiles(storage, DiskCache(config.files, config.files_max_bytes, [f.sha256 for f in manifest.files]))


def _mixed(
    config: DataConfig,
    mix: MixConfig,
    settings: ReaderSettings,
    columns: Sequence[str] | None,
    global_batch: int,
    seat: Seat,
) -> MixedReader:
    """Parts differ in their seeds, share threads' number and memory, and never pad: the mix cuts the batches."""
    parts = []
    share = max(1, settings.max_bytes // len(mix.parts))
    host = replace(seat, device=None)  # the mix moves whole batches
    for number, part in enumerate(mix.parts):
        storage = open_storage(part.dataset)
        manifest = read_manifest(storage)
        own = replace(settings, seed=settings.seed + number, tail="pad", max_bytes=share)
        parts.append(_one(config, Wanted(storage, manifest, part.split, columns, global_batch), own, host))
    plan = make_mix(
        [part.plan.rows for part in parts],
        [part.weight for part in mix.parts],
        global_batch,
        mix.stop,
        mix.epoch_samples,
    )
    return MixedReader(parts, plan, seat.device)
