"""Whether a model beats its baselines: decided by a pure function, acted on by the job."""

from __future__ import annotations

import math

import pytest

from sparkring.pipelines.evaluate import lost_to
from sparkring.training.result import MODEL

BASELINES = {"majority rate": {"loss": 0.6, "auc": 0.5}, "logistic regression": {"loss": 0.5, "auc": 0.7}}


@pytest.mark.parametrize(
    ("ours", "metrics", "lost"),
    [
        ({"loss": 0.4, "auc": 0.8}, ["loss", "auc"], []),
        ({"loss": 0.4, "auc": 0.6}, ["loss"], []),
        ({"loss": 0.4, "auc": 0.6}, ["loss", "auc"], ["auc 0.6000 does not beat 0.7000 of logistic regression"]),
        ({"loss": 0.5, "auc": 0.8}, ["loss"], ["loss 0.5000 does not beat 0.5000 of logistic regression"]),
        ({"loss": 0.4, "auc": 0.6}, [], []),
        ({"loss": 0.4}, ["accuracy"], []),
    ],
)
def test_every_baseline_must_be_beaten_in_every_metric(
    ours: dict[str, float], metrics: list[str], lost: list[str]
) -> None:
    assert lost_to({MODEL: ours} | BASELINES, metrics) == lost


@pytest.mark.parametrize("ours", [{"loss": math.nan}, {}])
def test_what_is_not_a_number_beats_nothing(ours: dict[str, float]) -> None:
    assert len(lost_to({MODEL: ours} | BASELINES, ["loss"])) == 2


def test_a_baseline_that_could_not_be_computed_is_not_beaten() -> None:
    missing = {"logistic regression": "out of memory"}
    ours = {MODEL: {"loss": 0.4}, "majority rate": {"loss": 0.6}}
    assert lost_to(ours, ["loss"], missing) == ["logistic regression could not be computed (out of memory)"]
    assert lost_to(ours, [], missing) == []
