"""Residuals of gradient codecs (parallel.compress) in checkpoints, where each rank has its own.

A world of another size takes all of them over, so their sum stays: rank r of w takes those of the ranks r, r + w, ...
Where no codec runs any more (one rank is left, or the recipe says so), all are added to the first step's gradient; by
replicas that train apart, each adds those that it took over, w times, as their mean is the gradient.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from sparkring.training.models.torch_private import is_dtensor
from sparkring.training.parallel.data_parallel.base import CodecState, DataParallel
from sparkring.training.parallel.state import plain_name

RESIDUALS, FACTORS = "residuals", "factors"  # parts of a checkpoint's state


class Residuals:
    """A strategy's side of them: what goes into a checkpoint, and what comes out of one."""

    def __init__(self, data_parallel: DataParallel, rank: int, world: int, apart: bool = False) -> None:
        """Start without residuals.

        Args:
            data_parallel: engine with a codec that may carry residuals.
            rank: number of this process, or of its replica.
            world: number of processes, or of replicas.
            apart: replicas step apart, so each has its own late residuals.
        """
        self.data_parallel, self.rank, self.world, self.apart = data_parallel, rank, world, apart
        self.late: dict[str, torch.Tensor] = {}  # by parameter, summed over ranks: no codec carries them on
        self.added: list[str] = []  # of these, in the gradients of this step

    def tensors(self) -> dict[str, dict[str, torch.Tensor]]:
        """Return sections of a checkpoint's state; {} without residuals."""
        codec = self.data_parallel.codec_state()
        own = codec.residuals or self.late
        rank = self.rank if codec.residuals or self.apart else 0
        parts = {RESIDUALS: {f"rank-{rank:05d}/{name}": t for name, t in own.items()}, FACTORS: codec.factors}
        return {part: tensors for part, tensors in parts.items() if tensors}

    def room_for(self, stored: Mapping[str, Sequence[int] | None], like: torch.Tensor) -> dict[str, Any]:
        """Allocate tensors to load residuals from a checkpoint: those that this rank takes over.

        Args:
            stored: shapes by full name (`residuals.rank-00001/head.weight`); other names are left out.
            like: dtype and device.
        """
        takes_all = not self.data_parallel.codec_state().residuals and not self.apart
        parts: dict[str, dict[str, torch.Tensor]] = {}
        for full_name, shape in stored.items():
            part, _, key = full_name.partition(".")
            if part not in (RESIDUALS, FACTORS) or shape is None:
                continue
            if part == FACTORS or takes_all or rank_of(key) % self.world == self.rank:
                parts.setdefault(part, {})[key] = like.new_zeros(tuple(shape))
        return parts

    def load(self, state: Mapping[str, Any], names: Container[str]) -> None:
        """Take the tensors that `room_for` was filled with, or `tensors` of the same world.

        Args:
            state: sections of a checkpoint's state.
            names: parameters that this rank steps; the late residuals of others belong to another rank.
        """
        residuals: dict[str, torch.Tensor] = {}
        for key, residual in sorted(state.get(RESIDUALS, {}).items()):
            name = key.partition("/")[2]
            residuals[name] = residuals[name] + residual if name in residuals else residual
        self.data_parallel.load_codec_state(CodecState(residuals, dict(state.get(FACTORS, {}))))
        late = {} if self.data_parallel.codec_state().residuals else residuals
        self.late = {name: residual for name, residual in late.items() if name in names}

    def add_late(self, named: Iterable[tuple[str, nn.Parameter]], aliases: Mapping[str, str], scale: float) -> None:
        """Add residuals without a codec to the gradients, which are summed over ranks.

        Args:
            named: parameters, whole or sharded; those without a gradient wait.
            aliases: further names of shared parameters.
            scale: scale of the loss.
        """
        plain = ((plain_name(name), p.grad) for name, p in named) if self.late else ()
        scale *= self.world if self.apart else 1
        canonical = [(aliases.get(name, name), gradient) for name, gradient in plain]
        reached = [(name, grad) for name, grad in canonical if name in self.late and grad is not None]
        for name, gradient in reached:
            late = self.late[name].to(gradient.device) * scale
            if is_dtensor(gradient):
                from torch.distributed.tensor import distribute_tensor  # with sympy: a second

                late = distribute_tensor(late, gradient.device_mesh, gradient.placements, src_data_rank=None)
            gradient.add_(late)
        self.added = [name for name, _ in reached]

    def commit(self) -> None:
        """Drop the residuals that were added, after a step was made."""
        for name in self.added:
            del self.late[name]
        self.added = []


def rank_of(key: str) -> int:
    """Parse the rank of `rank-00001/head.weight`, here 1."""
    return int(key.partition("/")[0].removeprefix("rank-"))
