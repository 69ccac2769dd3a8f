"""Ranks on servers with bound 0 make what one process makes."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from sparkring.training.data.batch import Batch, BatchShare, Ragged
from tests.ranks.cases_servers import MEETING, make_recommending, part_of, trained
from tests.ranks.cases_tables import STEPS
from tests.ranks.problem import EXACT, full_state
from tests.ranks.test_tables import whole

pytestmark = pytest.mark.ranks
RULES: dict[str, dict[str, Any]] = {
    "sgd": {"tables": {"optimizer": "sgd"}},
    "adagrad": {"tables": {"optimizer": "rowwise_adagrad"}, "optimizer": "adamw", "decay": 0.1},
    "adam": {"tables": {"optimizer": "adam"}, "optimizer": "adamw", "decay": 0.1},
}
TWO = RULES | {
    "accumulate": {"tables": {"optimizer": "adam"}, "parallel": {"accumulate": 2}},
    "uneven": {"tables": {"optimizer": "adam"}, "uneven": True},
    "admitted": {"tables": {"optimizer": "adam", "admit_after": 2}},
    "evicted": {"tables": {"optimizer": "adam", "max_rows": 1024}},
    "float32": {"tables": {"optimizer": "adam"}, "dtype": "float32", "optimizer": "adamw"},
    "only tables": {"tables": {}, "dense": False},
}
TOLERANCE = {"float32": 1e-6}


@cache
def alone(name: str) -> dict[str, Any]:
    case = TWO[name]
    dtype = getattr(torch, case.get("dtype", "float64"))
    return trained(make_recommending(0, 1, {**case, "parallel": {}}, dtype, None), dtype)


def difference(parts: list[dict[str, Any]], expected: dict[str, Any]) -> float:
    """The largest of any weight, row, output and norm."""
    found = [float(np.nanmax(np.abs(np.array(part["norms"]) - np.array(expected["norms"])))) / 10 for part in parts]
    for table in ("users", "tags"):
        one, many = whole([expected], table), whole(parts, table)
        assert one["rows"].shape[0] > 25 and many["ids"].tolist() == one["ids"].tolist(), table
        assert (many["counts"] == one["counts"]).all() and (many["seen"] == one["seen"]).all(), table
        found.append(float(np.abs(many["rows"] - one["rows"]).max()))
    found += [float((parts[0]["dense"][key] - value).abs().max()) for key, value in expected["dense"].items()]
    outputs = torch.cat([part["outputs"] for part in parts])
    return max(*found, float((outputs - expected["outputs"]).abs().max()) / 10)


@pytest.mark.parametrize(
    ("ranks", "servers", "cases"), [(2, 2, TWO), (3, 1, RULES), pytest.param(4, 3, RULES, marks=pytest.mark.slow)]
)
def test_ranks_on_servers_with_bound_0_are_one_process(
    launch: Any, ranks: int, servers: int, cases: dict[str, Any]
) -> None:
    """Twenty steps, clipped by the global norm, one of them skipped by all."""
    found = launch(ranks + servers, "cases_servers:many", {"cases": cases, "servers": servers})
    for name in cases:
        expected, parts = alone(name), [rank[name] for rank in found[:ranks]]
        assert parts[0]["skipped"] == expected["skipped"] and sum(expected["skipped"]) == 1, name
        assert np.allclose(parts[0]["losses"], expected["losses"], rtol=0, atol=1e-4, equal_nan=True), name
        assert np.nanmax(expected["norms"]) > 0.5, "nothing was clipped"
        assert difference(parts, expected) < TOLERANCE.get(name, EXACT), name
        for count in parts[0]["counts"]:
            assert count["gaps"] == {"0": STEPS * ranks} and count["not_finite"] == {"0": 1}, name


def test_pushes_that_are_applied_one_after_the_other_are_not_one_process(launch: Any) -> None:
    """Else the test above could not see it."""
    cases = {name: RULES[name] | {"servers": {"bound": 1}} for name in ("adagrad", "adam")}
    found = launch(3, "cases_servers:many", {"cases": cases, "servers": 1})
    for name in cases:
        dense = {key: (found[0][name]["dense"][key] - value).abs().max() for key, value in alone(name)["dense"].items()}
        assert max(dense.values()) > 1e-3, name


def union(parts: list[tuple[int, int]], of: int) -> Batch:
    """The rows of parts (clock, stream), one after the other."""
    pieces = [part_of(BatchShare(*part), of, torch.float64) for part in parts]
    columns: dict[str, Any] = {}
    for name, first in pieces[0].columns.items():
        values = [piece.columns[name] for piece in pieces]
        if isinstance(first, Ragged):
            sizes = torch.cat([each.offsets[0].diff() for each in values])
            offsets = torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)])
            columns[name] = Ragged(torch.cat([each.values for each in values]), (offsets,))
        else:
            columns[name] = torch.cat(values)
    weight = None if pieces[0].weight is None else torch.cat([piece.row_weights() for piece in pieces])
    return Batch(columns, sum(piece.rows for piece in pieces), pieces[0].global_rows, 0, weight)


@pytest.mark.parametrize(
    ("ranks", "servers", "backup"), [(2, 1, 1), (4, 2, 1), pytest.param(5, 1, 2, marks=pytest.mark.slow)]
)
def test_with_backup_workers_a_step_is_one_process_on_the_rows_that_counted(
    launch: Any, ranks: int, servers: int, backup: int
) -> None:
    """Twenty steps whose parts are of several clocks, as the slow rank has it; ranks meet after every ten."""
    cases = {name: case | {"servers": {"backup": backup}} for name, case in RULES.items()}
    found, of = launch(ranks + servers, "cases_servers:many", {"cases": cases, "servers": servers}), ranks - backup
    for name in cases:
        parts = [rank[name] for rank in found[:ranks]]
        made = [sorted(part["counted"][step] for part in parts if step in part["counted"]) for step in range(STEPS)]
        assert sorted(part for step in made for part in step) == [(c, s) for c in range(STEPS) for s in range(of)], name
        assert {len(step) for step in made} == {of}
        assert all(max(clock for step in made[:end] for clock, _ in step) < end for end in (MEETING, STEPS)), (
            "ranks meet"
        )
        alone = make_recommending(0, 1, {**RULES[name], "parallel": {}}, torch.float64, None)
        norms = []
        for step in made:
            alone.forward_backward(union(step, of))
            norms.append(alone.step(1e-2).grad_norm)
        for part in parts:
            assert part["norms"] == pytest.approx(norms, rel=1e-11, nan_ok=True), "late ranks know them too"
        assert sum(map(np.isnan, norms)) == 1
        for table in ("users", "tags"):
            dumps = {key: vars(each.table.dump(each.own_buckets)) for key, each in alone.tables.tables.items()}
            one, many = whole([{"tables": dumps}], table), whole(parts, table)
            assert many["ids"].tolist() == one["ids"].tolist() and (many["counts"] == one["counts"]).all(), table
            assert float(np.abs(many["rows"] - one["rows"]).max()) < EXACT, table
        for key, value in full_state(alone).items():
            assert (parts[0]["dense"][key] - value).abs().max() < EXACT, key
        assert int(parts[0]["counts"][0]["late"][str(ranks - 1)]) >= 2, "the slow rank was never late"
