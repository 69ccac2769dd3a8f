"""What may be wrong with the tracking store."""

from __future__ import annotations


class StoreUnreachable(RuntimeError):
    """The tracking store does not answer."""


class StoreUnfit(StoreUnreachable):
    """The store answers, but cannot take the job until somebody does what the message says. Nothing is dropped."""


class TryAgain(RuntimeError):
    """The store answers, but an operation failed that may yet succeed."""
