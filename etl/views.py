"""The recipe's joins: SQL views in order, or one Python function, over the sources -> the dataset's rows."""

from __future__ import annotations

import importlib
import inspect
import re

from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from etl.errors import EtlError


def build_rows(spark: SparkSession, tables: dict[str, DataFrame], views: dict[str, str], rows: str) -> DataFrame:
    """Register `tables` and `views` in this session and return the DataFrame `rows` names.

    Raises EtlError with the key's path when SQL or function fail, or the result is not a function of the sources
    alone (`rand()`, `uuid()`): such rows would change between two passes over them.
    """
    for name, table in tables.items():
        table.createOrReplaceTempView(name)
    for name, sql in views.items():
        tables[name] = _query(spark, f"etl.views.{name}", sql)
        tables[name].createOrReplaceTempView(name)
    found = _call(rows, tables) if ":" in rows else tables[rows]
    if not found._jdf.queryExecution().analyzed().deterministic():
        raise EtlError(
            f"etl.rows = {rows!r}: uses a random or position-dependent function; derive it from a hash of a key"
        )
    return found


def _query(spark: SparkSession, key: str, sql: str) -> DataFrame:
    try:
        return spark.sql(sql)
    except PySparkException as error:
        message = re.split(r"JVM stacktrace|;\n'|== SQL", str(error))[0].strip()
        raise EtlError(f"{key}: {message}") from error


def _call(reference: str, tables: dict[str, DataFrame]) -> DataFrame:
    try:
        module, _, name = reference.partition(":")
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise EtlError(f"etl.rows = {reference!r}: cannot be imported: {error}") from error
    try:
        made = function(dict(tables))
    except PySparkException as error:
        raise EtlError(f"etl.rows = {reference!r}: {str(error).splitlines()[0]}") from error
    if not isinstance(made, DataFrame):
        raise EtlError(f"etl.rows = {reference!r}: returned {type(made).__name__}, not a DataFrame")
    return made


def function_source(rows: str) -> str:
    """Source text of the module behind `module:function`, for the fingerprint; empty for a view."""
    if ":" not in rows:
        return ""
    try:
        return inspect.getsource(importlib.import_module(rows.partition(":")[0]))
    except (ImportError, OSError) as error:
        raise EtlError(f"etl.rows = {rows!r}: cannot be imported: {error}") from error
