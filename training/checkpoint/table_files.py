"""The files of sparse tables in a checkpoint: one safetensors file per table and rank, with what the rank owns.

Which buckets these are is in the file; any world reads from all files what it owns (training/tables/files.py). A file
may have only what changed since an earlier one, which the marker names as needed.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from sparkring.conf.storage import Storage
from sparkring.training.checkpoint.catalog import CheckpointInfo
from sparkring.training.checkpoint.format import CheckpointError, Chunk, place_chunks, raw_bytes
from sparkring.training.checkpoint.layout import TABLE_FILE, step_folder
from sparkring.training.checkpoint.weights import WeightsTensor, open_weights


def whole_tensors(tensors: Mapping[str, torch.Tensor], file: str) -> tuple[bytes, list[memoryview]]:
    """Return header and content of a safetensors file of whole tensors."""
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    chunks = [Chunk(name, t.dtype, shapes[name], (0,) * t.dim(), shapes[name]) for name, t in tensors.items()]
    header, _ = place_chunks(chunks, file)
    return header, [raw_bytes(tensor) for tensor in tensors.values()]


def has_changes_only(tensors: Mapping[str, torch.Tensor]) -> bool:
    """Return whether a table's tensors are changes since the previous file."""
    return "since" in tensors and len(tensors["since"]) > 0


def open_tables(storage: Storage, info: CheckpointInfo) -> dict[str, list[dict[str, WeightsTensor]]]:
    """Open the tensors of every table's files, including the earlier files they depend on.

    `storage`: folder of all steps. CheckpointError names a missing file.
    """
    found: dict[str, list[dict[str, WeightsTensor]]] = {}
    for path in sorted([*(f"{step_folder(info.step)}/{own}" for own in info.files), *info.needs]):
        if named := TABLE_FILE.fullmatch(path):
            if not storage.exists(path):
                raise CheckpointError(
                    f"{storage.uri}/{path}: is gone, and the tables of step {info.step} need it; delete that step too"
                )
            found.setdefault(named["table"], []).append(open_weights(storage, path))
    return found
