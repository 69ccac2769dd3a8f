"""Length-bounded JSON frames between the driver and its agents, after both sides have proved they know the run's
secret.

A frame is  length (4 bytes, big-endian) | MAC (16 bytes) | JSON object (UTF-8).  The handshake is three frames
without MAC:

    driver -> agent   challenge {nonce}
    agent  -> driver  hello     {agent, nonce, mac = H("agent", both nonces, agent)}
    driver -> agent   welcome   {mac = H("driver", both nonces, agent), seen}

H is HMAC-SHA256 under the secret. Later frames carry the first 16 bytes of HMAC-SHA256 under the connection's own
key over direction, counter and body, so none can be forged, replayed or dropped unnoticed. Nothing here hides
content from someone who reads the network: that is tls.py, below this. Nothing is unpickled, ever.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import secrets
import socket
import struct
import threading
from typing import Any

from training.tls import TlsSocket

MAX_FRAME_BYTES = 16 << 20
MAX_GREETING_BYTES = 2048
MAC_BYTES = 16
_LENGTH = struct.Struct(">I")

Message = dict[str, Any]
Connected = socket.socket | TlsSocket


class ProtocolError(ConnectionError):
    """The other side does not speak our protocol, or does not know the secret."""


def new_secret() -> str:
    """256 random bits as hex."""
    return secrets.token_hex(32)


def encode(message: Message) -> bytes:
    """JSON body of a message; ValueError where it is too large, TypeError where it is not JSON."""
    body = json.dumps(message, separators=(",", ":")).encode()
    if len(body) > MAX_FRAME_BYTES - MAC_BYTES:
        raise ValueError(
            f"a {message.get('kind')!r} message of {len(body):,} bytes: the limit is {MAX_FRAME_BYTES - MAC_BYTES:,}; "
            "write large values to the run's storage and send their URI"
        )
    return body


def decode(body: bytes) -> Message:
    """The message in a body from anyone; ProtocolError unless it is a JSON object with a string `kind`."""
    try:
        message = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"not JSON: {type(error).__name__}") from None
    if not isinstance(message, dict) or not isinstance(message.get("kind"), str):
        raise ProtocolError("not a message: a JSON object with a string 'kind' is expected")
    return message


def proof(secret: str, role: str, server_nonce: str, client_nonce: str, agent: str) -> str:
    """What only someone with the secret can say about this connection."""
    text = "\n".join(("sparkring-1", role, server_nonce, client_nonce, agent))
    return hmac.new(secret.encode(), text.encode(), hashlib.sha256).hexdigest()


def read_exactly(sock: Connected, count: int) -> bytes:
    """`count` bytes; EOFError where the other side has closed."""
    chunks, missing = [], count
    while missing:
        chunk = sock.recv(min(missing, 1 << 20))
        if not chunk:
            raise EOFError("connection closed")
        chunks.append(chunk)
        missing -= len(chunk)
    return b"".join(chunks)


def read_body(sock: Connected, limit: int) -> bytes:
    """One length-prefixed body. The length is checked before a byte of it is read."""
    (length,) = _LENGTH.unpack(read_exactly(sock, _LENGTH.size))
    if not 0 < length <= limit:
        raise ProtocolError(f"frame of {length:,} bytes; 1 to {limit:,} are accepted")
    return read_exactly(sock, length)


def write_body(sock: Connected, body: bytes) -> None:
    sock.sendall(_LENGTH.pack(len(body)) + body)


class Wire:
    """One authenticated connection. `send` is safe from any thread, `receive` belongs to one."""

    def __init__(self, sock: Connected, key: bytes, me: bytes, other: bytes):
        self.sock = sock
        self._key, self._me, self._other = key, me, other
        self._sent = self._received = 0
        self._lock = threading.Lock()

    def _mac(self, direction: bytes, counter: int, body: bytes) -> bytes:
        return hmac.new(self._key, direction + struct.pack(">Q", counter) + body, hashlib.sha256).digest()[:MAC_BYTES]

    def send(self, message: Message) -> None:
        body = encode(message)
        with self._lock:
            write_body(self.sock, self._mac(self._me, self._sent, body) + body)
            self._sent += 1

    def receive(self) -> Message:
        """The next message; EOFError at the end, ProtocolError for one that is not the other side's next."""
        frame = read_body(self.sock, MAX_FRAME_BYTES)
        mac, body = frame[:MAC_BYTES], frame[MAC_BYTES:]
        if not hmac.compare_digest(mac, self._mac(self._other, self._received, body)):
            raise ProtocolError("frame with a wrong MAC")
        self._received += 1
        return decode(body)

    def close(self) -> None:
        """Ends both directions; a receive blocked in another thread returns."""
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)
        self.sock.close()


