"""Run the recipe's joins, SQL views in order or one Python function, over the sources to get the dataset's rows."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import re
import sysconfig
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from sparkring.conf.errors import first_line
from sparkring.conf.references import load_reference, module_of
from sparkring.etl.errors import EtlError
from sparkring.etl.spark_platform.query_files import is_fixed

STDLIB = {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")}


def build_rows(
    spark: SparkSession, tables: dict[str, DataFrame], views: dict[str, str], rows: str, key: str = "etl.rows"
) -> DataFrame:
    """Register `tables` and `views` in this session and return the DataFrame `rows`, the value of `key`, names.

    Raises EtlError with the key's path when SQL or function fail, or the result is not a function of the sources
    alone (`rand()`, `current_date()`): such rows would change between two passes over them, or two runs.

    Args:
        spark: the session.
        tables: by name; those of the views are added.
        views: name -> SQL, each of which may use the ones before it.
        rows: name of a table or view, or `module:function`.
        key: of the recipe that holds `rows`, for messages.
    """
    for name, table in tables.items():
        table.createOrReplaceTempView(name)
    for name, sql in views.items():
        tables[name] = _query(spark, f"etl.views.{name}", sql)
        tables[name].createOrReplaceTempView(name)
    found = _call(key, rows, tables) if ":" in rows else tables[rows]
    if not is_fixed(found):
        raise EtlError(
            f"{key} = {rows!r}: uses a random or position-dependent function, or the current time or user; derive "
            "it from a hash of a key, or write the value there"
        )
    return found


def _query(spark: SparkSession, key: str, sql: str) -> DataFrame:
    try:
        return spark.sql(sql)
    except PySparkException as error:
        message = re.split(r"JVM stacktrace|;\n'|== SQL", str(error))[0].strip()
        raise EtlError(f"{key}: {message}") from error


def _call(key: str, reference: str, tables: dict[str, DataFrame]) -> DataFrame:
    function = rows_function(key, reference)
    try:
        made = function(dict(tables))
    except PySparkException as error:
        raise EtlError(f"{key} = {reference!r}: {first_line(error)}") from error
    if not hasattr(made, "mapInArrow"):
        raise EtlError(f"{key} = {reference!r}: returned {type(made).__name__}, not a DataFrame")
    return made


def rows_function(key: str, reference: str) -> Callable[..., Any]:
    """Import the function of `module:function`. EtlError where that is not possible, or it is none."""
    try:
        found = load_reference(reference)
    except (ImportError, AttributeError) as error:
        raise EtlError(f"{key} = {reference!r}: cannot be imported: {error}") from error
    except Exception as error:  # the module's own code runs
        why = f"{type(error).__name__}: {first_line(error)}"
        raise EtlError(f"{key} = {reference!r}: its import fails: {why}") from error
    if not callable(found):
        raise EtlError(f"{key} = {reference!r}: is {type(found).__name__}, not a function")
    function: Callable[..., Any] = found
    return function


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
