"""Metrics: scikit-learn is the oracle, with weights, ties and one class; what rows do not have is left out."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from sklearn import metrics as sklearn

from sparkring.conf.tasks import (
    BINARY,
    MULTICLASS,
    MULTILABEL,
    POISSON,
    REGRESSION,
    TABLE_TASKS,
    TASKS,
    LabelForm,
    Metric,
)
from sparkring.training.metrics import (
    OF_LOSS,
    WHOLE,
    Rows,
    calibration,
    calibration_error,
    class_counts,
    is_mean,
    metrics_of,
    row_values,
    task_scores,
    top_calibration,
    weighing,
)

DRAW = np.random.default_rng(5)
CLASSES = DRAW.integers(0, 7, 500)
SCORED: dict[str, tuple[np.ndarray, np.ndarray]] = {
    "binary": (CLASSES % 2, DRAW.random(500).round(2)),
    "multiclass": (CLASSES, DRAW.dirichlet(np.ones(7), 500) * 0.5 + 0.5 * np.eye(7)[DRAW.permutation(CLASSES)]),
    "regression": (CLASSES * 2.0, CLASSES * 2 + DRAW.normal(size=500)),
    "poisson": (DRAW.poisson(CLASSES) / 2, np.exp(DRAW.normal(size=500))),
    "multilabel": (np.stack([CLASSES % 2, CLASSES > 4, CLASSES > 9], axis=1), DRAW.random((500, 3)).round(2)),
}
FLAGS = st.lists(st.tuples(st.booleans(), st.integers(0, 8), st.integers(0, 3)), min_size=1, max_size=60)
ALL: list[Metric] = list({metric: None for name in TABLE_TASKS for metric in TASKS[name].metrics})


def oracle(task: str, labels: np.ndarray, scores: np.ndarray, weights: np.ndarray | None) -> dict[str, float]:
    """Every held-out metric of scikit-learn; calibration and the ranks of a class, which it has not, left out."""
    by: dict[str, Any] = {"sample_weight": weights}
    if task == "regression":
        squared = sklearn.mean_squared_error(labels, scores, **by)
        absolute = sklearn.mean_absolute_error(labels, scores, **by)
        return {"loss": squared, "rmse": squared**0.5, "abs_error": absolute,
                "r2": sklearn.r2_score(labels, scores, **by)}  # fmt: skip
    if task == "poisson":
        return {"loss": sklearn.mean_poisson_deviance(labels, scores, **by),
                "abs_error": sklearn.mean_absolute_error(labels, scores, **by),
                "d2": sklearn.d2_tweedie_score(labels, scores, power=1, **by)}  # fmt: skip
    if task == "multiclass":
        best, classes = scores.argmax(axis=1), np.arange(scores.shape[1])
        occur = sorted({*labels.tolist(), *best.tolist()})
        return {"loss": sklearn.log_loss(labels, scores, labels=classes, **by),
                "accuracy": sklearn.accuracy_score(labels, best, **by),
                "macro_f1": sklearn.f1_score(labels, best, labels=occur, average="macro", **by)}  # fmt: skip
    if task == "multilabel":
        clipped = np.clip(scores, 1e-15, 1 - 1e-15)
        losses = [sklearn.log_loss(a, b, labels=[0, 1], **by) for a, b in zip(labels.T, clipped.T, strict=True)]
        right = [sklearn.accuracy_score(a, b > 0.5, **by) for a, b in zip(labels.T, scores.T, strict=True)]
        found = {"loss": np.mean(losses), "accuracy": np.mean(right)}
        for mean in ("macro", "micro"):
            some = [0, 1] if mean == "macro" else [0, 1, 2]  # no row has the last label: it is in no mean over labels
            of = {"average": mean, **by}
            found |= {f"{mean}_auc": sklearn.roc_auc_score(labels[:, some], scores[:, some], **of),
                      f"{mean}_average_precision": sklearn.average_precision_score(labels[:, some], scores[:, some],
                                                                                   **of),
                      f"{mean}_f1": sklearn.f1_score(labels, scores > 0.5, **of)}  # fmt: skip
        return found
    found = {"loss": sklearn.log_loss(labels, np.clip(scores, 1e-15, 1 - 1e-15), labels=[0, 1], **by),
             "brier": sklearn.brier_score_loss(labels, scores, labels=[0, 1], **by),
             "accuracy": sklearn.accuracy_score(labels > 0.5, scores > 0.5, **by),
             "f1": sklearn.f1_score(labels > 0.5, scores > 0.5, zero_division=0.0, **by)}  # fmt: skip
    kept = labels if weights is None else labels[weights > 0]
    if 0 < kept.sum() < len(kept):
        found |= {"auc": sklearn.roc_auc_score(labels, scores, **by),
                  "average_precision": sklearn.average_precision_score(labels, scores, **by)}  # fmt: skip
    return found


def without_ours(found: dict[str, float]) -> dict[str, float]:
    """Without the metrics that scikit-learn has not."""
    ours = ("calibration_error", "top_5_accuracy", "mean_reciprocal_rank")
    return {name: value for name, value in found.items() if name not in ours}


def test_every_metric_of_a_table_task_has_one_formula() -> None:
    for metric in ALL:
        assert [is_mean(metric), metric in OF_LOSS, metric in WHOLE].count(True) == 1, metric


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("task", SCORED)
def test_scores_are_those_of_scikit_learn(task: str, weighted: bool) -> None:
    labels, scores = SCORED[task]
    weights = np.random.default_rng(3).random(500) * (np.arange(500) % 3) if weighted else None
    found = without_ours(task_scores(TASKS[task], labels, scores, weights))
    assert found == pytest.approx(oracle(task, labels, scores, weights), rel=1e-12)


@given(FLAGS)
@example([(True, 8, 1)])
@example([(False, 8, 1), (False, 0, 1)])
def test_flags_with_ties_certain_scores_and_one_class_score_as_in_scikit_learn(rows: list[Any]) -> None:
    labels, scores, weights = (np.array(column, float) for column in zip(*rows, strict=True))
    for by in (None, weights):
        if by is None or by.any():
            found = without_ours(task_scores(BINARY, labels, scores / 8, by))
            assert found == pytest.approx(oracle("binary", labels, scores / 8, by), rel=1e-12, abs=1e-12)


@given(FLAGS)
def test_auc_is_counted_so_it_is_equal_to_the_last_bit_in_any_order(rows: list[Any]) -> None:
    labels, scores, _ = (np.array(column, float) for column in zip(*rows, strict=True))
    positive, negative = scores[labels > 0].tolist(), scores[labels == 0].tolist()
    if positive and negative:
        pairs = sum(Fraction(2 * (p > n) + (p == n), 2) for p in positive for n in negative)
        found = weighing(BINARY.metric("auc"), Rows(LabelForm.FLAG, labels, scores))(np.ones(len(rows), np.int64))
        assert found == float(pairs / (len(positive) * len(negative)))


@pytest.mark.parametrize("task", TABLE_TASKS)
def test_a_row_of_weight_n_scores_as_n_rows_do(task: str) -> None:
    """But for calibration, whose slices are of equal counts of rows."""
    labels, scores = SCORED[task]
    weights = np.random.default_rng(2).integers(0, 4, 500)
    found = task_scores(TASKS[task], labels, scores, weights / 3)
    expected = task_scores(TASKS[task], np.repeat(labels, weights, axis=0), np.repeat(scores, weights, axis=0))
    assert found.keys() == expected.keys()
    for metric in found.keys() - {"calibration_error"}:
        assert found[metric] == pytest.approx(expected[metric], rel=1e-12), metric
    assert found != task_scores(TASKS[task], labels, scores)


@pytest.mark.parametrize("task", TABLE_TASKS)
def test_the_metrics_that_rules_may_name_are_those_a_task_has(task: str) -> None:
    assert task_scores(TASKS[task], *SCORED[task]).keys() == TASKS[task].directions.keys()


@pytest.mark.parametrize("task", TABLE_TASKS)
def test_rows_of_a_metric_have_its_mean(task: str) -> None:
    whole, rows = task_scores(TASKS[task], *SCORED[task]), Rows(TASKS[task].form, *SCORED[task])
    for metric in (m for m in TASKS[task].metrics if is_mean(m) and m.name in whole):
        assert row_values(metric, rows).mean() == pytest.approx(whole[metric.name], abs=1e-12), metric


def test_rows_without_weight_have_no_metric() -> None:
    for task in TABLE_TASKS:
        rows = Rows(TASKS[task].form, *SCORED[task])
        metrics = [m for m in TASKS[task].metrics if m.resampled]
        found = metrics_of(metrics, rows, np.zeros(500))
        assert all(math.isnan(value) or (name == "f1" and value == 0) for name, value in found.items()), found


def test_a_rate_weighted_by_its_exposure_has_the_deviance_of_the_count() -> None:
    """So exposure as `etl.weight` is the offset log(exposure) of other libraries."""
    rates, exposure = np.exp(DRAW.normal(size=500)), DRAW.uniform(0.1, 3, 500)
    counts = DRAW.poisson(rates * exposure)
    found = task_scores(POISSON, counts / exposure, rates, exposure)
    of_counts = sklearn.mean_poisson_deviance(counts, rates * exposure)
    assert found["loss"] * exposure.mean() == pytest.approx(of_counts, rel=1e-12)
    certain = task_scores(POISSON, np.array([0.0, 1.0]), np.zeros(2))
    assert certain["loss"] == pytest.approx(-math.log(1e-15) - 1), "a predicted rate of 0 is clipped, as probabilities"


def test_one_class_has_no_ranking_and_equal_labels_no_share_of_variance() -> None:
    found = task_scores(BINARY, np.zeros(3), np.array([0.1, 0.2, 0.3]))
    assert found.keys() == {"loss", "brier", "accuracy", "f1", "calibration_error"} and found["f1"] == 0
    assert "average_precision" not in task_scores(BINARY, np.ones(3), np.array([0.1, 0.2, 0.3]))
    values = np.full(7, 0.1)  # whose mean is not 0.1 in float64
    assert "r2" not in task_scores(REGRESSION, values, values + 1, np.linspace(0, 1, 7))
    resample = np.array([0, 0.3, 0.7]), Rows(LabelForm.NUMBER, np.array([5, 0.1, 0.1]), np.ones(3))
    assert math.isnan(weighing(REGRESSION.metric("r2"), resample[1])(resample[0])), "of the rows that count"


def test_a_label_that_no_row_has_and_none_is_predicted_to_have_is_in_no_mean_over_labels() -> None:
    labels, scores = np.array([[1, 0, 1], [0, 0, 1.0]]), np.array([[0.6, 0.2, 0.9], [0.4, 0.1, 0.4]])
    found = task_scores(MULTILABEL, labels, scores)
    assert found["macro_auc"] == found["macro_average_precision"] == 1.0, "of the first label alone"
    assert found["macro_f1"] == pytest.approx((1 + 2 / 3) / 2)
    nothing = task_scores(MULTILABEL, labels * 0, scores / 2)
    assert nothing.keys() == {"loss", "accuracy"}


RANKED = st.integers(2, 7).flatmap(
    lambda classes: st.lists(
        st.tuples(st.integers(0, classes - 1), st.lists(st.integers(1, 3), min_size=classes, max_size=classes)),
        min_size=1,
        max_size=40,
    )
)


@given(RANKED)
def test_ranks_and_counts_of_classes_are_those_counted_by_hand(rows: list[tuple[int, list[int]]]) -> None:
    labels, scores = np.array([label for label, _ in rows]), np.array([weights for _, weights in rows], float)
    found = task_scores(MULTICLASS, labels, scores / scores.sum(axis=1, keepdims=True))
    ranks = [1 + sum(w > ws[y] for w in ws) + (ws.count(ws[y]) - 1) / 2 for y, ws in rows]
    assert ("top_5_accuracy" in found) == (scores.shape[1] > 5) == ("mean_reciprocal_rank" in found)
    if "top_5_accuracy" in found:
        assert found["top_5_accuracy"] == pytest.approx(np.mean([rank <= 5 for rank in ranks]))
        assert found["mean_reciprocal_rank"] == pytest.approx(np.mean([1 / rank for rank in ranks]))
    counts, best = class_counts(labels, scores.argmax(axis=1), scores.shape[1]), scores.argmax(axis=1)
    for one in range(scores.shape[1]):
        right, rows_of, guessed = ((labels == one) & (best == one)).sum(), (labels == one).sum(), (best == one).sum()
        expected = [right / guessed if guessed else np.nan, right / rows_of if rows_of else np.nan]
        assert [counts.precision[one], counts.recall[one]] == pytest.approx(expected, nan_ok=True)


@given(FLAGS, st.integers(1, 20))
def test_calibration_covers_every_row_once_by_rising_score(rows: list[Any], bins: int) -> None:
    labels, scores, _ = (np.array(column, float) for column in zip(*rows, strict=True))
    found = calibration(labels, scores / 8, bins=bins)
    assert 1 <= len(found) <= bins and sum(b.rows for b in found) == len(rows)
    assert sum(b.rows * b.observed for b in found) == pytest.approx(labels.sum())
    assert sum(b.rows * b.predicted for b in found) == pytest.approx(scores.sum() / 8)
    assert [b.predicted for b in found] == sorted(b.predicted for b in found)


def test_calibration_slices_are_those_of_a_loop() -> None:
    scores = DRAW.beta(2, 6, 20_000).round(3)
    labels = (DRAW.uniform(size=scores.size) < scores).astype(float)
    order = np.argsort(scores, kind="stable")
    cuts = [int(np.searchsorted(scores[order], scores[order][i * scores.size // 15])) for i in range(15)]
    slices = [order[a:b] for a, b in zip(cuts, [*cuts[1:], scores.size], strict=True) if b > a]
    expected = [(len(s), scores[s].mean(), labels[s].mean(), len(s)) for s in slices]
    found = [(b.rows, b.predicted, b.observed, b.weight) for b in calibration(labels, scores)]
    np.testing.assert_allclose(found, expected, rtol=1e-12)


def test_calibration_of_a_calibrated_and_an_overconfident_model() -> None:
    truth = DRAW.uniform(size=200_000)
    labels = (DRAW.uniform(size=truth.size) < truth).astype(float)
    assert calibration_error(calibration(labels, truth)) < 0.01
    assert calibration_error(calibration(labels, np.round(truth))) > 0.2
    assert task_scores(BINARY, labels, truth)["auc"] == pytest.approx(5 / 6, abs=0.005)


def test_calibration_of_classes_compares_the_highest_probability_with_the_share_that_is_right() -> None:
    scores = np.array([[0.9, 0.05, 0.05]] * 10 + [[0.2, 0.6, 0.2]] * 10)
    labels = np.array([0] * 9 + [1] + [1] * 3 + [0] * 7)
    low, high = top_calibration(labels, scores)
    assert (low.rows, low.predicted, low.observed) == (10, pytest.approx(0.6), pytest.approx(0.3))
    assert (high.predicted, high.observed) == (pytest.approx(0.9), pytest.approx(0.9))
    assert task_scores(MULTICLASS, labels, scores)["calibration_error"] == pytest.approx(0.15)


def test_calibration_is_of_the_rows_weights() -> None:
    """Two slices of scores: of one half of the weight all labels are 1, and every row is given 0.5."""
    labels, scores, weights = np.array([1, 1, 0, 0]), np.full(4, 0.5), np.array([3.0, 3.0, 1.0, 1.0])
    assert task_scores(BINARY, labels, scores, weights)["calibration_error"] == pytest.approx(0.25)
    assert [b.rows for b in calibration(labels, scores, weights * [1, 0, 1, 1])] == [3], "rows of weight 0 do not count"


@pytest.mark.parametrize(
    ("task", "labels", "scores", "rule"),
    [
        ("binary", [], [], "at least one"),
        ("binary", [1, 0], [0.5], "equally many"),
        ("binary", [1, 2], [0.5, 0.5], "other than 0 and 1"),
        ("binary", [1, 0], [0.5, math.nan], "1 of 2 labels or scores are not finite"),
        ("multiclass", [], np.zeros((0, 2)), "at least one"),
        ("multiclass", [0, 1], np.zeros(2), "equally many rows"),
        ("multiclass", [0, 2], np.full((2, 2), 0.5), "labels other than 0 to 1: the model has 2 classes"),
        ("multiclass", [0, 0.5], np.full((2, 2), 0.5), "labels other than 0 to 1"),
        ("multiclass", [0, 1], [[0.5, 0.5], [math.nan, 1]], "1 of 2 labels or scores are not finite"),
        ("multilabel", np.ones((4, 2)), np.ones((4, 3)), "equally many rows of equally many labels"),
        ("multilabel", np.ones(4), np.ones(4), "equally many rows of equally many labels"),
        ("multilabel", np.full((4, 2), 2), np.ones((4, 2)), "other than 0 and 1"),
        ("multilabel", np.ones((4, 2)), [[0, math.inf]] * 4, "4 of 4 labels or scores are not finite"),
        ("regression", [], [], "at least one"),
        ("regression", [1.0, 2.0], [1.0], "equally many"),
        ("regression", [1.0, 2.0], [1.0, math.inf], "1 of 2 labels or scores are not finite"),
        ("regression", [math.nan, 2.0], [1.0, 1.0], "1 of 2 labels or scores are not finite"),
    ],
)
def test_what_cannot_be_scored_is_refused(task: str, labels: Any, scores: Any, rule: str) -> None:
    with pytest.raises(ValueError, match=rule):
        task_scores(TASKS[task], np.array(labels), np.array(scores))


def test_weights_that_are_all_zero_or_too_few_are_refused() -> None:
    for weights in (np.zeros(12), np.ones(11)):
        with pytest.raises(ValueError, match="there must be as many, and one above 0"):
            task_scores(REGRESSION, np.arange(12), np.arange(12) + 0.5, weights)
