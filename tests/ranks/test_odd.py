"""Unusual models equal one process under every layout: frozen stages, a module in two places, a layer that few rows
reach, passes over no rows. Models that would be cut into other models are refused by all ranks."""

from __future__ import annotations

from typing import Any

import pytest

from tests.ranks.cases_odd import one_process
from tests.ranks.layouts import INTERLEAVED, PIPE, ZERO_BUBBLE
from tests.ranks.problem import EXACT, runs_here, worst_difference

pytestmark = pytest.mark.ranks
TORCH = {"engine": "torch"}
LAUNCHES: dict[str, tuple[int, dict[str, dict[str, Any]]]] = {
    "two": (
        2,
        {
            "ring": {**TORCH, "uneven": True},
            "zero1": {**TORCH, "zero": 1},
            "zero2": {**TORCH, "zero": 2, "uneven": True},
            "zero3": {**TORCH, "zero": 3, "uneven": True},
            **{f"zero{n} beside another's plan": {**TORCH, "zero": n, "beside": True} for n in (1, 2, 3)},
            "tp": {**TORCH, "tp": 2},
            "1f1b": {**TORCH, **PIPE},
            "zero-bubble": {**TORCH, **ZERO_BUBBLE},
            "interleaved": {**TORCH, **INTERLEAVED},
        },
    ),
    "four": (
        4,
        {
            "dp-tp": {**TORCH, "tp": 2, "uneven": True},
            "dp-tp-zero1": {**TORCH, "tp": 2, "zero": 1, "uneven": True},
            "dp-pp": {**TORCH, **PIPE, "uneven": True},
            "dp-pp-zero2-interleaved": {**TORCH, **INTERLEAVED, "zero": 2, "uneven": True},
            "dp-pp-zero1-zero-bubble": {**TORCH, **ZERO_BUBBLE, "zero": 1, "uneven": True},
        },
    ),
    "horovod": (2, {"ring": {"engine": "horovod"}, "zero1": {"engine": "horovod", "zero": 1, "uneven": True}}),
}


@pytest.mark.parametrize("name", ["two", *(pytest.param(name, marks=pytest.mark.slow) for name in ("four", "horovod"))])
def test_unusual_models_equal_one_process(launch: Any, name: str) -> None:
    world, every = LAUNCHES[name]
    cases = {layout: case for layout, case in every.items() if runs_here(case, world)}
    ranks = launch(world, "cases_odd:many", {"cases": cases}, engine="horovod" if name == "horovod" else "torch")
    expected = one_process()
    for case in cases:
        assert worst_difference([rank[case] for rank in ranks], expected) < EXACT, case
        assert {rank[case]["no_rows"] for rank in ranks} <= {(0,), None}, case


def test_a_cut_that_would_train_another_model_is_refused_on_every_rank(launch: Any) -> None:
    bf16 = {"precision": "bf16"}
    cases = {
        "scaled under pp": ("scaled", PIPE),
        "scaled under pp in bf16": ("scaled", {**PIPE, **bf16}),
        "positions under cp": ("positions", {"cp": 2}),
        "positions under cp in bf16": ("positions", {"cp": 2, **bf16}),
        "scaled under cp": ("scaled", {"cp": 2}),
        "plain under pp": ("plain", {**PIPE, **bf16}),
        "plain under cp": ("plain", {"cp": 2}),
        "plain under cp in bf16": ("plain", {"cp": 2, **bf16}),
    }
    for said in launch(2, "cases_odd:compared", {"cases": cases}):
        for name in cases:
            if name.startswith("scaled under pp"):
                assert "Scaled's forward is not the composition" in said[name], name
            elif name.startswith("positions"):
                assert "parallel.cp = 2" in said[name] and "learned positions" in said[name], name
            else:
                assert said[name] == "accepted", name
