"""The door of the data path: the `data` block of a recipe in, a `Reader` out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from conf.manifest import MANIFEST_NAME, DatasetManifest
from conf.schema_data import CacheConfig, DataConfig, MixConfig
from conf.storage import Storage, open_storage
from training.data.batch import Reader
from training.data.cache import CachedFiles, DecodedGroups, DiskCache
from training.data.mix import MixedReader, make_mix
from training.data.reader import ParquetReader, ReaderSettings
from training.data.select import AllGather, Condition, alone, everything, filtered, quarantine
from training.data.source import Direct, Opener


@dataclass(frozen=True)
class Seat:
    """Where this rank sits: which part of every global batch it reads, of how many, onto which device, and how it asks
    the other data ranks (an all-gather of JSON-able values; only quarantine and filters do, before the plan)."""

    rank: int
    size: int
    device: torch.device | None
    gather: AllGather


def reader_settings(config: DataConfig) -> ReaderSettings:
    return ReaderSettings(
        lanes=config.lanes,
        window_row_groups=config.window_row_groups,
        seed=config.seed,
        tail=config.tail,
        shuffle=config.shuffle,
        threads=config.threads,
        max_bytes=config.max_bytes,
        chunk_bytes=config.chunk_bytes,
        ahead=config.ahead,
        verify=config.verify,
        audit=config.audit,
        decoders=dict(config.decoders),
    )


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
) -> Reader:
    """The reader a recipe asks for. `evaluation`: every row once, unshuffled, the last batch padded, always native: of
    the job's own dataset, for neither a mix nor petastorm's shards have every row once.

    Collective where config.on_corrupt is quarantine or config.filters is not empty: every data rank calls it, and
    `gather` asks them all.
    """
    seat = Seat(data_rank, data_size, device, gather)
    settings = reader_settings(config)
    if evaluation:
        settings = replace(settings, shuffle=False, tail="pad", audit=True)
    elif config.reader == "petastorm":
        return _petastorm(config, storage, manifest, split, columns, global_batch, seat)
    elif config.mix is not None:
        return _mixed(config, config.mix, settings, columns, global_batch, seat)
    return _one(config, storage, manifest, split, columns, global_batch, settings, seat)


def _one(
    config: DataConfig,
    storage: Storage,
    manifest: DatasetManifest,
    split: str,
    columns: Sequence[str] | None,
    global_batch: int,
    settings: ReaderSettings,
    seat: Seat,
) -> ParquetReader:
    files = manifest.files_of(split)
    opener = _opener(config.cache, storage, manifest)
    if config.on_corrupt == "quarantine":
        chosen = quarantine(files, opener, seat.rank, seat.size, seat.gather)
        settings = replace(settings, verify="size")
    else:
        chosen = everything(files)
    conditions: list[Condition] = list(config.filters)
    chosen = filtered(chosen, manifest, conditions, opener, seat.rank, seat.size, seat.gather)
    decoded = None
    if config.cache.decoded is not None:
        cache = DiskCache(config.cache.decoded, config.cache.decoded_max_bytes, [f.sha256 for f in manifest.files])
        decoded = DecodedGroups(cache, columns or [c.name for c in manifest.columns], conditions)
    return ParquetReader(
        storage, manifest, split, columns, global_batch, seat.rank, seat.size, settings, seat.device,
        opener, decoded, chosen,
    )  # fmt: skip


def _petastorm(
    config: DataConfig,
    storage: Storage,
    manifest: DatasetManifest,
    split: str,
    columns: Sequence[str] | None,
    global_batch: int,
    seat: Seat,
) -> Reader:
    from training.data.petastorm import PetastormReader, PetastormSettings, urls_of

    how = config.petastorm
    own = how.url is None
    names = [c.name for c in manifest.columns] if columns is None else list(columns)
    known = {c.name: c for c in manifest.columns}
    return PetastormReader(
        urls_of(storage, manifest, split) if how.url is None else how.url,
        [known[name] for name in names if name in known] if own or set(names) <= set(known) else names,
        global_batch,
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
        manifest = DatasetManifest.from_json(
            storage.read_bytes(MANIFEST_NAME).decode(), f"{part.dataset}/{MANIFEST_NAME}"
        )
        own = replace(settings, seed=settings.seed + number, tail="pad", max_bytes=share)
        parts.append(_one(config, storage, manifest, part.split, columns, global_batch, own, host))
    plan = make_mix(
        [part.plan.rows for part in parts],
        [part.weight for part in mix.parts],
        global_batch,
        mix.stop,
        mix.epoch_samples,
    )
    return MixedReader(parts, plan, seat.device)
