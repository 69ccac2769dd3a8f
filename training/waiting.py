"""A mark on functions in which a rank waits for other ranks.

The hang detector finds it in a stack, in whatever module they are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")
FRAME = "waiting_for_ranks"  # a stack shows the function below by this name


def waits_for_ranks(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function that blocks until other ranks have done their part."""

    @functools.wraps(function)
    def waiting_for_ranks(*args: P.args, **kwargs: P.kwargs) -> R:
        return function(*args, **kwargs)

    return waiting_for_ranks
