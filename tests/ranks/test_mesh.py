"""Every layout of layouts.py equals one process: float64, five AdamW steps with accumulation and clipping, the first
step's gradients compared parameter by parameter. A gradient spoiled by 1e-9 is seen."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sparkring.training.parallel.compose import TIMEOUT
from tests.ranks.cases_mesh import ORACLE, PROBLEM, bare, one_process
from tests.ranks.layouts import BY_LAUNCH, HOROVOD, PIPE, TWO
from tests.ranks.problem import EXACT, worst_difference

pytestmark = pytest.mark.ranks


class Results:
    """One launch per world size, kept for the module."""

    def __init__(self) -> None:
        self.launched: dict[str, list[dict[str, Any]]] = {}
        self.expected: dict[str, dict[str, Any]] = {}

    def oracle(self, case: dict[str, Any]) -> dict[str, Any]:
        key = str([(k, {**PROBLEM, **case}.get(k)) for k in sorted(ORACLE)])
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


def marks(name: str) -> tuple[pytest.MarkDecorator, ...]:
    return (pytest.mark.slow,) if name.endswith("rest") else ()


@pytest.mark.parametrize(
    ("name", "case"),
    [pytest.param(name, case, marks=marks(name)) for name, (_, cases) in BY_LAUNCH.items() for case in cases],
)
def test_layout_equals_one_process(results: Results, launch: Any, name: str, case: str) -> None:
    ranks, settings = launched(results, launch, name), BY_LAUNCH[name][1][case]
    expected = results.oracle(settings)
    assert expected["infos"][0].grad_norm > 1.0, "clipping at 0.5 must act"
    assert worst_difference([rank[case] for rank in ranks], expected) < EXACT
    if settings.get("optimizer", "adamw") != "lamb":  # it reads its own count of steps, on the host
        for rank in ranks:  # a step that leaves no layer out and no rank without rows
            assert rank[case]["reads"] == 1, "the host waits for the norm alone"


@pytest.mark.parametrize("name", [pytest.param(name, marks=marks(name)) for name in BY_LAUNCH])
def test_no_group_waits_longer_than_the_timeout(results: Results, launch: Any, name: str) -> None:
    """Those of meshes, of hosts and of shared weights too: torch would give them 30 minutes."""
    for rank in launched(results, launch, name):
        assert set(rank["timeouts"]) == {TIMEOUT} and len(rank["timeouts"]) > 1


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
        assert difference > 50 * 1e-12, case


def displaced(got: dict[str, torch.Tensor], oracle: dict[str, Any]) -> float:
    """How far the parameters ended from the oracle's, as a share of the way the oracle's went."""
    off = sum(float((got[name].double() - end).square().sum()) for name, end in oracle["end"].items() if name in got)
    way = sum(float((oracle["start"][n] - end).square().sum()) for n, end in oracle["end"].items() if n in got)
    return (off / way) ** 0.5


def test_one_process_is_plain_torch(results: Results) -> None:
    for case in ({"optimizer": "adamw", "lr": 1e-3}, {"optimizer": "sgd", "lr": 0.05}):
        oracle, got = bare(*case.values()), results.oracle(case)
        assert displaced(got["state"], oracle) < 1e-9
        assert [info.grad_norm for info in got["infos"]] == pytest.approx(oracle["norms"], rel=1e-12)


ROUNDED = {  # -> settings, and how far norms and the way of the parameters may be from float64
    "float32": ({"dtype": "float32"}, 1e-5, 1e-5),
    "bf16": ({"dtype": "float32", "precision": "bf16"}, 5e-3, 2e-2),
    "fp16": ({"dtype": "float32", "precision": "fp16"}, 1e-3, 5e-3),
}
HALF_REFUSED = ("tp", "1f1b")  # on CPU, by the capability table
QUICK = {"ddp float32", "ddp fp16", "zero1 bf16", "zero3 fp16", "tp bf16", "1f1b bf16"}  # each layout, each precision


@pytest.mark.parametrize("part", ["covering", pytest.param("rest", marks=pytest.mark.slow)])
def test_rounded_precisions_go_the_way_of_float64(launch: Any, part: str) -> None:
    """A step that is not made is off by its whole way; a clip that is off by the loss scale, by the more."""
    layouts = {"ddp": {}, "zero1": {"zero": 1}, "zero3": {"zero": 3}, "tp": {"tp": 2}, "1f1b": PIPE}
    cases = {
        f"{name} {precision}": {**layout, **settings, "optimizer": "sgd", "lr": 0.05}
        for name, layout in layouts.items()
        for precision, (settings, _, _) in ROUNDED.items()
        if not (name in HALF_REFUSED and precision == "fp16")
        and (f"{name} {precision}" in QUICK) == (part == "covering")
    }
    ranks = launch(2, "cases_mesh:many", {"cases": cases})
    for name, case in cases.items():
        _, norm_off, way_off = ROUNDED[name.split()[1]]
        infos = ranks[0][name]["infos"]
        skipped = frozenset(step for step, info in enumerate(infos) if info.skipped)
        assert len(skipped) < 3, name
        oracle = bare(case["optimizer"], case["lr"], skipped)
        for rank in ranks:
            norms = [info.grad_norm for info in rank[name]["infos"]]
            for step in set(range(len(norms))) - skipped:
                assert norms[step] == pytest.approx(oracle["norms"][step], rel=norm_off), f"{name} {step}"
            assert displaced(rank[name]["state"], oracle) < way_off, name
