"""Messages between the stages of a pipeline: tagged, in the background, shapes announced once per boundary."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

HEADER = 10  # ints before the first message of a boundary: dtype code, dims, sizes
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class Message(NamedTuple):
    """What a stage sends this rank. `key`: the boundary and batch shape, None where every message says its own."""

    stage: int
    key: Any
    tag: int


class Link:
    """One rank's end of the messages between neighbouring stages."""

    def __init__(self, group: dist.ProcessGroup, ranks: int, device: torch.device) -> None:
        self.group, self.ranks, self.device = group, ranks, device
        self.shapes: dict[Any, tuple[torch.Size, torch.dtype]] = {}
        self.announced: set[Any] = set()
        self.sending: list[tuple[Any, torch.Tensor]] = []
        self.expected: dict[int, tuple[Any, torch.Tensor]] = {}  # by tag
        self.waited_s = 0.0

    def _peer(self, stage: int) -> int:
        return dist.get_global_rank(self.group, stage % self.ranks)

    def send(self, x: torch.Tensor, to_stage: int, key: Any, tag: int) -> None:
        """`key` names the boundary and batch shape; its first message carries a header, with None every message."""
        x = x.detach().contiguous()
        if key is None or key not in self.announced:
            self.announced.add(key)
            header = torch.zeros(HEADER, dtype=torch.int64)
            header[: 2 + x.dim()] = torch.tensor([DTYPES.index(x.dtype), x.dim(), *x.shape])
            self._isend(header.to(self.device), to_stage, tag)
        self._isend(x, to_stage, tag)

    def _isend(self, x: torch.Tensor, to_stage: int, tag: int) -> None:
        self.sending.append((dist.isend(x, self._peer(to_stage), group=self.group, tag=tag), x))

    def expect(self, message: Message) -> None:
        """Begin to receive where the shape is known, so that a message travels while this rank still computes."""
        if message.key in self.shapes and message.tag not in self.expected:
            shape, dtype = self.shapes[message.key]
            x = torch.empty(shape, dtype=dtype, device=self.device)
            peer = self._peer(message.stage)
            self.expected[message.tag] = (dist.irecv(x, peer, group=self.group, tag=message.tag), x)

    def receive(self, message: Message) -> torch.Tensor:
        began = time.monotonic()
        if message.tag in self.expected:
            work, x = self.expected.pop(message.tag)
            work.wait()
        else:
            x = self._receive_now(*message)
        self.waited_s += time.monotonic() - began
        return x

    def _receive_now(self, from_stage: int, key: Any, tag: int) -> torch.Tensor:
        peer = self._peer(from_stage)
        if key is None or key not in self.shapes:
            header = torch.zeros(HEADER, dtype=torch.int64, device=self.device)
            dist.recv(header, peer, group=self.group, tag=tag)
            code, dims, *sizes = header.tolist()
            self.shapes[key] = (torch.Size(sizes[:dims]), DTYPES[code])
        shape, dtype = self.shapes[key]
        x = torch.empty(shape, dtype=dtype, device=self.device)
        dist.recv(x, peer, group=self.group, tag=tag)
        return x

    def drain(self) -> None:
        """Wait until everything sent has been taken."""
        began = time.monotonic()
        for work, _ in self.sending:
            work.wait()
        self.sending = []
        self.waited_s += time.monotonic() - began
