"""Parameters are found again from the steps that they predict; files that cannot be used say why."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from sparkring.conf.clusters.catalog import load_cluster
from sparkring.conf.errors import ConfigError
from sparkring.training.planner.timing.calibrate import fit_errors, fitted, most_errors, predicted, rank_correlation
from tests.helpers.published_steps import MeasuredStep, counts_of, pick_regret, read_measurements

HEAD = (
    "framework,precision,width,layers,heads,tokens,vocab,dp,tp,pp,zero,micro_batch,global_batch,recompute,"
    "gradient_bytes,step_s\n"
)
ROW = "megatron,fp16,1024,4,16,512,1024,2,1,1,0,4,16,false,2,0.5\n"
PUBLISHED = Path(__file__).parents[4] / "benchmarks/published"


def steps() -> list[MeasuredStep]:
    base = MeasuredStep.model_validate(dict(zip(HEAD.strip().split(","), _typed(ROW), strict=True)))
    return [
        base.model_copy(update={"width": width, "micro_batch": rows, "dp": dp, "tp": tp, "global_batch": 16 * dp})
        for width in (512, 1024, 4096)
        for rows in (1, 4, 16)
        for dp, tp in ((1, 1), (2, 1), (1, 4), (4, 2))
    ]


def _typed(row: str) -> list[str | int]:
    return [int(word) if word.isdecimal() else word for word in row.strip().split(",")]


def test_parameters_are_found_again_from_what_they_predict() -> None:
    known = load_cluster(str(PUBLISHED / "megatron.yaml"))
    changed = {"matmul": 0.6, "memory": 0.6, "launch_us": 20.0}
    true = known.model_copy(update={"reached": known.reached.model_copy(update=changed)})
    measured = steps()
    counts = [counts_of(step) for step in measured]
    seconds = predicted(counts, true)
    measured = [step.model_copy(update={"step_s": s}) for step, s in zip(measured, seconds, strict=True)]
    found = fitted(known, counts, measured, "made up", fixed=("contention",))
    assert (
        fit_errors(predicted(counts, found), measured).mean < 0.05 < fit_errors(predicted(counts, known), measured).mean
    )
    assert found.reached.launch_us == pytest.approx(20, rel=0.3)
    assert found.reached.contention == 1 and found.reached.attention == known.reached.attention, "nothing says it"
    assert "36 steps of made up" in found.fitted_on and found.error is not None and found.error <= 0.1


def test_nine_of_ten_errors_are_within_the_band() -> None:
    assert most_errors(np.array([0.01] * 9 + [0.5])) < 0.5 and most_errors(np.array([3.0, -3.0])) == 1.0
    assert most_errors(np.linspace(-0.2, 0.2, 41)) == 0.19


@pytest.mark.parametrize("times", [1000, 0.1])
def test_steps_that_the_hardware_cannot_take_are_of_another_machine(times: float) -> None:
    """In milliseconds, or faster than its peaks."""
    known, counts = load_cluster("a100-80gb-infiniband"), [counts_of(step) for step in steps()]
    seconds = times * predicted(counts, known)
    measured = [step.model_copy(update={"step_s": s}) for step, s in zip(steps(), seconds, strict=True)]
    with pytest.raises(ValueError, match=r"A100-SXM4-80GB takes .* times the seconds measured.*of other machines"):
        fitted(known, counts, measured, "made up")


def test_two_rows_are_too_few(tmp_path: Path) -> None:
    path = tmp_path / "steps.csv"
    path.write_text(HEAD + ROW + ROW)
    read = read_measurements(str(path))
    with pytest.raises(ValueError, match=r"2 measured steps cannot determine \d parameters .*measure at least"):
        fitted(load_cluster("a100-80gb-efa"), [counts_of(step) for step in read], read, "x")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (HEAD.replace("width", "widht") + ROW, "line 2: widht: unknown key; did you mean 'width'"),
        (HEAD + ROW.replace("0.5", "0"), "line 2: step_s = 0: input should be greater than 0"),
        (HEAD + ROW.replace("megatron", "megatorn"), "did you mean 'megatron'"),
    ],
)
def test_a_wrong_row_is_named_with_its_line(text: str, problem: str, tmp_path: Path) -> None:
    path = tmp_path / "steps.csv"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_measurements(str(path))
    assert any(problem in line for line in caught.value.problems)


def test_shipped_clusters_predict_the_table_that_they_were_fitted_on() -> None:
    read = read_measurements(str(PUBLISHED / "llmfoundry_a100_80gb.csv"))
    some = [step for step in read if step.width <= 2048]
    errors = fit_errors(predicted([counts_of(step) for step in some], load_cluster("a100-80gb-roce")), some)
    assert errors.mean < 0.08 and errors.rank > 0.9


def test_regret_and_ranks() -> None:
    measured = [step.model_copy(update={"step_s": s}) for step, s in zip(steps()[:2], (1.0, 1.5), strict=True)]
    same = [step.model_copy(update={"dp": 1, "global_batch": 16}) for step in measured]
    assert pick_regret(np.array([2.0, 1.0]), same) == pytest.approx(0.5)
    assert pick_regret(np.array([1.0, 2.0]), same) == 0
    assert rank_correlation(np.array([1.0, 2.0, 3.0]), np.array([10.0, 30.0, 20.0])) == pytest.approx(0.5)


def test_a_file_without_rows_says_so() -> None:
    with pytest.raises(ValueError, match="no measured steps: the file needs a header and a row per step"):
        fitted(load_cluster("a100-80gb-efa"), [], [], "x")
