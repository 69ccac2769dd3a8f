"""TLS of the channel: one certificate per launch, which only its own agents accept."""

from __future__ import annotations

import socket
import ssl
import threading

import pytest

from sparkring.training.launch.channel.tls import new_certificate, trusting


def handshake(server: ssl.SSLContext, client: ssl.SSLContext) -> str | None:
    """The TLS version of a connection over a socket pair."""
    ours, theirs = socket.socketpair()

    def serve() -> None:
        try:
            server.wrap_socket(theirs, server_side=True).close()
        except OSError:
            theirs.close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        with client.wrap_socket(ours) as wrapped:
            return wrapped.version()
    finally:
        ours.close()
        thread.join(60)


def test_an_agent_accepts_its_drivers_certificate_and_no_other() -> None:
    context, certificate = new_certificate()
    assert handshake(context, trusting(certificate)) == "TLSv1.3"
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(new_certificate()[0], trusting(certificate))
