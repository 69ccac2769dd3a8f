"""The files of sparse tables in a checkpoint: one safetensors file per table and rank, with what the rank owns.

Which buckets these are is in the file; any world reads from all files what it owns (training/tables/files.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch

from sparkring.conf.storage import Storage
from sparkring.training.checkpoint.catalog import CheckpointInfo
from sparkring.training.checkpoint.format import Chunk, layout, raw_bytes
from sparkring.training.checkpoint.weights import StoredTensor, open_weights


def table_file(generation: str, table: str, rank: int) -> str:
    return f"{generation}/tables/{table}/rank-{rank:05d}.safetensors"


def whole_tensors(tensors: Mapping[str, torch.Tensor], file: str) -> tuple[bytes, list[memoryview]]:
    """Header and content of a safetensors file of whole tensors."""
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    chunks = [Chunk(name, t.dtype, shapes[name], (0,) * t.dim(), shapes[name]) for name, t in tensors.items()]
    header, _ = layout(chunks, file)
    return header, [raw_bytes(tensor) for tensor in tensors.values()]


def open_tables(folder: Storage, info: CheckpointInfo) -> dict[str, list[dict[str, StoredTensor]]]:
    """The tensors of every table's files, in order of ranks. `folder`: of the step."""
    found: dict[str, list[dict[str, StoredTensor]]] = {}
    for path in sorted(info.files):
        if named := re.fullmatch(re.escape(info.generation) + r"/tables/(.+)/rank-\d+\.safetensors", path):
            found.setdefault(named[1], []).append(open_weights(folder, path))
    return found
