"""Copy one rank's shard of a checkpoint to host memory, so that training may change the state while it is written."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType

from sparkring.training.checkpoint.dcp import JsonSavePlanner
from sparkring.training.checkpoint.format import Chunk


@dataclass(frozen=True)
class Snapshot:
    """All that one rank writes of the checkpoint of one step.

    `chunks`: boxes of tensors in host memory. `values`: the state's values that are not tensors, by name. `paths`: the
    path in the state of each name. `trainer`, `rank`: content of trainer.json and rank-<n>.json, as JSON. `tables`: the
    rank's shard of each table, as named tensors.
    """

    step: int
    generation: str
    metric: float | None
    chunks: list[tuple[Chunk, torch.Tensor]]
    values: dict[str, Any]
    paths: dict[str, tuple[Any, ...]]
    trainer: dict[str, Any]
    rank: dict[str, Any]
    tables: Mapping[str, Mapping[str, torch.Tensor]] = field(default_factory=dict)


class HostBuffers:
    """Host memory for tensors, kept from save to save (pinned where the tensor is on CUDA)."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, tuple[int, ...]], torch.Tensor] = {}

    def copy(
        self, planner: JsonSavePlanner, items: list[WriteItem]
    ) -> tuple[list[tuple[Chunk, torch.Tensor]], dict[str, Any]]:
        """Copy what the planner's items name; returns the chunks and the values that are not tensors."""
        chunks: list[tuple[Chunk, torch.Tensor]] = []
        values: dict[str, Any] = {}
        on_cuda = False
        for item in items:
            data = planner.resolve_data(item)
            if item.type == WriteItemType.BYTE_IO:
                values[item.index.fqn] = json.loads(data.getvalue())  # type: ignore[union-attr]
                continue
            assert isinstance(data, torch.Tensor) and item.tensor_data is not None
            box = item.tensor_data.chunk
            shape, offsets, sizes = tuple(item.tensor_data.size), tuple(box.offsets), tuple(box.sizes)
            buffer = self._buffer((item.index.fqn, offsets), data)
            buffer.copy_(data.detach(), non_blocking=data.is_cuda)
            on_cuda |= data.is_cuda
            chunks.append((Chunk(item.index.fqn, data.dtype, shape, offsets, sizes), buffer))
        if on_cuda:
            torch.cuda.synchronize()
        return chunks, values

    def _buffer(self, key: tuple[str, tuple[int, ...]], like: torch.Tensor) -> torch.Tensor:
        buffer = self._buffers.get(key)
        if buffer is None or buffer.shape != like.shape or buffer.dtype != like.dtype:
            buffer = self._buffers[key] = torch.empty(like.shape, dtype=like.dtype, pin_memory=like.is_cuda)
        return buffer

    def clear(self) -> None:
        self._buffers.clear()


def library_versions() -> dict[str, str]:
    """Return the versions that trainer.json records next to the trainer's values."""
    versions = {"torch": str(torch.__version__), "python": platform.python_version()}
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):  # run from a source tree
        versions["sparkring"] = importlib.metadata.version("sparkring")
    return versions
