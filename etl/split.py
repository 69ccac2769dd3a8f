"""Assign each row to a split, by the row alone, so that it never depends on order or partitioning."""

from __future__ import annotations

import re

from pyspark.errors import PySparkException
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from sparkring.conf.blocks.etl import SPLIT_BUCKETS, SPLIT_SALT, SplitConfig, share_edges
from sparkring.conf.errors import first_line
from sparkring.etl.errors import EtlError

SPLIT = "__split"
UNDIVIDED = "rows"  # the one split of a day partition, whose window decides its split
FITTED = ("train", UNDIVIDED)  # splits whose rows features may be fitted on


def split_names(config: SplitConfig) -> list[str]:
    """List the splits in stored order; for kind `column` they are known only from the data."""
    return ["train", *config.boundaries] if config.kind == "time" else list(config.shares)


def split_column(config: SplitConfig, key: list[str]) -> Column:
    """Compute the split's name; null where the deciding column is null."""
    if config.kind == "column":
        return F.col(config.column or "").cast("string")
    if config.kind == "time":
        return _by_time(config)
    hashed = F.pmod(
        F.xxhash64(F.lit(SPLIT_SALT), F.lit(config.seed), *[F.col(c) for c in config.key or key]), F.lit(SPLIT_BUCKETS)
    )
    edges = share_edges(list(config.shares.values()))
    chosen = F.lit(list(config.shares)[-1])
    for name, edge in reversed(list(zip(config.shares, edges, strict=True))[:-1]):
        chosen = F.when(hashed < edge, name).otherwise(chosen)
    return chosen


def _by_time(config: SplitConfig) -> Column:
    column = F.col(config.column or "").cast("timestamp")
    chosen = F.when(column.isNotNull(), F.lit("train"))
    for name, text in config.boundaries.items():
        chosen = F.when(column >= F.lit(text).cast("timestamp"), F.lit(name)).otherwise(chosen)
    return chosen


def add_split(rows: DataFrame, config: SplitConfig, key: list[str]) -> DataFrame:
    """Add SPLIT to the rows. Raises EtlError where the deciding columns do not exist."""
    try:
        return rows.withColumn(SPLIT, split_column(config, key or rows.columns))
    except PySparkException as error:
        raise EtlError(f"etl.split: {first_line(error)}") from error


def check_splits(counts: dict[str, int], config: SplitConfig) -> dict[str, int]:
    """Sort the counts into stored order. Raises EtlError for an empty split, or one without rows to fit features on."""
    names = split_names(config) if config.kind != "column" else sorted(counts, key=lambda n: (n != "train", n))
    full = {name: counts.get(name, 0) for name in names}
    if "train" not in full:
        raise EtlError(f"etl.split.column = {config.column!r}: no row says `train`; it has {sorted(counts)}")
    if odd := sorted(name for name in full if not re.fullmatch(r"\w[\w.-]*", name)):
        raise EtlError(
            f"etl.split.column = {config.column!r}: {odd[0]!r} names no split; a name is letters, digits, _, - and ., "
            "since files are called after it; rename it in the recipe's SQL"
        )
    if empty := [name for name, rows in full.items() if rows == 0]:
        raise EtlError(f"etl.split: {', '.join(empty)} got no rows; rows by split: {full}")
    return full
