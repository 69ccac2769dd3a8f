"""The peak of a step's memory, and of an evaluation's, is what torch allocates within 2 %: weights, gradients,
optimizer, activations, loss, batch, what ZeRO gathers, what codecs, exchanges and pipelines hold. Each rank's, under
every layout of layouts.py."""

from __future__ import annotations

from typing import Any

import pytest

from tests.ranks.cases_peak import EVALUATION, WEIGHTS
from tests.ranks.layouts import BY_LAUNCH, FOUR, TWO
from tests.ranks.problem import RANKS_ON

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.skipif(RANKS_ON != "cpu", reason="storages are counted, of the CPU's kernels"),
]
WITHIN = 0.02
ONE = {
    "one": {},
    "accumulate": {"accumulate": 4},
    "checkpointing": {"activation_checkpointing": True},
    "bf16": {"precision": "bf16"},
    "lamb": {"optimizer": "lamb"},
}
MORE = {  # of two ranks; others are in layouts.py
    "ddp accumulate": {"accumulate": 4},
    "zero1 accumulate": {"zero": 1, "accumulate": 4},
    "zero2 accumulate": {"zero": 2, "accumulate": 4},
    "zero3 accumulate": {"zero": 3, "accumulate": 2},
    "ddp bf16": {"precision": "bf16"},
    "zero1 bf16": {"zero": 1, "accumulate": 4, "precision": "bf16"},
    "zero3 bf16": {"zero": 3, "precision": "bf16"},
    "local_sgd": {"averaging": {"kind": "local_sgd", "every": 3}},
    "diloco": {"averaging": {"kind": "diloco", "every": 3}},
    "int8": {"compress": {"codec": "int8"}},
    "onebit accumulate": {"compress": {"codec": "onebit"}, "accumulate": 8},
    "topk": {"compress": {"codec": "topk", "share": 1.0}, "accumulate": 16},
    "powersgd": {"compress": {"codec": "powersgd", "rank": 4}},
}
LAUNCHES = {"one": (1, ONE), "more": (2, MORE), **BY_LAUNCH}
IN_EVERY_TEST = ("one",)  # what ranks receive ahead, and so their peak, depends on the machine's load


def slow_unless_covering(name: str) -> Any:
    return name if name in IN_EVERY_TEST else pytest.param(name, marks=pytest.mark.slow)


def wrong_peaks(launch: Any, world: int, layouts: dict[str, Any], **shape: Any) -> list[str]:
    """Those that no launch of three has as planned: a collective's thread frees its buffers sooner or later."""
    cases = {layout: case for layout, case in layouts.items() if "shared" not in case}  # another model
    wrong: list[str] = []
    for _ in range(3):
        wrong, again = [], {}
        for rank, found in enumerate(launch(world, "cases_peak:peaks", {"cases": cases, **shape})):
            for name, (measured, planned) in found.items():
                if abs(planned / measured - 1) > WITHIN:
                    wrong.append(f"{name} {rank}: planned {planned:,}, measured {measured:,.0f}")
                    layout = name.removesuffix(EVALUATION)
                    again[layout] = cases[layout]
        if not (cases := again):
            break
    return wrong


@pytest.mark.parametrize("name", [slow_unless_covering(name) for name in LAUNCHES if name != "horovod"])
def test_a_steps_peak_is_as_planned(launch: Any, name: str) -> None:
    assert not wrong_peaks(launch, *LAUNCHES[name])


@pytest.mark.slow
@pytest.mark.parametrize(("world", "layouts"), [(2, TWO), (4, FOUR)])
def test_a_peak_of_weights_is_as_planned(launch: Any, world: int, layouts: dict[str, Any]) -> None:
    assert not wrong_peaks(launch, world, layouts, shape=WEIGHTS)
