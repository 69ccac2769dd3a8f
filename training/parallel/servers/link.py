"""Messages between ranks on servers, through rounds at the first server."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from sparkring.training.parallel.measure import combined
from sparkring.training.parallel.meeting import Gather, Meeting
from sparkring.training.servers.client import Client, ServerConnection
from sparkring.training.servers.definition import Definition
from sparkring.training.servers.protocol import pack_tensors, unpack_tensors
from sparkring.training.servers.rounds import START

MAIN, PART = "main", "part"  # channels
LOOP = "loop"  # name of the loop's state that is kept at the first server


@dataclass(frozen=True)
class ServersAt:
    """Where the servers of an attempt are. addresses: in their order. secret: of the attempt."""

    addresses: Sequence[tuple[str, int]]
    secret: bytes


class ServerLink(Meeting):
    """One rank's way to the servers, and through them to the other ranks.

    Rounds before the first step are numbered; later ones are numbered again at each synchronization point, so that a
    rank that takes another's place can take part in those it has missed.
    """

    def __init__(self, client: Client, rank: int, world: int) -> None:
        self.client, self.rank, self.world = client, rank, world
        self.is_replacement = False
        self.clock = 0  # steps that this rank has made since the run began
        self.begun = False  # steps may be made
        self.met_at: int | None = None  # step of the synchronization point that ranks are at
        self._scope, self._number = START, 0
        self._gathers: list[_Gather] = []

    def define(self, definition: Definition) -> None:
        self.is_replacement = self.client.define(definition)

    def meet(self, mine: bytes, at: int | None = None) -> list[bytes]:
        """Give a value and get those of all ranks, in their order. Called from the main thread.

        `at`: the step that this rank has made; None: that of the last synchronization point, or the start.
        """
        if at is not None and self.begun:
            self._enter(at)
        number, self._number = self._number, self._number + 1
        return self.client.round(self._scope, MAIN, number, mine)

    def _enter(self, step: int) -> None:
        self.met_at = step
        if step != self._scope:
            self._scope, self._number = step, 0

    def part(self, mine: bytes) -> list[bytes]:
        """Synchronize a last time, and continue."""
        answers = self.client.round(self._scope, PART, 0, mine)
        self.met_at = None
        return answers

    def go_on(self, step: int, meets: bool) -> None:
        """Take the place of a rank that died after `step` steps. `meets`: a synchronization point by schedule.

        RuntimeError where it died at a synchronization point, or while it wrote a checkpoint; also where it was the
        first to come there, since this rank would pass, and the others wait for it.
        """
        self.begun = True
        for gather in self._gathers:
            gather.check()
        # others may wait at a later synchronization point, which this rank still reaches
        if (meets or self.client.last_scope(MAIN) == step) and step > self.client.last_scope(PART, self.rank):
            raise RuntimeError(
                f"rank {self.rank} died while ranks met after step {step}, to evaluate or to write a checkpoint; "
                "nobody knows what it had done, so training goes on from the last checkpoint"
            )
        self._scope = step

    def of_first(self, tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Copy rank 0's values to every rank."""
        if not tensors:
            return {}
        on_host = {name: tensor.detach().cpu() for name, tensor in tensors.items()}
        mine = b"".join(bytes(part) for part in pack_tensors(on_host)) if self.rank == 0 else b""
        return unpack_tensors(self.meet(mine)[0])

    def wait_for_all(self) -> None:
        """Wait until every rank has made as many steps; they stay there until all continue (`part`)."""
        self.meet(b"", at=self.clock)

    def sum_over_data(self, values: torch.Tensor) -> torch.Tensor:
        own = self.share_of_sum(values)
        answers = self.meet(own.numpy().tobytes(), at=self.clock)
        parts = [torch.from_numpy(np.frombuffer(answer, np.float64).copy()) for answer in answers]
        return torch.stack(parts).sum(dim=0).reshape(own.shape)

    def combine(self, mine: dict[str, float]) -> dict[str, float]:
        self.wait_for_all()
        answers = self.meet(json.dumps(combined([mine])).encode(), at=self.clock)
        return combined([json.loads(answer) for answer in answers])

    def keep(self, state: bytes) -> None:
        if self.rank == 0 and not (self.is_replacement and not self.begun):
            self.client.keep(LOOP, state)

    def kept(self) -> bytes:
        """Return the value that rank 0 last gave to `keep`."""
        return self.client.kept(LOOP)

    def server_counts(self) -> list[dict[str, Any]]:
        return self.client.counts()

    def close(self, failed: bool) -> None:
        self.client.close()

    def open_gather(self, behind: int = 0) -> Gather:
        """See Meeting.open_gather. On a connection of its own; every rank opens them in the same order."""
        self._gathers.append(_Gather(self, f"gather {len(self._gathers)}", self.client.open_channel(), behind))
        return self._gathers[-1]


class _Gather:
    def __init__(self, link: ServerLink, channel: str, connection: ServerConnection, behind: int) -> None:
        self._link, self._channel, self._connection, self._behind = link, channel, connection, behind
        self._scope, self._number = START, 0
        self._later = 0  # number of the next round after the start, of those behind training

    def __call__(self, mine: bytes) -> list[bytes]:
        link = self._link
        if not link.begun:
            scope, number = START, self._number
            self._number += 1
        elif self._behind:
            scope, number = self._later, 0
            self._later += 1
        else:
            step = link.met_at if link.met_at is not None else 0
            if step != self._scope:
                self._scope, self._number = step, 0
            scope, number = step, self._number
            self._number += 1
        return link.client.round(scope, self._channel, number, mine, self._connection)

    def check(self) -> None:
        """Continue the rounds of a rank that died; RuntimeError where it died between those of one purpose."""
        if not self._behind:
            return
        self._later = 1 + self._link.client.last_scope(self._channel, self._link.rank, self._connection)
        if self._later % self._behind:
            raise RuntimeError(
                f"rank {self._link.rank} died while a checkpoint was written, of which its part is lost; training goes "
                "on from the last one"
            )
