"""Let Spark analyze a recipe's rows on empty tables: wrong SQL and types are found before a row is read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructType

from sparkring.conf.blocks.etl import EtlConfig
from sparkring.conf.features import State
from sparkring.conf.manifest import Column
from sparkring.conf.sources import WHOLE_FILES, FilesSource
from sparkring.conf.storage import Storage
from sparkring.etl import checks, text
from sparkring.etl.classes import label_state, text_label
from sparkring.etl.flags import flags_state, several_labels
from sparkring.etl.rows import RowsJob, rows_of, stored_table
from sparkring.etl.session import build_session
from sparkring.etl.sources.read import declared_schema
from sparkring.etl.sources.snapshot import SourceSnapshot
from sparkring.etl.split import add_split


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
        snapshots: of its sources; those of files are not read.
        settings: the recipe's `spark.conf`.
        storage: of datasets; nothing is written.
    """
    if ":" in config.rows:
        return None
    session, pinned = build_session(spark, settings), {snapshot.name: snapshot for snapshot in snapshots}
    tables: dict[str, DataFrame] = {}
    for name, source in config.sources.items():
        if isinstance(source, FilesSource):
            tables[name] = session.createDataFrame([], _declared(name, source))
        elif name in pinned:
            tables[name] = session.createDataFrame([], pinned[name].read(session).schema)
        else:  # a table of which no part was looked at
            return None
    # A limit would count the rows there are, by jobs of Spark's, and changes no column.
    rows = rows_of(RowsJob(config.model_copy(update={"limit_rows": None}), session, storage, ""), tables)
    key = config.key or rows.columns
    divided = add_split(rows, config.split, config.key)
    checks.mark(divided, config.checks, tables, key)
    if config.text is not None:
        text.check_column(rows, config.text.column)
        return None
    found = stored_table(rows, config)
    label = text_label(found.columns)
    labels: State = {} if label is None else {"labels": [label_state(label, {}, config.classes or [])]}
    several = several_labels(found.columns)
    labels |= {"flags": flags_state(several, {}, {})} if several else {}
    return AnalyzedRows(tuple(found.columns), found.features | labels)


def _declared(name: str, source: FilesSource) -> StructType:
    """The columns of a source of files, in the order of `read_files`."""
    key = f"etl.sources.{name}"
    columns = declared_schema(key, source.columns)
    if source.format in WHOLE_FILES:
        columns = declared_schema(key, WHOLE_FILES[source.format])
    fields = [*columns, *declared_schema(key, source.partitions, "partitions")]
    return StructType([*{field.name: field for field in fields}.values()])
