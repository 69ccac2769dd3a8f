"""Save under one layout, load under another; NaN on one rank; a parameter without a gradient; evaluation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ranks.cases_state import HALF, evaluated, prepared, run_steps
from tests.ranks.problem import EXACT, runs_here

pytestmark = pytest.mark.ranks
PIPE = {"engine": "torch", "pp": 2, "micro_batches": 2}
FOUR = {
    "dp-tp-zero3": {"engine": "torch", "tp": 2, "zero": 3},
    "dp-pp-zero1": {**PIPE, "zero": 1},
    "zero2": {"engine": "torch", "zero": 2},
}
TWO = {
    "ddp": {"engine": "torch"},
    "tp": {"engine": "torch", "tp": 2},
    "interleaved": {**PIPE, "schedule": "interleaved", "stages_per_rank": 2},
}
HOROVOD = {"horovod": {"engine": "horovod"}, "horovod-zero1": {"engine": "horovod", "zero": 1}}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the checkpoints that tests share."""
    return tmp_path_factory.mktemp("saved")


def save(launch: Any, folder: Path, world: int, cases: dict[str, Any], engine: str = "torch") -> None:
    """Half of the steps under each layout, then a checkpoint, where it is not there yet."""
    missing = {name: case for name, case in cases.items() if not (folder / name).exists()}
    if missing:
        launch(world, "cases_state:save_half", {"cases": missing, "tmp": str(folder)}, engine=engine)


def assert_goes_on(launch: Any, folder: Path, cases: dict[str, Any], names: list[str], engine: str = "torch") -> None:
    """Every checkpoint goes on under every layout of two ranks as one process which never stopped."""
    payload = {"cases": cases, "saved": names, "tmp": str(folder)}
    curves = launch(2, "cases_state:load_half", payload, engine=engine)[0]
    expected = run_steps(prepared(0, 1, {}), range(2 * HALF))[HALF:]
    assert len(curves) == len(cases) * len(names)
    for name, losses in curves.items():
        assert losses == pytest.approx(expected, abs=EXACT), name


def test_saved_under_one_layout_continues_under_another(launch: Any, saved: Path) -> None:
    cases = {name: case for name, case in FOUR.items() if runs_here(case, 4)}
    save(launch, saved, 4, cases)
    assert_goes_on(launch, saved, TWO, list(cases))


def test_checkpoints_go_from_horovod_to_torch_and_back(launch: Any, saved: Path) -> None:
    save(launch, saved, 2, HOROVOD, "horovod")
    save(launch, saved, 4, {"dp-tp-zero3": FOUR["dp-tp-zero3"]})
    assert_goes_on(launch, saved, {"tp": TWO["tp"]}, list(HOROVOD))
    assert_goes_on(launch, saved, HOROVOD, ["dp-tp-zero3", "horovod-zero1"], "horovod")


NAN = {  # case -> (settings, the rank whose loss is not a number: the first that sees the last data rank's loss)
    "ddp": ({"engine": "torch"}, 1),
    "int8": ({"engine": "torch", "compress": {"codec": "int8"}}, 1),
    "zero1": ({"engine": "torch", "zero": 1}, 1),
    "zero2": ({"engine": "torch", "zero": 2}, 1),
    "zero3": ({"engine": "torch", "zero": 3}, 1),
    "pipeline": (PIPE, 1),
    "interleaved": (TWO["interleaved"], 1),
    "zero-bubble": ({**PIPE, "schedule": "zero-bubble"}, 1),
    "tensor": ({"engine": "torch", "tp": 2}, 0),
    "context": ({"engine": "torch", "cp": 2}, 0),
}


NAN_FOUR = {  # the last stage of the last data rank's pipeline
    "pipeline-zero3": ({**PIPE, "zero": 3}, 3),
    "tensor-zero3": ({"engine": "torch", "tp": 2, "zero": 3}, 2),
}


def assert_skipped_together(ranks: list[dict[str, Any]], bad: dict[str, int]) -> None:
    for results in ranks:
        assert results.keys() == bad.keys()
        for name, infos in results.items():
            assert [info["skipped"] for info in infos] == [False, True, False], name
            assert infos[1]["first_bad_rank"] == bad[name], name
    for name, infos in ranks[0].items():
        assert [info["moved"] for info in infos] == [True, False, True], name


@pytest.mark.parametrize(("world", "layouts"), [(2, NAN), pytest.param(4, NAN_FOUR, marks=pytest.mark.slow)])
def test_a_nan_on_one_rank_skips_the_step_on_all(launch: Any, world: int, layouts: dict[str, Any]) -> None:
    layouts = {name: (case, rank) for name, (case, rank) in layouts.items() if runs_here(case, world)}
    cases = {name: settings for name, (settings, _) in layouts.items()}
    ranks = launch(world, "cases_state:not_a_number", {"cases": cases})
    assert_skipped_together(ranks, {name: rank for name, (_, rank) in layouts.items()})


def test_a_nan_on_one_rank_skips_the_step_on_all_of_horovods(launch: Any) -> None:
    ranks = launch(2, "cases_state:not_a_number", {"cases": HOROVOD}, engine="horovod")
    assert_skipped_together(ranks, dict.fromkeys(HOROVOD, 1))


def test_a_parameter_that_no_step_reaches_is_named_on_every_rank(launch: Any) -> None:
    cases: dict[str, Any] = {f"zero{level}": {"engine": "torch", "zero": level} for level in range(4)}
    cases |= {"pipeline": PIPE, "zero-bubble": {**PIPE, "schedule": "zero-bubble"}, "tensor": TWO["tp"]}
    for messages in launch(2, "cases_state:unreached", {"cases": cases}):
        for name in cases:
            assert "idle" in messages[name] and "requires_grad_(False)" in messages[name], name


def test_a_parameter_that_no_step_reaches_is_named_under_horovod(launch: Any) -> None:
    for messages in launch(2, "cases_state:unreached", {"cases": HOROVOD}, engine="horovod"):
        for name in HOROVOD:
            assert "idle.bias" in messages[name], name


def test_evaluation_gives_whole_outputs_and_sees_the_last_step(launch: Any) -> None:
    cases = {**TWO, "zero3": {"engine": "torch", "zero": 3}, "zero1": {"engine": "torch", "zero": 1}}
    cases["cp"] = {"engine": "torch", "cp": 2}
    first, second, _ = evaluated(0, 1, {"cases": {"one": {}}})["one"]
    for rank in launch(2, "cases_state:evaluated", {"cases": cases}):
        assert rank.keys() == cases.keys()
        for name, (got, later, is_output_rank) in rank.items():
            assert (got is not None) == is_output_rank, name
            if got is not None:
                assert torch.allclose(got, first, atol=EXACT, rtol=0), name
                assert torch.allclose(later, second, atol=1e-10, rtol=0), name
