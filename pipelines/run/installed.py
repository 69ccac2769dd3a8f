"""Whether optional packages are installed."""

from __future__ import annotations

from importlib.util import find_spec


def has_spark() -> bool:
    """Whether pyspark can be imported; finding it imports nothing."""
    try:
        return find_spec("pyspark") is not None
    except ImportError:
        return False
