"""Errors for the user: raw tables, recipe and Spark do not fit together."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from sparkring.conf.errors import first_line

if TYPE_CHECKING:
    from pyspark.errors import PySparkException

    from sparkring.etl.spark_platform.jvm import JavaThrew


class EtlError(ValueError):
    """The dataset cannot be built; the message has the key or file, the value, the rule and what to do."""


class NoFiles(EtlError):
    """There is a table, and no file of it where the condition holds."""


class ChecksFailed(EtlError):
    """Dataset-level rules failed; `report` is the whole checks report."""

    def __init__(self, message: str, report: list[dict[str, object]]):
        super().__init__(message)
        self.report = report


def innermost(error: JavaThrew | PySparkException) -> str:
    """Return the first line of a JVM error's innermost cause, as a driver or file system wrote it."""
    cause = getattr(error, "java_exception", None) or getattr(error, "_origin", None)  # py4j's name and pyspark's
    if cause is None:
        causes = re.findall(r"^Caused by: [\w.$]+: (.+)$", str(error), re.MULTILINE)  # of Spark Connect's server
        return causes[-1] if causes else first_line(error)
    while cause.getCause() is not None:
        cause = cause.getCause()
    return first_line(cause.getMessage() or cause.toString())
