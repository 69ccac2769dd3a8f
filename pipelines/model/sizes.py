"""Bytes in words, for every command that speaks of memory."""

from __future__ import annotations

from sparkring.conf.plain_text import size_text


def too_large_text(needed: float, limit: float) -> str:
    """Describe that a layout takes more of a device than it may."""
    return f"does not fit: {size_text(needed)} of {size_text(limit)}"
