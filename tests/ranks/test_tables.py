"""A table on N ranks is the table of one process, row by row."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from sparkring.training.tables.hashing import BUCKETS, hash_of
from tests.ranks.cases_tables import recommending, trained

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
    [(2, "torch", TWO), (3, "torch", RULES), (4, "torch", RULES), (2, "horovod", HOROVOD)],
)
def test_a_table_on_ranks_is_the_table_of_one_process(
    launch: Any, world: int, engine: str, cases: dict[str, Any]
) -> None:
    found = launch(world, "cases_tables:many", {"cases": cases}, engine=engine)
    for name, case in cases.items():
        settings, within = case["tables"], TOLERANCE.get(name, 1e-12)
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
