"""Averages of the weights are the weighted mean of what one process had after each step, on every layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.ranks.cases_average import naive
from tests.ranks.layouts import TWO

pytestmark = pytest.mark.ranks
NAMES = ("ddp", "zero1", "zero2", "zero3", "zero3-offload", "tp", "cp", "1f1b", "interleaved", "zero-bubble")
LAYOUTS = {name: {"engine": "torch", **TWO[name]} for name in NAMES}
USER = {f"user-zero{level}": {"engine": "torch", "zero": level, "user": True} for level in (0, 2, 3)}
HOROVOD = {f"{name}-{level}": {"engine": "horovod", "zero": level, "user": name == "user"}
           for name in ("gpt", "user") for level in (0, 1)}  # fmt: skip


@pytest.mark.parametrize(("engine", "cases"), [("torch", LAYOUTS | USER), ("horovod", HOROVOD)])
def test_every_layout_averages_what_one_process_has_after_each_step(
    launch: Any, engine: str, cases: dict[str, Any]
) -> None:
    wanted = {user: naive(user) for user in (False, True)}
    ranks = launch(2, "cases_average:many", {"cases": cases}, engine=engine)
    for name, case in cases.items():
        expected = wanted[case.get("user", False)]
        averages = ranks[0][name]["averages"]
        for key, mean in expected.items():
            torch.testing.assert_close(averages[key], mean, rtol=1e-10, atol=1e-13, msg=lambda m, n=name: f"{n}: {m}")
        assert all(rank[name]["restored"] for rank in ranks), name
        assert all(rank[name]["differ"] for rank in ranks), name
