"""A table on N ranks is the table of one process, row by row."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from sparkring.training.tables.hashing import BUCKETS, hash_of
from tests.ranks.cases_tables import lagged, recommending, trained
from tests.ranks.problem import EXACT

pytestmark = pytest.mark.ranks
RULES: dict[str, dict[str, Any]] = {
    "sgd": {"tables": {"optimizer": "sgd"}},
    "adagrad": {"tables": {"optimizer": "rowwise_adagrad"}},
    "adam": {"tables": {"optimizer": "adam"}},
}
TWO = RULES | {
    "accumulate": {"tables": {"optimizer": "adam"}, "parallel": {"accumulate": 2}},
    "uneven": {"tables": {"optimizer": "adam"}, "uneven": True},
    "zero1": {"tables": {"optimizer": "adam"}, "parallel": {"zero": 1}},
    "zero3": {"tables": {"optimizer": "adam"}, "parallel": {"zero": 3}},
    "replicate": {"tables": {"optimizer": "adam", "place": "replicate"}},
    "admitted": {"tables": {"optimizer": "adam", "admit_after": 2}},
    "evicted": {"tables": {"optimizer": "adam", "max_rows": BUCKETS}},
    "float32": {"tables": {"optimizer": "adam"}, "dtype": "float32"},
    "bf16": {"tables": {"optimizer": "sgd", "wire": "bf16"}},
    "only tables": {"tables": {}, "dense": False},
    "only tables, zero1": {"tables": {}, "dense": False, "parallel": {"zero": 1}},
    "only tables, zero3": {"tables": {}, "dense": False, "parallel": {"zero": 3}},
}
HOROVOD = {
    "adagrad": {"tables": {"optimizer": "rowwise_adagrad"}, "parallel": {"engine": "horovod"}},
    "zero1": {"tables": {"optimizer": "adam"}, "parallel": {"engine": "horovod", "zero": 1}},
    "only tables": {"tables": {}, "dense": False, "parallel": {"engine": "horovod"}},
    "only tables, zero1": {"tables": {}, "dense": False, "parallel": {"engine": "horovod", "zero": 1}},
}
LAGGED: dict[str, dict[str, Any]] = {
    "adagrad, 1": {"tables": {"optimizer": "rowwise_adagrad", "lag": 1}},
    "adam, 2": {"tables": {"optimizer": "adam", "lag": 2}},
    "unclipped, 2": {"tables": {"optimizer": "adam", "lag": 2}, "clip_norm": None},
    "uneven, accumulated": {"tables": {"lag": 1}, "uneven": True, "parallel": {"accumulate": 2}},
    "replicate": {"tables": {"lag": 2, "place": "replicate"}, "clip_norm": None},
    "evicted": {"tables": {"lag": 2, "max_rows": BUCKETS}},
    "evicted, replicate": {"tables": {"lag": 2, "max_rows": BUCKETS, "place": "replicate"}},
    "admitted": {"tables": {"lag": 1, "admit_after": 2}},
    "zero1": {"tables": {"lag": 2}, "parallel": {"zero": 1}},
}
# In `make test`: the others are these without one of clipping, eviction or accumulation.
COVERING = ("adam, 2", "unclipped, 2", "uneven, accumulated", "evicted, replicate", "admitted", "zero1")
LAGGED_ON_THREE = {name: LAGGED[name] for name in ("unclipped, 2", "replicate", "evicted")}
TWICE = {name: LAGGED[name] for name in ("adam, 2", "uneven, accumulated", "evicted, replicate")}
LAGGED_ON_HOROVOD = {
    "adam, 1": {"tables": {"optimizer": "adam", "lag": 1}, "parallel": {"engine": "horovod"}},
    "zero1, unclipped": {"tables": {"lag": 2}, "clip_norm": None, "parallel": {"engine": "horovod", "zero": 1}},
}
TOLERANCE = {"float32": 2e-6, "bf16": 2e-2}


@cache
def alone(dtype: str, dense: bool = True, **settings: Any) -> dict[str, Any]:
    kind = getattr(torch, dtype)
    return trained(recommending(0, 1, {"tables": settings, "dense": dense}, kind), kind)


def whole(parts: list[dict[str, Any]], table: str) -> dict[str, np.ndarray]:
    """The table's content from the ranks' parts, in the order of one dump."""
    dumps = [part["tables"][table] for part in parts]
    buckets = np.concatenate([dump["buckets"] for dump in dumps])
    assert sorted(buckets.tolist()) == list(range(BUCKETS))
    joined = {name: np.concatenate([dump[name] for dump in dumps]) for name in ("ids", "rows", "seen")}
    order, seen = np.argsort(hash_of(joined["ids"])), joined["seen"][np.argsort(hash_of(joined["seen"][:, 0].copy()))]
    counts = np.concatenate([dump["counts"] for dump in dumps])[np.argsort(buckets)]
    return {"ids": joined["ids"][order], "rows": joined["rows"][order], "seen": seen, "counts": counts}


@pytest.mark.parametrize(
    ("world", "engine", "cases"),
    [
        (2, "torch", TWO),
        (3, "torch", RULES),
        pytest.param(4, "torch", RULES, marks=pytest.mark.slow),
        (2, "horovod", HOROVOD),
    ],
)
def test_a_table_on_ranks_is_the_table_of_one_process(
    launch: Any, world: int, engine: str, cases: dict[str, Any]
) -> None:
    found = launch(world, "cases_tables:many", {"cases": cases}, engine=engine)
    for name, case in cases.items():
        settings, within = case["tables"], TOLERANCE.get(name, EXACT)
        plain = {key: value for key, value in settings.items() if key not in ("place", "wire")}
        expected = alone(case.get("dtype", "float64"), case.get("dense", True), **plain)
        parts = [rank[name] for rank in found]
        assert len({int(part["tables"]["users"]["clock"][0]) for part in (*parts, expected)}) == 1, name
        assert parts[0]["skipped"] == expected["skipped"] and sum(expected["skipped"]) == 1, name
        norms = np.array([part["norms"] for part in parts])
        assert np.nanmax(np.abs(norms - np.array(expected["norms"]))) < within * 100, name
        assert np.nanmax(norms) > 0.5, "nothing was clipped"
        for table in ("users", "tags"):
            one, many = whole([expected], table), whole(parts, table)
            assert one["rows"].shape[0] > 25 and many["ids"].tolist() == one["ids"].tolist(), (name, table)
            assert np.abs(many["rows"] - one["rows"]).max() < within, (name, table)
            assert (many["counts"] == one["counts"]).all() and (many["seen"] == one["seen"]).all(), (name, table)
            assert (name == "evicted") == bool(one["counts"][:, 1].any()), (name, table)
            held = [part["rows"][table] for part in parts]
            share = len(one["ids"]) if settings.get("place") == "replicate" else 0.75 * len(one["ids"])
            assert max(held) <= share if share < len(one["ids"]) else min(held) == share, (name, table)
        for key, value in expected["dense"].items():
            assert torch.allclose(parts[0]["dense"][key], value, rtol=0, atol=within), (name, key)
        outputs = torch.cat([part["outputs"] for part in parts])
        assert torch.allclose(outputs, expected["outputs"], rtol=0, atol=10 * within), name


def test_gradients_that_ranks_apply_one_after_the_other_make_another_table(launch: Any) -> None:
    """Else the test above could not see it."""
    cases = {name: RULES[name] | {"one_after_another": True} for name in ("adagrad", "adam")}
    found = launch(2, "cases_tables:many", {"cases": cases})
    for name, case in cases.items():
        one = whole([alone("float64", **case["tables"])], "users")
        many = whole([rank[name] for rank in found], "users")
        assert np.abs(many["rows"][:, :4] - one["rows"][:, :4]).max() > 1e-2, name


@pytest.mark.parametrize(
    ("world", "engine", "cases"),
    [
        (2, "torch", {name: case for name, case in LAGGED.items() if name in COVERING}),
        pytest.param(2, "torch", LAGGED, marks=pytest.mark.slow),
        pytest.param(3, "torch", LAGGED_ON_THREE, marks=pytest.mark.slow),
        (2, "horovod", LAGGED_ON_HOROVOD),
    ],
)
def test_a_lag_on_ranks_is_that_of_one_process_and_two_runs_are_equal_in_bits(
    launch: Any, world: int, engine: str, cases: dict[str, Any]
) -> None:
    """The thread and its process group are not in what is compared with: it reads copies of the table."""
    found = launch(world, "cases_tables:many", {"cases": cases}, engine=engine)
    again = (
        launch(world, "cases_tables:many", {"cases": TWICE}, engine=engine) if (world, engine) == (2, "torch") else []
    )
    for name, case in cases.items():
        settings = {key: value for key, value in case["tables"].items() if key not in ("place", "lag")}
        expected = lagged(case["tables"]["lag"], {"tables": settings, "clip_norm": case.get("clip_norm", 0.5)})
        assert ("evicted" in name) == bool(expected["dropped"]), name
        parts = [rank[name] for rank in found]
        assert parts[0]["skipped"] == expected["skipped"] and sum(expected["skipped"]) == 1, name
        if case.get("clip_norm", 0.5):
            norms = np.array([part["norms"] for part in parts])
            assert np.nanmax(np.abs(norms - np.array(expected["norms"]))) < 1e-10, name
        for table in ("users", "tags"):
            one, many = whole([expected], table), whole(parts, table)
            assert many["ids"].tolist() == one["ids"].tolist(), (name, table)
            assert np.abs(many["rows"] - one["rows"]).max() < EXACT, (name, table)
            assert (many["counts"] == one["counts"]).all() and (many["seen"] == one["seen"]).all(), (name, table)
            if again and name in TWICE:
                other = whole([rank[name] for rank in again], table)
                assert all((other[key] == many[key]).all() for key in many), (name, table)
        for key, value in expected["dense"].items():
            assert torch.allclose(parts[0]["dense"][key], value, rtol=0, atol=EXACT), (name, key)
            if again and name in TWICE:
                assert torch.equal(parts[0]["dense"][key], again[0][name]["dense"][key]), (name, key)
        outputs = torch.cat([part["outputs"] for part in parts])
        assert torch.allclose(outputs, expected["outputs"], rtol=0, atol=1e-11), name


def test_a_lag_makes_another_table() -> None:
    """Else the test above could not see it."""
    for settings in ({"optimizer": "rowwise_adagrad"}, {"optimizer": "adam"}):
        tables = [whole([lagged(behind, {"tables": settings})], "users")["rows"][:, :4] for behind in range(3)]
        assert np.abs(tables[0] - whole([alone("float64", **settings)], "users")["rows"][:, :4]).max() < EXACT
        assert min(np.abs(tables[0] - tables[1]).max(), np.abs(tables[1] - tables[2]).max()) > 1e-3
