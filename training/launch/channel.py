"""Length-bounded JSON frames: inside TLS between the driver and its agents, over a pair of sockets between an agent and
its own child.

A frame is  length (4 bytes, big-endian) | JSON object (UTF-8).  TLS proves the driver to its agents and keeps frames
from being read, changed, repeated or left out (tls.py); an agent proves itself by the launch's secret in its first
frame. Nothing is unpickled, ever.
"""

from __future__ import annotations

import json
import secrets
import socket
import struct
import threading
from collections.abc import Iterator
from typing import Any

MAX_FRAME_BYTES = 16 << 20
MAX_GREETING_BYTES = 2048
_LENGTH = struct.Struct(">I")

Message = dict[str, Any]


class ProtocolError(ConnectionError):
    """The other side does not speak our protocol, or does not know the secret."""


def new_secret() -> str:
    """256 random bits as hex."""
    return secrets.token_hex(32)


def encode(message: Message) -> bytes:
    """The frame of a message; ValueError where it is too large, TypeError where it is not JSON."""
    body = json.dumps(message, separators=(",", ":")).encode()
    if len(body) > MAX_FRAME_BYTES:
        raise ValueError(
            f"a {message.get('kind')!r} message of {len(body):,} bytes: the limit is {MAX_FRAME_BYTES:,}; "
            "write large values to the run's storage and send their URI"
        )
    return _LENGTH.pack(len(body)) + body


def decode(body: bytes) -> Message:
    """The message in a body from anyone; ProtocolError unless it is a JSON object with a string `kind`."""
    try:
        message = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"not JSON: {type(error).__name__}") from None
    if not isinstance(message, dict) or not isinstance(message.get("kind"), str):
        raise ProtocolError("not a message: a JSON object with a string 'kind' is expected")
    return message


def text_of(message: Message, key: str) -> str:
    """A short string that can be printed and compared; ProtocolError for anything else."""
    value = message.get(key)
    if not isinstance(value, str) or not 0 < len(value) <= 512 or not value.isprintable():
        raise ProtocolError(f"{key!r} must be a short string")  # lone surrogates are not printable
    return value


def length_of(prefix: bytes | bytearray, limit: int) -> int:
    """The length a frame announces; checked before a byte of the body is read."""
    (length,) = _LENGTH.unpack_from(prefix)
    if not 0 < length <= limit:
        raise ProtocolError(f"frame of {length:,} bytes; 1 to {limit:,} are accepted")
    return int(length)


class Frames:
    """Cuts a stream of bytes into the bodies of its frames, none larger than `limit`."""

    def __init__(self, limit: int):
        self.limit = limit
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Bodies that are complete now. Raises ProtocolError for a length out of bounds."""
        self._buffer += data
        while len(self._buffer) >= _LENGTH.size:
            end = _LENGTH.size + length_of(self._buffer, self.limit)
            if len(self._buffer) < end:
                return
            body = bytes(self._buffer[_LENGTH.size : end])
            del self._buffer[:end]
            yield body


def read_exactly(sock: socket.socket, count: int) -> bytes:
    """`count` bytes; EOFError where the other side has closed."""
    chunks, missing = [], count
    while missing:
        chunk = sock.recv(min(missing, 1 << 20))
        if not chunk:
            raise EOFError("connection closed")
        chunks.append(chunk)
        missing -= len(chunk)
    return b"".join(chunks)


class Plain:
    """The same frames over a pair of sockets nobody else holds. `send` is safe from any thread, `receive` from one."""

    def __init__(self, sock: socket.socket):
        self.sock = sock
        self._lock = threading.Lock()

    def send(self, message: Message) -> None:
        frame = encode(message)
        with self._lock:
            self.sock.sendall(frame)

    def receive(self) -> Message:
        length = length_of(read_exactly(self.sock, _LENGTH.size), MAX_FRAME_BYTES)
        return decode(read_exactly(self.sock, length))
