"""Exchange tensors between pipeline stages: tagged, in the background."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

HEADER = 10  # int64 numbers before the first tensor of a boundary: dtype code, dims, sizes
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class StageMessage(NamedTuple):
    """A tensor that goes to or comes from a stage.

    `key` names the boundary and batch shape; its first message carries a header with the shape, with None every
    message.
    """

    stage: int
    key: Any
    tag: int


class StageChannel:
    """Send and receive tensors between this rank and the ranks of neighboring stages."""

    def __init__(self, group: dist.ProcessGroup, ranks: int, device: torch.device) -> None:
        self.group, self.ranks, self.device = group, ranks, device
        self.shapes: dict[Any, tuple[torch.Size, torch.dtype]] = {}  # by key, as announced
        self.announced: set[Any] = set()  # keys whose header was sent
        self.sending: list[tuple[Any, torch.Tensor]] = []
        self.expected: dict[int, tuple[Any, torch.Tensor]] = {}  # by tag
        self.waited_s = 0.0

    def _peer(self, stage: int) -> int:
        return dist.get_global_rank(self.group, stage % self.ranks)

    def send(self, x: torch.Tensor, message: StageMessage) -> None:
        """Start to send; never blocks."""
        x = x.detach().contiguous()
        if message.key is None or message.key not in self.announced:
            self.announced.add(message.key)
            header = torch.zeros(HEADER, dtype=torch.int64)
            header[: 2 + x.dim()] = torch.tensor([DTYPES.index(x.dtype), x.dim(), *x.shape])
            self._isend(header.to(self.device), message)
        self._isend(x, message)

    def _isend(self, x: torch.Tensor, message: StageMessage) -> None:
        self.sending.append((dist.isend(x, self._peer(message.stage), group=self.group, tag=message.tag), x))

    def expect(self, message: StageMessage) -> None:
        """Start to receive if the shape is known, so that a message travels while this rank still computes."""
        if message.key in self.shapes and message.tag not in self.expected:
            shape, dtype = self.shapes[message.key]
            x = torch.empty(shape, dtype=dtype, device=self.device)
            peer = self._peer(message.stage)
            self.expected[message.tag] = (dist.irecv(x, peer, group=self.group, tag=message.tag), x)

    def receive(self, message: StageMessage) -> torch.Tensor:
        began = time.monotonic()
        if message.tag in self.expected:
            work, x = self.expected.pop(message.tag)
            work.wait()
        else:
            x = self._receive_now(message)
        self.waited_s += time.monotonic() - began
        return x

    def _receive_now(self, message: StageMessage) -> torch.Tensor:
        peer = self._peer(message.stage)
        if message.key is None or message.key not in self.shapes:
            header = torch.zeros(HEADER, dtype=torch.int64, device=self.device)
            dist.recv(header, peer, group=self.group, tag=message.tag)
            code, dims, *sizes = header.tolist()
            self.shapes[message.key] = (torch.Size(sizes[:dims]), DTYPES[code])
        shape, dtype = self.shapes[message.key]
        x = torch.empty(shape, dtype=dtype, device=self.device)
        dist.recv(x, peer, group=self.group, tag=message.tag)
        return x

    def drain(self) -> None:
        """Wait until everything sent has been received."""
        began = time.monotonic()
        for work, _ in self.sending:
            work.wait()
        self.sending = []
        self.waited_s += time.monotonic() - began
