"""Whether a model beats its baselines: decided by a pure function, acted on by the job."""

from __future__ import annotations

import datetime as dt
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch import nn

from sparkring.conf.blocks.report import ReportConfig
from sparkring.conf.config import RunConfig
from sparkring.conf.storage import open_storage
from sparkring.conf.tasks import BINARY, MULTICLASS, MULTILABEL, REGRESSION, TaskKind
from sparkring.etl.errors import EtlError
from sparkring.pipelines.evaluation.balance import OTHER, constant_guess, is_constant
from sparkring.pipelines.evaluation.baselines.baseline import score
from sparkring.pipelines.evaluation.baselines.design import Design
from sparkring.pipelines.evaluation.baselines.linear import BaselineModel
from sparkring.pipelines.evaluation.evaluate import (
    HeldOut,
    check_finite,
    check_labels,
    count_unseen,
    evaluate_text,
    gap_to_guess,
    group_values,
    known_scores,
    lost_to,
    reasons_against,
    tell_missing,
)
from sparkring.training.metrics import task_scores
from sparkring.training.model.folder import write_tables
from sparkring.training.models.sparse_embedding import SparseEmbedding
from sparkring.training.tables.exchange import Alone
from sparkring.training.tables.sharded import ShardedTable
from sparkring.training.tables.table import TableSpec
from sparkring.training.worker.result import MODEL, Evaluated, LabelBalance
from tests.pipelines.results import rank_result
from tests.pipelines.served import export, text_folder


