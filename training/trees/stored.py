"""What a file of trees holds, read and checked before XGBoost parses it: its parser trusts every index in the file.

The file is UBJSON (https://ubjson.org) as XGBoost writes it, with one way to write each value; a file that says a thing
in another way, or holds what these versions do not write, is refused.
"""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from sparkring.conf.plain_text import count_of

Ints = NDArray[np.int64]
NUMBERS = {"i": "b", "U": "B", "I": "h", "l": "i", "L": "q", "d": "f", "D": "d"}
"""UBJSON's marker of a number -> struct's and numpy's code; in the file the largest byte is first."""
DEEPEST_VALUE, DEEPEST_TREE = 16, 1000
MOST_GROUPS, MOST_CATEGORY = 1 << 16, 1 << 24  # XGBoost's own bound of categories
MOST_CATEGORY_BITS = 1 << 33  # a split has a bit for each category up to its largest
NO_PARENT = 2**31 - 1
LEARNER = {"attributes", "feature_names", "feature_types", "gradient_booster", "learner_model_param", "objective"}
OF_NODES = {
    "base_weights": "f", "default_left": "u", "left_children": "i", "loss_changes": "f", "parents": "i",
    "right_children": "i", "split_conditions": "f", "split_indices": "i", "split_type": "u", "sum_hessian": "f",
}  # fmt: skip
"""Array with a value for each node of a tree -> its kind of number, as numpy calls it."""
CATEGORIES = ("categories", "categories_nodes", "categories_segments", "categories_sizes")


@dataclass(frozen=True)
class StoredTrees:
    """What a file says of its trees. groups: outputs that trees are added up to, classes or labels."""

    names: list[str]
    types: list[str]
    objective: str
    groups: int


def read_stored(data: bytes) -> StoredTrees:
    """Read a file of trees. ValueError says what XGBoost could not have written, or could not follow."""
    reader = _Reader(data)
    content = reader.value()
    if reader.at != len(data):
        raise ValueError(f"{len(data) - reader.at} bytes after its end")
    try:
        return _checked(content)
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error


