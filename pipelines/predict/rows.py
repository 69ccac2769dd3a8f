"""The rows that are scored: the sources as they are now, and what the recipe's views make of them."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Collection
from dataclasses import dataclass

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql import types as T

from sparkring.conf.blocks.etl import EtlConfig, SplitConfig
from sparkring.conf.blocks.predict import PredictConfig
from sparkring.conf.config import RunConfig
from sparkring.conf.rules.rule import nearest
from sparkring.etl.errors import EtlError
from sparkring.etl.rows import check_plain
from sparkring.etl.sources.pin import pin_sources
from sparkring.etl.sources.snapshot import PinContext, SourceSnapshot
from sparkring.etl.spark_platform.session import BATCH_ROWS, MOST_BATCH_BYTES, build_session
from sparkring.etl.views import build_rows
from sparkring.etl.windows.parts import PartSources, of_interval
from sparkring.etl.windows.window import pin_window
from sparkring.pipelines.predict.score import LONG

ARROW_ROWS = 1 << 15  # of a batch that Spark sends to a worker
TEXT_BYTES = 512  # of all texts of a row; longer ones are sent apart
FIXED_TYPES = (T.NumericType, T.BooleanType, T.DateType, T.TimestampType, T.TimestampNTZType)
FIXED_BYTES = 17  # of a value at most, that of a decimal, with its bit for nulls


@dataclass(frozen=True)
class PinnedRows:
    """The sources before anything is read. `part`: the one interval whose rows are scored; None: all rows."""

    sources: dict[str, SourceSnapshot]
    part: PartSources | None = None

    def check_unchanged(self) -> None:
        """Raise EtlError if a source may have changed since."""
        for source in self.snapshots:
            source.check_unchanged()

    @property
    def snapshots(self) -> list[SourceSnapshot]:
        return self.part.snapshots if self.part is not None else [*self.sources.values()]

    @property
    def fingerprints(self) -> dict[str, str]:
        """By the source's name; `sales[-1]` is of the interval before."""
        if self.part is None:
            return {name: source.fingerprint for name, source in self.sources.items()}
        found = {name: source.fingerprint for name, source in self.part.whole.items()}
        for name, snapshots in self.part.cut.items():
            read = [snapshot for snapshot in snapshots if snapshot is not None]
            for back, snapshot in enumerate(reversed(read)):
                found[f"{name}[-{back}]" if back else name] = snapshot.fingerprint
        return found

    def read(self, spark: SparkSession) -> dict[str, DataFrame]:
        if self.part is not None:
            return self.part.read(lambda source: source.read(spark))
        return {name: source.read(spark) for name, source in self.sources.items()}


def pin_rows(config: RunConfig, session: Callable[[], SparkSession]) -> PinnedRows:
    """Pin the sources. Of a recipe with `etl.interval` those of its last interval alone, and of what it looks back at.

    `session` opens Spark, and is called for sources that only Spark can pin.
    """
    assert config.etl is not None
    settings = config.spark.settings()
    context = PinContext(functools.cache(lambda: build_session(session(), settings)), config.storage.datasets)
    if config.etl.interval is None:
        return PinnedRows(pin_sources(config.etl.sources, context))
    window = pin_window(last_interval(config.etl), settings, context)
    (pinned,) = window.parts
    return PinnedRows({}, pinned.sources)


def last_interval(etl: EtlConfig) -> EtlConfig:
    """Return the etl block for the last interval alone, without a split."""
    assert etl.interval is not None
    interval = etl.interval.model_copy(update={"window": 1, "missing": "fail"})
    return etl.model_copy(update={"interval": interval, "split": SplitConfig()})


def make_rows(spark: SparkSession, config: RunConfig, block: PredictConfig, pinned: PinnedRows) -> DataFrame:
    """Make the rows of `predict.rows`, before anything is computed.

    `spark`: a session of the build's kind. EtlError for impossible views, as in a build.
    """
    assert config.etl is not None
    spark.conf.set(BATCH_ROWS, str(ARROW_ROWS))
    rows = build_rows(spark, pinned.read(spark), config.etl.views, block.rows, key="predict.rows")
    if pinned.part is not None:
        assert config.etl.interval is not None
        rows = of_interval(rows, config.etl.interval, pinned.part.interval)
    return rows


@dataclass(frozen=True)
class PickedColumns:
    """What is sent to the workers, and which raw columns are null in every row."""

    sent: tuple[str, ...]
    absent: tuple[str, ...]


def check_kept(block: PredictConfig, predicted: Collection[str]) -> None:
    """Raise EtlError for a kept column that has the name of one of the prediction's, those of classes or labels."""
    if taken := [name for name in block.keep if name in predicted]:
        raise EtlError(
            f"predict.keep = {taken[0]!r}: the model's predictions have a column of that name; give the kept one "
            "another name in the view"
        )


def pick_columns(block: PredictConfig, given: list[str], needed: list[str]) -> PickedColumns:
    """Pick the columns that the model needs and the recipe keeps. EtlError names those that the rows lack."""
    if unknown := [name for name in block.keep if name not in given]:
        raise EtlError(
            f"predict.keep = {unknown[0]!r}: {block.rows!r} has no such column; {nearest(unknown[0], given)}"
        )
    check_plain("predict.keep", block.keep)
    absent = tuple(name for name in needed if name not in given)
    if absent and block.on_missing_column == "fail":
        raise EtlError(
            f"predict.rows = {block.rows!r}: lacks {list(absent)}, which the model was trained on; it has {given}; add "
            "them to the view, or set predict.on_missing_column to null"
        )
    return PickedColumns(tuple(dict.fromkeys([*(n for n in needed if n in given), *block.keep])), absent)


@dataclass(frozen=True)
class BoundedRows:
    """Rows whose batches need no count of their bytes, which Spark takes before each row: 1 to 1.7 of 7.5 us of CPU.

    `rows` has another column LONG and, where that is true, null for every text; `long` has those rows whole. Both are
    read from the source; `long` is None where the rows have no texts.
    """

    rows: DataFrame
    row_bytes: int
    long: DataFrame | None

    @property
    def batch_rows(self) -> int:
        return max(1, min(ARROW_ROWS, MOST_BATCH_BYTES // self.row_bytes))


def bounded(rows: DataFrame) -> BoundedRows | None:
    """Bound the rows' texts; None if a column holds arrays, binary values or the like."""
    texts = {field.name for field in rows.schema if isinstance(field.dataType, T.StringType)}
    if any(field.name not in texts and not isinstance(field.dataType, FIXED_TYPES) for field in rows.schema):
        return None
    row_bytes = FIXED_BYTES * len(rows.columns)
    if not texts:
        return BoundedRows(rows, row_bytes, None)
    columns = {name: F.col(f"`{name}`") for name in rows.columns}
    is_long = functools.reduce(operator.add, map(_octets, map(columns.__getitem__, sorted(texts)))) > TEXT_BYTES
    sent = (F.when(~is_long, column).alias(name) if name in texts else column for name, column in columns.items())
    return BoundedRows(rows.select(*sent, is_long.alias(LONG)), row_bytes + TEXT_BYTES, rows.where(is_long))


def _octets(text: Column) -> Column:
    return F.coalesce(F.octet_length(text), F.lit(0)).cast("bigint")
