"""Spark's JVM, and all else that sessions of Spark Connect lack, is touched in one folder."""

from __future__ import annotations

import re
from pathlib import Path

from tests.ci.test_docs import ROOT

PRIVATE = re.compile(
    r"\b(?:sparkContext|SparkContext\b(?!\.was)|_jvm|_jsparkSession|_jsc|_jdf|_jconf|_java_resource_profile)\b"
    r"|\.rdd\b|\b(?:from|import) py4j|\brepartitionById\b|\bis_valid_utf8\b|\.toArrow\(|\bconf\.getAll\b|\bfromDDL\b"
)
HOME = ROOT / "etl/spark_platform"


def uses(text: str) -> list[str]:
    code = [line for line in text.splitlines() if "re.search(" not in line]
    return [line.strip() for line in code if PRIVATE.search(line)]


def test_the_jvm_is_touched_in_one_folder() -> None:
    files = [path for package in ("etl", "pipelines") for path in (ROOT / package).rglob("*.py")]
    found = {str(path.relative_to(ROOT)): uses(path.read_text()) for path in files if HOME not in path.parents}
    assert {path: lines for path, lines in found.items() if lines} == {}
    assert any(uses(path.read_text()) for path in HOME.rglob("*.py"))


def test_functions_are_those_of_the_objects_not_of_classes_that_connect_has_others_of() -> None:
    """Of Spark 3.5, `pyspark.sql.DataFrame` and `Column` are the classic ones: reduce(Column.__or__, ...) failed."""
    taken = re.compile(r"[(,=] ?(?:DataFrame|Column|Expression|SparkColumn)\.[a-z_]")
    code = [path.read_text() for package in ("etl", "pipelines") for path in (ROOT / package).rglob("*.py")]
    assert [line for text in code for line in text.splitlines() if taken.search(line)] == []
    assert taken.search("reduce(DataFrame.union, counts)")


def test_the_check_finds_what_it_is_for() -> None:
    assert uses("a = spark.sparkContext\nb = rows.rdd\nc = query._jdf\nd = jvm_of(spark)\n") == [
        "a = spark.sparkContext",
        "b = rows.rdd",
        "c = query._jdf",
    ]


def test_what_a_session_may_lack_has_one_name_each() -> None:
    from sparkring.etl.spark_platform.capabilities import EVERY

    assert len({each.name for each in EVERY}) == len(EVERY)
    used = "\n".join(path.read_text() for path in Path(ROOT / "etl").rglob("*.py"))
    named = re.findall(r"^([A-Z_]+) = Capability\(", (HOME / "capabilities.py").read_text(), re.M)
    assert [name for name in named if not re.search(rf"\bcan\([^)]*\b{name}\b", used)] == []