class NextByte(nn.Module):
    """A language model whose logits are the rows of its tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = SparseEmbedding("tokens", dim=258)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return cast(torch.Tensor, self.rows(tokens))


BASELINES = {"majority rate": {"loss": 0.6, "auc": 0.5}, "logistic regression": {"loss": 0.5, "auc": 0.7}}


@pytest.mark.parametrize(
    ("ours", "metrics", "lost"),
    [
        ({"loss": 0.4, "auc": 0.8}, ["loss", "auc"], []),
        ({"loss": 0.4, "auc": 0.6}, ["loss"], []),
        (
            {"loss": 0.4, "auc": 0.6},
            ["loss", "auc"],
            ["auc 0.6000 does not beat 0.7000 of logistic regression"],
        ),
        (
            {"loss": 0.5, "auc": 0.8},
            ["loss"],
            ["loss 0.5000 does not beat 0.5000 of logistic regression"],
        ),
        ({"loss": 0.4, "auc": 0.6}, [], []),
        ({"loss": 0.4}, ["accuracy"], ["accuracy has no value on the test rows"]),
    ],
)
def test_every_baseline_must_be_beaten_in_every_metric(
    ours: dict[str, float], metrics: list[str], lost: list[str]
) -> None:
    assert lost_to({MODEL: ours} | BASELINES, ReportConfig(must_beat=metrics)) == [
        f"report.must_beat: {line}" for line in lost
    ]


def test_what_is_not_beaten_is_told_in_any_unit() -> None:
    scores = {MODEL: {"loss": 2e-12}, "mean": {"loss": 1e-12}}
    assert lost_to(scores, ReportConfig(must_beat=["loss"])) == [
        "report.must_beat: loss 2e-12 does not beat 1e-12 of mean"
    ]


@pytest.mark.parametrize("ours", [{"loss": math.nan}, {}])
def test_what_is_not_a_number_beats_nothing(ours: dict[str, float]) -> None:
    assert len(lost_to({MODEL: ours} | BASELINES, ReportConfig(must_beat=["loss"]))) == 2


def test_test_rows_of_a_value_that_was_not_trained_on_are_counted_by_feature() -> None:
    states = [
        {"name": "shop", "column": "shop", "kind": "categorical", "values": ["a", "b"]},
        {"name": "floor", "column": "floor", "kind": "categorical", "values": ["1", "-3"]},
        {"name": "hour_of_day", "column": "hour", "kind": "cyclic", "period": 24.0},
    ]
    stored = {
        "shop": pa.chunked_array(
            [pa.array(["a", "c", None, "", "c"]).dictionary_encode(), pa.array(["b"]).dictionary_encode()]
        ),
        "floor": pa.chunked_array([pa.array([1, -3, None], pa.int64())]),
    }
    manifest = SimpleNamespace(
        fitted=states,
        features={"inputs": {"shop": "string", "floor": "bigint", "hour": "int"}},
        column=lambda name: SimpleNamespace(name=name, dtype="string" if name == "shop" else "int64"),
    )
    rows: Any = SimpleNamespace(manifest=manifest, column=lambda name, text: stored[name])
    assert count_unseen(rows) == {"shop": 3}


def test_a_prediction_that_is_not_finite_names_the_columns_that_are_not() -> None:
    stored = {"x": pa.chunked_array([[1.0, math.inf, None]]), "y": pa.chunked_array([[1.0, 2.0, 3.0]])}
    columns = [SimpleNamespace(name=name, layout="scalar", dtype="float64") for name in stored]
    rows: Any = SimpleNamespace(manifest=SimpleNamespace(columns=columns), column=stored.__getitem__)
    check_finite(np.array([0.1, 0.2, 0.3]), rows)
    with pytest.raises(EtlError, match=r"1 of 3 predictions of the test rows are not finite: \['x'\] hold infinite"):
        check_finite(np.array([0.1, math.nan, 0.3]), rows)
    stored["x"] = stored["y"]
    with pytest.raises(EtlError, match=r"2 of 3 predictions .*: it diverged"):
        check_finite(np.array([[0.1, 0.9], [math.nan, 1.0], [1.0, math.inf]]), rows)


def test_text_of_a_model_with_a_sparse_table_is_written_with_its_rows(tmp_path: Path) -> None:
    config, manifest = text_folder(tmp_path)
    changed = {
        "model": {"factory": f"{__name__}:NextByte", "task": "language_model"},
        "report": {"baselines": False, "sample_prompt": "a"},
    }
    config = RunConfig.model_validate(config.model_dump(exclude_unset=True) | changed)
    table = ShardedTable(TableSpec("rows", 258), Alone())
    ids = np.arange(258)
    table.table.begin_with(ids, 100 * np.eye(258, dtype=np.float32)[(ids + 1) % 256])  # after each byte comes the next
    write_tables(export(tmp_path / "model", NextByte()), {"rows": table}, lambda block: None)
    scored = evaluate_text(config, manifest, open_storage(str(tmp_path)), rank_result(test={"loss": 1.0}))
    assert scored.sample is not None and scored.sample.startswith("abc")


def test_a_label_that_is_not_finite_is_named() -> None:
    check_labels(np.array([0.0, 1.5]), "cost")
    with pytest.raises(EtlError, match="2 of 3 test rows have a label 'cost' that is infinite or NaN"):
        check_labels(np.array([0.0, math.nan, math.inf]), "cost")


@pytest.mark.parametrize(
    ("labels", "lines"),
    [
        ([0.0, 1.0], []),
        ([0.0, 0.0], ["the test rows have no auc, average_precision: each label is 0; hold out more rows, or others"]),
    ],
)
def test_metrics_that_test_rows_do_not_have_are_named(
    labels: list[float], lines: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    found = np.array(labels)
    tell_missing(BINARY, found, task_scores(BINARY, found, np.array([0.2, 0.7])))
    assert [message.partition(" (etl.split)")[0] for message in caplog.messages] == lines


def held_out(rows: int, gain: float, seed: int = 0) -> HeldOut:
    """Binary predictions that move from the base rate towards the label by `gain` of the way, with noise."""
    draw = np.random.default_rng(seed)
    labels = (draw.random(rows) < 0.3).astype(np.float64)
    return HeldOut(labels, np.clip(0.3 + gain * (labels - 0.3) + draw.normal(0, 0.1, rows), 0.01, 0.99))


def evaluated(held: HeldOut, train: LabelBalance) -> Evaluated:
    ours = task_scores(BINARY, held.labels, held.scores, held.weights)
    gap = gap_to_guess(BINARY, held, train)
    return Evaluated(scores={MODEL: ours}, labels={"train": train}, guess_gap=gap)


TRAIN = LabelBalance(rows=1000, shares={"0": 0.7, "1": 0.3})


def test_a_model_is_no_champion_by_a_few_rows() -> None:
    """31 test rows made one."""
    few, many = evaluated(held_out(31, 0.06), TRAIN), evaluated(held_out(31_000, 0.06), TRAIN)
    (line,) = reasons_against(few, ReportConfig())
    assert line.startswith("not certainly better than a constant guess on 31 test rows: loss 0.")
    assert "hold out more rows (etl.split), or report.must_beat_guess=false promotes it" in line
    assert reasons_against(many, ReportConfig()) == []
    assert reasons_against(few, ReportConfig(must_beat_guess=False)) == []
    assert len(reasons_against(evaluated(held_out(3100, -0.1), TRAIN), ReportConfig())) == 1
    assert "with one row there is no interval" in reasons_against(evaluated(held_out(1, 0.9), TRAIN), ReportConfig())[0]


def test_of_many_models_that_learned_nothing_few_are_promoted() -> None:
    """Each predicts the rate with noise that has nothing to do with the label."""
    promoted = [
        not reasons_against(evaluated(held_out(rows, 0.0, seed), TRAIN), ReportConfig())
        for rows in (5, 31, 300)
        for seed in range(50)
    ]
    assert sum(promoted) <= 2


@pytest.mark.parametrize(
    ("train", "expected"),
    [
        (LabelBalance(rows=9, shares={"0": 1.0}), True),
        (LabelBalance(rows=9, shares={"0": 1.0, "1": 0.0}), True),  # as it is measured where another split has both
        (LabelBalance(rows=9, mean=2.5, std=0.0), True),
        (LabelBalance(rows=9, shares={"0": 1.0, "1": 1.0}), True),  # of several labels, as the next two
        (LabelBalance(rows=9, shares={"0": 0.0, "1": 0.0}), True),
        (LabelBalance(rows=9, shares={"0": 0.0, "1": 0.2}), False),
        (TRAIN, False),
        (LabelBalance(rows=9, mean=2.5, std=0.1), False),
    ],
)
def test_training_rows_of_one_label_make_no_champion(train: LabelBalance, expected: bool) -> None:
    """Label 0 only until the first cut, as in fraud and churn: trained, promoted, better than trees."""
    assert is_constant(train) == expected
    if expected and train.mean is None:
        (line,) = reasons_against(evaluated(held_out(3000, 0.5), train), ReportConfig())
        assert line.startswith("each training row has the same label, so nothing was learned")


@pytest.mark.parametrize(
    ("kind", "train", "scores", "guess"),
    [
        (BINARY, TRAIN, np.zeros(4), 0.3),
        (REGRESSION, LabelBalance(rows=9, mean=2.5, std=1.0), np.zeros(4), 2.5),
        (MULTICLASS, LabelBalance(rows=9, shares={"0": 0.5, "2": 0.5}), np.zeros((4, 3)), [0.5, 0.0, 0.5]),
        (MULTICLASS, LabelBalance(rows=9, shares={"0": 0.5, OTHER: 0.5}), np.zeros((4, 3)), [0.5, 0.25, 0.25]),
        (MULTILABEL, LabelBalance(rows=9, shares={"0": 0.2, "1": 0.9}), np.zeros((4, 2)), [0.2, 0.9]),
    ],
)
def test_a_constant_guess_is_of_the_training_labels(
    kind: TaskKind, train: LabelBalance, scores: np.ndarray, guess: Any
) -> None:
    np.testing.assert_allclose(constant_guess(kind, train, scores[0]), guess)


@pytest.mark.parametrize("share", [0.0, 0.012])
def test_a_guess_that_training_rows_mislead_is_equal_chances(share: float) -> None:
    """56 % of the test rows had a label of 1.2 % of the training rows: a loss of 2.34 was better than the guess."""
    held = held_out(2000, 0.0)
    wrong = replace(held, labels=(np.arange(2000) % 9 > 3) * 1.0, scores=np.full(2000, 0.02))
    train = LabelBalance(rows=1000, shares={"0": 1 - share, "1": share})
    assert evaluated(held, TRAIN).guess_gap.theirs < math.log(2)  # type: ignore[union-attr]
    assert evaluated(wrong, train).guess_gap.theirs == pytest.approx(math.log(2))  # type: ignore[union-attr]
    assert reasons_against(evaluated(wrong, train), ReportConfig())


def test_an_auc_that_does_not_exist_is_neither_the_models_nor_a_baselines() -> None:
    """It was nan of the model and 0.5000 of baselines."""
    assert known_scores({"loss": 0.5, "auc": math.nan}) == {"loss": 0.5}
    rows = Design(np.ones((4, 1)), np.zeros((4, 1), np.int32), np.zeros((4, 1)), None, (), 1)
    assert "auc" not in score(BINARY, {"guess": BaselineModel(lambda _: np.full(4, 0.1), 0)}, [rows]).scores["guess"]
    assert math.isnan(known_scores({"loss": math.nan})["loss"])


def test_a_baseline_that_could_not_be_computed_is_not_beaten() -> None:
    missing = {"logistic regression": "out of memory"}
    ours = {MODEL: {"loss": 0.4}, "majority rate": {"loss": 0.6}}
    asked = ReportConfig(must_beat=["loss"])
    assert lost_to(ours, asked, missing) == [
        "report.must_beat: logistic regression could not be computed (out of memory)"
    ]
    assert lost_to(ours, ReportConfig(), missing) == []


@pytest.mark.parametrize(
    ("stored", "shown"),
    [
        (pa.array(["UA", None, "AA", "UA"]).dictionary_encode(), ["UA", "null", "AA", "UA"]),
        (pa.array([3, None, -1], pa.int64()), ["3", "null", "-1"]),
        (pa.array([0.1, None], pa.float32()), ["0.1", "null"]),
        (pa.array([True, None, False]), ["True", "null", "False"]),
        (pa.array([dt.date(2013, 11, 4), None]), ["2013-11-04", "null"]),
        (pa.array([3_000_000], pa.int32()).view(pa.date32()), ["10183-09-21"]),
    ],
)
def test_rows_are_grouped_by_the_values_that_people_know(stored: pa.Array, shown: list[Any]) -> None:
    assert group_values(pa.chunked_array([stored, stored.slice(1)])).tolist() == [*shown, *shown[1:]]
    assert group_values(pa.chunked_array([], stored.type)).tolist() == []
