"""Prove that the views make the same rows of an interval whether they see it alone or within its window.

A view that looks at other intervals (a running total, the flight before) makes other rows night by night than it would
over all days. It is found by building one interval both ways and comparing digests of its rows.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from sparkring.conf.code import code_digest
from sparkring.conf.config import EtlConfig
from sparkring.conf.manifest import digest
from sparkring.etl.errors import EtlError
from sparkring.etl.fingerprint import PACKAGE, declared
from sparkring.etl.rows import RowsJob, rows_of
from sparkring.etl.views import own_modules
from sparkring.etl.windows.parts import PartSources, of_interval

log = logging.getLogger(__name__)

ENOUGH = 3  # intervals: one that has others before and after it


def prove_independent(job: RowsJob, name: str, parts: Sequence[PartSources]) -> None:
    """Compare an interval's rows made of its own sources with those made of all the parts' sources.

    Done once for a recipe's sources, views and rows, and not where `look_back` says how far views look. Raises EtlError
    if the rows differ.

    job: of the root of all datasets, where the proof is noted; name: of the recipe; parts: the window's, as far as
    their sources were pinned, oldest first.
    """
    config, root = job.config, job.storage
    assert config.interval is not None
    note = f"parts/{name}/independent/{_views_digest(config)[:12]}.json"
    if config.interval.look_back or len(parts) < 2 or root.exists(note):
        return
    tested = parts[len(parts) // 2]
    alone = _digest(job, tested, tested)
    within = _digest(job, tested, _together(tested, parts))
    if alone != within:
        raise EtlError(
            f"etl.rows = {config.rows!r}: the rows of {tested.interval.label} are others ({within[0]}, not {alone[0]}, "
            "or other values) when the other intervals of the window are read too: a view looks across intervals. Let "
            f"it look within one (PARTITION BY the day of {config.interval.column!r}), or say in "
            "etl.interval.look_back how many intervals before it needs"
        )
    log.info("the views make the same rows of %s alone and in its window", tested.interval.label)
    if len(parts) >= ENOUGH:
        root.put_atomic(note, json.dumps({"interval": tested.interval.label, "rows": alone[0]}).encode())


def _views_digest(config: EtlConfig) -> str:
    block = {key: declared(config)[key] for key in ("sources", "views", "rows", "interval")}
    for key in ("last", "window", "missing"):
        del block["interval"][key]
    return digest([json.dumps(block), own_modules(config.rows), code_digest(PACKAGE)])


def _together(tested: PartSources, parts: Sequence[PartSources]) -> PartSources:
    return PartSources(tested.interval, tested.whole, {name: [p.cut[name][-1] for p in parts] for name in tested.cut})


def _digest(job: RowsJob, tested: PartSources, sources: PartSources) -> tuple[int, str]:
    """Count the interval's rows, and sum a hash of each: equal for equal rows in any order."""
    assert job.config.interval is not None
    rows = of_interval(rows_of(job, sources.read(job.spark)), job.config.interval, tested.interval)
    return row_digest(rows)


def row_digest(rows: DataFrame) -> tuple[int, str]:
    """The number of rows, and the sum of their hashes."""
    # xxhash64 passes over a null as if it were not there, so which values are null is hashed beside them.
    columns = [F.col(f"`{name}`") for name in rows.columns]
    row = F.xxhash64(*columns, *[column.isNull() for column in columns]).cast("decimal(20,0)")
    count, total = rows.agg(F.count(F.lit(1)), F.sum(row)).collect()[0]
    return count, str(total)
