"""The order in which Python looks for modules: its own library first, and the folder that one works in last.

A user's random.py or queue.py would otherwise be imported by whatever asks for Python's. Only `os` and `sys` are
imported here: other modules might already be the user's.
"""

import os
import sys

LIBRARY = os.path.dirname(os.path.abspath(os.__file__))


def library_first(path: list[str], folder: str) -> list[str]:
    """Order a search path: Python's library, the others in their order, and `folder`, possibly new, last."""
    places = [each or folder for each in path]  # some are no paths, but names that a finder of modules knows
    found = list(dict.fromkeys(os.path.abspath(each) if os.path.exists(each) else each for each in places))
    library = [each for each in found if _is_library(each)]
    return [*library, *(each for each in found if each != folder and each not in library), folder]


def _is_library(path: str) -> bool:
    name = os.path.basename(path)
    in_library = path == LIBRARY or (os.path.dirname(path) == LIBRARY and name == "lib-dynload")
    return in_library or (os.path.dirname(path) == os.path.dirname(LIBRARY) and name.endswith(".zip"))


def working_folder() -> str:
    """Return the working directory; the root if it was removed."""
    try:
        return os.getcwd()
    except OSError:
        return os.sep


def put_library_first() -> None:
    """Order this process's own search path; with its working directory only where that is on it."""
    folder, before = working_folder(), list(sys.path)
    ordered = library_first(before, folder)
    is_there = any(not each or os.path.abspath(each) == folder for each in before)
    sys.path[:] = ordered if is_there else ordered[:-1]


def put_after_library(folder: str) -> None:
    """Add the folder of a script or module that is run to the search path, before all installed packages."""
    path = library_first(sys.path, folder)
    at = sum(map(_is_library, path))
    sys.path[:] = [*path[:at], folder, *path[at:-1]]


def shadowed_modules() -> list[str]:
    """List files on the search path that are shadowed by modules of Python's library: never imported."""
    found = []
    for folder in sys.path:
        if _is_library(folder) or "-packages" in folder or not os.path.isdir(folder):
            continue
        names = sorted(each.name for each in os.scandir(folder))
        found += [os.path.join(folder, n) for n in names if n.endswith(".py") and n[:-3] in sys.stdlib_module_names]
    return found
