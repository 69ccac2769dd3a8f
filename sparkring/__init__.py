"""The one import name of the product: no folder of a user's project can shadow ours, nor ours theirs.

In a checkout `sparkring/conf`, `etl`, `training` and `pipelines` are links to the folders next to this one; the wheel
and the archive of `sparkring package` hold the files themselves.

Public are the names in PUBLIC, and what the reference lists of the Python API. They are imported when they are used;
__init__.pyi has their types.
"""

from importlib import import_module
from typing import Any

PUBLIC = {  # name -> module that has it; a module of that name is itself meant
    "Recipe": "sparkring.api",
    "Run": "sparkring.api",
    "data": "sparkring.data",
    "launch": "sparkring.api",
    "run": "sparkring.api",
}


def __getattr__(name: str) -> Any:
    if name not in PUBLIC:
        raise AttributeError(f"module 'sparkring' has no attribute {name!r}; public are {', '.join(sorted(PUBLIC))}")
    module = import_module(PUBLIC[name])
    return module if PUBLIC[name] == f"sparkring.{name}" else getattr(module, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *PUBLIC})
