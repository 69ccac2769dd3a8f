"""The edges of splits by hash, their names and order. Splits of rows: tests/spark/test_etl_checks.py."""

import pytest

from sparkring.conf.blocks.etl import SplitConfig, share_edges
from sparkring.etl.errors import EtlError
from sparkring.etl.split import check_splits, split_names


def test_shares_become_edges_of_a_million_buckets():
    assert share_edges([0.7, 0.1, 0.2]) == [700_000, 800_000, 1_000_000]
    assert share_edges([1 / 3] * 3) == [333_333, 666_667, 1_000_000]


def test_splits_are_stored_in_the_order_of_the_recipe_with_train_first():
    assert split_names(SplitConfig(kind="time", column="t", boundaries={"valid": "2024-01-01"})) == ["train", "valid"]
    counts = check_splits({"b": 1, "a": 2, "train": 3}, SplitConfig(kind="column", column="s"))
    assert list(counts) == ["train", "a", "b"]


def test_a_split_whose_name_could_not_be_a_files_name_is_refused():
    with pytest.raises(EtlError, match=r"'a/b' names no split"):
        check_splits({"train": 1, "a/b": 1}, SplitConfig(kind="column", column="s"))


def test_empty_splits_are_named():
    with pytest.raises(EtlError, match="valid, test got no rows"):
        check_splits({"train": 5}, SplitConfig())
    with pytest.raises(EtlError, match="no row says `train`"):
        check_splits({"test": 5}, SplitConfig(kind="column", column="s"))
