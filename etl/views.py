"""Run the recipe's joins, SQL views in order or one Python function, over the sources to get the dataset's rows."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from sparkring.conf.errors import first_line
from sparkring.conf.references import load_reference
from sparkring.etl.errors import EtlError
from sparkring.etl.spark_platform.query_files import is_fixed


def build_rows(
    spark: SparkSession, tables: dict[str, DataFrame], views: dict[str, str], rows: str, key: str = "etl.rows"
) -> DataFrame:
    """Register `tables` and `views` in this session and return the DataFrame `rows`, the value of `key`, names.

    Raises EtlError with the key's path when SQL or function fail, or the result is not a function of the sources
    alone (`rand()`, `current_date()`): such rows would change between two passes over them, or two runs.

    Args:
        spark: session in which views are registered.
        tables: DataFrames by name; those of the views are added.
        views: name -> SQL, each of which may use the ones before it.
        rows: name of a table or view, or `module:function`.
        key: recipe key that holds `rows`, for messages.
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
