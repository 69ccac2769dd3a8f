"""When splits are said to differ, and by what."""

from __future__ import annotations

import dataclasses
import itertools
import math
from functools import partial

import numpy as np
import pyarrow as pa
import pytest

from sparkring.pipelines.evaluation.balance import (
    OTHER,
    LabelMoments,
    class_balance,
    class_rows,
    differences,
    label_moments,
    split_losses,
    value_balance,
)
from sparkring.training.model.calibration import Calibration
from sparkring.training.worker.result import CalibrationFit, FamilyChoice, LabelBalance, SplitScores
from tests.pipelines.results import rank_result, train_result


def shares(rows: int, share: float) -> LabelBalance:
    return LabelBalance(rows=rows, shares={"0": 1 - share, "1": share})


def mean(rows: int, value: float) -> LabelBalance:
    return LabelBalance(rows=rows, mean=value, std=4.0)


@pytest.mark.parametrize(
    ("balances", "sentence"),
    [
        ({"train": shares(10_000, 0.2), "valid": shares(5000, 0.21), "test": shares(5000, 0.3)},
         "The splits differ: late = yes is 20.0% of train, 21.0% of valid, 30.0% of test."),
        ({"train": shares(10_000, 0.2), "test": shares(5000, 0.24)}, ""),  # too little to matter
        ({"train": shares(100, 0.2), "test": shares(20, 0.4)}, ""),  # chance alone gives as much
        ({"train": shares(10_000, 0.2), "test": LabelBalance(rows=900, shares={"0": 1.0})},
         "The splits differ: late = yes is 20.0% of train, 0.0% of test."),
        ({"train": mean(10_000, 10.0), "test": mean(5000, 11.5)},
         "The splits differ: the mean of late is 10 in train, 11.5 in test, with a standard deviation of 4 in train."),
        ({"train": mean(10_000, 10.0), "test": mean(5000, 10.9)}, ""),
        ({"train": mean(40, 10.0), "test": mean(4, 12.0)}, ""),
        ({"valid": mean(40, 10.0), "test": mean(4, 99.0)}, ""),  # nothing is known of train
        ({"train": shares(10_000, 0.2)}, ""),
        ({}, ""),
    ],
)  # fmt: skip
def test_labels_that_differ_much_and_by_more_than_chance_are_named(
    balances: dict[str, LabelBalance], sentence: str
) -> None:
    assert differences(balances, {}, "late", {"1": "yes"}) == sentence


@pytest.mark.parametrize(
    ("losses", "sentence"),
    [
        ({"train": 0.5, "valid": 0.55, "test": 0.59}, ""),
        ({"train": 0.5, "valid": 0.55, "test": 0.61},
         "The splits differ: the loss is 0.5 in train, 0.55 in valid, 0.61 in test."),
        ({"train": 0.9, "valid": 0.5, "test": 0.65},
         "The splits differ: the loss is 0.9 in train, 0.5 in valid, 0.65 in test."),
        ({"train": 0.9, "test": 0.5}, ""), ({"train": math.nan, "test": 0.5}, ""), ({"test": 0.5}, ""),
    ],
)  # fmt: skip
def test_losses_that_grow_from_split_to_split_are_named(losses: dict[str, float], sentence: str) -> None:
    assert differences({}, losses, "late", {}) == sentence


def test_losses_are_those_of_the_exported_model() -> None:
    history = {
        "train/loss": [(1, 3.0), (4, 2.0), (6, 0.1)],
        "valid/loss": [(1, 9.0), (5, 2.5), (6, 7.0)],
        "valid/auc": [(5, 0.5)],
    }
    train = rank_result(exported_step=5, steps=6, valid={"loss": 7.0})
    trained = train_result(history=history, train=train)
    assert trained.model_valid() == {"loss": 2.5, "auc": 0.5}
    assert split_losses(trained, {"loss": 2.75}) == {"train": 2.0, "valid": 2.5, "test": 2.75}
    scored = SplitScores(metrics={"loss": 2.25}, left_out=[], predictions=None)
    again = train_result(history=history, train=dataclasses.replace(train, exported_valid=scored))
    assert split_losses(again, {})["valid"] == 2.25, "what was measured of the exported model itself"
    fit = CalibrationFit(method="", rows=9, loss_before=2.5, loss_after=2.0, kept=Calibration(scale=0.5))
    assert split_losses(trained, {"loss": 2.75}, fit) == {"valid": 2.0, "test": 2.75}
    assert split_losses(trained, {}, dataclasses.replace(fit, kept=None))["valid"] == 2.5
    assert split_losses(train_result(train=rank_result(valid={"loss": 4.0})), {}) == {"valid": 4.0}
    assert split_losses(train_result(train=rank_result(valid={})), {"auc": 0.5}) == {}


