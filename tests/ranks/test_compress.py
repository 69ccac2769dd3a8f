"""Codecs on real ranks of both engines: nothing of a gradient is lost, all ranks end alike, checkpoints keep it all."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

from tests.ranks.cases_compress import Named, Run, checkpointer, load, resume_elsewhere, still_gradients
from tests.ranks.problem import EXACT
from tests.training.parallel.test_compress import CODECS

pytestmark = pytest.mark.ranks
KEPT = {name: {"engine": "torch", "compress": CODECS[name]} for name in ("int8", "powersgd")}
DENSE = {"engine": "torch"}


def off(left: Named, right: Named) -> float:
    assert left.keys() == right.keys()
    return max((float((left[name] - right[name]).abs().max()) for name in left), default=0.0)


def plus(left: Named, right: Named) -> Named:
    return {name: left.get(name, 0) + right.get(name, 0) for name in left.keys() | right.keys()}


def added(parts: list[Named]) -> Named:
    return functools.reduce(plus, parts)


@pytest.mark.parametrize(("engine", "world"), [("torch", 3), ("horovod", 2)])
def test_nothing_of_a_gradient_is_lost_and_all_ranks_end_alike(launch: Any, engine: str, world: int) -> None:
    cases: dict[str, Any] = {name: {"engine": engine, "compress": codec} for name, codec in CODECS.items()}
    cases["scaled loss"] = {**cases["int8"], "precision": "fp16"}  # of a model in float64, which is computed in it
    expected = still_gradients()
    ranks = launch(world, "cases_compress:fed_back", {"cases": cases}, engine=engine)
    for name in cases:
        for found in (rank[name] for rank in ranks):
            gone = plus(found["applied"], found["carried"])
            assert off({key: gone[key] for key in expected}, expected) < EXACT, name
            assert all(not gone[key].any() for key in gone.keys() - expected.keys()), name
            assert off(found["applied"], ranks[0][name]["applied"]) == 0, name
            assert off(found["weights"], ranks[0][name]["weights"]) == 0, name
            assert found["skipped"] == [True] and found["rolled_back"] and found["moved"], name
        assert off({key: found["applied"][key] for key in expected}, expected) > 1e-6, f"{name} compressed nothing"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kept")


@pytest.fixture
def saved(launch: Any, folder: Path, kept: dict[str, Any]) -> list[dict[str, Any]]:
    """Every rank's results of saving on three ranks."""
    if not kept:
        kept["ranks"] = launch(3, "cases_compress:save_and_resume", {"cases": KEPT, "folder": str(folder)})
    ranks: list[dict[str, Any]] = kept["ranks"]
    return ranks


@pytest.fixture(scope="module")
def kept() -> dict[str, Any]:
    return {}


def test_a_resumed_run_has_the_same_bits(saved: list[dict[str, Any]]) -> None:
    for rank in saved:
        for name in KEPT:
            assert off(rank[name]["went_on"], rank[name]["resumed"]) == 0, name
            assert max(float(t.abs().max()) for t in rank[name]["carried"].values()) > 1e-3, name


@pytest.mark.parametrize(("engine", "world"), [("horovod", 2), pytest.param("torch", 4, marks=pytest.mark.slow)])
def test_residuals_keep_their_sum_in_another_world(
    launch: Any, saved: list[dict[str, Any]], folder: Path, engine: str, world: int
) -> None:
    cases = {name: (name, {"engine": engine, "compress": CODECS[name]}) for name in KEPT}
    cases["other codec"] = ("int8", {"engine": engine, "compress": CODECS["topk"]})
    payload = {"cases": cases, "folder": str(folder)}
    for found in launch(world, "cases_compress:resume_elsewhere", payload, engine=engine):
        for name, (was, _) in cases.items():
            carried = saved[0][was]["carried"]
            assert off(found[name]["carried"], carried) < EXACT and not found[name]["late"], name
            assert found[name]["skipped"] == [True]
            gone = plus(found[name]["applied"], found[name]["left"])
            assert off(gone, plus(carried, true_gradients(folder, was))) < EXACT, name


