"""Wait for what a date's sources are made by: `schedule.wait_for`."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from sparkring.conf.errors import first_line
from sparkring.conf.storage import Storage, open_storage
from sparkring.pipelines.schedule.errors import NotReady, UpstreamUnreadable

log = logging.getLogger(__name__)
LOOK_EVERY_S = 15.0
AWAY = ("NETWORK_CONNECTION", "REQUEST_TIMEOUT", "SERVICE_UNAVAILABLE", "SLOW_DOWN", "THROTTLING", "INTERNAL_FAILURE")
"""What pyarrow calls errors of S3 that pass."""


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
                + f", after {timeout_s:.0f} s (schedule.wait_timeout); the date is not started: try again later"
            )
        log.info("waiting for %s, %.0f s more", missing[0], left_s)
        sleep(min(LOOK_EVERY_S, left_s))


def is_there(uri: str) -> bool:
    """Return whether a file or folder exists now. UpstreamUnreadable without the right to know."""
    try:
        storage: Storage = open_storage(uri)
        return storage.exists()
    except (OSError, ValueError) as error:
        if is_away(error):
            log.warning("schedule.wait_for: %s cannot be looked for now: %s", uri, first_line(error))
            return False
        raise UpstreamUnreadable(
            f"schedule.wait_for: {uri} cannot be looked for: {error}; give this job the right to list and read there"
        ) from error


def is_away(error: Exception) -> bool:
    """Return whether a storage did not answer, or asks to retry: another look may succeed."""
    return isinstance(error, ConnectionError | TimeoutError) or any(f"AWS Error {name} " in str(error) for name in AWAY)
