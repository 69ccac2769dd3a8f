"""A finished model as a folder: what it was configured as, the dataset it was trained on, and its weights.

    <folder>/config.json    the resolved configuration: which module, with which arguments, for which task
             manifest.json  the dataset's manifest: columns, vocabularies, fitted feature state
             weights.safetensors  parameter name -> tensor (training/checkpoint/weights.py)
             trees.ubj     in their place: trees (model.family), as XGBoost's own file
             blend.json    where both are there: how their predictions are mixed (training/model/blend.py)
             calibration.json  where its probabilities are calibrated: how (training/model/calibration.py)
             tables.json    where the model has sparse tables: what they are, by name
             tables/<name>/part-00000.safetensors  the rows of rank 0's buckets, in order of their ids' hashes
             sha256.json    of every file above, written last, and of a sample that a registered model has

A run has it below `model/`; a registered model holds a copy.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
import torch
from pydantic import Field
from torch import nn

from sparkring.conf.blocks.model import WEIGHTS_FILE
from sparkring.conf.config import RunConfig
from sparkring.conf.manifest import DatasetManifest
from sparkring.conf.rules.families import of_family
from sparkring.conf.storage import Storage, copy_files, open_storage
from sparkring.conf.stored import Finite, RelativePath, Sha256, Stored, StoredError, parse, read, up_to
from sparkring.training.checkpoint.format import Chunk, place_chunks, raw_bytes
from sparkring.training.checkpoint.weights import FILE, open_weights
from sparkring.training.model.blend import FILE as BLEND
from sparkring.training.model.blend import Blend, read_blend
from sparkring.training.model.calibration import FILE as CALIBRATION
from sparkring.training.model.calibration import Calibration, read_calibration
from sparkring.training.models.sparse_embedding import sparse_embeddings
from sparkring.training.tables.hashing import hash_of
from sparkring.training.tables.lookup import LookupPart, LookupTable
from sparkring.training.tables.sharded import ShardedTable

log = logging.getLogger(__name__)
CONFIG, MANIFEST, TABLES = "config.json", "manifest.json", "tables.json"
DIGESTS = "sha256.json"  # file of the model -> sha256
SAMPLE = ("sample_rows.parquet", "sample_predictions.parquet")  # no prediction is made of them
TREES_FILE, TREES_ENGINE = "trees.ubj", "xgboost"  # an engine carries the collectives of a training


@dataclass(frozen=True)
class TrainedModel:
    """What a model folder says of its weights."""

    config: RunConfig
    manifest: DatasetManifest
    calibration: Calibration | None = None  # None: probabilities are the model's own
    blend: Blend | None = None  # None: the model is of one family

    @property
    def parts(self) -> tuple[TrainedModel, ...]:
        """The models whose predictions are mixed, the network's first and neither calibrated; of one family itself."""
        if self.blend is None:
            return (self,)
        return tuple(TrainedModel(of_family(self.config, family), self.manifest) for family in ("net", "trees"))


class ExportedTable(Stored):
    """A sparse table of a model. scale: of initial values, one per value of a row; parts: files, one per rank."""

    seed: int
    dtype: Literal["float32", "float64"]
    scale: list[Annotated[Finite, Field(ge=0)]]
    parts: Annotated[int, Field(ge=1, le=1 << 16)]


class TablesFile(Stored):
    """tables.json."""

    format: Annotated[int, up_to(1)] = 1
    tables: dict[RelativePath, ExportedTable]


def part_file(table: str, rank: int) -> str:
    return f"tables/{table}/part-{rank:05d}.safetensors"


def model_files(folder: Storage) -> list[str]:
    """List the files of a model, which are copied together."""
    weights = [TREES_FILE if folder.exists(TREES_FILE) else FILE]
    always = [CONFIG, MANIFEST, *([FILE, TREES_FILE, BLEND] if folder.exists(BLEND) else weights)]
    always += [CALIBRATION] if folder.exists(CALIBRATION) else []
    if not folder.exists(TABLES):
        return always
    tables = read(TablesFile, folder, TABLES).tables
    return [*always, TABLES, *(part_file(name, rank) for name in tables for rank in range(tables[name].parts))]