@pytest.mark.parametrize("world", [1, 2])
def test_without_a_codec_the_first_step_takes_what_was_carried(
    launch: Any, saved: list[dict[str, Any]], folder: Path, world: int
) -> None:
    cases = {"dense": ("int8", DENSE if world > 1 else {"compress": CODECS["int8"]})}
    cases |= {"zero": ("int8", {"engine": "torch", "zero": 2})} if world > 1 else {}
    payload = {"cases": cases, "folder": str(folder)}
    found = (
        launch(world, "cases_compress:resume_elsewhere", payload) if world > 1 else [resume_elsewhere(0, 1, payload)]
    )
    carried = saved[0]["int8"]["carried"]
    for rank in found:
        for name in cases:
            assert off(rank[name]["late"], carried) < EXACT
            assert "residuals" in rank[name]["parts"], "a checkpoint before that step has them"
            assert set(rank[name]["late_left"]) == carried.keys() - rank[name]["applied"].keys(), (
                "a skipped step took them"
            )
            if name == "dense":
                taken = {key: rank[name]["applied"][key] - true for key, true in true_gradients(folder, "int8").items()}
                assert off(taken, {key: carried[key] for key in taken}) < EXACT


LOCAL = {"engine": "torch", "averaging": {"kind": "local_sgd", "every": 2}}
APART = {
    "replicas": ("int8", LOCAL),
    "hosts": ("powersgd", {**LOCAL, "averaging": {**LOCAL["averaging"], "groups": "host"}, "local_size": 2}),
    "gossip": ("int8", {"engine": "torch", "averaging": {"kind": "gossip", "every": 3}}),
}


@pytest.mark.parametrize("world", [pytest.param(3, marks=pytest.mark.slow), 4])
def test_replicas_add_what_was_carried_once_and_resume_where_each_of_them_was(
    launch: Any, saved: list[dict[str, Any]], folder: Path, world: int
) -> None:
    """Replicas step apart: one has no rows, one skips its step, and few rows reach some layers."""
    cases = {f"{name}, {world}": case for name, case in APART.items() if name != "hosts" or world == 4}
    ranks = launch(world, "cases_compress:resume_apart", {"cases": cases, "folder": str(folder)})
    for name, (was, case) in cases.items():
        found = [rank[name] for rank in ranks][:: 2 if "local_size" in case else 1]  # one of each replica
        carried = saved[0][was]["carried"]
        assert off(added([each["began"] for each in found]), carried) < EXACT, name
        mean = {key: t / len(found) for key, t in added([each["once"]["applied"] for each in found]).items()}
        gone = plus(mean, added([each["once"]["waits"] for each in found]))
        assert off(gone, plus(carried, true_gradients(folder, was))) < EXACT, name
        assert any(each["waits"].keys() != found[0]["waits"].keys() for each in found), "they differ"
        for each in (rank[name] for rank in ranks):
            assert off(each["waits"], each["waits_again"]) == 0, name
            assert off(each["went_on"], each["resumed"]) == 0, name


def test_a_checkpoint_has_no_residuals_that_a_rank_of_any_layout_has_added(launch: Any) -> None:
    cases: dict[str, Any] = {"pp": {"pp": 2, "micro_batches": 2, "accumulate": 1}, "tp": {"tp": 2}, "zero": {"zero": 3}}
    ranks = launch(2, "cases_compress:left_by_layouts", {"cases": {**cases, "ring": {}}, "compress": CODECS["int8"]})
    for name in ranks[0]:
        assert set().union(*(rank[name]["stepped"] for rank in ranks)) == set(ranks[0][name]["carried"])
        assert [rank[name]["saved"] for rank in ranks] == [[], []], name


def true_gradients(folder: Path, saved: str) -> Named:
    """Of step 3, by one process from the weights of the checkpoint."""
    run = Run(0, 1, {})
    load(run, checkpointer(str(folder / saved), 1))
    run.strategy.local.residuals.late = {}
    run.steps(range(3, 4), lr=0.0)
    return run.applied
