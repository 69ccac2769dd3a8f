"""Save under one layout, load under another; NaN on one rank; a parameter without a gradient; evaluation."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))

from cases_state import HALF, evaluated, prepared, run_steps

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


def test_saved_under_one_layout_continues_under_another(launch: Any) -> None:
    expected = run_steps(prepared(0, 1, {}), range(2 * HALF))[HALF:]
    launch(4, "cases_state:save_half", {"cases": FOUR})
    launch(2, "cases_state:save_half", {"cases": HOROVOD}, engine="horovod")
    saved = [*FOUR, *HOROVOD]
    curves = launch(2, "cases_state:load_half", {"cases": TWO, "saved": saved})[0]
    curves |= launch(2, "cases_state:load_half", {"cases": HOROVOD, "saved": saved}, engine="horovod")[0]
    assert len(curves) == len(saved) * (len(TWO) + len(HOROVOD))
    for name, losses in curves.items():
        assert losses == pytest.approx(expected, abs=1e-12), name


def test_a_nan_on_one_rank_skips_the_step_on_all(launch: Any) -> None:
    torch_cases = {"ddp": {"engine": "torch"}, "zero2": {"engine": "torch", "zero": 2}}
    ranks = launch(2, "cases_state:not_a_number", {"cases": torch_cases})
    rings = launch(2, "cases_state:not_a_number", {"cases": HOROVOD}, engine="horovod")
    for results in [*ranks, *rings]:
        for name, infos in results.items():
            assert [info["skipped"] for info in infos] == [False, True, False], name
            assert infos[1]["first_bad_rank"] == 1, name
    assert [info["moved"] for info in ranks[0]["ddp"]] == [True, False, True]


def test_a_parameter_without_gradient_is_named(launch: Any) -> None:
    for name, case in {"ddp": {"engine": "torch"}, "zero3": {"engine": "torch", "zero": 3}}.items():
        for message in launch(2, "cases_state:unreached", {"cases": {name: case}}):
            assert "idle.weight" in message[name] and "requires_grad_(False)" in message[name]
    for message in launch(2, "cases_state:unreached", {"cases": HOROVOD}, engine="horovod"):
        for name in HOROVOD:
            assert "idle.bias" in message[name]


def test_evaluation_gives_whole_outputs_and_sees_the_last_step(launch: Any) -> None:
    cases = {**TWO, "zero3": {"engine": "torch", "zero": 3}, "zero1": {"engine": "torch", "zero": 1}}
    cases["cp"] = {"engine": "torch", "cp": 2}
    first, second, _ = evaluated(0, 1, {"cases": {"one": {}}})["one"]
    for rank in launch(2, "cases_state:evaluated", {"cases": cases}):
        for name, (got, later, is_output_rank) in rank.items():
            assert (got is not None) == is_output_rank, name
            if got is not None:
                assert torch.allclose(got, first, atol=1e-12, rtol=0), name
                assert torch.allclose(later, second, atol=1e-10, rtol=0), name
