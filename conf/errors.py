"""What is shown of an exception."""

from __future__ import annotations


def first_line(error: object) -> str:
    """Return the first line of an error's text, or its type where it has none."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
