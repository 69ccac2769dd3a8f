"""What features were before shards held values, in Spark SQL: the oracle that the reader's numpy is compared with."""

from __future__ import annotations

import math
from typing import Any

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from sparkring.conf.features import FIRST_CODE, NULL_CODE, UNSEEN_CODE, output_names

State = dict[str, Any]


def _double(column: str) -> Column:
    value = F.col(column).cast("double")
    return F.when(~F.isnan(value), value)


def _transformed(value: Column, transform: str) -> Column:
    return F.log1p(F.greatest(value, F.lit(0.0))) if transform == "log1p" else value


def apply(rows: DataFrame, state: State) -> tuple[DataFrame, dict[str, list[Column]]]:
    """Join `rows` with the vocabularies; returns them, and by feature the expressions of its output columns."""
    expressions: dict[str, list[Column]] = {}
    for index, feature in enumerate(state["features"]):
        if feature["kind"] == "categorical":
            code = f"__code_{index}"
            rows = _join_codes(rows, feature, code)
            expressions[feature["name"]] = [F.col(code)]
        elif feature["kind"] == "numeric":
            expressions[feature["name"]] = _numeric(feature)
        elif feature["kind"] == "cyclic":
            expressions[feature["name"]] = _cyclic(feature)
        else:
            expressions[feature["name"]] = [F.col(feature["column"])]
    return rows, expressions


def _join_codes(rows: DataFrame, feature: State, code: str) -> DataFrame:
    """A broadcast join: unlike a map literal it costs the same for ten values and for a million."""
    pairs = [(value, FIRST_CODE + i) for i, value in enumerate(feature["values"])]
    vocabulary = F.broadcast(rows.sparkSession.createDataFrame(pairs, f"{code}_value string, {code}_known int"))
    joined = rows.join(vocabulary, F.col(feature["column"]).cast("string") == F.col(f"{code}_value"), "left")
    unseen_or_known = F.coalesce(F.col(f"{code}_known"), F.lit(UNSEEN_CODE))
    null = F.col(feature["column"]).isNull()
    return joined.withColumn(code, F.when(null, F.lit(NULL_CODE)).otherwise(unseen_or_known)).drop(
        f"{code}_value", f"{code}_known"
    )


def _numeric(feature: State) -> list[Column]:
    raw = _double(feature["column"])
    value = F.when(raw.isNull(), F.lit(feature["fill"])).otherwise(_transformed(raw, feature["transform"]))
    out = [((value - F.lit(feature["mean"])) / F.lit(feature["std"])).cast("float")]
    return [*out, raw.isNull().cast("float")] if feature["indicator"] else out


def _cyclic(feature: State) -> list[Column]:
    raw = _double(feature["column"])
    angle = raw * F.lit(2.0 * math.pi / feature["period"])
    return [F.when(raw.isNull(), F.lit(0.0)).otherwise(f(angle)).cast("float") for f in (F.sin, F.cos)]


def feature_frame(rows: DataFrame, state: State, *carry: str) -> DataFrame:
    """The tensors of every fitted feature, and the columns of `rows` named in `carry`."""
    joined, expressions = apply(rows, state)
    named = [(e, n) for s in state["features"] for e, n in zip(expressions[s["name"]], output_names(s), strict=True)]
    return joined.select(*[e.alias(n) for e, n in named], *carry)
