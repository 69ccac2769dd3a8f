"""Signals to a job whose ranks run: a checkpoint, an orderly stop, a kill."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sparkring.training.launch.attempt import Control
from sparkring.training.launch.failure import Cancelled, WorkerFailed

log = logging.getLogger(__name__)


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

    ends = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:  # under nohup
        ends.remove(signal.SIGHUP)
    before = {number: signal.signal(number, on_signal) for number in ends}
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
