"""Frames between a worker and a server: a message (messages.py) and raw bytes next to it, over blocking TCP.

    kind (1 byte) | length of the message (4) | length of the bytes (8) | the message, by codec.py | the bytes

A connection begins with proof, in frames of one fixed size: the server sends 32 random bytes, the worker its own 32 and
an HMAC-SHA256 of both under the attempt's secret, the server another one over both. Until then nothing is parsed, and
no memory is taken that depends on what arrives. What follows is neither encrypted nor signed, as in the ring. The TLS
of the control channel (training/launch/channel/tls.py) is not used: over it a loopback connection carries a fifth of
the bytes per second (2 cores), and workers would need its certificate besides the secret.

Bytes of a worker's step, P of dense parameters, u distinct ids with rows of D values of b bytes: it sends
P + u (16 + D b), the ids with the pull and with the push, and receives P + u D b. Heads and messages of a step are
below 220 + 16 T with each server, T tables, and 8 more for each slice that no gradient reached. Backup workers add what
the first server is asked of shares, some 80 and 24 for each of them.
"""

from __future__ import annotations

import hmac
import json
import math
import secrets
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np
import torch

from sparkring.conf.plain_text import count_of
from sparkring.training.servers.codec import Buffer, pack, unpack
from sparkring.training.servers.messages import ServerReply, WorkerRequest

NONCE = 32
PROOF_S = 5.0  # for a whole handshake
MAX_BYTES = 1 << 34  # of a frame: what an authenticated peer may make us take
MAX_MESSAGE_BYTES = 1 << 24
_HEAD = struct.Struct("<BIQ")
_INT = struct.Struct("<q")


class ServerProtocolError(ConnectionError):
    """The other side does not speak our protocol, or does not know the secret."""


@dataclass(frozen=True)
class Frame:
    """What was read of a socket: the number of a message's class, its bytes, and those next to it."""

    kind: int
    message: Buffer
    body: Buffer


REQUESTS: dict[int, type] = dict(enumerate(get_args(WorkerRequest), 1))
REPLIES: dict[int, type] = dict(enumerate(get_args(ServerReply), 101))
_KINDS = {kind: number for number, kind in (REQUESTS | REPLIES).items()}


def send(sock: socket.socket, message: WorkerRequest | ServerReply, body: Sequence[Buffer] = ()) -> int:
    """Send a message, and next to it the bytes of `body` joined; returns how many bytes were sent."""
    parts = [memoryview(part).cast("B") for part in body if len(part)]
    size = sum(len(part) for part in parts)
    packed = pack(message)
    head = _HEAD.pack(_KINDS[type(message)], len(packed), size) + packed
    total = len(head) + size
    if size <= 1 << 14:
        sock.sendall(b"".join([head, *parts]))
        return total
    sock.sendall(head)
    for part in parts:
        sock.sendall(part)
    return total


def receive(sock: socket.socket) -> Frame:
    """Read a frame. EOFError where the other side has closed, ServerProtocolError for what is no frame."""
    kind, length, size = _HEAD.unpack(_exactly(sock, _HEAD.size))
    if size > MAX_BYTES or length > MAX_MESSAGE_BYTES:
        raise ServerProtocolError(
            f"a frame of {length:,} and {count_of(size, 'byte', ',')}; {MAX_MESSAGE_BYTES:,} and {MAX_BYTES:,} are "
            "accepted at most"
        )
    message = _exactly(sock, length) if length else b""
    return Frame(kind, message, _exactly(sock, size) if size else b"")


def message_of(frame: Frame, accepted: Mapping[int, type]) -> Any:
    """Read a frame's message, whose class is one of REQUESTS or REPLIES; ServerProtocolError for any other."""
    kind = accepted.get(frame.kind)
    if kind is None:
        raise ServerProtocolError(f"a message of kind {frame.kind} is not accepted here")
    try:
        return unpack(kind, frame.message)
    except ValueError as error:
        raise ServerProtocolError(str(error)) from None


def _exactly(sock: socket.socket, count: int, deadline: float | None = None) -> bytearray:
    """Read so many bytes; TimeoutError after `deadline`, by time.monotonic, however slowly they come."""
    buffer = bytearray(count)
    view, done = memoryview(buffer), 0
    while done < count:
        if deadline is not None:
            sock.settimeout(max(deadline - time.monotonic(), 1e-3))
        read = sock.recv_into(view[done:], count - done)
        if not read:
            raise EOFError("connection closed")
        done += read
    return buffer


def _proof(secret: bytes, side: bytes, first: Buffer, second: Buffer) -> bytes:
    return hmac.digest(secret, side + bytes(first) + bytes(second), "sha256")


def admit(sock: socket.socket, secret: bytes) -> None:
    """Prove the secret as the server. ServerProtocolError, EOFError or TimeoutError if the peer cannot."""
    deadline = time.monotonic() + PROOF_S
    sock.settimeout(PROOF_S)
    own = secrets.token_bytes(NONCE)
    sock.sendall(own)
    theirs = _exactly(sock, 2 * NONCE, deadline)
    nonce, proof = theirs[:NONCE], theirs[NONCE:]
    if not hmac.compare_digest(proof, _proof(secret, b"worker", own, nonce)):
        raise ServerProtocolError("the other side does not know the attempt's secret")
    sock.sendall(_proof(secret, b"server", nonce, own))
    sock.settimeout(None)


def enter(sock: socket.socket, secret: bytes) -> None:
    """Prove the secret as the worker."""
    deadline = time.monotonic() + PROOF_S
    theirs = _exactly(sock, NONCE, deadline)
    own = secrets.token_bytes(NONCE)
    sock.sendall(own + _proof(secret, b"worker", theirs, own))
    if not hmac.compare_digest(_exactly(sock, NONCE, deadline), _proof(secret, b"server", own, theirs)):
        raise ServerProtocolError("the server does not know the attempt's secret")
    sock.settimeout(None)


def pack_tensors(tensors: Mapping[str, torch.Tensor]) -> list[Buffer]:
    """Pack named tensors: length of a JSON description, the description, then each tensor's memory."""
    described = {name: [str(t.dtype).removeprefix("torch."), list(t.shape)] for name, t in tensors.items()}
    text = json.dumps(described).encode()
    return [_INT.pack(len(text)), text, *(raw(tensor) for tensor in tensors.values())]


def unpack_tensors(body: Buffer) -> dict[str, torch.Tensor]:
    """Read what `pack_tensors` made, as tensors with memory of their own. ServerProtocolError where it is cut."""
    view = memoryview(body)
    try:
        (length,) = _INT.unpack_from(view)
        at = _INT.size + length
        found: dict[str, torch.Tensor] = {}
        for name, (dtype_name, shape) in json.loads(bytes(view[_INT.size : at])).items():
            dtype = getattr(torch, dtype_name)
            size = math.prod(shape) * dtype.itemsize
            if at + size > len(view):
                raise ServerProtocolError(f"tensor {name!r} is cut")
            memory = torch.from_numpy(np.frombuffer(view, np.uint8, size, at).copy())
            found[name] = memory.view(dtype).reshape(shape) if size else torch.empty(shape, dtype=dtype)
            at += size
    except (ValueError, TypeError, AttributeError, struct.error) as error:
        raise ServerProtocolError(f"not named tensors: {error}") from None
    return found


def raw(tensor: torch.Tensor) -> Buffer:
    """Return the memory of a tensor on the CPU."""
    if not tensor.numel():
        return b""  # torch refuses views of some empty tensors
    array: Any = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)
