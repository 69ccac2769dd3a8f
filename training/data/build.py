"""Makes the reader that a recipe's `data` block describes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from sparkring.conf.blocks.data import DataConfig, MixConfig
from sparkring.conf.manifest import read_manifest, with_features
from sparkring.conf.storage import open_storage
from sparkring.training.data.batch import SAMPLE, Reader
from sparkring.training.data.cache import CachedFiles, DiskCache
from sparkring.training.data.files import FileOpener
from sparkring.training.data.mix import MixedReader, make_mix
from sparkring.training.data.reader import ParquetReader
from sparkring.training.data.request import DataRank, ReadRequest
from sparkring.training.data.select import apply_filters, quarantine, select_all


def make_reader(
    config: DataConfig, request: ReadRequest, rank: DataRank | None = None, evaluation: bool = False
) -> Reader:
    """Make the reader of a recipe.

    Collective where `on_corrupt` is quarantine or there are filters: `rank.gather` asks all ranks. `evaluation`: every
    row once, unshuffled, the last batch padded, always native and of the job's own dataset, as neither a mix nor
    petastorm's shards have every row once.
    """
    rank = rank or DataRank()
    if evaluation:
        return _native(_changed(config, shuffle=False, tail="pad", audit=True), request, rank)
    if config.reader == "petastorm":
        return _petastorm(config, request, rank)
    if config.mix is not None:
        return _mixed(config, config.mix, request, rank)
    return _native(config, request, rank)


def _changed(config: DataConfig, **values: Any) -> DataConfig:
    return config.model_copy(update=values)


def _native(config: DataConfig, request: ReadRequest, rank: DataRank) -> ParquetReader:
    manifest, cache = request.manifest, config.cache
    files = manifest.files_of(request.split)
    opener = FileOpener(request.files_folder)
    if cache.files is not None:
        opener = CachedFiles(
            request.files_folder, DiskCache(cache.files, cache.files_max_bytes, [f.sha256 for f in manifest.files])
        )
    selection = select_all(files)
    if config.on_corrupt == "quarantine":
        selection = quarantine(files, opener, rank)
        config = _changed(config, verify="size")  # quarantine has hashed them
    selection = apply_filters(selection, manifest, config.filters, opener, rank)
    return ParquetReader(request, rank, config, opener, selection)


def _petastorm(config: DataConfig, request: ReadRequest, rank: DataRank) -> Reader:
    from sparkring.training.data.petastorm_adapter.dataset import urls_of
    from sparkring.training.data.petastorm_adapter.reader import PetastormReader

    manifest, url = request.manifest, config.petastorm.url
    names = [c.name for c in manifest.tensors] if request.columns is None else list(request.columns)
    if url is None:
        urls = urls_of(request.files_folder, manifest, request.split)
        return PetastormReader(urls, names, request.global_batch, rank, config, manifest)
    declared = {c.name: c for c in manifest.tensors}
    # Another dataset's columns are tensors as they are, and have the manifest's types only if it has all of them.
    known = set(names) <= set(declared) | {SAMPLE}
    columns = [declared.get(name, name) for name in names] if known else names
    return PetastormReader(url, columns, request.global_batch, rank, config)


def _mixed(config: DataConfig, mix: MixConfig, request: ReadRequest, rank: DataRank) -> MixedReader:
    """Make a mix and the readers of its parts.

    Parts differ in their seeds, share memory, and never pad: the mix cuts the batches, and moves them to devices. The
    job's own feature state is applied to all of them: a model has one code for a value, whichever part it comes from.
    """
    parts = []
    for number, part in enumerate(mix.parts):
        storage = open_storage(part.dataset)
        manifest = with_features(read_manifest(storage), request.manifest.features)
        own = ReadRequest(storage, manifest, part.split, request.columns, request.global_batch)
        share = max(1, config.max_bytes // len(mix.parts))
        part_config = _changed(config, seed=config.seed + number, tail="pad", max_bytes=share)
        parts.append(_native(part_config, own, replace(rank, device=None)))
    plan = make_mix([part.plan.rows for part in parts], mix, request.global_batch)
    return MixedReader(parts, plan, rank.device)
