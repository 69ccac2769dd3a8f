"""Hash the user's modules behind a `module:function` of the recipe. Imports nothing of Spark: trainings ask too."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import sysconfig
from importlib.machinery import ModuleSpec
from pathlib import Path

from sparkring.conf.references import module_of
from sparkring.etl.errors import EtlError

STDLIB = {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")}


def own_modules(rows: str, key: str = "etl.rows") -> dict[str, str]:
    """Hash the module behind `module:function` and the user's modules it imports, directly or not; sha256 by name.

    Imports are read from the source, those inside functions too. Not seen: what is imported by a computed name, files
    that the code reads, and the insides of installed packages. {} for a view. `key`: of the recipe, for messages.
    """
    found: dict[str, str] = {}
    first = module_of(rows)
    wanted = [first] if ":" in rows else []
    while wanted:
        name = wanted.pop()
        spec = None if name in found else _spec(name)
        if spec is None or (name != first and _is_installed(spec)):
            continue
        source = getattr(spec.loader, "get_source", lambda name: None)(name)  # not every kind of loader has it
        content = source.encode() if source is not None else Path(spec.origin or "").read_bytes()
        found[name] = hashlib.sha256(content).hexdigest()
        try:
            wanted += _imports(source or "", name if spec.submodule_search_locations else spec.parent or "")
        except SyntaxError as error:
            raise EtlError(f"{key} = {rows!r}: {spec.origin}, line {error.lineno}: {error.msg}") from error
        wanted.append(spec.parent or "")
    if ":" in rows and first not in found:
        raise EtlError(f"{key} = {rows!r}: cannot be imported: no module named {first!r}")
    return found


def _spec(name: str) -> ModuleSpec | None:
    """Find a module's code; None for what is not a module or has no code file (a namespace, a built-in)."""
    try:
        spec = importlib.util.find_spec(name) if name else None
    except (ImportError, ValueError):
        return None
    return spec if spec is not None and spec.has_location else None


def _is_installed(spec: ModuleSpec) -> bool:
    path = Path(spec.origin or "")
    return bool({"site-packages", "dist-packages"} & set(path.parts)) or any(map(path.is_relative_to, STDLIB))


def _imports(source: str, package: str) -> list[str]:
    """List every dotted name in the import statements of `source` that may be a module."""
    names: list[str] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            names += [base, *(f"{base}.{alias.name}" for alias in node.names)]
    return names
