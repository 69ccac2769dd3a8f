"""Let Spark analyze a recipe's rows on empty tables: wrong SQL and types are found before a row is read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from pyspark.sql import DataFrame, SparkSession

from sparkring.conf.blocks.etl import EtlConfig
from sparkring.conf.features import State
from sparkring.conf.manifest import Column
from sparkring.conf.storage import Storage
from sparkring.etl import checks
from sparkring.etl.profile import NO_ROWS, unfitted_labels
from sparkring.etl.rows import RowsJob, rows_of, stored_table
from sparkring.etl.shards.duplicates import check_comparable
from sparkring.etl.sources.pin import kind_of
from sparkring.etl.sources.snapshot import SourceSnapshot
from sparkring.etl.spark_platform.session import build_session
from sparkring.etl.split import add_split
from sparkring.etl.text import sequences as text


@dataclass(frozen=True)
class AnalyzedRows:
    """The columns that a table's dataset will have, and its feature state before anything is measured."""

    columns: tuple[Column, ...]
    features: State


def analyze(
    spark: SparkSession,
    config: EtlConfig,
    snapshots: Iterable[SourceSnapshot],
    settings: Mapping[str, str],
    storage: Storage,
) -> AnalyzedRows | None:
    """Analyze views, checks, split and features. No file is read; EtlError for what cannot be built.

    None where the rows are those of a function, which may look into its tables, and of text, whose columns are known.

    Args:
        spark: the job's session.
        config: the etl block.
        snapshots: snapshots of the sources; sources with all columns declared are not read.
        settings: the recipe's `spark.conf`.
        storage: storage of datasets, to which nothing is written.
    """
    if ":" in config.rows:
        return None
    session, pinned = build_session(spark, settings), {snapshot.name: snapshot for snapshot in snapshots}
    tables: dict[str, DataFrame] = {}
    for name, source in config.sources.items():
        schema = kind_of(source).declared_schema(name, source)
        if schema is None and name not in pinned:  # a table of which no part was looked at
            return None
        tables[name] = session.createDataFrame([], pinned[name].read(session).schema if schema is None else schema)
    rows = rows_of(RowsJob(config, session, storage), tables)
    check_comparable(rows, config)
    key = config.key or rows.columns
    divided = add_split(rows, config.split, config.key)
    checks.mark(divided, config.checks, tables, key)
    if config.text is not None:
        text.check_column(rows, config.text.column)
        return None
    found = stored_table(rows, config)
    labels = unfitted_labels(found.columns, NO_ROWS, config.classes or [])
    return AnalyzedRows(tuple(found.columns), found.features | labels)
