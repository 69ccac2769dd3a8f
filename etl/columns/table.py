"""Turn the rows of a table into the stored columns: what features are made of, then label, weight and kept columns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import DataType

from sparkring.conf.blocks.etl import EtlConfig
from sparkring.conf.features import State, output_names
from sparkring.conf.manifest import Column, Role
from sparkring.conf.schema import same_but_for_case
from sparkring.etl.columns.types import ColumnOptions, input_column, manifest_column, stored_expression
from sparkring.etl.errors import EtlError

Types = dict[str, DataType]


def stored_columns(rows: DataFrame, config: EtlConfig, features: State) -> list[Column]:
    """List the manifest's columns, in stored order. EtlError for one that is missing, double or cannot be stored.

    A column that is passed through is stored by its feature's name, every other one by its own, once.
    """
    types, states = _types(rows), features["features"]
    passed = {s["name"]: s for s in states if s["kind"] == "passthrough"}
    columns = [_passed_column(state, types) for state in passed.values()]
    columns += [manifest_column(name, types[name], role) for name, role in plain_roles(config, types).items()]
    made = [name for s in states if s["kind"] != "passthrough" for name in output_names(s)]
    _check_distinct("read", [*made, *(c.name for c in columns if c.dtype != "string" or c.role == "label")])
    _check_distinct("stored", [c.name for c in columns])
    stored = {column.name: column for column in columns}
    for state in states:
        source = state["column"]
        if state["kind"] == "passthrough":
            continue
        if source in passed and (passed[source]["column"] != source or stored[source].dtype == "float16"):
            raise EtlError(
                f"etl.features.{source}: the column {source!r} is stored as it is, since {state['name']!r} is made of "
                f"it, and this feature would store other values by that name; rename the feature {source!r}"
            )
        stored.setdefault(source, input_column(source, types[source]))
    _check_distinct("stored", stored)
    order = [s["name"] if s["kind"] == "passthrough" else s["column"] for s in states]
    return [stored[name] for name in dict.fromkeys([*order, *stored])]


def _passed_column(state: State, types: Types) -> Column:
    options = ColumnOptions(state["nulls"], state["fill"], state["shape"], state["dtype"], "fit" in state)
    return manifest_column(state["name"], types[state["column"]], "feature", options)


def _check_distinct(what: str, names: Iterable[str]) -> None:
    if twice := same_but_for_case(names):
        raise EtlError(
            f"etl.features: two columns would be {what} as {twice[0]!r} and {twice[1]!r}; rename one feature"
        )


def plain_roles(config: EtlConfig, types: Types) -> dict[str, Role]:
    """Find the roles of the columns stored as they are. Raises EtlError for a missing column or a second role."""
    roles: dict[str, Role] = {}
    named: list[tuple[str, str | None, Role]] = [("label", name, "label") for name in config.labels]
    named += [("weight", config.weight, "weight"), *(("keep", name, "meta") for name in config.keep)]
    for where, name, role in named:
        if name is None:
            continue
        if name not in types:
            raise EtlError(f"etl.{where} = {name!r}: rows have no such column; they have {sorted(types)}")
        if name in roles:
            raise EtlError(f"etl.{where}: {name!r} is {roles[name]} already; a column has one role")
        roles[name] = role
    return roles


def to_stored(
    rows: DataFrame, config: EtlConfig, features: State, columns: list[Column], carry: Sequence[str] = ()
) -> DataFrame:
    """Select the stored columns.

    Args:
        rows: the good rows, as the views give them.
        config: the etl block.
        features: the fitted state.
        columns: `stored_columns` of these rows.
        carry: further columns of `rows` to pass through.
    """
    types = _types(rows)
    source = {s["name"]: s["column"] for s in features["features"] if s["kind"] == "passthrough"}
    named = [(source.get(column.name, column.name), column) for column in columns]
    stored = [stored_expression(F.col(name), types[name], column).alias(column.name) for name, column in named]
    return rows.select(*stored, *carry)


def _types(rows: DataFrame) -> Types:
    return {f.name: f.dataType for f in rows.schema.fields}
