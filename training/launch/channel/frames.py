"""Length-bounded JSON frames.

Over TLS between the driver and its agents, over a socket pair between an agent and its children. A frame is  length (4
bytes, big-endian) | JSON object (UTF-8) of a message's fields, its `kind` and, where it must be acknowledged, its
number `n`. TLS proves the driver to its agents and keeps frames from being read, changed, repeated or left out
(tls.py); an agent proves itself by the launch's secret in its first frame. Nothing is unpickled, ever.
"""

from __future__ import annotations

import json
import secrets
import socket
import struct
import threading
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, get_args

from sparkring.conf.plain_text import count_of
from sparkring.training.launch.channel.codec import Check, as_json, check_of
from sparkring.training.launch.messages import Message

MAX_FRAME_BYTES = 16 << 20
MAX_HELLO_BYTES = 2048
_LENGTH = struct.Struct(">I")
_to_json = json.JSONEncoder(separators=(",", ":"), default=as_json).encode


class ProtocolError(ConnectionError):
    """The other side does not speak our protocol, or does not know the secret."""


def new_secret() -> str:
    """Return 256 random bits as hex."""
    return secrets.token_hex(32)


def encode(message: Message, number: int = 0) -> bytes:
    """Encode a message as a frame. ValueError if it is too large, TypeError for a value that is not JSON."""
    kind = type(message).__name__
    fields: dict[str, Any] = {"kind": kind, **vars(message)}
    if number:
        fields["n"] = number
    body = _to_json(fields).encode()
    if len(body) > MAX_FRAME_BYTES:
        raise ValueError(
            f"a {kind} message of {count_of(len(body), 'byte', ',')}: the limit is {MAX_FRAME_BYTES:,}; write large "
            "values to the run's storage and send their URI"
        )
    return _LENGTH.pack(len(body)) + body


def decode(body: bytes, accepted: Any = Message) -> tuple[Any, int]:
    """Read (message, its number or 0) from a frame's body, from any sender.

    `accepted` is the union of the message classes this side takes. ProtocolError for anything else.
    """
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"not JSON: {type(error).__name__}") from None
    kind = fields.pop("kind", None) if isinstance(fields, dict) else None
    if not isinstance(kind, str):
        raise ProtocolError("not a message: a JSON object with a string 'kind' is expected")
    check = _checks(accepted).get(kind)
    if check is None:
        raise ProtocolError(f"a message of kind {kind[:50]!r} is not accepted here")
    number = fields.pop("n", 0)
    if type(number) is not int or number < 0:
        raise ProtocolError(f"{kind}: n: a message's number")
    try:
        return check(fields), number
    except ValueError as error:
        raise ProtocolError(f"{kind}: {error}") from None


@cache
def _checks(accepted: Any) -> Mapping[str, Check]:
    return {kind.__name__: check_of(kind) for kind in get_args(accepted)}


def length_of(prefix: bytes | bytearray, limit: int) -> int:
    """Return the length a frame announces; checked before a byte of the body is read."""
    (length,) = _LENGTH.unpack_from(prefix)
    if not 0 < length <= limit:
        raise ProtocolError(f"frame of {count_of(length, 'byte', ',')}; 1 to {limit:,} are accepted")
    return int(length)


class FrameParser:
    """Cuts a stream of bytes into the bodies of its frames, none larger than `limit`."""

    def __init__(self, limit: int):
        self.limit = limit
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield the bodies that are complete now. Raises ProtocolError for a length out of bounds."""
        self._buffer += data
        while len(self._buffer) >= _LENGTH.size:
            end = _LENGTH.size + length_of(self._buffer, self.limit)
            if len(self._buffer) < end:
                return
            body = bytes(self._buffer[_LENGTH.size : end])
            del self._buffer[:end]
            yield body


class SocketChannel:
    """The same frames over a socket pair that no other process holds.

    `send` is safe from any thread, `receive` from one.
    """

    def __init__(self, sock: socket.socket, accepted: Any):
        """Wrap a socket. `accepted`: the union of the message classes this end takes."""
        self.sock = sock
        self._accepted = accepted
        self._lock = threading.Lock()

    def send(self, message: Message) -> None:
        frame = encode(message)
        with self._lock:
            self.sock.sendall(frame)

    def receive(self) -> Any:
        """Receive the next message. EOFError if the peer closed, ProtocolError for an unaccepted message."""
        length = length_of(self._read(_LENGTH.size), MAX_FRAME_BYTES)
        return decode(self._read(length), self._accepted)[0]

    def _read(self, count: int) -> bytes:
        chunks, missing = [], count
        while missing:
            chunk = self.sock.recv(min(missing, 1 << 20))
            if not chunk:
                raise EOFError("connection closed")
            chunks.append(chunk)
            missing -= len(chunk)
        return b"".join(chunks)
