"""References of the form "module:name", as recipes and jobs give them."""

from __future__ import annotations

import importlib
import re
from typing import Any

REFERENCE = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


class NoSuchName(AttributeError):
    """The module has no such name."""


def module_of(reference: str) -> str:
    """Return the module's name in "module:name"."""
    return reference.partition(":")[0]


def load_reference(reference: str) -> Any:
    """Import the object behind "module:name". NoSuchName, or what the module's import raises."""
    module, _, name = reference.partition(":")
    imported = importlib.import_module(module)
    try:
        return getattr(imported, name)
    except AttributeError:
        raise NoSuchName(f"module {module!r} has no {name!r}") from None
