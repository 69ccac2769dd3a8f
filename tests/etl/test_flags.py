"""Several label columns: what is counted of them, and what is refused or named."""

from __future__ import annotations

import pyarrow as pa
import pytest

from sparkring.conf.manifest import Column
from sparkring.etl.checks import RULE
from sparkring.etl.classes import fit_label
from sparkring.etl.errors import EtlError
from sparkring.etl.flags import check_flags, fit_flags, odd_rows, ones, several_labels
from sparkring.etl.split import SPLIT

LABELS = ["a", "b"]
COLUMNS = [Column(name="x", dtype="float32"), *(Column(name=name, dtype="int64", role="label") for name in LABELS)]


def counted(**changes: list[int]) -> pa.Table:
    """Two buckets of train, one of test, and rows that a check has refused."""
    zeros = dict.fromkeys(["__one_0", "__odd_0", "__null_label_0", "__one_1", "__odd_1", "__null_label_1"], [0] * 4)
    return pa.table({RULE: [None, None, None, 0], SPLIT: ["train", "train", "test", "valid"]} | zeros | changes)


def test_rows_of_1_are_counted_by_split_and_label_without_refused_rows() -> None:
    table = counted(__one_0=[3, 2, 1, 9], __odd_1=[0, 1, 1, 7])
    assert ones(LABELS, table) == {"train": {"a": 5, "b": 0}, "test": {"a": 1, "b": 0}}
    assert odd_rows(LABELS, table) == {"a": 0, "b": 2}
    check_flags(LABELS, counted(__null_label_1=[0, 0, 0, 5]))


def test_rows_without_a_label_are_named_with_the_check_that_leaves_them_out() -> None:
    with pytest.raises(EtlError, match=r"etl.label: 'b' is null in 3 rows; .*sql: b IS NOT NULL, level: row"):
        check_flags(LABELS, counted(__null_label_1=[0, 1, 2, 5]))


def test_the_state_has_the_labels_in_their_order() -> None:
    counts = {"train": {"a": 4, "b": 2}, "test": {"a": 1, "b": 0}}
    state = fit_flags(COLUMNS, counts, {"b": 0})
    values = {"values": LABELS, "counts": {"test": [1, 0], "train": [4, 2]}, "odd": {"a": 0, "b": 0}}
    assert state == {"flags": values}


def test_one_label_is_not_several_and_texts_are_none_of_several() -> None:
    assert several_labels(COLUMNS[:2]) == [] and fit_flags(COLUMNS[:2], {}, {}) == {}
    text = Column(name="kind", dtype="string", role="label", logical="string")
    with pytest.raises(EtlError, match=r"etl.label = \['a', 'kind'\]: 'kind' is string; of several labels each"):
        several_labels([COLUMNS[1], text])
    day = Column(name="day", dtype="int32", role="label", logical="date")
    with pytest.raises(EtlError, match=r"'day' is date; of several labels each is a number or a boolean"):
        several_labels([COLUMNS[1], day])


def test_the_state_of_tags_has_those_of_all_splits() -> None:
    tags = [Column(name="tags", dtype="string", layout="ragged", role="label", logical="array<string>")]
    counts = {"train": {"k": 4, "l": 2}, "test": {"m": 1}}
    (state,) = fit_label(tags, counts, None)["labels"]
    assert (state["kind"], state["values"]) == ("tags", ["k", "l", "m"])
    assert state["counts"] == {"train": [4, 2, 0], "test": [0, 0, 1]}
    with pytest.raises(EtlError, match=r"etl.label = 'tags': no row has a tag"):
        fit_label(tags, {}, None)
