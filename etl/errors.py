"""Errors for the user: raw tables, recipe and Spark do not fit together."""

from __future__ import annotations


class EtlError(ValueError):
    """The dataset cannot be built; the message has the key or file, the value, the rule and what to do."""


class ChecksFailed(EtlError):
    """Dataset-level rules failed; `report` is the whole checks report."""

    def __init__(self, message: str, report: list[dict[str, object]]):
        super().__init__(message)
        self.report = report
