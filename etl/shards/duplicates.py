"""Number the duplicates among rows without a key, so that each row has a place of its own.

A row's split and its place in the stored order are hashes of its key. Without a key that is the whole row, label and
all: duplicates would be of one split and lie side by side. Of a table of few categories, most test rows would then have
the features of training rows of other labels only, and a batch would hold few different rows.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from functools import reduce

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from sparkring.conf.blocks.etl import MANY_DUPLICATES, EtlConfig, SplitConfig
from sparkring.conf.plain_text import count_of
from sparkring.etl.errors import EtlError
from sparkring.etl.spark_platform.hashes import hash_of
from sparkring.etl.spark_platform.plans import is_cheap

log = logging.getLogger(__name__)

DUPLICATE = "__duplicate"  # how many equal rows were counted before a row; null for the first, which hashes pass over
INCOMPARABLE = re.compile(r"\b(map<|variant\b(?!:))")  # of the names of Spark's types; `variant:` is a field
FLOATS = re.compile(r"\b(float|double)\b")


def number_duplicates(frames: Sequence[DataFrame], config: EtlConfig) -> list[DataFrame]:
    """Add DUPLICATE to the rows of each frame, which then belongs to their key, where some are equal.

    Equal rows are interchangeable, so the numbered rows are the same in any order. With a key, and for documents, of
    which equal ones stay in one split, the rows are left as they are. Where rows are cheap to read again, one job, over
    hashes, finds whether some are equal; only then are they shuffled. Raises EtlError for a column of a type that
    cannot be compared.
    """
    if config.key or config.text is not None:
        return [*frames]
    check_comparable(frames[0], config)
    if all(map(is_cheap, frames)) and not _has_duplicates(frames):
        return [*frames]
    return [_numbered(frame) for frame in frames]


def check_comparable(rows: DataFrame, config: EtlConfig) -> None:
    """Raise EtlError where rows have no key, and a column of a type that cannot be compared."""
    odd = [] if config.key else [(name, kind) for name, kind in rows.dtypes if INCOMPARABLE.search(kind)]
    if odd:
        name, kind = odd[0]
        raise EtlError(
            f"etl.key: without one, rows are compared by all columns, and {name!r} ({kind}) cannot be: name the "
            "columns that identify a row, or leave this one out of etl.rows"
        )


def remark_duplicates(duplicates: int, rows: int, config: SplitConfig) -> None:
    """Log how many of the `rows` are equal to one before them, as a warning where they may be a mistake."""
    if duplicates and config.kind == "hash" and config.key is None:
        log.log(
            logging.WARNING if duplicates > MANY_DUPLICATES * rows else logging.INFO,
            "%s among %s: equal to another row in all columns. Every row is assigned to a split by itself, so "
            "duplicates are in training and in test. If they are copies of one observation, select DISTINCT rows; if "
            "equal rows must be in one split, name their columns in etl.split.key",
            count_of(duplicates, "duplicate row", ","),
            count_of(rows, "row", ","),
        )


def _has_duplicates(frames: Sequence[DataFrame]) -> bool:
    hashes = [
        frame.select(F.lit(n).alias("frame"), hash_of(frame.columns).alias("hash")) for n, frame in enumerate(frames)
    ]
    counted = reduce(lambda a, b: a.union(b), hashes).groupBy("frame", "hash").count()
    return not counted.where("count > 1").isEmpty()


def _columns(frame: DataFrame) -> list[Column]:
    return [F.col(f"`{name}`") for name in frame.columns]


def _numbered(frame: DataFrame) -> DataFrame:
    # By the hash first, since numbers are sorted faster than rows.
    equal = Window.partitionBy(hash_of(frame.columns), *_columns(frame)).orderBy(_zeros(frame))
    before = F.row_number().over(equal) - 1
    return frame.withColumn(DUPLICATE, F.when(before > 0, before))


def _zeros(frame: DataFrame) -> Column:
    # To Spark -0.0 is 0.0, so such rows are equal and their files would not be: texts tell them apart.
    texts = []
    for column, (_, kind) in zip(_columns(frame), frame.dtypes, strict=True):
        text = column.cast("string")
        if FLOATS.search(kind):
            texts.append(F.when(column == 0, text) if FLOATS.fullmatch(kind) else text)
    return F.xxhash64(F.lit(0), *texts)