def weight_files(folder: Storage) -> list[str]:
    """List the files of a model with learned values, except its calibration."""
    return [name for name in model_files(folder) if name not in (CONFIG, MANIFEST, CALIBRATION)]


def copy_model_files(source: Storage, target: Storage) -> None:
    """Copy a model folder, with the record of what its files are; not its sample."""
    copy_files(source, target, [*model_files(source), *([DIGESTS] if source.exists(DIGESTS) else [])])


def write_digests(folder: Storage, also: Iterable[str] = ()) -> dict[str, str]:
    """Record what a finished model's files are, and `also` others; file -> sha256."""
    found = {name: folder.sha256(name) for name in [*model_files(folder), *also]}
    folder.put_atomic(DIGESTS, json.dumps(found, indent=1).encode())
    return found


def changed_files(folder: Storage, leave_out: Collection[str] = SAMPLE) -> list[str]:
    """List a model's files that are missing or differ from the record; [] without a record.

    StoredError for a damaged record.
    """
    if not folder.exists(DIGESTS):
        return []
    recorded = read(dict[RelativePath, Sha256], folder, DIGESTS)
    names = sorted({*model_files(folder), *recorded}.difference(leave_out))
    return [name for name in names if not folder.exists(name) or recorded.get(name) != folder.sha256(name)]


def check_digests(folder: Storage) -> None:
    """Raise StoredError where a file of a model is not what was recorded; one without a record is named in the log."""
    if not folder.exists(DIGESTS):
        log.warning(
            "%s: has no %s, as models of an older sparkring: whether its files are whole is not known; train or "
            "register it again to have them checked",
            folder.uri,
            DIGESTS,
        )
    if changed := changed_files(folder):
        raise StoredError(
            f"{folder.uri}: {', '.join(changed)}: not as when the model was written, by {DIGESTS}; copy the model "
            "again from where it is whole, or train again"
        )


def weights_sha256(folder: Storage, known: Mapping[str, str] | None = None) -> str:
    """Hash a model's weights: sha256 of the file, or of the hashes of all files of a blend, or with sparse tables.

    `known`: of files whose sha256 was taken just before.
    """
    found = [(known or {}).get(name) or folder.sha256(name) for name in weight_files(folder)]
    return found[0] if len(found) == 1 else hashlib.sha256("".join(found).encode()).hexdigest()


def write_tables(folder: Storage, tables: Mapping[str, ShardedTable], on_progress: Callable[[int], None]) -> None:
    """Write this rank's shard of each table in blocks; rank 0 writes the index.

    Args:
        folder: folder of the model.
        tables: tables by name; without tables no file is written.
        on_progress: called with the number of each block of rows.
    """
    blocks = itertools.count(1)
    for name, held in tables.items():
        spec, rank = held.table.spec, held.exchange.rank
        ids, rows = held.table.weights(held.own_buckets)
        own = {"hashes": torch.from_numpy(hash_of(ids)), "ids": torch.from_numpy(ids)}
        chunks = [Chunk(key, each.dtype, each.shape, (0,), each.shape) for key, each in own.items()]
        shape = (len(ids), spec.dim)
        chunks.append(Chunk("rows", getattr(torch, spec.dtype), shape, (0, 0), shape))
        with folder.create(part_file(name, rank)) as file:
            file.write(place_chunks(chunks, FILE)[0])
            for tensor in own.values():
                file.write(raw_bytes(tensor))
            for block in rows:
                on_progress(next(blocks))
                file.write(np.ascontiguousarray(block))
    if tables and next(iter(tables.values())).exchange.rank == 0:
        stored = {
            name: ExportedTable(
                seed=held.table.spec.seed,
                dtype=held.table.spec.dtype,
                scale=held.table.scale.tolist(),
                parts=held.exchange.world,
            )
            for name, held in tables.items()
        }
        folder.put_atomic(TABLES, TablesFile(tables=stored).model_dump_json(indent=1).encode())


