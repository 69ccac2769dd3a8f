"""What a table is predicted to hold, beside what it holds."""

from __future__ import annotations

import numpy as np
import pytest

from sparkring.training.tables.hashing import BUCKETS
from sparkring.training.tables.size import table_bytes
from sparkring.training.tables.table import Table, TableSpec
from sparkring.training.tables.update_rules import UpdateRule

DIM = 16


@pytest.mark.parametrize("rows", [1, 700, 5_000, 300_000])
@pytest.mark.parametrize("is_limited", [False, True])
def test_a_table_holds_what_was_predicted(rows: int, is_limited: bool) -> None:
    rule = UpdateRule("adam")
    limit = 2 * 300_000 // BUCKETS * BUCKETS if is_limited else None
    table = Table(TableSpec(name="t", dim=DIM, scale=0.1, seed=1, rule=rule, dtype="float32", max_rows=limit))
    empty = table.bytes if is_limited else 0  # what no row adds to
    table.push(np.arange(rows), np.ones((rows, DIM), np.float32), 0.1)
    predicted = table_bytes(rows, (DIM + rule.state_width(DIM)) * 4, share=limit and limit // BUCKETS)
    assert len(table) == rows
    held = table.bytes - empty
    assert held / 1.05 <= predicted <= (1.5 if is_limited else 1.1) * held  # few rows leave some buckets empty
