"""XGBoost's own collective between the ranks of an attempt.

XGBoost's tracker gives every rank the ports of the others. It accepts the first connections as ranks and waits for a
silent one. So each rank has a tracker of its own on its loopback, which answers this process alone; the ranks exchange
their ports through the job's all-gather.
"""

from __future__ import annotations

import io
import json
import os
import select
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from stat import S_ISSOCK
from threading import Thread
from typing import Any

import numpy as np
import torch
import xgboost.collective as xgb_collective
from xgboost.core import XGBoostError

from sparkring.conf.rank_info import RankInfo
from sparkring.training.parallel.meeting import Gather, Meeting
from sparkring.training.waiting import waits_for_ranks

INT = struct.Struct("=i")
MAGIC = INT.pack(0xFF99)
START = 1  # the command of a worker that has opened its ports


class RankTracker:
    """The tracker of one rank, as XGBoost 3.2 speaks with it (its src/collective/protocol.h)."""

    def __init__(self, info: RankInfo, gather: Gather, timeout_s: float) -> None:
        self._info, self._gather, self._timeout_s = info, gather, timeout_s
        self._host = address_toward(os.environ["MASTER_ADDR"])
        family, self._loopback = (socket.AF_INET6, "::1") if ":" in self._host else (socket.AF_INET, "127.0.0.1")
        self._listeners = [socket.create_server((self._loopback, 0), family=family, backlog=1024)]
        self._held = list[socket.socket]()
        self.uri, self.port = self._listeners[0].getsockname()[:2]
        self.failure: Exception | None = None
        Thread(target=self._serve, daemon=True, name="sparkring-tracker").start()

    def close(self) -> None:
        self._listeners[0].shutdown(socket.SHUT_RDWR)  # which ends the thread

    def _serve(self) -> None:
        """Answer connections of this process one after the other; close all others unread."""
        with suppress(OSError):  # closed
            while True:
                for listener in select.select(self._listeners, [], [])[0]:
                    worker, peer = listener.accept()
                    if not any(own.getsockname() == peer for own in own_sockets()):
                        worker.close()
                    elif listener is not self._listeners[0]:
                        self._held.append(worker)
                    else:
                        with worker:
                            worker.settimeout(self._timeout_s)
                            self._answer(worker)
        for each in [*self._listeners, *self._held]:
            each.close()

    def _answer(self, worker: socket.socket) -> None:
        """Tell a worker that starts where its next one listens, which is collective; let one go that ends."""
        try:
            worker.sendall(MAGIC)
            receive(worker, len(MAGIC))
            receive_message(worker)  # its name, which we know
            asked = receive_message(worker)
            if asked["cmd"] == START:
                # XGBoost's error port trusts its first connection. Ours is the first, and ends that listening; the
                # port stays open, because `finalize` connects to it.
                self._listeners.append(listening(asked["error_port"]))
                with socket.create_connection((self._loopback, asked["error_port"]), self._timeout_s) as errors:
                    errors.sendall(INT.pack(0))
                send_message(worker, {"world_size": self._info.world_size})
                send_message(worker, self._following(asked["port"]))
        except Exception as error:  # the worker ends where it is not answered, and `connected` raises this
            self.failure = self.failure or error

    def _following(self, port: int) -> dict[str, Any]:
        """Return where the next rank listens, once all have sent away who came too early to be a rank. Collective."""
        peers = self._gather(json.dumps({"host": self._host, "port": port}).encode())
        with listening(port) as listener:
            while select.select([listener], [], [], 0)[0]:
                listener.accept()[0].close()
        self._gather(b"alone")
        following = (self._info.rank + 1) % self._info.world_size
        return {**json.loads(peers[following]), "rank": following}


def address_toward(other: str) -> str:
    """Return the address that `other` sees this host at."""
    family, _, _, _, address = socket.getaddrinfo(other, 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)  # which sends nothing
        return str(probe.getsockname()[0])


def own_sockets() -> Iterator[socket.socket]:
    """Open each socket of this process once more, until the next."""
    for number in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError):  # closed since
            if S_ISSOCK(os.stat(number).st_mode):
                with socket.socket(fileno=os.dup(number)) as one:
                    yield one


def listening(port: int) -> socket.socket:
    """Open the socket once more on which this process listens at a port."""
    for one in own_sockets():
        if one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) and one.getsockname()[1] == port:
            return one.dup()
    raise OSError(f"XGBoost says that it listens at port {port}, and does not")


def receive(worker: socket.socket, size: int) -> bytes:
    return worker.recv(size, socket.MSG_WAITALL)


def receive_message(worker: socket.socket) -> dict[str, Any]:
    message: dict[str, Any] = json.loads(receive(worker, INT.unpack(receive(worker, INT.size))[0]))
    return message


def send_message(worker: socket.socket, message: dict[str, Any]) -> None:
    text = json.dumps(message).encode()
    worker.sendall(INT.pack(len(text)) + text)


@contextmanager
def connected(info: RankInfo, gather: Gather, timeout_s: float) -> Iterator[None]:
    """Connect the ranks for the block. Collective.

    After an error nothing is closed, as that would wait for ranks that may be dead: the processes end.

    Args:
        info: this process among all.
        gather: all-gather of bytes between all ranks, from any thread.
        timeout_s: timeout of the start and of each collective.
    """
    if info.world_size == 1:
        yield
        return
    tracker = RankTracker(info, gather, timeout_s)
    try:
        with redirect_stdout(io.StringIO()):  # it prints which task is which rank
            xgb_collective.init(
                dmlc_tracker_uri=tracker.uri,
                dmlc_tracker_port=tracker.port,
                dmlc_task_id=f"{info.rank:08d}",
                dmlc_timeout=max(1, round(timeout_s)),
                dmlc_retry=3,
            )
    except XGBoostError as error:
        raise tracker.failure or error from None
    yield
    xgb_collective.finalize()
    tracker.close()


class TreesMeeting(Meeting):
    """Over XGBoost's collective."""

    def __init__(self, info: RankInfo) -> None:
        self.rank, self.world = info.rank, info.world_size

    @waits_for_ranks
    def sum_over_data(self, values: torch.Tensor) -> torch.Tensor:
        if not xgb_collective.is_distributed():
            return values
        total = xgb_collective.allreduce(values.numpy(), xgb_collective.Op.SUM)
        return torch.from_numpy(np.asarray(total).reshape(values.shape))

    def combine(self, mine: dict[str, float]) -> dict[str, float]:
        return mine  # nothing is planned of trees, so nothing is measured

    def close(self, failed: bool) -> None:
        """Do nothing: `connected` closes."""
