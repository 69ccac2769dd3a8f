"""Server processes and ranks of the tests: a server keeps the sums that ranks push to it, each push once."""

from __future__ import annotations

import hmac
import os
import signal
import socket
import struct
import threading
import time
from typing import Any

from sparkring.training.launch.channel.connection import listen

PUSH = struct.Struct("<iiq")  # rank, clock, value


def read(sock: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = sock.recv(size - len(data))
        if not part:
            raise EOFError
        data += part
    return data


class Sums:
    """The total, and the next clock of each rank."""

    def __init__(self, world: int) -> None:
        self.lock, self.total, self.clocks = threading.Lock(), 0, [0] * world

    def push(self, rank: int, clock: int, value: int) -> tuple[int, int]:
        """(total, next clock of the rank); a repeated push changes nothing. clock -1 only asks."""
        with self.lock:
            if clock == self.clocks[rank]:
                self.total += value
                self.clocks[rank] += 1
            return self.total, self.clocks[rank]


def serve(ctx: Any) -> None:
    """A thread per connection; ends when it is killed, or as the payload says."""
    end = ctx.payload.get("end")
    print(f"server {ctx.server} of {ctx.servers} for {ctx.world_size} ranks", flush=True)
    if end == "raises" and ctx.server == 1:
        raise ValueError("no such shard")
    if end == "is never ready":
        time.sleep(600)
    sums, listening = Sums(ctx.world_size), listen(ctx.address, 16)
    ctx.event("pid", {"pid": os.getpid(), "attempt": ctx.attempt})
    ctx.ready(listening.getsockname()[1])
    if end == "returns":
        return

    def answer(sock: socket.socket) -> None:
        try:
            if not hmac.compare_digest(read(sock, 32), ctx.secret):
                return
            while True:
                sock.sendall(struct.pack("<qq", *sums.push(*PUSH.unpack(read(sock, PUSH.size)))))
        except (EOFError, OSError):
            return

    while True:
        sock, _ = listening.accept()
        threading.Thread(target=answer, args=(sock,), daemon=True).start()


def work(ctx: Any) -> dict[str, Any]:
    """Push 1 to every server in each step, from the clock that the servers know; stops and saves at cuts."""
    payload, saved, began = ctx.payload, list[int](), time.monotonic()
    connections = [socket.create_connection(address) for address in ctx.servers]
    for sock in connections:
        sock.sendall(ctx.server_secret)

    def push(sock: socket.socket, clock: int) -> tuple[int, int]:
        sock.sendall(PUSH.pack(ctx.rank, clock, 1))
        total, at = struct.unpack("<qq", read(sock, 16))
        return total, at

    clock = min(push(sock, -1)[1] for sock in connections)
    ctx.event("begins", {"step": clock, "replacement": ctx.replacement, "pid": os.getpid()})
    ctx.begin_steps(clock, payload["steps"])
    while clock < payload["steps"]:
        ctx.heartbeat(clock, "step")
        fault(ctx, clock)
        for sock in connections:
            push(sock, clock)
        clock += 1
        time.sleep(payload.get("step_s", 0.01))
        stop, checkpoint = ctx.cut_after(clock)
        if stop or checkpoint:
            saved.append(clock)
        if stop:
            break
    totals = [push(sock, -1)[0] for sock in connections]
    return {"step": clock, "saved": saved, "totals": totals, "replacement": ctx.replacement,
            "seconds": time.monotonic() - began}  # fmt: skip


def fault(ctx: Any, step: int) -> None:
    """Die, or raise, at the steps that the payload says: [rank, step, replacement or null for any, how]."""
    for rank, at, replacement, how in ctx.payload.get("faults", []):
        if (rank, at) != (ctx.rank, step) or replacement not in (None, ctx.replacement):
            continue
        ctx.event("fault", {"how": how})
        if how == "raise":
            raise RuntimeError("injected")
        if how == "exit":
            os._exit(3)
        if how == "fork server":
            os.kill(os.getppid(), signal.SIGKILL)
            time.sleep(600)
        os.kill(os.getpid(), getattr(signal, how))
