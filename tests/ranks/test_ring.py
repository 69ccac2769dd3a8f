"""Data-parallel rings equal one process: rows, not ranks, are what is averaged over. The module is a user's: biases,
blocks, and a 0-dim parameter that cannot be cut."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.ranks.cases_ring import one_process
from tests.ranks.cases_tower import many as tower
from tests.ranks.problem import ENGINE, EXACT, table_batch, worst_difference

pytestmark = pytest.mark.ranks

TORCH, HOROVOD = {"engine": "torch"}, {"engine": "horovod"}
LAUNCHES: dict[str, tuple[int, str, dict[str, tuple[str, dict[str, Any]]]]] = {  # case -> (the axis it takes, settings)
    f"{engine} {world}": (
        world,
        engine,
        {"even": (axis, {"engine": engine}), "uneven": (axis, {"engine": engine, "uneven": True})},
    )
    for engine, axis in (("torch", "TorchRing"), ("horovod", "HorovodRing"))
    for world in (2, 3)
}
LAUNCHES["torch 3"][2].update(
    {f"zero {level}": ("TorchZero", {**TORCH, "zero": level, "uneven": True}) for level in (1, 2, 3)}
)
LAUNCHES["horovod 3"][2]["zero 1"] = ("HorovodZero1", {**HOROVOD, "zero": 1, "uneven": True})
LAUNCHES["hosts"] = (  # ranks that share hosts sum in two levels, where every host has as many
    4,
    "torch",
    {
        f"{size} a host": (axis, {**TORCH, "local_size": size, "uneven": True})
        for size, axis in ((2, "TorchRing"), (1, "TorchRing"), (3, "TorchRing"))
    },
)


@pytest.fixture(scope="module")
def launched() -> dict[str, list[dict[str, Any]]]:
    """Every rank's results by launch, each made once."""
    return {}


@pytest.mark.parametrize(("name", "case"), [(name, case) for name, (_, _, cases) in LAUNCHES.items() for case in cases])
def test_equals_one_process(launch: Any, launched: dict[str, list[dict[str, Any]]], name: str, case: str) -> None:
    world, engine, cases = LAUNCHES[name]
    if name not in launched:
        settings = {key: each for key, (_, each) in cases.items()}
        launched[name] = launch(world, "cases_ring:many", {"cases": settings}, engine=engine)
    expected = one_process()
    assert expected["losses"][-1] < expected["losses"][0]
    ranks = [rank[case] for rank in launched[name]]
    assert {rank["axis"] for rank in ranks} == {cases[case][0]}
    assert {rank["engine"] for rank in ranks} == {{"horovod": "horovod", "torch": ENGINE}[engine]}
    assert worst_difference(ranks, expected) < EXACT


@pytest.mark.parametrize(("engine", "levels"), [("torch", range(4)), ("horovod", range(2))])
def test_buffers_become_the_first_ranks(launch: Any, engine: str, levels: range) -> None:
    alone = torch.nn.BatchNorm1d(6).double()
    for step in range(3):
        alone(table_batch(step, 24).columns["x"][:12])
    own = {"engine": engine, "sync_batch_norm": False}
    cases = {f"zero {level}": {**own, "zero": level} for level in levels}
    for rank in launch(2, "cases_ring:running_means", {"cases": cases}, engine=engine):
        for name in cases:
            assert torch.allclose(rank[name], alone.running_mean, rtol=0, atol=EXACT), name


def test_a_users_model_with_a_table_is_cut_over_pipeline_and_tensor_ranks(launch: Any) -> None:
    cases = {
        "tensor": {"engine": "torch", "tp": 2},
        "pipeline": {"engine": "torch", "pp": 2, "micro_batches": 2},
        "measured": {"engine": "torch", "pp": 2, "micro_batches": 2, "balance": "measured"},
    }
    expected = tower(0, 1, {"cases": {"one": {}}})["one"]
    ranks = launch(2, "cases_tower:many", {"cases": cases})
    for name in cases:
        assert worst_difference([rank[name] for rank in ranks], expected) < EXACT, name
