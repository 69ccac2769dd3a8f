"""Whether optional packages are installed; looking for them imports nothing."""

from __future__ import annotations

from importlib.util import find_spec


def is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ImportError:
        return False


def has_spark() -> bool:
    return is_installed("pyspark")
