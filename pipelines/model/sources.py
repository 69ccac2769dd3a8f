"""The Python files that a model needs where it is loaded, found by following imports, and the packages it needs.

A module is ours or the user's, and is copied, or it is of an installed package, which becomes a requirement.
"""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache, lru_cache
from importlib.machinery import ModuleSpec
from importlib.metadata import Distribution, distributions, version
from pathlib import Path
from typing import Any

from sparkring.conf.config import RunConfig
from sparkring.conf.references import module_of

OURS = "sparkring"
INSTALLED = {"site-packages", "dist-packages"}  # folders of pip's packages
LOADER = "sparkring.pipelines.serving"
TOKENIZER, DECODE = "sparkring.etl.text.tokenizer", "sparkring.training.data.decoding.cells"
TREES = "sparkring.training.trees.model"
LOOK_ON = """
# Added where this file was copied into a model: what it does not carry is taken from an installed sparkring.
__path__ = __import__("pkgutil").extend_path(__path__, __name__)
"""
SERVER = "mlflow-skinny"  # `load_model`, `spark_udf` and `models serve`, without the store, its UI and plots


@dataclass
class Sources:
    """Of some modules and all that they import.

    files: path below a folder on Python's path -> text; packages: top-level import names; left_out: modules without
    source text, such as compiled ones.
    """

    files: dict[str, str] = field(default_factory=dict)
    packages: set[str] = field(default_factory=set)
    left_out: list[str] = field(default_factory=list)


def model_sources(config: RunConfig, images: bool = False) -> Sources:
    """Collect what predicting with the recipe's model imports: our loader, and the modules of the code it names.

    `images`: it has features of images, which Pillow decodes.
    """
    own = [module_of(each) for each in config.model_code.values()]
    also = [TOKENIZER] if config.model.kind.is_text else []
    also += [DECODE] if images else []
    also += [TREES] if "trees" in config.model.families else []
    return collect([LOADER, *also, *own])


def requirements(packages: set[str]) -> list[str]:
    """Pin the distributions of import names to the versions installed here, and what serves a model to MLflow's.

    A local part, as in 2.13.0+cpu, is left out: another host may have the build for its GPUs.
    """
    found = {each.name for each in distributions() if provides(each, packages)} | {SERVER}
    return sorted(f"{name}=={version(name).partition('+')[0]}" for name in found)


def provides(distribution: Distribution, packages: set[str]) -> bool:
    """Return whether a distribution has one of these import names.

    `packages_distributions` of the standard library does the same ten times slower: it makes a path of each file.
    """
    if declared := (distribution.read_text("top_level.txt") or "").split():
        return not packages.isdisjoint(declared)
    names = "|".join(map(re.escape, sorted(packages)))
    return bool(re.search(rf'^"?(?:{names})(?:/.*)?\.py"?,', distribution.read_text("RECORD") or "", re.MULTILINE))


def collect(modules: list[str]) -> Sources:
    """Follow the imports of `modules`.

    Of our own modules only imports at the top of a file count: others are of commands that do not serve. Imports of
    names that cannot be found here are passed over, as optional ones are.
    """
    found, waiting, seen = Sources(), list(modules), set[str]()
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        top = name.partition(".")[0]
        if top in sys.stdlib_module_names:
            continue
        if is_installed(top):
            found.packages.add(top)
            continue
        spec = find(name)
        if spec is None or spec.origin is None:  # not a module, or a folder without __init__.py
            continue
        waiting += parents(name)
        text, is_package = source_text(spec), spec.submodule_search_locations is not None
        names = None if text is None else imported(text, name, is_package, nested=top != OURS)
        if text is None or names is None:
            found.left_out.append(name)
            continue
        found.files[file_name(spec)] = text + (LOOK_ON if top == OURS and is_package else "")
        waiting += names
    return found


def parents(name: str) -> list[str]:
    """List the packages that are imported before a module: a.b.c -> a, a.b."""
    parts = name.split(".")
    return [".".join(parts[:length]) for length in range(1, len(parts))]


def find(name: str) -> ModuleSpec | None:
    """Find a module without importing it, but for its packages; None if no module has that name."""
    try:
        return importlib.util.find_spec(name)
    except Exception:  # its parent is no package, or is the user's and raises anything
        return None


@cache
def is_installed(top: str) -> bool:
    """Return whether pip installed an import name in any folder (`pip install --target`); never ours."""
    spec = None if top == OURS else find(top)
    if spec is None:
        return False
    places = {Path(place) for place in (spec.origin, *(spec.submodule_search_locations or [])) if place}
    return (
        spec.origin == "built-in"
        or any(INSTALLED & {*place.parts} for place in places)
        or any(is_recorded(top, place.parent) for place in places)
    )


def is_recorded(top: str, folder: Path) -> bool:
    """Return whether pip's record in the folder has the import name; an editable install does not count."""
    return any(each.read_text("RECORD") and provides(each, {top}) for each in distributions(path=[str(folder)]))


def source_text(spec: ModuleSpec) -> str | None:
    """Return the text of a module, from a folder or an archive, or None."""
    loader: Any = spec.loader
    text: str | None = loader.get_source(spec.name) if hasattr(loader, "get_source") else None
    return text


def file_name(spec: ModuleSpec) -> str:
    """Return a module's file relative to Python's path: a.b -> a/b.py, or a/b/__init__.py for a package."""
    path = spec.name.replace(".", "/")
    return f"{path}.py" if spec.submodule_search_locations is None else f"{path}/__init__.py"


@lru_cache(maxsize=1024)  # a process that trains a model a date packs the same texts each time
def imported(text: str, name: str, is_package: bool, nested: bool) -> tuple[str, ...] | None:
    """List the modules that a file imports; None if the text is not Python.

    `from a import b` names a and a.b: whether b is a module is not known here.

    Args:
        text: text of the file.
        name: name of its module, or of its package if `is_package`.
        is_package: whether it is an `__init__.py`.
        nested: include imports inside functions and classes.
    """
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return None
    package, found = name if is_package else name.rpartition(".")[0], list[str]()
    for node in statements(tree.body, nested):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = importlib.util.resolve_name("." * node.level + base, package)
            found += [base, *(f"{base}.{alias.name}" for alias in node.names)]
    return tuple(found)


def statements(body: list[ast.stmt], nested: bool) -> Iterator[ast.stmt]:
    """List statements, also those in `if` and `try`, except under TYPE_CHECKING; in functions where `nested`."""
    for statement in body:
        yield statement
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef) and not nested:
            continue
        if isinstance(statement, ast.If) and "TYPE_CHECKING" in ast.unparse(statement.test):
            yield from statements(statement.orelse, nested)
            continue
        for child in ("body", "orelse", "finalbody"):
            yield from statements(getattr(statement, child, []), nested)
        for handler in getattr(statement, "handlers", []):
            yield from statements(handler.body, nested)
