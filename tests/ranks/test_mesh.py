"""Every layout of layouts.py equals one process: float64, ten AdamW steps with accumulation and clipping, the first
step's gradients compared parameter by parameter. A gradient spoiled by 1e-6 is seen."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

from cases_mesh import ORACLE, one_process
from layouts import BY_LAUNCH, HOROVOD, TWO
from problem import worst_difference

pytestmark = pytest.mark.ranks
TOLERANCE = 1e-12
ROUNDED = {  # precision or dtype -> how far the final parameters may be from one process in the same precision
    "float32": ({"dtype": "float32"}, 2e-5),
    "float32-sgd": ({"dtype": "float32", "optimizer": "sgd"}, 2e-6),
    "bf16": ({"dtype": "float32", "precision": "bf16"}, 2e-2),
    "fp16": ({"dtype": "float32", "precision": "fp16"}, 5e-3),
}


class Results:
    """One launch per world size, kept for the module."""

    def __init__(self) -> None:
        self.launched: dict[str, list[dict[str, Any]]] = {}
        self.expected: dict[str, dict[str, Any]] = {}

    def oracle(self, case: dict[str, Any]) -> dict[str, Any]:
        key = str([(k, case.get(k)) for k in sorted(ORACLE)])
        if key not in self.expected:
            self.expected[key] = one_process(case)
        return self.expected[key]


@pytest.fixture(scope="module")
def results() -> Results:
    return Results()


def launched(results: Results, launch: Any, name: str) -> list[dict[str, Any]]:
    if name not in results.launched:
        world, cases = BY_LAUNCH[name]
        engine = "horovod" if name == "horovod" else "torch"
        results.launched[name] = launch(world, "cases_mesh:many", {"cases": cases}, engine=engine)
    return results.launched[name]


@pytest.mark.parametrize(
    ("world", "case"), [(world, case) for world, (_, cases) in BY_LAUNCH.items() for case in cases]
)
def test_layout_equals_one_process(results: Results, launch: Any, world: str, case: str) -> None:
    ranks = launched(results, launch, world)
    expected = results.oracle(BY_LAUNCH[world][1][case])
    assert expected["infos"][0].grad_norm > 1.0, "clipping at 0.5 must act"
    assert worst_difference([rank[case] for rank in ranks], expected) < TOLERANCE


SPOILED = {
    "two": (
        2,
        TWO,
        ("ddp", "zero1", "zero2", "zero3", "tp", "tp-sequence", "cp", "1f1b", "interleaved", "zero-bubble"),
    ),
    "horovod": (2, HOROVOD, ("horovod", "horovod-zero1")),
}


@pytest.mark.parametrize("name", list(SPOILED))
def test_a_gradient_spoiled_by_a_billionth_on_one_rank_is_seen(results: Results, launch: Any, name: str) -> None:
    world, layouts, chosen = SPOILED[name]
    cases = {case: {**layouts[case], "spoil": 1e-9, "steps": 1} for case in chosen}
    ranks = launch(world, "cases_mesh:many", {"cases": cases}, engine="horovod" if name == "horovod" else "torch")
    for case in cases:
        difference = worst_difference([rank[case] for rank in ranks], results.oracle({"steps": 1}))
        assert difference > 50 * TOLERANCE, case


def test_rounded_precisions_stay_within_their_tolerance(results: Results, launch: Any) -> None:
    layouts = {
        "ddp": {},
        "zero1": {"zero": 1},
        "zero3": {"zero": 3},
        "tp": {"tp": 2},
        "1f1b": {"pp": 2, "micro_batches": 2},
    }
    refused = {("tp", "fp16"), ("1f1b", "fp16")}  # on CPU, by the capability table
    pairs = [(name, precision) for name in layouts for precision in ROUNDED if (name, precision) not in refused]
    cases = {f"{name} {precision}": {**layouts[name], **ROUNDED[precision][0]} for name, precision in pairs}
    ranks = launch(2, "cases_mesh:many", {"cases": cases})
    for name, case in cases.items():
        expected, tolerance = results.oracle(case), ROUNDED[name.split()[1]][1]
        got = ranks[0][name]
        assert [info.skipped for info in got["infos"]] == [info.skipped for info in expected["infos"]], name
        far = max(float((got["state"][k] - v).abs().max()) for k, v in expected["state"].items())
        assert far < tolerance, f"{name}: {far}"
        assert abs(got["losses"][-1] - expected["losses"][-1]) < 10 * tolerance, name
