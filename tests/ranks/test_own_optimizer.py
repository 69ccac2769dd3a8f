"""Elementwise optimizers of users step shards as they step whole weights, also after a checkpoint."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.ranks.cases_own_optimizer import OPTIMIZERS, one_process
from tests.ranks.layouts import TWO

pytestmark = pytest.mark.ranks
LAYOUTS = {name: {"engine": "torch", **TWO[name]} for name in ("zero2", "zero3", "tp", "1f1b")}
HOROVOD = {"zero1": {"engine": "horovod", "zero": 1}}


@pytest.mark.parametrize(
    ("engine", "cases"), [("torch", LAYOUTS), pytest.param("horovod", HOROVOD, marks=pytest.mark.slow)]
)
def test_every_layout_steps_as_one_process(launch: Any, engine: str, cases: dict[str, Any]) -> None:
    found = launch(2, "cases_own_optimizer:many", {"cases": cases}, engine=engine)[0]
    for optimizer in OPTIMIZERS:
        expected = one_process(optimizer)
        for case in cases:
            for name, weight in expected.items():
                got = found[f"{case} {optimizer}"][name]
                assert torch.allclose(got, weight, rtol=1e-9, atol=1e-11), (case, optimizer, name)
