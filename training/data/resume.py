"""Compare the order in a checkpoint with that of a reader: may the run continue?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from sparkring.conf.blocks.data import Condition
from sparkring.conf.stored import Count, Stored

PASSES = "parallel.accumulate"
MEANING = {
    "order_version": "the program that decides the order changed",
    "fingerprint": "another dataset",
    "split": "another split",
    "rows": "another number of rows",
    "row_groups": "other row groups",
    "global_batch": "another global batch",
    "reader": "another reader",
    PASSES: "batch normalization takes its statistics over the rows of a pass",
    "block_rows": "follows from the global batch and the lanes; data.block_rows keeps it",
}


class OrderState(Stored):
    """What decides the native reader's order, as a checkpoint holds it."""

    order_version: int
    fingerprint: str
    split: str
    rows: Count
    row_groups: str  # a digest of their rows
    global_batch: Count
    lanes: Count
    window_row_groups: Count
    block_rows: Count
    seed: Count
    tail: Literal["drop", "pad", "error"]
    shuffle: bool
    filters: list[Condition]
    quarantined: list[str]


def explain_difference(old: Mapping[str, Any], new: Mapping[str, Any], where: str = "") -> list[str]:
    """Describe each setting that differs between two `order_state`s, by its path."""
    lines = []
    for key in sorted(old.keys() | new.keys()):
        before, after, path = old.get(key), new.get(key), f"{where}{key}"
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            lines += explain_difference(before, after, f"{path}.")
        elif isinstance(before, list) and isinstance(after, list) and _are_states(before + after):
            lines += explain_difference(_numbered(before), _numbered(after), f"{path}.")
        elif before != after:
            meaning = f" ({MEANING[key]})" if key in MEANING else ""
            lines.append(f"{path}: {before!r} in the checkpoint, {after!r} now{meaning}")
    return lines


def _are_states(values: list[Any]) -> bool:
    return bool(values) and all(isinstance(v, Mapping) for v in values)


def _numbered(values: list[Any]) -> dict[str, Any]:
    return {str(number): value for number, value in enumerate(values)}
