"""Which models pass, by MLflow's own arithmetic; resamples and slices on made-up predictions."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlflow.models import MetricThreshold
from mlflow.models.evaluation.validation import ModelValidationFailedException, validate_evaluation_results

from sparkring.conf.blocks.promote import MetricRule, PromoteConfig
from sparkring.conf.tasks import BINARY, REGRESSION, task_kind
from sparkring.pipelines.promotion import rules
from sparkring.pipelines.promotion.rules import ScoredRows, judge, judge_rule, reasons_of, slices_of

OWN = task_kind("own:Task")
VALUES = st.sampled_from([-0.5, 0.0, 0.25, 0.5, 0.5 + 1e-12, 0.6, 0.75, 1.0]) | st.floats(-2, 2).map(lambda x: x or 0.0)


def passes_in_mlflow(ours: float, champion: float, better: bool, words: dict[str, float]) -> bool:
    threshold = MetricThreshold(**words, greater_is_better=better)
    results: Any = [SimpleNamespace(metrics={"m": value}) for value in (ours, champion)]
    try:
        validate_evaluation_results({"m": threshold}, *results)
    except ModelValidationFailedException:
        return False
    return True


@given(
    VALUES,
    VALUES,
    st.booleans(),
    st.dictionaries(
        st.sampled_from(["threshold", "min_absolute_change"]), st.sampled_from([0.1, 0.25, 0.5]), min_size=1
    ),
)
@settings(max_examples=200)
def test_a_rule_passes_what_mlflow_passes(ours: float, champion: float, better: bool, words: dict[str, float]) -> None:
    rule = MetricRule(metric="m", greater_is_better=better, **words)
    found = judge_rule(rule, OWN, {"m": ours}, {"m": champion}, None)
    assert found.passed == passes_in_mlflow(ours, champion, better, words)


@pytest.mark.parametrize("better", [True, False])
@pytest.mark.parametrize("champion", [0.5, -0.5, 0.0])
@pytest.mark.parametrize("change", [0.0, 0.1])
@pytest.mark.parametrize("step", [-0.06, -0.04, -1e-9, 0.0, 1e-9, 0.04, 0.06])
def test_a_relative_change_is_a_share_of_the_champions_value(
    better: bool, champion: float, change: float, step: float
) -> None:
    """A champion of 0 has no share: MLflow then asks for 1e-10."""
    rule = MetricRule(metric="m", greater_is_better=better, min_relative_change=change)
    found = judge_rule(rule, OWN, {"m": champion + step}, {"m": champion}, None)
    assert found.passed == passes_in_mlflow(champion + step, champion, better, {"min_relative_change": change})


def test_without_a_champion_only_thresholds_are_asked() -> None:
    rule = MetricRule(metric="auc", threshold=0.6, min_absolute_change=0.1)
    assert judge_rule(rule, BINARY, {"auc": 0.61}, {}, None).passed
    found = judge_rule(rule, BINARY, {"auc": 0.59}, {}, None)
    assert not found.passed and found.champion is None
    assert reasons_of([found]) == ["auc >= 0.6 and auc better than the champion's by 0.1: not met: it is 0.5900"]


def test_values_are_told_in_any_unit() -> None:
    rule = MetricRule(metric="rmse", min_absolute_change=1e-9)
    found = judge_rule(rule, REGRESSION, {"rmse": 2e-6}, {"rmse": 1e-6}, None)
    assert reasons_of([found])[0].endswith("it is 2e-06, the champion's is 1e-06")


@pytest.mark.parametrize(("better", "beyond"), [(True, 0.499), (False, 0.501)])
def test_the_threshold_itself_is_enough(better: bool, beyond: float) -> None:
    rule = MetricRule(metric="m", threshold=0.5, greater_is_better=better)
    assert judge_rule(rule, OWN, {"m": 0.5}, {}, None).passed
    assert not judge_rule(rule, OWN, {"m": beyond}, {}, None).passed


def test_a_metric_that_is_no_number_passes_nothing() -> None:
    changed, reached = MetricRule(metric="auc", min_relative_change=0.0), MetricRule(metric="auc", threshold=0.0)
    for ours in ({}, {"auc": float("nan")}):
        assert not judge_rule(reached, BINARY, ours, {}, None).passed
        assert not judge_rule(changed, BINARY, ours, {"auc": 0.5}, None).passed
        assert not judge_rule(changed, BINARY, ours, {}, None).passed, "without a champion too"
    assert not judge_rule(changed, BINARY, {"auc": 0.5}, {"auc": float("nan")}, None).passed
    assert "it is no number" in reasons_of([judge_rule(reached, BINARY, {}, {}, None)])[0]


def test_names_say_which_way_is_better() -> None:
    lower, higher = (MetricRule(metric=name, min_relative_change=0.0) for name in ("loss", "auc"))
    assert judge_rule(lower, BINARY, {"loss": 0.4}, {"loss": 0.5}, None).passed
    assert not judge_rule(lower, BINARY, {"loss": 0.6}, {"loss": 0.5}, None).passed
    assert judge_rule(higher, BINARY, {"auc": 0.6}, {"auc": 0.5}, None).passed
    assert not judge_rule(higher, BINARY, {"auc": 0.4}, {"auc": 0.5}, None).passed


def scored(seed: int, rows: int, ours_noise: float, champion_noise: float, slices: Any = None) -> ScoredRows:
    """Two models of one truth, each with its own error."""
    draw = np.random.default_rng(seed)
    truth = draw.random(rows)
    labels = (draw.random(rows) < truth).astype(np.float64)
    ours, champion = (
        np.clip(truth + noise * draw.normal(size=rows), 0.01, 0.99) for noise in (ours_noise, champion_noise)
    )
    return ScoredRows(BINARY, labels, ours, champion, slices or {})


def of(rows: ScoredRows, *rules: MetricRule, **more: Any) -> list[Any]:
    from sparkring.training.metrics import task_scores

    both = [task_scores(BINARY, rows.labels, scores) for scores in rows.models]
    return judge(PromoteConfig(rules=list(rules), **more), BINARY, both[0], both[1], rows)


@pytest.mark.parametrize("metric", ["loss", "auc"])
def test_a_lead_by_chance_is_not_sure(metric: str) -> None:
    """Two equally good models: one leads by chance, on every set of rows another."""
    plain, sure = MetricRule(metric=metric, min_relative_change=0.0), None
    sure = MetricRule(metric=metric, min_relative_change=0.0, confidence=0.99)
    found = [of(scored(seed, 500, 0.2, 0.2), plain, sure) for seed in range(8)]
    leads, certain = ([each[i].passed for each in found] for i in (0, 1))
    assert any(leads) and not any(certain)
    assert all(f.passed for f in of(scored(1, 2000, 0.05, 0.6), plain, sure))


@pytest.mark.parametrize(("better", "passed"), [(949, False), (950, True)])
def test_the_share_of_resamples_that_the_rule_asks_for_is_enough(
    better: int, passed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses = np.ones((1000, 2))
    losses[better:, 0] = 2.0
    monkeypatch.setattr(rules, "resampled", lambda *_, **__: losses)
    rule = MetricRule(metric="loss", min_relative_change=0.0, confidence=0.95)
    found = judge_rule(rule, BINARY, {"loss": 0.1}, {"loss": 0.2}, scored(1, 300, 0.1, 0.3))
    assert found.passed == passed and found.resamples_met == better / 1000
    said = "it is 0.1000, the champion's is 0.2000; so it is in 94.9% of the resamples"
    assert [line.rpartition(": ")[2] for line in reasons_of([found])] == ([] if passed else [said])


def test_equal_models_are_surely_not_worse() -> None:
    rows = scored(1, 300, 0.1, 0.1)
    same = ScoredRows(BINARY, rows.labels, rows.ours, rows.ours)
    assert of(same, MetricRule(metric="auc", min_relative_change=0.0, confidence=0.99))[0].passed


def test_a_better_model_may_lose_no_slice() -> None:
    rows = scored(2, 4000, 0.1, 0.3)
    where = np.where(np.arange(4000) < 700, "JFK", np.where(np.arange(4000) < 1100, "small", "LGA"))
    ours = np.where(where == "LGA", rows.ours, 1 - rows.ours)  # good on most rows, upside down on others
    one_sided = ScoredRows(BINARY, rows.labels, ours, rows.champion, {"origin": where})
    rule = MetricRule(metric="accuracy", min_relative_change=0.0)
    found = of(one_sided, rule, slices=["origin"])
    assert [(f.slice, f.rows, f.passed) for f in found[1:]] == [
        ("origin = JFK", 700, False),
        ("origin = LGA", 2900, True),
    ]
    assert "not met where origin = JFK (700 rows)" in reasons_of(found)[-1]
    assert len(of(one_sided, rule, slices=["origin"], min_slice_rows=400)) == 4


def test_noise_loses_no_slice_because_there_are_many() -> None:
    rows = scored(5, 12_000, 0.2, 0.2, {"shop": np.arange(12_000) % 24})
    found = of(rows, MetricRule(metric="loss", min_relative_change=0.0), slices=["shop"])[1:]
    assert len(found) == 24 and all(f.passed for f in found)
    worse = [f for f in found if f.ours > f.champion]
    assert len(worse) > 5, "some are worse by chance"


def test_slices_are_of_texts_and_nulls_alike() -> None:
    values = np.array(["a", "null", "a", "b"], object)
    rows = ScoredRows(BINARY, np.zeros(4), np.zeros(4), np.zeros(4), {"c": values})
    found = slices_of(PromoteConfig(min_slice_rows=1), rows)
    assert [(name, mask.tolist()) for name, mask in found] == [
        ("c = a", [True, False, True, False]),
        ("c = b", [False, False, False, True]),
        ("c = null", [False, True, False, False]),
    ]


def test_rows_of_no_weight_make_no_slice() -> None:
    rows = ScoredRows(BINARY, *[np.zeros(4)] * 3, {"c": np.array(["a", "a", "b", "b"])}, np.array([1.0, 1, 0, 1]))
    assert [name for name, _ in slices_of(PromoteConfig(min_slice_rows=2), rows)] == ["c = a"]
