"""The driver's callback for events."""

from __future__ import annotations

import logging
from collections.abc import Callable

from sparkring.training.launch.messages import Event

log = logging.getLogger(__name__)
OnEvent = Callable[[Event], None]


def emit(on_event: OnEvent, event: Event) -> None:
    """Call the caller's callback; its own errors are logged and never end training."""
    try:
        on_event(event)
    except Exception:
        log.exception("on_event failed for %s", type(event).__name__)
