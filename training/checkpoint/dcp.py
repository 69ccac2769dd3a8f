"""torch.distributed.checkpoint's planning, with JSON where it pickles.

DCP decides which rank writes which box of which tensor (replicated tensors are written once, spread over ranks by size)
and which stored boxes a rank of another layout needs. Its writers and readers pickle the metadata and every value that
is not a tensor; here both are JSON.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from sparkring.conf.storage import Storage
from sparkring.conf.stored import StoredError, read
from sparkring.training.checkpoint.format import DTYPE_NAMES, DTYPES, CheckpointError, Chunk, decode_value, encode_value
from sparkring.training.checkpoint.layout import Index, StoredChunk, StoredTensor, covered, index_file

OPTIONAL = "averaging."  # of replicas (parallel.averaging): of use to as many others only


class JsonSavePlanner(DefaultSavePlanner):
    """Writes values that are not tensors as JSON."""

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        if write_item.type != WriteItemType.BYTE_IO:
            return object
        return io.BytesIO(json.dumps(encode_value(object, write_item.index.fqn)).encode())


class JsonLoadPlanner(DefaultLoadPlanner):
    """Reads values that are not tensors from JSON."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        from torch.distributed.checkpoint._nested_dict import set_element  # private to torch

        path = self.mappings[read_item.dest_index.fqn]
        set_element(self.original_state_dict, path, decode_value(json.loads(value.getvalue())))


def encode_plan(plan: SavePlan) -> dict[str, Any]:
    """Turn a rank's plan into JSON. CheckpointError for a dtype that safetensors has no name for."""
    items = []
    for item in plan.items:
        row: dict[str, Any] = {"fqn": item.index.fqn, "type": item.type.name}
        if data := item.tensor_data:
            if data.properties.dtype not in DTYPE_NAMES:
                raise CheckpointError(f"{item.index.fqn}: tensors of {data.properties.dtype} cannot be stored")
            row |= {"dtype": DTYPE_NAMES[data.properties.dtype], "shape": list(data.size), "index": item.index.index}
            row |= {"offsets": list(data.chunk.offsets), "sizes": list(data.chunk.sizes)}
            row["placed"] = item.index.offset is not None
        items.append(row)
    return {"items": items, "paths": {fqn: list(path) for fqn, path in plan.planner_data.items()}}


def decode_plan(encoded: dict[str, Any]) -> SavePlan:
    """Turn the form of `encode_plan` back into a plan."""
    items = []
    for row in encoded["items"]:
        kind = WriteItemType[row["type"]]
        if kind == WriteItemType.BYTE_IO:
            items.append(WriteItem(MetadataIndex(row["fqn"]), kind))
            continue
        chunk = ChunkStorageMetadata(torch.Size(row["offsets"]), torch.Size(row["sizes"]))
        data = TensorWriteData(chunk, TensorProperties(dtype=DTYPES[row["dtype"]]), torch.Size(row["shape"]))
        offset = row["offsets"] if row["placed"] else None
        items.append(WriteItem(MetadataIndex(row["fqn"], offset, row["index"]), kind, tensor_data=data))
    return SavePlan(items, planner_data={fqn: tuple(path) for fqn, path in encoded["paths"].items()})


def build_index(parts: Iterable[dict[str, Any]], paths: dict[str, tuple[Any, ...]]) -> Index:
    """Merge what each rank wrote into one index. ValueError where the chunks of a tensor do not cover it."""
    tensors: dict[str, StoredTensor] = {}
    values: dict[str, Any] = {}
    for part in parts:
        values |= part["values"]
        for row in part["chunks"]:
            entry = tensors.setdefault(row["fqn"], {"dtype": row["dtype"], "shape": row["shape"], "chunks": []})
            chunk: Any = {key: row[key] for key in StoredChunk.__annotations__}
            entry["chunks"].append(chunk)
    return {"tensors": covered(tensors), "values": values, "paths": {fqn: list(path) for fqn, path in paths.items()}}


def read_index(folder: Storage, generation: str, files: dict[str, dict[str, Any]]) -> Index:
    """Read index.json. StoredError for one that is damaged, or names bytes that the marker's `files` do not have."""
    file = index_file(generation)
    index = read(Index, folder, file)
    for fqn, entry in index["tensors"].items():
        for chunk in entry["chunks"]:
            if chunk["file"] not in files or chunk["end"] > files[chunk["file"]]["bytes"]:
                raise StoredError(f"{folder.uri}/{file}: {fqn}: {chunk} is in no file of the marker")
    return index