class Plain:
    """The same frames without MAC, between an agent and its own child over a pair of sockets nobody else holds."""

    def __init__(self, sock: socket.socket):
        self.sock = sock
        self._lock = threading.Lock()

    def send(self, message: Message) -> None:
        body = encode(message)
        with self._lock:
            write_body(self.sock, body)

    def receive(self) -> Message:
        return decode(read_body(self.sock, MAX_FRAME_BYTES))


def text_of(message: Message, key: str) -> str:
    value = message.get(key)
    if not isinstance(value, str) or len(value) > 512:
        raise ProtocolError(f"{message['kind']}: {key!r} must be a short string")
    return value


def greet_as_driver(sock: Connected, secret: str, seen_of: Any, timeout_s: float) -> tuple[Wire, str]:
    """Challenge whoever has connected; (wire, agent id) or ProtocolError, EOFError, TimeoutError.

    `seen_of(agent)` is the number of that agent's messages the driver already has (a reconnection resends the rest).
    """
    sock.settimeout(timeout_s)
    nonce = os.urandom(16).hex()
    write_body(sock, encode({"kind": "challenge", "nonce": nonce}))
    hello = decode(read_body(sock, MAX_GREETING_BYTES))
    if hello["kind"] != "hello":
        raise ProtocolError("no hello")
    agent, theirs = text_of(hello, "agent"), text_of(hello, "nonce")
    if not hmac.compare_digest(text_of(hello, "mac").encode(), proof(secret, "agent", nonce, theirs, agent).encode()):
        raise ProtocolError("hello with a wrong proof: it does not know this run's secret")
    welcome = {"kind": "welcome", "mac": proof(secret, "driver", nonce, theirs, agent), "seen": seen_of(agent)}
    write_body(sock, encode(welcome))
    sock.settimeout(None)
    return Wire(sock, bytes.fromhex(proof(secret, "key", nonce, theirs, agent)), b"d", b"a"), agent


def greet_as_agent(sock: Connected, secret: str, agent: str, timeout_s: float) -> tuple[Wire, int]:
    """Prove ourselves and have the driver prove itself; (wire, messages it has already seen)."""
    sock.settimeout(timeout_s)
    challenge = decode(read_body(sock, MAX_GREETING_BYTES))
    nonce, theirs = os.urandom(16).hex(), text_of(challenge, "nonce")
    mac = proof(secret, "agent", theirs, nonce, agent)
    write_body(sock, encode({"kind": "hello", "agent": agent, "nonce": nonce, "mac": mac}))
    welcome = decode(read_body(sock, MAX_GREETING_BYTES))
    if welcome["kind"] != "welcome":
        raise ProtocolError("no welcome")
    expected = proof(secret, "driver", theirs, nonce, agent)
    if not hmac.compare_digest(text_of(welcome, "mac").encode(), expected.encode()):
        raise ProtocolError("welcome with a wrong proof: not this run's driver")
    seen = welcome.get("seen")
    sock.settimeout(None)
    key = bytes.fromhex(proof(secret, "key", theirs, nonce, agent))
    return Wire(sock, key, b"a", b"d"), seen if isinstance(seen, int) else 0


def keep_alive(sock: Connected, dead_after_s: int) -> None:
    """Let the kernel notice a peer that vanished without a word (host lost, cable cut)."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 2), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", max(1, dead_after_s // 2))):
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, dead_after_s * 1000)
