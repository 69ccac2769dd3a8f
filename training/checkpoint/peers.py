"""How the ranks of a checkpoint agree: one all-gather of bytes, over torch.distributed, or alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from sparkring.training.checkpoint.format import CheckpointError

Gather = Callable[[bytes], list[bytes]]


@dataclass(frozen=True)
class Peers:
    """The ranks' all-gather: `gather(mine)` gives every rank the bytes of all ranks, in rank order.

    It is called from one thread at a time, but not always the same one, so it needs a separate communicator.
    """

    rank: int
    world: int
    gather: Gather

    def together(self, what: str, act: Callable[[], Any]) -> list[Any]:
        """Run `act` on every rank; returns the JSON-able results of all. A failure on any is CheckpointError on all."""
        failure: Exception | None = None
        try:
            mine = {"ok": act()}
        except Exception as error:
            failure, mine = error, {"error": f"{type(error).__name__}: {error}"}
        answers = [json.loads(answer) for answer in self.gather(json.dumps(mine).encode())]
        failed = [f"rank {rank} of {self.world}: {a['error']}" for rank, a in enumerate(answers) if "error" in a]
        if failed:
            raise CheckpointError(f"{what} failed on {'; '.join(failed)}") from failure
        return [answer["ok"] for answer in answers]


def solo() -> Peers:
    """Return the peers of a single process, without a process group."""
    return Peers(0, 1, lambda mine: [mine])


def torch_peers(timeout: timedelta) -> Peers:
    """Connect all ranks in a separate Gloo group, so that writing behind never mixes with training's collectives.

    Collective: every rank calls it at the same point. Messages are JSON in byte tensors, not pickles.
    """
    group = dist.new_group(backend="gloo", timeout=timeout)
    rank, world = dist.get_rank(), dist.get_world_size()

    def gather(mine: bytes) -> list[bytes]:
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(world)]
        dist.all_gather(sizes, torch.tensor([len(mine)]), group=group)
        longest = int(max(sizes))
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: len(mine)] = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
        gathered = [torch.empty_like(padded) for _ in range(world)]
        dist.all_gather(gathered, padded, group=group)
        return [g[: int(size)].numpy().tobytes() for g, size in zip(gathered, sizes, strict=True)]

    return Peers(rank, world, gather)
