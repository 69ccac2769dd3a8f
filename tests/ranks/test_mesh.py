"""Every layout of layouts.py equals one process: float64, ten AdamW steps with accumulation and clipping, the first
step's gradients compared parameter by parameter. A gradient spoiled by 1e-6 is seen."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

from cases_mesh import one_process
from layouts import BY_LAUNCH
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
        keys = ("tied", "kv_heads", "dtype", "precision", "optimizer")
        key = str([(k, case.get(k)) for k in keys])
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
    assert len(ranks[0][case]["gradients"]) == len(expected["gradients"])
    for rank in ranks:
        assert worst_difference(rank[case], expected) < TOLERANCE


def test_a_spoiled_gradient_is_seen(results: Results, launch: Any) -> None:
    cases = {name: {**case, "spoil": 1e-6} for name, case in {"ddp": {}, "zero2": {"zero": 2}, "tp": {"tp": 2}}.items()}
    ranks = launch(2, "cases_mesh:many", {"cases": cases})
    for name in cases:
        assert max(worst_difference(rank[name], results.oracle({})) for rank in ranks) > 100 * TOLERANCE


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
