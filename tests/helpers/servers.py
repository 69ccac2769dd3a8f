"""Servers that answer from a thread of the test's own process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from socketserver import BaseServer
from threading import Thread


@contextmanager
def answering(server: BaseServer) -> Iterator[None]:
    """Answer requests inside the block, and close the server behind it.

    `shutdown` waits for the next poll: at the default interval each test would take half a second more.
    """
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
