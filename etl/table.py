"""Turn the rows of a table into the stored columns: features, then label and kept columns."""

from __future__ import annotations

from collections.abc import Sequence

from pyspark.sql import Column as Expression
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import DataType, FloatType, IntegerType

from sparkring.conf.config import EtlConfig
from sparkring.conf.manifest import Column, Role
from sparkring.conf.schema import same_but_for_case
from sparkring.etl import fit
from sparkring.etl.columns import ColumnOptions, manifest_column, stored_expression
from sparkring.etl.errors import EtlError
from sparkring.etl.features import State, cardinality, output_names

Types = dict[str, DataType]


def stored_columns(rows: DataFrame, config: EtlConfig, features: State) -> list[Column]:
    """List the manifest's columns, in stored order. EtlError for one that is missing, double or cannot be stored."""
    types = _types(rows)
    columns = [c for state in features["features"] for c in _feature_columns(state, types)]
    columns += [manifest_column(name, types[name], role) for name, role in plain_roles(config, types).items()]
    if twice := same_but_for_case(c.name for c in columns):
        raise EtlError(
            f"etl.features: two columns would be stored as {twice[0]!r} and {twice[1]!r}; rename one feature"
        )
    return columns


def plain_roles(config: EtlConfig, types: Types) -> dict[str, Role]:
    """Find the roles of the columns stored as they are. Raises EtlError for a missing column or a second role."""
    roles: dict[str, Role] = {}
    named: list[tuple[str, str | None, Role]] = [("label", config.label, "label")]
    named += [("keep", name, "meta") for name in config.keep]
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
    """Apply the features.

    Args:
        rows: the good rows, as the views give them.
        config: the etl block.
        features: the fitted state.
        columns: `stored_columns` of these rows.
        carry: further columns of `rows` to pass through.
    """
    types = _types(rows)
    joined, expressions = fit.apply(rows, features)
    values = [_with_type(e, s, types) for s in features["features"] for e in expressions[s["name"]]]
    values += [(F.col(name), types[name]) for name in plain_roles(config, types)]
    stored = [stored_expression(e, t, c).alias(c.name) for (e, t), c in zip(values, columns, strict=True)]
    return joined.select(*stored, *carry)


def _types(rows: DataFrame) -> Types:
    return {f.name: f.dataType for f in rows.schema.fields}


def _feature_columns(state: State, types: Types) -> list[Column]:
    found = types[state["column"]]
    if state["kind"] == "passthrough":
        options = ColumnOptions(state["nulls"], state["fill"], state["shape"], state["dtype"])
        return [manifest_column(state["name"], found, "feature", options)]
    logical = found.simpleString()
    if state["kind"] == "categorical":
        return [Column(name=state["name"], dtype="int32", logical=logical, cardinality=cardinality(state))]
    return [Column(name=name, dtype="float32", logical=logical) for name in output_names(state)]


def _with_type(expression: Expression, state: State, types: Types) -> tuple[Expression, DataType]:
    """An output with the Spark type it has before storing."""
    if state["kind"] == "passthrough":
        return expression, types[state["column"]]
    return expression, IntegerType() if state["kind"] == "categorical" else FloatType()
