"""Which texts of a CSV file's column are nulls: words and oddities of that column, and of no other."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sparkring.conf.load import load_config
from sparkring.etl.sources.files import csv_file
from sparkring.etl.sources.files.csv_file import CsvOptions
from sparkring.pipelines.cli import main
from sparkring.pipelines.init.columns import Columns, decide_columns
from sparkring.pipelines.init.remarks import null_lines
from sparkring.pipelines.init.sample import read_sample
from sparkring.pipelines.init.table import decided, look_at
from sparkring.pipelines.init.text_types import FEWEST_VALUES, decide_type

ROWS = 1200
NUMBER = [str(i % 97) for i in range(ROWS)]
AMOUNTS = np.arange(ROWS) % 97
SOME_DAYS = [f"2023-01-{i % 28 + 1:02}" for i in range(ROWS)]


def write(folder: Path, **columns: list[str]) -> str:
    lines = [",".join(columns), *map(",".join, zip(*columns.values(), strict=True))]
    (folder / "rows.csv").write_text("\n".join(lines) + "\n")
    return str(folder / "rows.csv")


def decide(data: str, label: str) -> Columns:
    return decide_columns(read_sample(data), label)


def some(word: str, every: int, others: list[str]) -> list[str]:
    return [word if i % every == 0 else text for i, text in enumerate(others)]


@pytest.mark.parametrize("word", ["NA", "None", "null", "nil", "-", "?", "unknown", "N/A"])
def test_a_word_for_null_of_one_column_takes_no_class_of_another(word: str, tmp_path: Path) -> None:
    """`None` for missing in a number column made the class None null: three classes became two, 1,200 rows 810."""
    kinds = [[word, "x", "y"][i % 3] for i in range(ROWS)]
    data = write(tmp_path, size=some(word, 50, NUMBER), kind=kinds)
    sample, found = read_sample(data), decide(data, "kind")
    assert sample.types == {"size": "bigint", "kind": "string"} and sample.options == {"nulls": {"size": [word]}}
    assert found.label.task == "multiclass" and sample.rows.column("kind").null_count == 0
    assert f"{word!r} is a class of its own, of 400 rows" in found.remarks["kind"]


def test_each_column_has_its_own_word(tmp_path: Path) -> None:
    data = write(tmp_path, a=some("NA", 9, NUMBER), b=some("?", 7, NUMBER), c=some("-", 5, some("NA", 7, NUMBER)))
    sample = read_sample(data)
    assert set(sample.types.values()) == {"bigint"}
    assert sample.options == {"nulls": {"a": ["NA"], "b": ["?"], "c": ["-", "NA"]}}
    assert null_lines(sample, [*sample.types]) == ["'-' is a null in c", "'?' is a null in b", "'NA' is a null in a, c"]


@pytest.mark.parametrize(
    "odd",
    [
        "n.v.",
        " NA",
        "1e400",
        "9007199254740993.0",
        "\u22125",
        "(1.25)",
        "1\u00a0200",
        "Total",
        "12 kg",
        "#REF!",
        "inf.",
    ],
)
def test_a_few_odd_texts_leave_a_column_of_numbers_one_of_numbers(odd: str, tmp_path: Path) -> None:
    """The strongest column was left out as free text, or nearly an id, after it had become the key."""
    texts = [f"{i}.25" for i in range(ROWS)]
    texts[7] = texts[700] = odd
    data = write(tmp_path, x=texts, y=NUMBER)
    sample, found = read_sample(data), decide(data, "y")
    assert sample.types["x"] == "double" and found.features["x"]["kind"] == "numeric" and not found.key
    assert sample.rows.column("x").null_count == 2
    said = "\n".join(decided(sample, found))
    assert (
        f"x: all but 2 of 1,200 are numbers; a null is each {odd!r} (2 rows)" in said
        or f"{odd!r} is a null in x" in said
    )


@pytest.mark.parametrize("kind", ["date", "timestamp", "double", "bigint"])
def test_odd_texts_are_found_beside_values_of_any_type(kind: str) -> None:
    start = datetime(2024, 1, 1, tzinfo=UTC)
    days = {"date": "%Y-%m-%d", "timestamp": "%Y-%m-%d %H:%M:%S"}
    texts = {
        "double": [f"{i}.5" for i in range(40)],
        "bigint": [str(i) for i in range(40)],
    } | {
        name: [(start + timedelta(days=i, seconds=i)).strftime(form) for i in range(40)] for name, form in days.items()
    }
    found = decide_type(dict.fromkeys(texts[kind], 5) | {"later": 1})
    assert (found.kind, found.odd) == (kind, {"later": 1})


@pytest.mark.parametrize(
    ("counts", "kind"),
    [
        ({"1": 50, "2": 50, "3": 50, "A": 10}, "string"),  # codes
        ({str(i): 50 for i in range(FEWEST_VALUES - 5)} | {"A": 5}, "string"),  # codes, of which one is a letter
        ({str(i): 5 for i in range(40)} | {"1.5": 1, "later": 1}, "double"),
        ({str(i): 5 for i in range(FEWEST_VALUES)} | {"A": 50}, "string"),  # too many rows
        ({str(i): 5 for i in range(FEWEST_VALUES)} | {f"A{i}": 1 for i in range(9)}, "string"),  # too many texts
        ({"yes": 50, "no": 50, "Yes": 1}, "boolean"),
        ({"yes": 50, "no": 50, "maybe": 1}, "string"),
        ({"yes": 50, "no": 50, "NA": 1}, "string"),  # classes of their own name
        ({"00123": 50, "10115": 50, "NA": 1}, "string"),  # zip codes
        ({"NA": 50}, "string"),
        ({str(i): 5 for i in range(40)} | {"1.5": 1}, "double"),  # no oddity: a narrower type would lose it
    ],
)
def test_codes_and_answers_stay_what_they_are(counts: dict[str, int], kind: str) -> None:
    assert decide_type(counts).kind == kind


def test_a_rare_word_for_null_in_a_column_of_texts_is_a_null_and_a_frequent_one_a_value() -> None:
    texts = {"red": 500, "blue": 400}
    assert decide_type(texts | {"N/A": 3}).nulls == {"N/A": 3}
    assert decide_type(texts | {"None": 30}).nulls == {}


def test_the_reader_takes_nulls_of_a_column_however_they_are_quoted(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text('a,b,c\nNA,NA,NA\n"NA","NA","NA"\n1,x,?\n')
    options = CsvOptions(nulls={"a": ["NA"], "c": ["NA", "?"]})
    types = {"a": "int", "b": "string", "c": "string"}
    assert csv_file.check(lambda: path.open("rb"), options, types) == []
    (batch,) = csv_file.read(lambda: path.open("rb"), options, types)
    assert batch.to_pydict() == {"a": [None, None, 1], "b": ["NA", "NA", "x"], "c": [None, None, None]}


def test_nulls_of_a_column_that_is_not_declared_are_refused(tmp_path: Path) -> None:
    data = write(tmp_path, a=some("NA", 9, NUMBER), y=NUMBER)
    assert main(["init", "table", "--data", data, "--label", "y", str(tmp_path / "mine")]) == 0
    recipe = tmp_path / "mine" / "recipe.yaml"
    assert load_config(str(recipe)).config.etl.sources["raw"].options.nulls == {"a": ["NA"]}
    recipe.write_text(recipe.read_text().replace("nulls:\n          a:", "nulls:\n          b:"))
    with pytest.raises(Exception, match=r"options\.nulls: 'b' is not in columns; there are \['a', 'y'\]"):
        load_config(str(recipe))


def test_words_that_yaml_reads_as_numbers_are_read_back_as_words(tmp_path: Path) -> None:
    """`1e999` stood bare in the recipe, which its own validation refused."""
    words = ["1e999", "-1E400", "NA", "~", "yes", "0o17", ".nan", "1_000"]
    texts = [f"{i}.25" for i in range(ROWS)]
    texts[: len(words)] = words
    data = write(tmp_path, x=texts, y=NUMBER)
    assert main(["init", "table", "--data", data, "--label", "y", str(tmp_path / "mine")]) == 0
    nulls = load_config(str(tmp_path / "mine" / "recipe.yaml")).config.etl.sources["raw"].options.nulls["x"]
    assert {"1e999", "-1E400", "NA"} <= {*nulls} and all(isinstance(word, str) for word in nulls)


@pytest.mark.parametrize(
    ("classes", "label", "wanted"),
    [
        ([5, 10], "CAST(`y` AS string)", ["5", "10"]),
        ([2.5, 10.5], "CAST(`y` AS string)", ["2.5", "10.5"]),
        ([-2, -1], "CAST(`y` AS string)", ["-2", "-1"]),
        ([0.0, 1.0, 2.0], "CAST(CAST(`y` AS bigint) AS string)", ["0", "1", "2"]),
        ([9, 10, 100, 1000], "CAST(`y` AS string)", ["9", "10", "100", "1000"]),
        (["stay", "churn"], "`y`", ["churn", "stay"]),
    ],
)
def test_classes_that_are_numbers_are_sorted_by_value_and_the_recipe_lists_them(
    classes: list[Any], label: str, wanted: list[str], tmp_path: Path
) -> None:
    """Of 5 and 10 the positive class was 5, and each prediction the complement of every other library's."""
    rows = {"x": np.arange(ROWS) % 97 / 2, "y": [classes[i % len(classes)] for i in range(ROWS)]}
    pq.write_table(pa.table(rows), tmp_path / "rows.parquet")
    found = decide(str(tmp_path / "rows.parquet"), "y").label
    assert found.columns == {"y": label} and found.classes == wanted
    assert found.task == ("binary" if len(classes) == 2 else "multiclass")
    assert (f"prediction is the probability of {wanted[-1]}" in found.why) == (len(classes) == 2)


