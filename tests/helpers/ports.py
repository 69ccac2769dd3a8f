"""A port for a server that a test starts."""

from __future__ import annotations

import random
import socket

FIRST, END = 20_000, 32_000  # below the ports that the system gives to connections, which may take a free one first


def unused_port() -> int:
    """A port of this host that nobody listens to, and that no connection of another test is given."""
    order = random.SystemRandom()
    while True:
        port = order.randrange(FIRST, END)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