def attach_tables(model: nn.Module, folder: Storage) -> None:
    """Let the model's SparseEmbeddings read their rows from the folder. StoredError for a table that does not fit."""
    embeddings = sparse_embeddings(model)
    tables = open_tables(folder, {name: module.dim for name, module in embeddings.items()})
    for name, module in embeddings.items():
        module.source = tables[name]


def open_tables(folder: Storage, wanted: Mapping[str, int]) -> dict[str, LookupTable]:
    """Open a model's tables. `wanted`: name -> values of a row. StoredError for one that is missing or does not fit."""
    stored = read(TablesFile, folder, TABLES).tables if wanted else {}
    for name, dim in wanted.items():
        if name not in stored or len(stored[name].scale) != dim:
            there = {table: len(each.scale) for table, each in stored.items()}
            raise StoredError(
                f"{folder.uri}/{TABLES}: no table {name!r} with rows of {dim} values, which the model has; there are "
                f"{there}"
            )
    return {name: _lookup(folder, name, stored[name]) for name in wanted}


def _lookup(folder: Storage, name: str, stored: ExportedTable) -> LookupTable:
    parts = []
    for rank in range(stored.parts):
        file = part_file(name, rank)
        try:
            found = open_weights(folder, file)
            hashes, ids, rows = found["hashes"], found["ids"], found["rows"]
        except (OSError, KeyError) as error:
            raise StoredError(f"{folder.uri}/{file}: no part of a table ({error})") from error
        fits = rows.shape[1:] == (len(stored.scale),) and rows.dtype == getattr(torch, stored.dtype)
        fits = fits and hashes.shape == ids.shape == rows.shape[:1]
        if not fits or (hashes.dtype, ids.dtype) != (torch.uint64, torch.int64):
            raise StoredError(f"{folder.uri}/{file}: no part of the table that {TABLES} describes")
        parts.append(LookupPart(hashes.mapped(), ids.mapped(), rows.mapped()))
    return LookupTable(name, stored.seed, np.asarray(stored.scale, stored.dtype), parts)


def describe_model(folder: Storage, config: RunConfig, manifest: DatasetManifest) -> None:
    """Write config.json and manifest.json next to the weights."""
    folder.put_atomic(CONFIG, json.dumps(config.model_dump(mode="json"), indent=1).encode())
    folder.put_atomic(MANIFEST, manifest.to_json().encode())


def read_model_folder(folder: Storage) -> TrainedModel:
    """Check that a model's files are as they were written, and read what is next to the weights.

    StoredError names a file that is missing or damaged.
    """
    check_digests(folder)
    return read_description(folder)


def read_description(folder: Storage) -> TrainedModel:
    """Read what is next to the weights of a model whose files were checked. StoredError as `read_model_folder`."""
    if missing := [name for name in model_files(folder) if not folder.exists(name)]:
        raise StoredError(f"{folder.uri}: no model: it has no {', '.join(missing)}")
    config = parse(RunConfig, folder.read_bytes(CONFIG), f"{folder.uri}/{CONFIG}")
    manifest = DatasetManifest.from_json(folder.read_bytes(MANIFEST), f"{folder.uri}/{MANIFEST}")
    found = described_model(folder, config, manifest)
    if (config.model.family == "both") != (found.blend is not None):
        given = f"{CONFIG} says model.family = {config.model.family!r}"
        raise StoredError(f"{folder.uri}: {given}, and there is {'no' if found.blend is None else 'a'} {BLEND}")
    return found


def described_model(folder: Storage, config: RunConfig, manifest: DatasetManifest) -> TrainedModel:
    """Describe the model in a folder, with its known configuration. StoredError for a damaged file."""
    return TrainedModel(config, manifest, read_calibration(folder), read_blend(folder))


def weights_at(uri: str) -> tuple[Storage, str]:
    """Return folder and file name of the weights a URI names: a file, or a model folder with one."""
    place = open_storage(uri)
    return (place.parent, place.root.rpartition("/")[2]) if place.root.endswith(WEIGHTS_FILE) else (place, FILE)
