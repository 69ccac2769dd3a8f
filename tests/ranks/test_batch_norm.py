"""Batch normalization over all ranks is that of one process: outputs, gradients, and what layers keep."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.ranks.cases_batch_norm import LAYERS, by_torch, trained
from tests.ranks.problem import EXACT

pytestmark = pytest.mark.ranks
TORCH, HOROVOD = {"engine": "torch"}, {"engine": "horovod"}
LAYOUTS: dict[str, dict[str, Any]] = {
    "ring": TORCH,
    "ring, uneven": {**TORCH, "uneven": True},
    "ring, passes": {**TORCH, "accumulate": 3},
    "ring, passes, uneven": {**TORCH, "accumulate": 3, "uneven": True},
    "checkpointing": {**TORCH, "activation_checkpointing": True},
    "checkpointing, passes, uneven": {**TORCH, "activation_checkpointing": True, "accumulate": 3, "uneven": True},
    "checkpointing, zero 3": {**TORCH, "activation_checkpointing": True, "zero": 3, "uneven": True},
    **{f"zero {level}": {**TORCH, "zero": level, "uneven": level > 1, "accumulate": level} for level in (1, 2, 3)},
}
HOROVOD_LAYOUTS = {
    "ring": HOROVOD,
    "ring, passes, uneven": {**HOROVOD, "accumulate": 3, "uneven": True},
    "zero 1": {**HOROVOD, "zero": 1, "accumulate": 2, "uneven": True},
    "checkpointing, uneven": {**HOROVOD, "activation_checkpointing": True, "uneven": True},
}


def check(found: list[dict[str, Any]], kind: str, world: int, case: dict[str, Any], name: str) -> None:
    expected = by_torch(kind, world, case.get("accumulate", 1), case.get("uneven", False))
    outputs = expected["outputs"]
    assert {*found[0]["exported"], "outputs"} == set(expected), "a checkpoint or an exported model is of plain layers"
    for key, value in found[0]["exported"].items():
        assert (value - expected[key]).abs().max() <= EXACT, (name, kind, key)
    for rank in found:
        for key, value in rank["kept"].items():
            assert (value - expected[key]).abs().max() <= EXACT, (name, kind, key)
        assert (rank["outputs"] - outputs).abs().max() <= EXACT, (name, kind)


def covering(engine: str, world: int) -> set[tuple[str, str]]:
    """The pairs of layout and kind in `make test`: each kind under several layouts, other ones on three ranks."""
    layouts, kinds = (LAYOUTS if engine == "torch" else HOROVOD_LAYOUTS), list(LAYERS)[1:]
    pairs = {(name, kinds[(number + world) % len(kinds)]) for number, name in enumerate(layouts)}
    return pairs | {(name, "plain") for name in layouts if world == 2}


@pytest.mark.parametrize("part", ["covering", pytest.param("rest", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("engine", "world"), [("torch", 2), ("torch", 3), ("horovod", 2)])
def test_every_split_of_the_rows_normalizes_as_one_process(launch: Any, engine: str, world: int, part: str) -> None:
    layouts, chosen = LAYOUTS if engine == "torch" else HOROVOD_LAYOUTS, covering(engine, world)
    pairs = [(name, kind) for name in layouts for kind in LAYERS if ((name, kind) in chosen) == (part == "covering")]
    cases = {f"{name}: {kind}": (kind, layouts[name]) for name, kind in pairs}
    ranks = launch(world, "cases_batch_norm:many", {"cases": cases}, engine=engine)
    for name, (kind, case) in cases.items():
        check([rank[name] for rank in ranks], kind, world, case, name)


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("kind", LAYERS)
def test_one_process_leaves_rows_of_weight_0_out_too(kind: str, accumulate: int, checkpointing: bool) -> None:
    case = {"accumulate": accumulate, "activation_checkpointing": checkpointing}
    check([trained(0, 1, case, kind)], kind, 1, case, "one process")


def test_without_it_each_rank_sees_its_own_rows(launch: Any) -> None:
    cases = {"off": ("plain", {**TORCH, "sync_batch_norm": False})}
    found = launch(2, "cases_batch_norm:many", {"cases": cases})[0]["off"]["exported"]
    expected = by_torch("plain", 2, 1, False)
    assert max(float((found[key] - expected[key]).abs().max()) for key in found) > 1e-3
    assert torch.equal(found["blocks.2.1.num_batches_tracked"], expected["blocks.2.1.num_batches_tracked"])
