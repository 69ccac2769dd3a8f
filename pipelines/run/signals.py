"""Signals to a job: an end at once; where its ranks run: a checkpoint, an orderly stop, a kill."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from sparkring.training.launch.failure import Cancelled, WorkerFailed

if TYPE_CHECKING:
    from sparkring.training.launch.control import Control

log = logging.getLogger(__name__)
AGAIN = "sparkring: interrupted again: ended at once\n"


class Stopped(KeyboardInterrupt):
    """SIGTERM or SIGHUP. py4j leaves a connection in order after a KeyboardInterrupt only."""


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Leave the block as KeyboardInterrupt at Ctrl-C, and as Stopped at SIGTERM or SIGHUP (a closed terminal).

    While it is left, a second Ctrl-C ends the process; other signals change nothing, since shells and systemd send two.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received: list[int] = []

    def on_signal(number: int, _: Any) -> None:
        received.append(number)
        if len(received) > 1:
            if number == signal.SIGINT:
                os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, AGAIN.encode())
                os._exit(128 + signal.SIGINT)
            return
        raise _stop(number)

    before = {number: signal.signal(number, on_signal) for number in _ends()}
    try:
        yield
    except Exception as error:
        if not received:
            raise
        log.debug("while the job was stopped: %s", error)  # Spark's connection is gone
        raise _stop(received[0]) from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _stop(number: int) -> KeyboardInterrupt:
    return KeyboardInterrupt() if number == signal.SIGINT else Stopped(f"stopped by {signal.Signals(number).name}")


def _ends() -> set[signal.Signals]:
    """Return the signals that end a job; not SIGHUP under nohup."""
    ends = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
    return ends if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN else ends - {signal.SIGHUP}


@contextmanager
def obeying_signals(control: Control, grace_s: float) -> Iterator[None]:
    """Turn signals inside the block into requests to the ranks.

    SIGUSR1 requests a checkpoint. Ctrl-C, SIGTERM and SIGHUP (a closed terminal) request a last one and an end; a
    second of them, or `grace_s` passing, kills the ranks. The block then leaves as KeyboardInterrupt or
    SystemExit(143), once the ranks are gone.
    """
    if threading.current_thread() is not threading.main_thread():  # a notebook's worker thread: signals are not ours
        yield
        return
    received: list[int] = []
    timer: threading.Timer | None = None

    def on_signal(number: int, _: Any) -> None:
        nonlocal timer
        received.append(number)
        if len(received) > 1:
            control.cancel()
            return
        log.warning("%s: stopping after a last checkpoint, %.0f s at most", signal.Signals(number).name, grace_s)
        control.stop()
        timer = threading.Timer(grace_s, control.cancel)
        timer.daemon = True
        timer.start()

    before: dict[signal.Signals, Any] = {number: signal.signal(number, on_signal) for number in _ends()}
    before[signal.SIGUSR1] = signal.signal(signal.SIGUSR1, lambda *_: control.checkpoint())
    try:
        yield
    except (Cancelled, WorkerFailed) as error:
        if not received:
            raise
        if isinstance(error, WorkerFailed):
            log.error("while stopping: %s", error)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if timer is not None:
            timer.cancel()
    if received:
        raise KeyboardInterrupt if received[0] == signal.SIGINT else SystemExit(128 + signal.SIGTERM)
