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

from sparkring.conf.blocks.etl import EtlConfig
from sparkring.conf.code import code_digest
from sparkring.conf.digest import digest
from sparkring.etl.errors import EtlError
from sparkring.etl.fingerprint import PACKAGE, declared
from sparkring.etl.rows import RowsJob, rows_of
from sparkring.etl.sources.own_code import own_modules
from sparkring.etl.spark_platform.hashes import hash_of
from sparkring.etl.windows.parts import PartSources, of_interval

log = logging.getLogger(__name__)

ENOUGH = 3  # intervals: one that has others before and after it


def prove_independent(job: RowsJob, name: str, parts: Sequence[PartSources]) -> None:
    """Compare an interval's rows made of its own sources with those of all day partitions' sources.

    Done once for a recipe's sources, views and rows. Raises EtlError if the rows differ; with `look_back`, where each
    part reads so far and no further, a warning says that the views would look further.

    job: of the root of all datasets, where the proof is noted; name: of the recipe; parts: the window's, as far as
    their sources were pinned, oldest first.
    """
    config, root = job.config, job.storage
    assert config.interval is not None
    note = f"parts/{name}/independent/{_views_digest(config)[:12]}.json"
    if len(parts) < 2 or root.exists(note):
        return
    middle_first = sorted(range(len(parts)), key=lambda i: abs(i - len(parts) // 2))
    digests = ((parts[i], _digest(job, parts[i], parts[i])) for i in middle_first)
    tested, alone = next(((part, found) for part, found in digests if found[0]), (None, None))
    if tested is None or alone is None:
        return  # there are no rows that could differ
    within = _digest(job, tested, _together(tested, parts))
    if alone != within:
        found = (
            f"etl.rows = {config.rows!r}: the rows of {tested.interval.label} are others ({within[0]}, not {alone[0]}, "
            "or other values) when the other intervals of the window are read too"
        )
        if not config.interval.look_back:
            raise EtlError(
                f"{found}: a view looks across intervals. Let it look within one (PARTITION BY the day of "
                f"{config.interval.column!r}), or say in etl.interval.look_back how many intervals before it needs"
            )
        log.warning(
            "%s: a view looks further than etl.interval.look_back = %d, and sees so many intervals before its own; "
            "raise it, or bound the view",
            found,
            config.interval.look_back,
        )
    log.info("the views make the same rows of %s alone and in its window: %s", tested.interval.label, alone == within)
    if len(parts) >= ENOUGH:
        proof = {"interval": tested.interval.label, "rows": alone[0], "same": alone == within}
        root.put_atomic(note, json.dumps(proof).encode())


def _views_digest(config: EtlConfig) -> str:
    block = {key: declared(config)[key] for key in ("sources", "views", "rows", "interval")}
    for key in ("last", "window", "missing"):
        del block["interval"][key]
    return digest([json.dumps(block), own_modules(config.rows), code_digest(PACKAGE)])


def _together(tested: PartSources, parts: Sequence[PartSources]) -> PartSources:
    """Return the tested interval with all that any of the day partitions reads."""
    first, *others = parts
    cut = {name: [*first.cut[name], *(p.cut[name][-1] for p in others)] for name in tested.cut}
    return PartSources(tested.interval, tested.whole, cut)


def _digest(job: RowsJob, tested: PartSources, sources: PartSources) -> tuple[int, str]:
    """Return the number of rows in the interval and the sum of their hashes, independent of order."""
    assert job.config.interval is not None
    rows = of_interval(
        rows_of(job, sources.read(lambda snapshot: snapshot.read(job.spark))), job.config.interval, tested.interval
    )
    return row_digest(rows)


def row_digest(rows: DataFrame) -> tuple[int, str]:
    """Return the number of rows, and the sum of their hashes."""
    row = hash_of(rows.columns).cast("decimal(20,0)")
    count, total = rows.agg(F.count(F.lit(1)), F.sum(row)).collect()[0]
    return count, str(total)
