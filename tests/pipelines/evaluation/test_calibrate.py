"""A calibration is kept only where it lowers the log loss of rows that it was not fitted on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from sparkring.conf.storage import open_storage
from sparkring.conf.stored import StoredError
from sparkring.conf.tasks import BINARY, MULTICLASS, LabelForm
from sparkring.pipelines.evaluation.balance import shifted_class
from sparkring.pipelines.evaluation.calibrate import (
    FEWEST,
    FEWEST_OTHERS,
    ValidationRows,
    class_slopes,
    fit_calibration,
    fit_isotonic,
    fit_platt,
    fit_shift,
    fit_temperature,
    flag_slopes,
    shift_between,
    with_test_errors,
)
from sparkring.training.metrics import SortedRows
from sparkring.training.model.calibration import FILE, Calibration, read_calibration
from sparkring.training.worker.result import LabelBalance

ROWS = 20_000


def fit(rows: ValidationRows) -> Calibration:
    return fit_temperature(rows) if rows.form is LabelForm.CLASS else fit_platt(rows)


def sigmoid(z: np.ndarray) -> np.ndarray:
    found: np.ndarray = 1 / (1 + np.exp(-z))
    return found


def softmax(z: np.ndarray) -> np.ndarray:
    powers = np.exp(z - z.max(axis=1, keepdims=True))
    found: np.ndarray = powers / powers.sum(axis=1, keepdims=True)
    return found


def flags(rows: int = ROWS, scale: float = 1.0, shift: float = 0.0, seed: int = 0) -> ValidationRows:
    """A model whose log-odds are (true log-odds - shift) / scale."""
    draw = np.random.default_rng(seed)
    true = draw.normal(-1, 1.5, rows)
    labels = (draw.random(rows) < sigmoid(true)).astype(np.float64)
    return ValidationRows(LabelForm.FLAG, labels, sigmoid((true - shift) / scale), np.ones(rows))


def classes(rows: int = ROWS, scale: float = 1.0, seed: int = 0) -> ValidationRows:
    draw = np.random.default_rng(seed)
    true = draw.normal(0, 1.5, (rows, 4))
    labels = (draw.random(rows)[:, None] > softmax(true).cumsum(axis=1)).sum(axis=1).astype(np.float64)
    return ValidationRows(LabelForm.CLASS, labels, softmax(true / scale), np.ones(rows))


def test_too_certain_and_shifted_probabilities_are_mended() -> None:
    found = fit_calibration(flags(scale=0.5, shift=0.7))
    assert found.kept is not None and found.method == "Platt scaling" and found.rows == ROWS
    assert found.kept.scale == pytest.approx(0.5, rel=0.05) and found.kept.shift == pytest.approx(0.7, abs=0.05)
    assert found.loss_after == pytest.approx(flags().loss, abs=1e-3) and found.loss_after < found.loss_before - 0.05


def test_a_temperature_is_found_and_no_class_overtakes_another() -> None:
    rows = classes(scale=0.4)
    found = fit_calibration(rows)
    assert found.kept is not None and found.method == "temperature scaling" and found.kept.shift == 0
    assert found.kept.scale == pytest.approx(0.4, rel=0.05)
    calibrated = found.kept.of(rows.scores)
    np.testing.assert_allclose(calibrated.sum(axis=1), 1)
    np.testing.assert_array_equal(calibrated.argsort(axis=1), rows.scores.argsort(axis=1))


@pytest.mark.parametrize("make", [flags, classes])
def test_perfect_probabilities_stay_nearly_as_they_are(make: type[ValidationRows]) -> None:
    rows = make(100_000)  # type: ignore[call-arg, arg-type]
    assert fit(rows).scale == pytest.approx(1, abs=0.02) and fit(rows).shift == pytest.approx(0, abs=0.02)
    assert np.abs(fit(rows).of(rows.scores) - rows.scores).max() < 0.01


def test_the_order_of_rows_stays_so_that_auc_does_too() -> None:
    rows = flags(scale=0.3, shift=1.0)
    scores = np.concatenate([rows.scores, [0.0, 1e-250, 1e-20, 1 - 1e-15, 1.0]])
    calibrated = Calibration(scale=0.5, shift=-1.0).of(scores)
    np.testing.assert_array_equal(np.argsort(calibrated, kind="stable"), np.argsort(scores, kind="stable"))
    before, after = (SortedRows(rows.labels > 0.5, each).auc(rows.weights) for each in (scores[:-5], calibrated[:-5]))
    assert before == after


@pytest.mark.parametrize("seed", range(40))
def test_what_is_kept_lowers_the_loss_of_rows_it_was_not_fitted_on(seed: int) -> None:
    draw = np.random.default_rng(seed)
    rows, scale = int(draw.integers(3 * FEWEST, 6 * FEWEST)), float(np.exp(draw.normal(0, 0.7)))
    made = flags(rows, scale, float(draw.normal(0, 0.5)), seed) if seed % 2 else classes(rows, scale, seed)
    weights = draw.exponential(1, rows)
    found = fit_calibration(ValidationRows(made.form, made.labels, made.scores, weights / weights.mean()))
    assert (found.kept is not None) == (found.loss_before - found.loss_after > found.gain_error)
    assert np.isfinite([found.loss_before, found.loss_after]).all()


@pytest.mark.parametrize("others", [0, FEWEST_OTHERS - 1])
@pytest.mark.parametrize("form", [LabelForm.FLAG, LabelForm.CLASS])
def test_rows_of_nearly_one_label_calibrate_nothing(form: LabelForm, others: int) -> None:
    """117 rows without a positive one made all probabilities of a rare label 0."""
    labels = np.zeros(ROWS // 100)
    labels[:others] = 1
    scores = np.full(len(labels), 0.05)
    rows = ValidationRows(
        form, labels, scores if form is LabelForm.FLAG else np.column_stack([1 - scores, scores]), labels * 0 + 1
    )
    with pytest.raises(ValueError, match=f"{others} have another label than most, at least 10 are needed"):
        fit_calibration(rows)


@pytest.mark.parametrize("rows", [FEWEST, 1000, 5237])
@pytest.mark.parametrize("make", [flags, classes])
def test_a_model_that_is_calibrated_stays_so_but_for_chance(make: Callable[..., ValidationRows], rows: int) -> None:
    """A gain of 0.0003 on 5,237 rows was kept, and the calibration error of the test rows grew from .0120 to .0198."""
    found = [fit_calibration(make(rows, seed=seed)) for seed in range(60)]
    assert sum(each.kept is not None for each in found) <= 4
    refused = next(each for each in found if each.kept is None)
    assert "gains less than its error on" in refused.describe()


@pytest.mark.parametrize(
    ("scale", "shift", "wanted"),
    [(1.0, 0.6, "a shift of log-odds"), (0.4, 0.0, "Platt scaling"), (2.0, -1.0, "Platt scaling")],
)
def test_the_simplest_of_equally_good_methods_is_kept(scale: float, shift: float, wanted: str) -> None:
    found = fit_calibration(flags(ROWS, scale, shift))
    assert found.kept is not None and found.method == wanted


def bent_flags(rows: int, seed: int = 0) -> ValidationRows:
    """A model that is right below even odds and far too certain above: no straight line mends it."""
    made = flags(rows, seed=seed)
    odds = np.log(made.scores) - np.log1p(-made.scores)
    return replace(made, scores=sigmoid(np.where(odds > 0, 6 * odds, odds)))


def test_a_curve_is_kept_where_a_line_does_not_do_and_keeps_the_order() -> None:
    found = fit_calibration(bent_flags(ROWS))
    assert found.kept is not None and found.method == "isotonic regression" and found.kept.format == 2
    others, truth = bent_flags(ROWS, seed=1), flags(ROWS, seed=1)
    line = others.calibrated(fit_platt(bent_flags(ROWS)))
    assert others.calibrated(found.kept).loss < line.loss - 0.01
    assert others.calibrated(found.kept).loss == pytest.approx(truth.loss, abs=0.003)
    scores = np.sort(np.concatenate([others.scores, [0.0, 1e-300, 1e-20, 1.0]]))
    assert (np.diff(found.kept.of(scores)) >= 0).all()


@pytest.mark.parametrize("method", [fit_isotonic, fit_platt, fit_shift])
def test_no_method_makes_infinite_log_odds(method: Callable[[ValidationRows], Calibration]) -> None:
    """Blocks of one class, a certain model, ties, and rows of uneven weight."""
    draw = np.random.default_rng(1)
    for labels, scores in [
        (np.arange(200) % 2.0, np.arange(200) % 2.0),
        (np.arange(200) % 2.0, 1 - np.arange(200) % 2.0),
        ((np.arange(200) > 100) * 1.0, np.linspace(0, 1, 200)),
        (draw.integers(0, 2, 200) * 1.0, np.full(200, 0.3)),
    ]:
        found = method(ValidationRows(LabelForm.FLAG, labels, scores, draw.exponential(1, 200)))
        calibrated = found.of(np.linspace(0, 1, 101))
        assert np.isfinite(calibrated).all() and (np.diff(calibrated) >= 0).all()
        assert 0 < calibrated[50] < 1


@pytest.mark.parametrize(
    ("labels", "scores"),
    [
        (np.arange(FEWEST) % 2.0, np.arange(FEWEST) % 2.0),  # certain and right
        (np.arange(FEWEST) % 2.0, 1 - np.arange(FEWEST) % 2.0),  # certain and wrong
        (np.zeros(FEWEST), np.linspace(0.1, 0.9, FEWEST)),  # one class
        (np.arange(FEWEST) % 2.0, np.full(FEWEST, 0.3)),  # one score
        ((np.arange(FEWEST) > 50) * 1.0, np.linspace(0.4, 0.6, FEWEST)),  # separated
        ((np.arange(FEWEST) < 50) * 1.0, np.linspace(0.1, 0.9, FEWEST)),  # the wrong way around
    ],
)
def test_odd_rows_give_finite_probabilities_in_their_order(labels: np.ndarray, scores: np.ndarray) -> None:
    for rows in (scores, np.column_stack([1 - scores, scores])):
        form = LabelForm.FLAG if rows.ndim == 1 else LabelForm.CLASS
        found = fit(ValidationRows(form, labels, rows, np.ones(FEWEST)))
        of_one = found.of(rows) if rows.ndim == 1 else found.of(rows)[:, 1]
        assert np.isfinite(of_one).all() and (np.diff(of_one[np.argsort(scores, kind="stable")]) >= 0).all()
        assert 0 < found.scale < 1e3 and abs(found.shift) < 1e3


def test_rows_count_by_their_weight() -> None:
    one, other = flags(ROWS, scale=0.5), flags(ROWS, scale=2.0, seed=1)
    weights = np.repeat([1.9, 0.1], ROWS)
    both = ValidationRows(
        LabelForm.FLAG, np.append(one.labels, other.labels), np.append(one.scores, other.scores), weights
    )
    assert fit(both).scale == pytest.approx(fit(one).scale, rel=0.1)
    assert fit(ValidationRows(both.form, both.labels, both.scores, weights[::-1])).scale == pytest.approx(2.0, rel=0.3)


@pytest.mark.parametrize("at", [[1.0, 0.0], [0.3, -2.0], [2.0, 1.0]])
def test_slopes_are_those_of_the_loss(at: list[float]) -> None:
    rows, small = flags(500), 1e-5
    odds = np.log(rows.scores / (1 - rows.scores))
    many = classes(500)
    cases = [(lambda x: flag_slopes(x, odds, rows), 2), (lambda x: class_slopes(x, np.log(many.scores), many), 1)]
    for slopes, parameters in cases:
        here = np.array(at[:parameters])
        _, gradient, curve = slopes(here)
        for n, step in enumerate(np.eye(parameters) * small):
            (above, slope_above, _), (below, slope_below, _) = slopes(here + step), slopes(here - step)
            assert gradient[n] == pytest.approx((above - below) / (2 * small), rel=1e-4, abs=1e-4)
            np.testing.assert_allclose(curve[n], (slope_above - slope_below) / (2 * small), rtol=1e-4, atol=1e-3)


def test_validation_rows_of_another_time_calibrate_nothing() -> None:
    balance = {"train": LabelBalance(rows=275_711, shares={"0": 0.766, "1": 0.234})}
    seasons = balance | {"valid": LabelBalance(rows=25_421, shares={"0": 0.828, "1": 0.172})}
    shift = shift_between(seasons, "valid")
    assert shift == "the label 1 is 23.4% of train and 17.2% of valid"
    found = fit_calibration(flags(scale=0.5), shift)
    assert found.kept is None and found.loss_after < found.loss_before
    assert found.describe().startswith(f"not calibrated: {shift}, and Platt scaling of rows that differ")


@pytest.mark.parametrize(
    ("rows", "share", "shifted"),
    [
        (100_000, 0.234, False),
        (100_000, 0.245, False),  # certain, and little
        (300, 0.29, False),  # much, and chance
        (3_000, 0.29, True),
        (100_000, 0.17, True),
        (100_000, 0.0, True),
    ],
)
def test_labels_are_shifted_where_odds_differ_certainly_and_by_a_tenth(rows: int, share: float, shifted: bool) -> None:
    train, valid = ({"0": 1 - one, "1": one} for one in (0.234, share))
    found = shifted_class(LabelBalance(rows=100_000, shares=train), LabelBalance(rows=rows, shares=valid))
    assert bool(found) == shifted
    assert not shift_between({"train": LabelBalance(rows=9, shares=train)}, "valid"), "of a mix, say"


def test_few_rows_are_refused() -> None:
    with pytest.raises(ValueError, match=f"{FEWEST - 1} say too little, at least {FEWEST} are needed"):
        fit_calibration(flags(FEWEST - 1))


def test_rows_beside_a_few_of_huge_weight_are_few() -> None:
    rows = flags(1000)
    weights = np.where(np.arange(1000) < 3, 1e6, 1.0)
    with pytest.raises(ValueError, match=f"1000 of uneven weights are as good as 3, which say too little, .* {FEWEST}"):
        fit_calibration(replace(rows, weights=weights / weights.mean()))


@pytest.mark.parametrize(("kind", "rows"), [(BINARY, flags(scale=0.4)), (MULTICLASS, classes(scale=0.4))])
def test_the_calibration_error_of_test_rows_is_told_before_and_after(kind: type, rows: ValidationRows) -> None:
    found = fit_calibration(rows)
    assert found.kept is not None
    with_errors = with_test_errors(found, kind, rows.labels, (rows.scores, found.kept.of(rows.scores)), None)  # type: ignore[arg-type]
    assert with_errors.error_before is not None and with_errors.error_after is not None
    assert with_errors.error_after < 0.02 < 0.05 < with_errors.error_before
    assert "calibration error of the test rows 0." in with_errors.describe()


def test_a_damaged_file_is_refused_and_a_missing_one_is_none(tmp_path: Path) -> None:
    folder = open_storage(str(tmp_path))
    assert read_calibration(folder) is None
    Calibration(scale=0.5, shift=1.0).write(folder)
    assert read_calibration(folder) == Calibration(scale=0.5, shift=1.0)
    for text, why in [
        ('{"scale": 0}', "scale = 0"),
        ('{"scale": -1.0}', "greater than 0"),
        ('{"scale": 1.0, "shift": NaN}', ""),
        ('{"format": 3}', "upgrade sparkring"),
        ('{"other": 1}', "other"),
        ("{", ""),
    ]:
        folder.put_atomic(FILE, text.encode())
        with pytest.raises(StoredError, match=rf"calibration\.json.*{why}"):
            read_calibration(folder)
