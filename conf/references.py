"""References of the form "module:name", as recipes and jobs give them."""

from __future__ import annotations

import importlib
import re
from typing import Any

OLD_NAMES = ("training.models.gpt", "training.models.tabular")
REFERENCE = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


class NoSuchName(AttributeError):
    """The module has no such name."""


def module_of(reference: str) -> str:
    """Return the module's name in "module:name".

    `training.models.gpt` was ours before all our names began with `sparkring`, and still is in stored recipes and in
    registered models.
    """
    module = reference.partition(":")[0]
    return f"sparkring.{module}" if module in OLD_NAMES else module


def load_reference(reference: str) -> Any:
    """Import the object behind "module:name". NoSuchName, or what the module's import raises."""
    module, name = module_of(reference), reference.partition(":")[2]
    imported = importlib.import_module(module)
    try:
        return getattr(imported, name)
    except AttributeError:
        raise NoSuchName(f"module {module!r} has no {name!r}") from None


def load_setting(reference: str, key: str) -> Any:
    """Import `module:name`. ValueError names the configuration key, what was found and what to do."""
    try:
        return load_reference(reference)
    except ImportError as error:
        raise ValueError(
            f"{key} = {reference!r}: module {module_of(reference)!r} cannot be imported ({error}); it must be on the "
            "Python path of the workers (install it there; spark-submit ships it by --py-files)"
        ) from error
    except NoSuchName as error:
        raise ValueError(f"{key} = {reference!r}: {error}") from error
