"""Paths as Spark takes them: a host, and signs that make a path a pattern."""

from __future__ import annotations

import re

HOST = re.compile(r"^[A-Za-z][\w+.-]*:(//[^/]*)?")  # scheme and host
GLOB = re.compile(r"[]\[{}*?\\]")  # what makes Spark take a path for a pattern


def escaped(path: str) -> str:
    """Write a path as the pattern that matches it alone."""
    return GLOB.sub(r"\\\g<0>", path)


def any_of(paths: list[str]) -> str:
    """Write a pattern that matches these paths of one host, and may match others of them that do not exist."""
    host = found[0] if (found := HOST.match(paths[0])) else ""
    inner = (escaped(path.removeprefix(host).lstrip("/")).replace(",", "\\,") for path in paths)
    return f"{host}/{{{','.join(inner)}}}"
