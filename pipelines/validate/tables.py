"""Check what the dataset is made of. Imports no torch (`sparkring etl` begins with it), and Spark for etl alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sparkring.conf.blocks.etl import EtlConfig
from sparkring.conf.config import RunConfig
from sparkring.conf.plain_text import count_of
from sparkring.conf.rules.rule import Rule, find_problems
from sparkring.etl.errors import EtlError
from sparkring.etl.foreseen import row_problems
from sparkring.etl.sources.own_code import own_modules
from sparkring.pipelines.run.problems import Problems
from sparkring.pipelines.validate.folders import check_folders, storage_problems

if TYPE_CHECKING:
    from sparkring.etl.examine import Examined


@dataclass(frozen=True)
class OnTables:
    """A recipe that has an etl block, and its tables as they were examined."""

    config: RunConfig
    etl: EtlConfig
    examined: Examined


def check_tables(config: RunConfig, folders: Sequence[str]) -> None:
    """Raise one error with everything that is wrong with a recipe's tables, its rows, and `folders`, which are made.

    `folders`: keys of those that the job writes to whatever it finds.
    """
    problems = Problems() if config.etl is None else table_problems(config, examine(config, pinned_soon=True))
    (problems + storage_problems(config, folders)).raise_any(config.name)
    check_folders(config, folders)


def check_declared(config: RunConfig) -> None:
    """Raise ConfigError with what is wrong with a recipe's tables and rows as they are declared; none is looked at."""
    from sparkring.etl.examine import Examined

    table_problems(config, Examined()).raise_any(config.name)


def examine(config: RunConfig, pinned_soon: bool = False) -> Examined:
    """Examine the recipe's tables, where their declarations are right; nothing without an etl block.

    `pinned_soon`: as of `examine_sources`.
    """
    from sparkring.etl.examine import Examined, examine_sources

    return Examined() if config.etl is None or type_problems(config) else examine_sources(config.etl, pinned_soon)


def table_problems(config: RunConfig, examined: Examined) -> Problems:
    """List problems with the examined tables, and with the rows that are made of them."""
    if config.etl is None:
        return Problems()
    return Problems(find_problems(TABLES, OnTables(config, config.etl, examined)), examined.problems)


def type_problems(config: RunConfig) -> list[str]:
    """List the declared columns whose type Spark does not have."""
    from sparkring.etl.sources.types import NoSuchType, parse_type

    declared = {
        f"etl.sources.{name}.{block}": getattr(source, block, {})
        for name, source in (config.etl.sources.items() if config.etl else ())
        for block in ("columns", "partitions")
    }
    found = []
    for key, columns in declared.items():
        for column, text in columns.items():
            try:
                parse_type(text)
            except NoSuchType as problem:
                found.append(f"{key}.{column} = {text!r}: not a Spark type: {problem}")
    return found


def _function_problems(rows: str) -> Iterator[str]:
    """Import `module:function` of etl.rows, where it is one."""
    from sparkring.etl.views import rows_function

    if ":" in rows:
        try:
            own_modules(rows)
            rows_function("etl.rows", rows)
        except EtlError as error:
            yield str(error)


def _batch_problems(on: OnTables) -> list[str]:
    """Check that a batch is not larger than the table that the rows are made of."""
    etl, data, batch = on.etl, on.config.data, on.config.train.global_batch
    if etl.interval is not None or data.tail == "pad" or data.mix is not None or etl.kind == "text":
        return []
    table = etl.one_per or etl.rows
    rows = on.examined.rows.get(table)
    if rows is None or batch <= rows:
        return []
    return [
        f"train.global_batch = {batch}: larger than the whole table {table!r} of {count_of(rows, 'row')}, so an epoch "
        "has no full batch; make it smaller, or set data.tail to pad"
    ]


TABLES: tuple[Rule[OnTables], ...] = (
    Rule(("etl.sources",), lambda on: type_problems(on.config)),
    # sqlglot's guess at the columns: milliseconds, where Spark's analysis starts a JVM first
    Rule(("etl.features", "etl.label", "etl.keep", "etl.rows", "etl.views"), lambda on: row_problems(on.etl)),
    Rule(("etl.rows",), lambda on: _function_problems(on.etl.rows)),
    Rule(("train.global_batch", "data.tail", "etl.rows", "etl.one_per"), _batch_problems),
)
