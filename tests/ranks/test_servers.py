"""Ranks on servers with bound 0 make what one process makes."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from tests.ranks.cases_servers import make_recommending, trained
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


@pytest.mark.parametrize(("ranks", "servers", "cases"), [(2, 2, TWO), (3, 1, RULES), (4, 3, RULES)])
def test_ranks_on_servers_with_bound_0_are_one_process(
    launch: Any, ranks: int, servers: int, cases: dict[str, Any]
) -> None:
    """Thirty steps, clipped by the global norm, one of them skipped by all."""
    found = launch(ranks + servers, "cases_servers:many", {"cases": cases, "servers": servers})
    for name in cases:
        expected, parts = alone(name), [rank[name] for rank in found[:ranks]]
        assert parts[0]["skipped"] == expected["skipped"] and sum(expected["skipped"]) == 1, name
        assert np.allclose(parts[0]["losses"], expected["losses"], rtol=0, atol=1e-4, equal_nan=True), name
        assert np.nanmax(expected["norms"]) > 0.5, "nothing was clipped"
        assert difference(parts, expected) < TOLERANCE.get(name, 1e-12), name
        for count in parts[0]["counts"]:
            assert count["gaps"] == {"0": 30 * ranks} and count["not_finite"] == {"0": 1}, name


def test_pushes_that_are_applied_one_after_the_other_are_not_one_process(launch: Any) -> None:
    """Else the test above could not see it."""
    cases = {name: RULES[name] | {"servers": {"bound": 1}} for name in ("adagrad", "adam")}
    found = launch(3, "cases_servers:many", {"cases": cases, "servers": 1})
    for name in cases:
        dense = {key: (found[0][name]["dense"][key] - value).abs().max() for key, value in alone(name)["dense"].items()}
        assert max(dense.values()) > 1e-3, name
