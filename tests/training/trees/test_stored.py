"""A file of trees is read as XGBoost writes it, and refused before XGBoost sees what it would follow anywhere."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
import xgboost

from sparkring.training.trees.stored import read_stored

ROWS = np.column_stack(
    [np.random.default_rng(0).standard_normal(300), np.random.default_rng(1).integers(0, 6, 300)]
).astype(np.float32)
LABELS = np.random.default_rng(2).integers(0, 3, 300)


def grown(labels: np.ndarray, rounds: int = 3, **params: Any) -> bytes:
    data = xgboost.DMatrix(ROWS, labels, feature_names=["a", "b"], feature_types=["q", "c"], enable_categorical=True)
    return bytes(xgboost.train({"max_depth": 3, "nthread": 1} | params, data, rounds).save_raw("ubj"))


CLASSES = grown(LABELS, objective="multi:softprob", num_class=3)


def overwritten(key: str, at: int, value: int, code: str = ">i") -> bytes:
    """The file with one number of the first tree's array `key` changed."""
    begin = CLASSES.index(key.encode() + b"[$") + len(key) + 4 + 1 + 8 + at * struct.calcsize(code)
    return CLASSES[:begin] + struct.pack(code, value) + CLASSES[begin + struct.calcsize(code) :]


@pytest.mark.parametrize(
    ("labels", "params", "groups"),
    [
        (LABELS > 1, {"objective": "binary:logistic"}, 1),
        (LABELS, {"objective": "multi:softprob", "num_class": 3}, 3),
        (np.column_stack([LABELS > 1, LABELS > 0]), {"objective": "binary:logistic"}, 2),
        (LABELS, {"objective": "count:poisson"}, 1),
        (LABELS, {"objective": "reg:squarederror", "gamma": 9.0, "max_depth": 9}, 1),
        (LABELS, {"objective": "reg:squarederror", "gamma": 9.0, "tree_method": "exact", "max_cat_to_onehot": 9}, 1),
    ],
)
def test_what_the_library_writes_is_read(labels: np.ndarray, params: dict[str, Any], groups: int) -> None:
    if params.get("tree_method") == "exact":  # it knows no categories, and deletes the nodes that it prunes
        data = xgboost.DMatrix(ROWS, labels, feature_names=["a", "b"], feature_types=["q", "q"])
        found = read_stored(bytes(xgboost.train(params, data, 3).save_raw("ubj")))
        assert found.types == ["q", "q"]
        return
    found = read_stored(grown(labels.astype(float), **params))
    assert (found.names, found.types, found.objective) == (["a", "b"], ["q", "c"], params["objective"])
    assert found.groups == groups


def test_a_model_without_trees_and_its_first_rounds_are_read() -> None:
    data = xgboost.DMatrix(ROWS, LABELS, feature_names=["a", "b"], feature_types=["q", "c"], enable_categorical=True)
    params = {"objective": "multi:softprob", "num_class": 3}
    assert read_stored(bytes(xgboost.Booster(params, [data]).save_raw("ubj"))).groups == 3
    assert read_stored(bytes(xgboost.train(params, data, 5)[:2].save_raw("ubj"))).groups == 3


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (overwritten("left_children", 1, 0), "child of two"),  # a cycle
        (overwritten("left_children", 0, 4000), "a child outside"),
        (overwritten("right_children", 0, -7), "a child outside"),
        (overwritten("left_children", 0, -1), "a node with one child"),
        (overwritten("right_children", 0, 1), "child of two"),
        (overwritten("parents", 1, 2), "child of two, or of another"),
        (overwritten("parents", 0, 2), "its root has the parent"),
        (overwritten("split_indices", 0, 10**6), "a split by a column outside 0 to 1"),
        (overwritten("split_indices", 0, -1), "a split by a column outside 0 to 1"),
        (overwritten("categories", 0, 1 << 30), r"categor(y|ies) where"),
        (overwritten("categories_nodes", 0, 90), "categories of nodes"),
        (overwritten("categories_segments", 0, 1 << 40, ">q"), "next to those"),
        (overwritten("categories_sizes", 0, 1 << 40, ">q"), "next to those"),
        (CLASSES.replace(b"idi\x01", b"idi\x09", 1), "tree 1 has the id 9"),
        (CLASSES.replace(b"i\x00i\x01i\x02", b"i\x00i\x01i\x07", 1), "a tree for output 7 of 3"),
        (CLASSES.replace(b"\x011", b"\x014", 1), "are not those of"),  # num_parallel_tree
        (CLASSES.replace(b"\x0bnum_featureSL" + bytes(7) + b"\x012", b"\x0bnum_featureSL" + bytes(7) + b"\x019"), "9"),
        (CLASSES.replace(b"num_classSL" + bytes(7) + b"\x013", b"num_classSL" + bytes(7) + b"\x019"), "9 outputs"),
        (CLASSES.replace(b"\x06gbtree", b"\x06gbline", 1), "booster"),
        (CLASSES.replace(b"split_type", b"split_typo", 1), "missing or unknown"),
        (CLASSES.replace(b"attributes", b"attribules", 1), "unknown parts .*upgrade"),
        (CLASSES[:-100], "cut"),
        (CLASSES + b"x", "1 bytes after its end"),
        (b"{L" + (1 << 62).to_bytes(8) + b"a", "cut"),
        (b"{L" + (-5).to_bytes(8, signed=True) + b"a", "a length of -5"),
        (b'{"learner": {}}', "marker"),
        (b"[#L" + (1 << 40).to_bytes(8), "an array of"),
        ((b"[#L" + (1).to_bytes(8)) * 5000, "deep"),
        (b"", "cut"),
        (b"[#L" + bytes(8), "TypeError"),
    ],
)
def test_what_the_library_would_follow_out_of_bounds_is_refused(data: bytes, why: str) -> None:
    assert data != CLASSES
    with pytest.raises(ValueError, match=why):
        read_stored(data)
