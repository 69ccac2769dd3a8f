"""Exchange tensors between pipeline stages, in the background.

What two ranks send each other in one direction is received in the order in which it is sent, for NCCL has no tags: a
receive is posted once all are that its peer sends before it. Each direction has a group of its own under NCCL, which
runs what one group sends and receives one after the other: in a shared one, two ranks that both send first would wait
for each other. Shapes go ahead of tensors as headers, on the host.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

HEADER = 10  # int64 numbers before the first tensor of a boundary: dtype code, dims, sizes
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
Links = Mapping[tuple[int, int], dist.ProcessGroup]  # (rank of the pipeline that sends, that receives) -> their group


class StageMessage(NamedTuple):
    """A tensor that goes to or comes from a stage.

    `key` names the boundary and batch shape; its first message carries a header with the shape, with None every
    message. `number` is the message's among those of a pass.
    """

    stage: int
    key: Any
    number: int


class StageChannel:
    """Send and receive tensors between this rank and the ranks of neighboring stages."""

    def __init__(self, links: Links, rank: int, column: Sequence[int], device: torch.device) -> None:
        """Create the channel of one pipeline rank.

        Args:
            links: process group of each direction between neighbors.
            rank: number of this rank in the pipeline.
            column: world rank by pipeline rank; stage s is on pipeline rank s mod their number.
            device: device of the tensors.
        """
        self.links, self.rank, self.column, self.device = links, rank, column, device
        self.shapes: dict[Any, tuple[torch.Size, torch.dtype]] = {}  # by key, as announced
        self.announced: set[Any] = set()  # keys whose header was sent
        self.sending: list[tuple[Any, torch.Tensor]] = []
        self.incoming: dict[int, deque[StageMessage]] = {}  # by peer, not yet posted, as the peer sends them
        self.posted: dict[int, tuple[Any, torch.Tensor]] = {}  # by number
        self.waited_s = 0.0

    def begin(self, incoming: Mapping[int, Sequence[StageMessage]]) -> None:
        """List what a pass receives: by peer, in the order in which the peer sends it."""
        self.incoming = {peer: deque(messages) for peer, messages in incoming.items()}

    def peer(self, message: StageMessage) -> int:
        """Return the pipeline rank that the message goes to or comes from."""
        return message.stage % len(self.column)

    def send(self, x: torch.Tensor, message: StageMessage) -> None:
        """Start to send; never blocks."""
        x = x.detach().contiguous()
        if message.key is None or message.key not in self.announced:
            self.announced.add(message.key)
            header = torch.zeros(HEADER, dtype=torch.int64)
            header[: 2 + x.dim()] = torch.tensor([DTYPES.index(x.dtype), x.dim(), *x.shape])
            self._isend(header, message)
        self._isend(x, message)

    def _isend(self, x: torch.Tensor, message: StageMessage) -> None:
        peer = self.peer(message)
        self.sending.append((dist.isend(x, self.column[peer], group=self.links[self.rank, peer]), x))

    def expect(self, message: StageMessage) -> None:
        """Start to receive if shapes are known, so that a message travels while this rank still computes."""
        queue = self.incoming[self.peer(message)]
        while message.number not in self.posted and queue[0].key in self.shapes:
            self._post(queue.popleft())

    def receive(self, message: StageMessage) -> torch.Tensor:
        began = time.monotonic()
        queue = self.incoming[self.peer(message)]
        while message.number not in self.posted:
            self._post(queue.popleft())
        work, x = self.posted.pop(message.number)
        work.wait()
        self.waited_s += time.monotonic() - began
        return x

    def _post(self, message: StageMessage) -> None:
        """Start to receive a message; waits for its header if its shape is not known."""
        peer = self.peer(message)
        source, group = self.column[peer], self.links[peer, self.rank]
        shape = self.shapes.get(message.key)
        if shape is None:
            header = torch.zeros(HEADER, dtype=torch.int64)
            dist.recv(header, source, group=group)
            code, dims, *sizes = header.tolist()
            shape = torch.Size(sizes[:dims]), DTYPES[code]
            if message.key is not None:
                self.shapes[message.key] = shape
        x = torch.empty(shape[0], dtype=shape[1], device=self.device)
        self.posted[message.number] = (dist.irecv(x, source, group=group), x)

    def drain(self) -> None:
        """Wait until everything sent has been received."""
        began = time.monotonic()
        for work, _ in self.sending:
            work.wait()
        self.sending = []
        self.waited_s += time.monotonic() - began
