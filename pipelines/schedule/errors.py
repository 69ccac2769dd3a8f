"""What ends a dated job before its work is done. All of them are for a scheduler to try again later."""

from __future__ import annotations

from sparkring.etl.errors import EtlError


class TryLater(Exception):
    """The date cannot be run now; the same command may succeed later. Exit code 75, as of sysexits.h's EX_TEMPFAIL."""


class DateTaken(TryLater):
    """Another job holds the lease."""


class LeaseLost(TryLater):
    """This job's lease was taken by another, or could not be renewed: it publishes nothing more."""


class NotReady(TryLater):
    """What the date waits for is not there."""


class UpstreamUnreadable(EtlError):
    """What the date waits for cannot be looked for: no rights, no such bucket."""
