"""What a plan of Spark says of a query: whether its rows are cheap to read again, and how it reads as text."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from sparkring.etl.spark_platform.capabilities import PLAN_INSPECTION, can, is_classic
from sparkring.etl.spark_platform.jvm import plans_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

PLAN_CHARACTERS = 20_000
COLUMNAR, ROW_BY_ROW = {"Parquet", "ORC"}, {"Project", "Filter", "Union"}  # Spark's names


def is_cheap(rows: DataFrame) -> bool:
    """Return whether rows are cheaper to read again than to keep; False where that cannot be known.

    True for columns of Parquet or ORC files, of which a pass reads only those it needs, without windows, Python, random
    numbers, or joins except with a table inside the plan, such as that of the files and their partitions.
    """
    if not can(rows.sparkSession, PLAN_INSPECTION):
        return False
    plan = plans_of(rows).optimizedPlan()
    nodes = [plan]
    for node in nodes:  # grows as it goes
        below = [node.children().apply(number) for number in range(node.children().size())]
        if node.nodeName() == "LogicalRelation":
            relation = node.relation()
            is_files = relation.getClass().getSimpleName() == "HadoopFsRelation"
            if not is_files or relation.fileFormat().toString() not in COLUMNAR:
                return False
        elif node.nodeName() == "Join":
            sides = below
            below = [side for side in sides if side.nodeName() != "LocalRelation"]
            if len(below) == len(sides):
                return False
        elif node.nodeName() not in ROW_BY_ROW:
            return False
        nodes += below
    return bool(plan.deterministic())


def plan_text(rows: DataFrame) -> str:
    """Return Spark's analyzed plan of the views, for the lineage."""
    if is_classic(rows.sparkSession):
        plan = plans_of(rows).analyzed().toString()
    else:
        explained = rows._explain_string(extended=True)  # type: ignore[operator]
        plan = explained.partition("== Analyzed Logical Plan ==")[2].partition("\n== ")[0].lstrip()
    return re.sub(r"#\d+L?", "", plan)[:PLAN_CHARACTERS]