@pytest.mark.parametrize(
    ("name", "values", "why"),
    [
        ("created_at", 1_700_000_000 + 977 * np.arange(ROWS), "seconds since 1970; timestamp_seconds(`created_at`)"),
        ("event_time", 1_700_000_000_000 + 977 * np.arange(ROWS), "milliseconds since 1970; timestamp_millis("),
        ("date", 40_000.0 + np.arange(ROWS) % 900, "dates of a spreadsheet; date_add(DATE '1899-12-30'"),
        ("price", 1_700_000_000 + 977 * np.arange(ROWS), ""),
        ("t", 1_700_000_000_000 + 977 * np.arange(ROWS), "milliseconds since 1970; timestamp_millis("),
        ("compact", 20240100 + np.arange(ROWS) % 28 + 1, "dates as 20240131; to_date(CAST("),
        ("compact", 20240100 + np.arange(ROWS) % 99, ""),
        ("d", [f"{i % 28 + 1}.02.2024" if i % 99 else "TBD" for i in range(ROWS)], "try_to_timestamp("),
        ("day", [f"{i % 12 + 1}/{i % 28 + 1}/2023 1:30 PM" for i in range(ROWS)], "times with AM or PM"),
        ("t", [f"{day} 10:00:00.{i:09}" for i, day in enumerate(SOME_DAYS)], "more than six digits of a second"),
        ("t", [day if i % 2 else f"13/{i % 12 + 1}/2023" for i, day in enumerate(SOME_DAYS)], "several forms"),
        ("t", [day if i % 2 else f"13/13/{i % 99}" for i, day in enumerate(SOME_DAYS)], ""),
        ("tag", [["churn", "churn ", "Churn", "no"][i % 4] for i in range(ROWS)], "differ in case or blanks alone"),
        ("n", [f"{i}.5" if i % 100 else "later" for i in range(ROWS)], "all but 12 of 1,200 are numbers: 'later'"),
    ],
)
def test_what_is_written_in_another_way_is_said_with_its_sql(name: str, values: Any, why: str, tmp_path: Path) -> None:
    """Each was a category, an amount or left out, without a word."""
    pq.write_table(pa.table({name: values, "x": np.arange(ROWS) % 97 / 2, "y": AMOUNTS}), tmp_path / "rows.parquet")
    found = decide(str(tmp_path / "rows.parquet"), "y")
    said = found.remarks.get(name, "") + found.left_out.get(name, "")
    assert why in said if why else "in the view" not in said


