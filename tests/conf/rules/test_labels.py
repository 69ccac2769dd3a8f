"""The label and the task: which labels a recipe may have, and what each task says of those that it cannot have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from sparkring.conf.blocks.etl import EtlConfig
from sparkring.conf.config import RunConfig
from sparkring.conf.manifest import Column
from sparkring.conf.rules.dataset import label_problems, label_range_problem
from sparkring.conf.rules.foreseen import foreseen_problems

SOURCE = {"path": "t", "format": "parquet", "columns": {"x": "double", "a": "bigint", "b": "bigint", "c": "bigint"}}
FLAGS = [Column(name=name, dtype="int64", role="label") for name in ("a", "b", "c")]
TAGS = [Column(name="tags", dtype="string", layout="ragged", role="label", logical="array<string>")]
TEXT = [Column(name="kind", dtype="string", role="label", logical="string")]


def etl(**keys: Any) -> dict[str, Any]:
    return {"sources": {"t": SOURCE}, "rows": "t", "features": {"x": {"kind": "numeric"}}} | keys


def recipe(task: str, label: str | None = None, **blocks: Any) -> RunConfig:
    dataset = {} if "etl" in blocks else {"dataset": "somewhere"}
    given = {"name": "mine", "model": {"task": task, "label": label} | blocks.pop("model", {})}
    return RunConfig.model_validate(given | dataset | blocks)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"label": ["a"]}, r"a list names two columns or more, each once; one label is its name alone"),
        ({"label": ["a", "a"]}, r"a list names two columns or more"),
        ({"label": ["a", "b"], "classes": ["k", "l"]}, r"classes: of several labels, none is of texts"),
        ({"label": ["a", "x"]}, r"features.x: is a label too; a column has one role"),
        ({"label": "x"}, r"features.x: is the label too; a column has one role"),
        ({"label": ["a", "b"], "keep": ["B"]}, r"'B' and 'b' are one name"),
        ({"label": ["a", "b"], "features": {"f": {"kind": "numeric", "column": "b"}}}, r"features.f: reads the label"),
    ],
)  # fmt: skip
def test_lists_of_labels_that_are_none_are_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EtlConfig.model_validate(etl() | keys)


def test_one_label_and_several_are_named_alike() -> None:
    for label, labels in (("a", ["a"]), (["a", "b"], ["a", "b"]), (None, [])):
        assert EtlConfig.model_validate(etl(label=label)).labels == labels


@pytest.mark.parametrize(
    ("label", "weight", "task", "chosen", "expected"),
    [
        (["a", "b"], None, "multilabel", None, None),
        (["a", "b"], None, "own:Task", None, None),
        (["a", "b"], None, "binary", "b", None),
        (["a", "b"], None, "binary", None, "model.task = 'binary': it has one label, and etl.label lists ['a', 'b']"),
        (None, None, "multilabel", None, "etl.label: model.task = 'multilabel' needs a label column"),
        (["a", "b"], "c", "multilabel", "c", "model.label = 'c': is etl.weight too"),
    ],
)  # fmt: skip
def test_what_a_task_needs_of_labels_is_known_from_the_recipe(
    label: Any, weight: str | None, task: str, chosen: str | None, expected: str | None
) -> None:
    config = recipe(task, chosen, etl=etl(label=label, weight=weight))
    found = list(foreseen_problems(config))
    assert found == [] if expected is None else any(problem.startswith(expected) for problem in found)


def flags(**odd: int) -> dict[str, Any]:
    return {"flags": {"values": ["a", "b", "c"], "counts": {}, "odd": odd}}


def texts(kind: str, *values: str) -> dict[str, Any]:
    return {"labels": [{"name": "kind", "kind": kind, "column": "kind", "values": [*values], "counts": {}}]}


@pytest.mark.parametrize(
    ("config", "columns", "features", "expected"),
    [
        (recipe("multilabel"), FLAGS, flags(), ""),
        (recipe("multilabel"), FLAGS, flags(a=0, b=3), "3 rows have a label 'b' other than 0 and 1"),
        (recipe("multilabel"), FLAGS, {}, ""),
        (recipe("own:Task"), FLAGS, flags(b=3), ""),
        (recipe("multiclass"), FLAGS, flags(), "'multiclass': it has one label, and there are ['a', 'b', 'c']"),
        (recipe("binary", "b"), FLAGS, flags(), ""),
        (recipe("multilabel", "b"), FLAGS, flags(), "there is one label, 'b'; list several columns"),
        (recipe("multilabel", model={"args": {"outputs": 2}}), FLAGS, flags(), "outputs = 2: there are 3 labels"),
        (recipe("multilabel", model={"args": {"outputs": 2}, "factory": "own:M"}), FLAGS, flags(), ""),
        (recipe("multilabel"), TAGS, texts("tags", "k", "l"), ""),
        (recipe("multilabel"), TAGS, texts("tags"), ""),
        (recipe("multilabel"), TAGS, texts("tags", "k"), "the label 'tags' has the tag 'k' only"),
        (recipe("binary"), TAGS, texts("tags", "k", "l"), "'tags' is an array of texts; set model.task to multilabel"),
        (recipe("multilabel", data={"reader": "petastorm"}), TAGS, texts("tags", "k", "l"), "it reads no tags"),
        (recipe("multilabel"), TEXT, texts("classes", "k", "l"), "the label 'kind' is text, one class per row"),
        (recipe("binary"), TEXT, texts("classes", "k", "l", "m"), "is text of 3 classes (k, l, m); set model."),
        (recipe("multiclass"), TEXT, texts("classes", "k", "l"), "outputs = 1: the label 'kind' has 2 classes"),
        (recipe("regression"), TEXT, texts("classes", "k", "l"), "is text, a class and no number"),
    ],
)  # fmt: skip
def test_a_task_that_is_not_for_the_label_is_named_with_the_remedy(
    config: RunConfig, columns: Sequence[Column], features: dict[str, Any], expected: str
) -> None:
    found = label_problems(config, columns, features)
    assert found == [] if not expected else len(found) == 1 and expected in found[0]


TABULAR = {"factory": "sparkring.training.models.tabular:Tabular"}


@pytest.mark.parametrize(
    ("task", "low", "high", "model", "expected"),
    [
        ("binary", 0.0, 1.0, TABULAR, ""),
        ("binary", 0.0, 0.0, TABULAR, ""),
        ("binary", 0.0, 2.0, TABULAR, "has values from 0 to 2, and binary has 0 and 1; set model.task to regression"),
        ("binary", -1.0, 1.0, TABULAR, "has values from -1 to 1, and binary has 0 and 1"),
        ("multiclass", 0.0, 2.0, TABULAR | {"args": {"outputs": 3}}, ""),
        ("multiclass", 0.0, 3.0, TABULAR | {"args": {"outputs": 3}}, "model.args.outputs is 3; set it to 4, or make"),
        ("multiclass", 1.0, 3.0, TABULAR, "and model.args.outputs is 1; set it to 4, or make texts of them"),
        ("multiclass", 0.0, 9.0, {"factory": "mine:Net"}, ""),
        ("multiclass", 0.0, 9.5, {"factory": "mine:Net"}, "from 0 to 9.5, and classes are whole numbers from 0"),
        ("multiclass", 0.5, 9.0, {"factory": "mine:Net"}, "and classes are whole numbers from 0"),
        ("multiclass", -1.0, 9.0, {"factory": "mine:Net"}, "CAST(y AS string) in the SQL"),
        ("poisson", 0.0, 9.5, TABULAR, ""),
        ("poisson", -0.5, 9.0, TABULAR, "from -0.5 to 9, and counts and rates are at least 0; set model.task to"),
        ("regression", -0.5, 9.0, TABULAR, ""),
    ],
)  # fmt: skip
def test_numbers_that_are_no_labels_of_the_task_are_refused(
    task: str, low: float, high: float, model: dict[str, Any], expected: str
) -> None:
    found = label_range_problem(recipe(task, model=model), "y", low, high)
    assert expected in found and bool(found) == bool(expected)
