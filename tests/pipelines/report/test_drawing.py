"""The numbers under the figures, counted again row by row."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from sparkring.pipelines.evaluation.evaluate import HeldOut
from sparkring.pipelines.report.drawing import (
    MOST_COLUMNS,
    MOST_ROWS,
    Drawn,
    by_prediction,
    confusion_of,
    draw,
    most_frequent,
)
from sparkring.training.worker.result import Importance, ServerTotals
from tests.pipelines.report.test_report import inputs

RANDOM = np.random.default_rng(5)


def drawn(task: str, labels: np.ndarray, scores: np.ndarray) -> dict[str, Drawn]:
    held = HeldOut(labels.astype(float), scores)
    return {each.name: each for each in draw(inputs(held, model={"task": task, "label": "kind"}))}


def test_the_confusion_of_many_classes_has_the_frequent_ones_and_the_others_together() -> None:
    labels, guesses = RANDOM.integers(0, 30, 2000) ** 2 // 30, RANDOM.integers(0, 30, 2000)
    some = most_frequent(np.bincount(labels, minlength=30), 4)
    assert list(some) == sorted(sorted(range(30), key=lambda one: (-np.sum(labels == one), one))[:4])
    matrix = confusion_of(labels, guesses, some, 30)
    for row, actual in enumerate([*some, None]):
        for column, predicted in enumerate([*some, None]):
            of = [(a in some and a == actual) or (a not in some and actual is None) for a in labels]
            to = [(b in some and b == predicted) or (b not in some and predicted is None) for b in guesses]
            assert matrix[row, column] == sum(a and b for a, b in zip(of, to, strict=True))
    assert matrix.sum() == 2000 and confusion_of(labels, guesses, np.arange(30), 30).shape == (30, 30)


def test_classes_are_in_the_tables_with_their_rows_precision_and_recall() -> None:
    labels, scores = np.array([0, 0, 1, 1, 1, 2]), np.eye(4)[[0, 1, 1, 1, 0, 1]]
    found = drawn("multiclass", labels, scores)
    assert found["confusion"].numbers.columns == ["actual \\ predicted", "0", "1", "2", "3"]
    assert found["confusion"].numbers.rows[:3] == [("0", 1, 1, 0, 0), ("1", 1, 2, 0, 0), ("2", 0, 1, 0, 0)]
    first, second, third, none = found["classes"].numbers.rows
    assert first == ("0", 2, 2, 0.5, 0.5, 0.5) and second[:3] == ("1", 3, 4)
    assert second[3:] == (0.5, pytest.approx(2 / 3), pytest.approx(4 / 7)) and third[:3] == ("2", 1, 0)
    assert np.isnan(third[3]) and third[4] == 0 and np.isnan(none[5]), "never predicted; never at all"


def test_labels_of_which_a_row_has_several_are_in_a_table_with_precision_and_recall() -> None:
    labels, scores = np.array([[1, 0], [1, 1], [0, 0]]), np.array([[0.9, 0.1], [0.2, 0.8], [0.7, 0.6]])
    found = drawn("multilabel", labels, scores)
    assert found["labels"].numbers.rows == [("0", 2, 2, 0.5, 0.5, 0.5), ("1", 1, 2, 0.5, 1.0, pytest.approx(2 / 3))]
    assert sum(row[0] for row in found["calibration"].numbers.rows) == 6, "every pair of row and label"


def test_more_classes_than_a_page_holds_have_one_more_for_the_others() -> None:
    labels = RANDOM.integers(0, 40, 900)
    found = drawn("multiclass", labels, np.eye(40)[labels])
    assert len(found["confusion"].numbers.rows) == 21 and found["confusion"].numbers.rows[-1][0] == "others"
    assert found["confusion"].wide and len(found["classes"].numbers.rows) == 20


def test_slices_by_prediction_have_every_row_once() -> None:
    labels, predictions = RANDOM.normal(size=103), RANDOM.normal(size=103)
    slices = by_prediction(labels, predictions)
    assert sum(rows for rows, *_ in slices) == 103 and len(slices) == 10
    assert sum(rows * mean for rows, mean, *_ in slices) == pytest.approx(predictions.sum())
    assert sum(rows * mean for rows, _, mean, _ in slices) == pytest.approx(labels.sum())
    assert sum(rows * error for rows, *_, error in slices) == pytest.approx(abs(predictions - labels).sum())
    assert [mean for _, mean, *_ in slices] == sorted(mean for _, mean, *_ in slices)
    assert len(by_prediction(labels[:3], predictions[:3])) == 3


def test_the_most_important_columns_are_drawn_with_their_intervals() -> None:
    found = [Importance(feature=f"x{n}", mean=1 / n, low=0.9 / n, high=1.1 / n) for n in range(1, 30)]
    made = {each.name: each for each in draw(inputs(importance=found, importance_rows=1234))}["importance"]
    assert len(made.numbers.rows) == MOST_COLUMNS and made.numbers.rows[1] == ("x2", 0.5, 0.45, 0.55)
    assert "of 1,234 test rows" in made.caption and made.caption.endswith(f"the first {MOST_COLUMNS} of 29")
    axes = made.figure.axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()][:2] == ["x1", "x2"] and axes.get_yticks()[0] == 14


def test_a_model_that_is_always_right_and_one_row_alone_are_drawn() -> None:
    for labels in (np.arange(50.0), np.ones(1)):
        found = drawn("regression", labels, labels)
        assert {value for _, value in found["residuals"].numbers.rows} == {0.0}


def test_long_curves_have_their_first_and_last_points_and_some_between_in_the_table() -> None:
    held = HeldOut(np.arange(5000) % 2, RANDOM.random(5000))
    found = {each.name: each for each in draw(inputs(held))}
    roc, loss = found["roc"].numbers, found["loss"].numbers
    assert len(roc.rows) == MOST_ROWS and roc.rows[0] == (0.0, 0.0) and roc.rows[-1] == (1.0, 1.0)
    assert loss.columns == ["step", "train/loss", "valid/loss"] and loss.rows[0] == [1, 1.0, ""]
    assert len(loss.rows) == MOST_ROWS and loss.rows[-1][0] == 1999
    assert [row for row in loss.rows if row[2] != ""] == [[500, 0.002, 0.4], [1000, 0.001, 0.3]]


def test_evaluations_are_in_the_table_of_losses_however_few_they_are() -> None:
    history = {"train/loss": [(step, 0.5) for step in range(0, 5000, 10)], "valid/loss": [(1237, 0.4)]}
    held = HeldOut(np.arange(10) % 2, RANDOM.random(10))
    loss = draw(inputs(held, history=history))[0].numbers
    assert [1237, "", 0.4] in loss.rows and len(loss.rows) == MOST_ROWS + 1


def test_the_curves_of_a_resumed_run_say_where_they_begin() -> None:
    held = HeldOut(np.arange(10) % 2, RANDOM.random(10))
    history = {"train/loss": [(50, 0.5), (60, 0.4)]}
    assert draw(inputs(held, history=history))[0].caption == "Loss over steps"
    caption = draw(inputs(held, history=history, resumed_from=40))[0].caption
    assert (
        caption == "Loss over steps, from step 40 on: the steps before were an earlier command's; MLflow shows them all"
    )
    whole = {"train/loss": [(40, 0.6), *history["train/loss"]]}
    caption = draw(inputs(held, history=whole, resumed_from=40))[0].caption
    assert caption == "Loss over steps; the last command went on at step 40"


def test_a_run_on_servers_shows_how_far_ranks_were_ahead_and_how_old_gradients_were() -> None:
    given = inputs()
    lags = {lag: 100 - lag for lag in range(40)}
    servers = ServerTotals(gaps={0: 3, 1: 5}, lags=lags, applied=8, repeated=0, rejected=0, not_finite={})
    result = replace(given.result, train=replace(given.result.train, servers=servers))
    found = {each.name: each for each in draw(replace(given, result=result))}
    assert found["clock_gap"].numbers.rows == [(0, 3), (1, 5)]
    assert found["version_lag"].numbers.rows == [(lag, 100 - lag) for lag in range(MOST_ROWS)]
    assert not {"clock_gap", "version_lag"} & {each.name for each in draw(given)}
    metrics = servers.metrics()
    assert metrics["servers/gap/1"] == 5 / 8 and metrics["servers/gap_mean"] == 5 / 8