def test_the_curve_of_a_blends_network_is_not_the_loss_of_the_blend() -> None:
    choice = FamilyChoice(metric="loss", winner="both", values={"net": 2.5}, half_width=None, train_s={}, share=0.5)
    history = {"train/loss": [(4, 2.0)]}
    scored = SplitScores(metrics={"loss": 2.5}, left_out=[], predictions=None)
    trained = train_result(history=history, train=rank_result(exported_valid=scored), choice=choice)
    assert split_losses(trained, {"loss": 2.75}) == {"valid": 2.5, "test": 2.75}
    alone = dataclasses.replace(trained, choice=dataclasses.replace(choice, winner="net", share=None))
    assert split_losses(alone, {})["train"] == 2.0


def test_of_many_classes_the_frequent_ones_have_a_share_of_their_own() -> None:
    counted = {"train": {str(n): 1000 - n for n in range(60)}, "test": {"0": 3, "59": 1}}
    found = class_balance(counted)
    assert len(found["train"].shares) == 51 and "59" not in found["train"].shares
    assert found["train"].shares["0"] == 1000 / sum(counted["train"].values()) and found["train"].rows == 58_230
    assert found["test"].shares["0"] == 0.75 and found["test"].shares[OTHER] == pytest.approx(0.25)
    assert class_balance({"train": {"1": 3, "0": 1}})["train"].shares == {"0": 0.25, "1": 0.75}


def test_labels_are_measured_batch_by_batch_as_if_they_were_one() -> None:
    values = np.random.default_rng(0).normal(1e6, 2.0, size=(100, 2))
    cuts = (0, 1, 1, 40, 100)
    batches = [pa.record_batch({"a": values[a:b, 0], "b": values[a:b, 1]}) for a, b in itertools.pairwise(cuts)]
    found = label_moments(batches)
    assert found.rows == 100 and found.means == pytest.approx(values.mean(axis=0), rel=1e-12)
    assert found.deviations == pytest.approx(values.std(axis=0), rel=1e-9)
    assert found.lows == values.min(axis=0).tolist() and found.highs == values.max(axis=0).tolist()
    assert label_moments([]) == LabelMoments(0, [], [], [], [])
    classes = [pa.record_batch({"kind": np.array(part, float)}) for part in ([0, 2, 2], [], [2])]
    assert class_rows(classes) == {"0": 1, "2": 3}


def test_a_histogram_has_every_row_and_the_bars_of_the_first_split() -> None:
    train, test = np.random.default_rng(0).normal(5, 2, 1000), np.array([-100.0, 5.0, 5.1, 100.0])

    def batches(values: np.ndarray) -> list[pa.RecordBatch]:
        return [pa.record_batch({"y": part}) for part in np.array_split(values, 3)]

    splits = {"train": train, "none": np.zeros(0), "test": test}
    moments = {name: label_moments(batches(values)) for name, values in splits.items()}
    found = value_balance(moments, {name: partial(batches, values) for name, values in splits.items()})
    assert [*found] == ["train", "test"], "a split without rows has no mean"
    assert sum(found["train"].counts) == 1000 and sum(found["test"].counts) == 4
    assert found["test"].counts[0] == found["test"].counts[-1] == 1, "what is beyond is in the outermost"
    assert found["train"].edges == found["test"].edges and found["train"].mean == pytest.approx(train.mean())
    wide = 3 * train.std()
    assert found["train"].edges[0] == pytest.approx(max(train.min(), train.mean() - wide))
    assert found["train"].edges[-1] == pytest.approx(min(train.max(), train.mean() + wide))


def test_a_histogram_of_counts_begins_at_the_least_of_them() -> None:
    batches = [pa.record_batch({"y": np.repeat([0.0, 1.0, 2.0, 30.0], [900, 90, 9, 1])})]
    (found,) = value_balance({"train": label_moments(batches)}, {"train": lambda: batches}).values()
    assert found.edges[0] == 0.0 and found.counts[0] == 900 and found.edges[-1] < 30
    assert found.counts[-1] == 1, "what is beyond is in the outermost"


def test_a_label_that_is_constant_has_a_histogram() -> None:
    batches = [pa.record_batch({"y": np.full(7, 3.0)})]
    (found,) = value_balance({"train": label_moments(batches)}, {"train": lambda: batches}).values()
    assert sum(found.counts) == 7 == max(found.counts)