def test_classes_in_two_spellings_are_said(tmp_path: Path) -> None:
    data = write(tmp_path, x=NUMBER, y=[["churn", "churn ", "stay"][i % 3] for i in range(ROWS)])
    found = decide(data, "y")
    assert "'churn' and 'churn ' differ in case or blanks alone" in "\n".join(look_at(read_sample(data), found))


@pytest.mark.parametrize("form", ["parquet", "csv"])
def test_the_zone_of_hours_is_said_where_the_file_has_another(form: str, tmp_path: Path) -> None:
    moments = [datetime(2023, 1, 1, tzinfo=UTC) + timedelta(hours=i) for i in range(ROWS)]
    data = str(tmp_path / "rows.parquet")
    if form == "parquet":
        at = pa.array(moments, pa.timestamp("us", "America/New_York"))
        pq.write_table(pa.table({"at": at, "y": AMOUNTS}), data)
    else:
        data = write(tmp_path, at=[f"{m:%Y-%m-%d %H:%M:%S}-05:00" for m in moments], y=NUMBER)
    zone = {"parquet": "America/New_York", "csv": "-05:00"}[form]
    assert f"from_utc_timestamp(`at`, '{zone}')" in decide(data, "y").remarks["at"]


@pytest.mark.parametrize(
    ("texts", "sql"),
    [
        (["(1.25)", "(7)"], "CAST(concat(IF(`a` RLIKE"),
        (["\u22121.25"], "CAST(concat(IF(`a` RLIKE"),
        (["$5", "$7.25"], "CAST(regexp_replace(`a`, '[^0-9.-]', '') AS double)"),
        (["1'234"], "CAST(regexp_replace(`a`, '[^0-9.-]', '') AS double)"),
        (["n.v.", "ask Anna"], ""),
        (["(1.25)", "n.v."], ""),
        (["5 kg"], ""),  # the others may be of another unit
    ],
)
def test_the_sql_is_said_that_reads_numbers_among_others_that_are_written_otherwise(
    tmp_path: Path, texts: list[str], sql: str
) -> None:
    data = write(tmp_path, a=[*texts, *NUMBER[len(texts) :]], y=["u", "v"] * (ROWS // 2))
    (line,) = null_lines(read_sample(data), ["a"])
    assert f"a: all but {len(texts)} of 1,200 are whole numbers" in line
    assert (f"; as string in columns, {sql}" in line) if sql else "in columns" not in line


@pytest.mark.parametrize("words", [("Yes", "No"), ("yes", "no"), ("Y", "N"), ("t", "f"), ("TRUE", "no")])
def test_classes_have_the_words_of_the_file(tmp_path: Path, words: tuple[str, str]) -> None:
    data = write(tmp_path, a=NUMBER, y=some("NA", 9, [words[i % 2] for i in range(ROWS)]))
    sample, found = read_sample(data), decide(data, "y")
    assert sample.types["y"] == "string" and sample.options == {"nulls": {"y": ["NA"]}}
    assert found.label.task == "binary" and sorted(found.label.classes) == sorted(words)
    assert f"two values: {', '.join(sorted(words))}" in found.label.why


@pytest.mark.parametrize("words", [("true", "false"), ("True", "False"), ("Yes", "no", "NO", "yes", "y")])
def test_booleans_of_their_own_words_or_of_several_spellings_stay_booleans(
    tmp_path: Path, words: tuple[str, ...]
) -> None:
    data = write(tmp_path, a=NUMBER, y=[words[i % len(words)] for i in range(ROWS)])
    assert read_sample(data).types["y"] == "boolean" and decide(data, "y").label.task == "binary"
