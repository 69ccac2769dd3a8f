"""TLS for the channel, where a certificate is given: what is said cannot be read by who reads the network.

The driver holds certificate and key; agents get the certificate beside the secret and take no other. Who is who is
still proved by the secret: TLS adds nothing to that, and hides everything after its handshake.
"""

from __future__ import annotations

import socket
import ssl
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CHUNK_BYTES = 1 << 16


@dataclass(frozen=True)
class Certificate:
    """PEM files on the driver's machine; `openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes ...`."""

    certificate: str
    key: str

    def context(self) -> ssl.SSLContext:
        """The driver's; ValueError names the keys of the configuration where the files are not what they should be."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        try:
            context.load_cert_chain(self.certificate, self.key)
        except OSError as error:  # an ssl.SSLError is one
            raise ValueError(
                f"launch.tls_certificate = {self.certificate!r}, launch.tls_key = {self.key!r}: {error}; "
                "give the PEM files of a certificate and of its private key"
            ) from error
        return context

    def pem(self) -> str:
        """The certificate alone, for the agents."""
        return Path(self.certificate).read_text()


def trusting(pem: str) -> ssl.SSLContext:
    """An agent's: this certificate, whatever host it names, or one it has signed; no other."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # it need not be its own issuer
    context.load_verify_locations(cadata=pem)
    return context


class TlsSocket:
    """A connected socket whose `recv` and `sendall` go through TLS; for the rest it is that socket.

    One thread may receive while another sends, which an ssl.SSLSocket does not allow: the encryption is locked, the
    waiting for the network is not. Raises OSError where the handshake fails.
    """

    def __init__(self, sock: socket.socket, context: ssl.SSLContext, is_server: bool):
        self._sock = sock
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=is_server)
        self._lock = threading.Lock()
        self._greet()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sock, name)

    def _greet(self) -> None:
        while True:
            try:
                self._tls.do_handshake()
                return self._sock.sendall(self._outgoing.read())
            except ssl.SSLWantReadError:
                self._sock.sendall(self._outgoing.read())
                self._incoming.write(self._sock.recv(CHUNK_BYTES) or self._closed())
            except ssl.SSLError:
                self._sock.sendall(self._outgoing.read())  # the alert that says why
                raise

    def _closed(self) -> bytes:
        raise ConnectionError("closed during the TLS handshake")

    def recv(self, count: int) -> bytes:
        """At most `count` bytes; empty at the end. For one thread."""
        while True:
            try:
                with self._lock:
                    return self._tls.read(count)
            except ssl.SSLWantReadError:
                pass
            except ssl.SSLZeroReturnError:
                return b""
            chunk = self._sock.recv(CHUNK_BYTES)
            if not chunk:
                return b""
            with self._lock:
                self._incoming.write(chunk)

    def sendall(self, data: bytes) -> None:
        """For one thread at a time: the channel's own lock sees to that."""
        with self._lock:
            self._tls.write(data)
            out = self._outgoing.read()
        self._sock.sendall(out)