def to_metadata(index: Index) -> Metadata:
    """Describe a stored checkpoint to DCP."""
    entries: dict[str, Any] = {fqn: BytesStorageMetadata() for fqn in index["values"]}
    for fqn, entry in index["tensors"].items():
        chunks = [ChunkStorageMetadata(torch.Size(c["offsets"]), torch.Size(c["sizes"])) for c in entry["chunks"]]
        properties = TensorProperties(dtype=DTYPES[entry["dtype"]])
        entries[fqn] = TensorStorageMetadata(properties, torch.Size(entry["shape"]), chunks)
    return Metadata(entries, planner_data={fqn: tuple(path) for fqn, path in index["paths"].items()})


def stored_chunk(index: Index, where: MetadataIndex) -> Chunk:
    """Find the stored chunk that a read item points at."""
    entry = index["tensors"][where.fqn]
    for chunk in entry["chunks"]:
        if where.offset is None or tuple(where.offset) == tuple(chunk["offsets"]):
            shape, offsets, sizes = tuple(entry["shape"]), tuple(chunk["offsets"]), tuple(chunk["sizes"])
            place = chunk["file"], chunk["begin"], chunk["end"]
            return Chunk(where.fqn, DTYPES[entry["dtype"]], shape, offsets, sizes, *place)
    raise CheckpointError(f"{where.fqn}: no stored chunk at offset {where.offset}")


def fill_state(
    state: dict[str, Any],
    index: Index,
    read: Callable[[Chunk, tuple[int, ...], tuple[int, ...]], torch.Tensor],
) -> None:
    """Copy stored chunks into the tensors of `state` (plain or DTensor, any layout) and replace its other values."""
    planner = JsonLoadPlanner()
    planner.set_up_planner(state, to_metadata(index))
    for item in planner.finish_plan(planner.create_local_plan()).items:
        if item.type == LoadItemType.BYTE_IO:
            value = index["values"][item.storage_index.fqn]
            planner.load_bytes(item, io.BytesIO(json.dumps(value).encode()))
            continue
        chunk = stored_chunk(index, item.storage_index)
        target = planner.resolve_tensor(item).detach()
        target.copy_(read(chunk, tuple(item.storage_offsets), tuple(item.lengths)))


def state_shapes(state: dict[str, Any]) -> dict[str, list[int] | None]:
    """Return global shapes by flat names of the index; None for values that are not tensors."""
    from torch.distributed.checkpoint._nested_dict import flatten_state_dict  # private to torch

    flat, _ = flatten_state_dict(state)
    return {name: list(value.shape) if isinstance(value, torch.Tensor) else None for name, value in flat.items()}


def stored_shapes(index: Index) -> dict[str, list[int] | None]:
    """Return the shapes of what is stored, in the form of `state_shapes`."""
    shapes: dict[str, list[int] | None] = {fqn: entry["shape"] for fqn, entry in index["tensors"].items()}
    return shapes | dict.fromkeys(index["values"])


def mismatch(have: dict[str, list[int] | None], index: Index, all_names: set[str]) -> list[str]:
    """Explain why a stored checkpoint cannot fill a state, one line per kind of problem; empty when it fits.

    `have`: `state_shapes` of this rank; `all_names`: names of all ranks (a pipeline rank has a part). What is stored
    of parts that are OPTIONAL may be left unread.
    """
    stored = stored_shapes(index)
    missing = sorted(have.keys() - stored.keys())
    unexpected = sorted(name for name in stored.keys() - all_names if not name.startswith(OPTIONAL))
    differing = [name for name in sorted(have.keys() & stored.keys()) if have[name] != stored[name]]
    shapes = [f"{name} {_kind(stored[name])} there, {_kind(have[name])} here" for name in differing]
    lines = [
        ("missing from the checkpoint", missing),
        ("unexpected in the checkpoint", unexpected),
        ("misshapen", shapes),
    ]
    return [f"{len(names)} {what}: {_some(names)}" for what, names in lines if names]


def _kind(shape: list[int] | None) -> str:
    return "a value" if shape is None else f"shape {tuple(shape)}"


def _some(names: list[str], most: int = 8) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