class _Reader:
    """Reads UBJSON from `at`."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def value(self, depth: int = 0) -> Any:
        if depth > DEEPEST_VALUE:
            raise ValueError(f"values within values, over {DEEPEST_VALUE} deep")
        marker = self._marker()
        if marker == "{":
            return self._object(depth)
        if marker == "[":
            return self._array(depth)
        if marker == "S":
            return self._text()
        if marker in NUMBERS:
            return struct.unpack(">" + NUMBERS[marker], self._take(struct.calcsize(NUMBERS[marker])))[0]
        if marker in "TF":
            return marker == "T"
        self._refuse(marker)

    def _object(self, depth: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        while self.data[self.at : self.at + 1] != b"}":
            key = self._text()
            if key in found:
                raise ValueError(f"{key!r} is there twice")
            found[key] = self.value(depth + 1)
        self.at += 1
        return found

    def _array(self, depth: int) -> Any:
        marker = self._marker()
        kind = self._marker() if marker == "$" else None
        if kind is not None:
            marker = self._marker()
        if marker != "#" or (kind is not None and kind not in NUMBERS):
            self._refuse(marker if kind is None else kind)
        count = self._length()
        if kind is None:
            if count > len(self.data) - self.at:
                raise ValueError(f"an array of {count} values, and {len(self.data) - self.at} bytes left")
            return [self.value(depth + 1) for _ in range(count)]
        dtype = np.dtype(NUMBERS[kind]).newbyteorder(">")
        return np.frombuffer(self._take(count * dtype.itemsize), dtype).astype(NUMBERS[kind])

    def _text(self) -> str:
        return self._take(self._length()).decode()

    def _length(self) -> int:
        if (marker := self._marker()) != "L":
            self._refuse(marker)
        count = int.from_bytes(self._take(8), signed=True)
        if count < 0:
            raise ValueError(f"a length of {count}")
        return count

    def _marker(self) -> str:
        return chr(self._take(1)[0])

    def _take(self, count: int) -> bytes:
        if count > len(self.data) - self.at:
            raise ValueError(f"cut: {count} bytes are to follow byte {self.at} of {len(self.data)}")
        self.at += count
        return self.data[self.at - count : self.at]

    def _refuse(self, marker: str) -> NoReturn:
        raise ValueError(f"marker {marker!r} before byte {self.at}, where XGBoost writes another")


def _checked(content: Any) -> StoredTrees:
    learner, booster = content["learner"], content["learner"]["gradient_booster"]
    names, types, param = learner["feature_names"], learner["feature_types"], learner["learner_model_param"]
    if unknown := sorted((learner.keys() - LEARNER) | (booster.keys() - {"model", "name"})):
        raise ValueError(f"unknown parts {unknown}; a newer XGBoost may have written it: upgrade sparkring")
    if booster["name"] != "gbtree" or set(map(type, [*names, *types])) - {str} or len(names) != len(types):
        raise ValueError(f"booster {booster['name']!r} with columns named {names[:20]}, of types {types[:20]}")
    if _number(param["num_feature"]) != len(names):
        raise ValueError(f"num_feature = {param['num_feature']}, and {count_of(len(names), 'column has')} a name")
    groups = max(1, _number(param["num_class"]), _number(param["num_target"]))
    scores = json.loads(param["base_score"])
    scores = scores if isinstance(scores, list) else [scores]
    if groups > MOST_GROUPS or len(scores) not in (1, groups) or not all(map(math.isfinite, scores)):
        raise ValueError(f"base_score has {count_of(len(scores), 'number')} for {count_of(groups, 'output')}")
    objective = learner["objective"]
    if int(objective.get("softmax_multiclass_param", param)["num_class"]) != int(param["num_class"]):
        raise ValueError(f"num_class = {param['num_class']}, of the objective {objective['softmax_multiclass_param']}")
    _check_model(booster["model"], groups, [kind == "c" for kind in types])
    return StoredTrees(names, types, objective["name"], groups)


def _check_model(model: dict[str, Any], groups: int, is_category: list[bool]) -> None:
    trees, info, rounds = model["trees"], _ints(model["tree_info"]), _ints(model["iteration_indptr"])
    known = {"cats", "gbtree_model_param", "iteration_indptr", "tree_info", "trees"}
    if unknown := sorted(model.keys() - known) or any(map(len, model.get("cats", {}).values())):
        raise ValueError(f"a model with {unknown if isinstance(unknown, list) else 'categories by name'}")
    param = {key: _number(value) for key, value in model["gbtree_model_param"].items()}
    each = groups * param["num_parallel_tree"]
    if not each or param["num_trees"] != len(trees) or len(info) != len(trees):
        raise ValueError(f"{count_of(len(trees), 'tree')}, outputs of {len(info)}, where {param} are to be")
    if len(rounds) != len(trees) // each + 1 or (rounds != each * np.arange(len(rounds))).any() or len(trees) % each:
        raise ValueError(f"{count_of(len(trees), 'tree')} for {count_of(groups, 'output')} are not those of rounds")
    if ((info < 0) | (info >= groups)).any():
        raise ValueError(f"a tree for output {int(info.max())} of {groups}")
    bits = 0
    for number, tree in enumerate(trees):
        if tree["id"] != number:
            raise ValueError(f"tree {number} has the id {tree['id']}")  # by which XGBoost places it
        try:
            bits += _check_tree(tree, np.array(is_category, bool))
        except ValueError as error:
            raise ValueError(f"tree {number}: {error}") from error
        if bits > MOST_CATEGORY_BITS:
            raise ValueError(f"tree {number}: its categories, and those before, need over {MOST_CATEGORY_BITS} bits")


def _check_tree(tree: dict[str, Any], is_category: NDArray[np.bool_]) -> int:
    """Check one tree; returns the bits of its categories in memory. is_category: (columns,)."""
    if unknown := sorted(tree.keys() ^ {*OF_NODES, *CATEGORIES, "id", "tree_param"}):
        raise ValueError(f"parts {unknown} are missing or unknown")
    param = {key: _number(value) for key, value in tree["tree_param"].items()}
    nodes = param["num_nodes"]
    if param["num_feature"] != len(is_category) or param["size_leaf_vector"] > 1 or not nodes:
        raise ValueError(f"{param} in a model of {count_of(len(is_category), 'column')}")
    for name, kind in OF_NODES.items():
        values = tree[name]
        if not isinstance(values, np.ndarray) or values.dtype.kind != kind or len(values) != nodes:
            raise ValueError(f"{name} has not one number for each of {nodes} nodes")
    splits, reached = _follow(tree, nodes)
    if nodes - reached != param["num_deleted"]:
        raise ValueError(f"{nodes - reached} of {nodes} nodes are not reached, {param['num_deleted']} are deleted")
    columns, coded = tree["split_indices"][splits], tree["split_type"][splits]
    if ((columns < 0) | (columns >= len(is_category))).any():
        raise ValueError(f"a split by a column outside 0 to {len(is_category) - 1}")
    if (coded != is_category[columns]).any():
        raise ValueError("a split by categories of a column of numbers, or by a number of one of categories")
    return _check_categories(tree)


def _follow(tree: dict[str, Any], nodes: int) -> tuple[Ints, int]:
    """Follow the children from the root, a level at a time; the splits, and how many nodes were reached."""
    left, right, parents = (_ints(tree[name]) for name in ("left_children", "right_children", "parents"))
    seen, level, splits = np.zeros(nodes, bool), np.zeros(1, np.int64), list[Ints]()
    seen[0] = True
    if parents[0] != NO_PARENT:
        raise ValueError(f"its root has the parent {parents[0]}")
    for _ in range(DEEPEST_TREE):
        is_leaf = left[level] == -1
        if (right[level[is_leaf]] != -1).any():
            raise ValueError("a node with one child")
        inner = level[~is_leaf]
        if not len(inner):
            return np.concatenate([*splits, inner]), int(seen.sum())
        level = np.concatenate([left[inner], right[inner]])
        if ((level < 0) | (level >= nodes)).any():
            raise ValueError(f"a child outside of its {nodes} nodes")
        if seen[level].any() or len(np.unique(level)) != len(level) or (parents[level] != np.tile(inner, 2)).any():
            raise ValueError("a node is the child of two, or of another than its parent")
        seen[level] = True
        splits.append(inner)
    raise ValueError(f"it is over {DEEPEST_TREE} splits deep")


def _check_categories(tree: dict[str, Any]) -> int:
    values, nodes, begins, sizes = (_ints(tree[name]) for name in CATEGORIES)
    if not np.array_equal(nodes, np.flatnonzero(tree["split_type"])):
        raise ValueError("categories of nodes that do not split by them")
    if (sizes < 0).any() or (sizes > len(values)).any() or not np.array_equal(begins, np.cumsum(sizes) - sizes):
        raise ValueError("categories of a node are not next to those of the one before")
    if sizes.sum() != len(values) or ((values < 0) | (values >= MOST_CATEGORY)).any():
        raise ValueError(
            f"{count_of(len(values), 'category')} where {sizes.sum()} are to be, each below {MOST_CATEGORY}"
        )
    return int(sum(values[begin : begin + size].max(initial=0) for begin, size in zip(begins, sizes, strict=True)))


def _ints(values: Any) -> Ints:
    found = np.asarray(values)
    if found.ndim != 1 or (len(found) and found.dtype.kind != "i"):
        raise ValueError(f"{str(values)[:40]!r} where whole numbers are to be")
    return found.astype(np.int64)


def _number(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise ValueError(f"{text[:40]!r} where a whole number is to be")
    return int(text)
