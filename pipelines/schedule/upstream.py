"""Wait for what a date's sources are made by: `schedule.wait_for`."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from sparkring.conf.storage import Storage, open_storage
from sparkring.pipelines.schedule.errors import NotReady, UpstreamUnreadable

log = logging.getLogger(__name__)
LOOK_EVERY_S = 15.0


def wait_for(
    uris: Sequence[str],
    timeout_s: float,
    monotonic: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Return when all of them are there.

    NotReady names the first that is not there in time, UpstreamUnreadable one that cannot be looked for.
    """
    until = monotonic() + timeout_s
    while missing := [uri for uri in uris if not is_there(uri)]:
        left_s = until - monotonic()
        if left_s <= 0:
            raise NotReady(
                f"schedule.wait_for: {missing[0]} is not there"
                + (f", nor are {len(missing) - 1} more" if len(missing) > 1 else "")
                + f", after {timeout_s:.0f} s (schedule.wait_timeout); the date is not begun: try again later"
            )
        log.info("waiting for %s, %.0f s more", missing[0], left_s)
        sleep(min(LOOK_EVERY_S, left_s))


def is_there(uri: str) -> bool:
    """Whether a file or folder exists. UpstreamUnreadable where we may not know."""
    try:
        storage: Storage = open_storage(uri)
        return storage.exists()
    except (OSError, ValueError) as error:
        raise UpstreamUnreadable(
            f"schedule.wait_for: {uri} cannot be looked for: {error}; give this job the right to list and read there"
        ) from error
