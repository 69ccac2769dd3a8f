"""Bytes in words, for every command that speaks of memory."""

from __future__ import annotations

from sparkring.conf.clusters.cluster import GIB


def size_text(size: float) -> str:
    """Bytes in GiB, or in MiB below a tenth of one."""
    return f"{size / GIB:,.2f} GiB" if size >= GIB / 10 else f"{size / GIB * 1024:,.1f} MiB"


def too_large_text(needed: float, limit: float) -> str:
    """Say that a layout takes more of a device than it may."""
    return f"does not fit: {size_text(needed)} of {size_text(limit)}"
