"""The report's view of a result."""

from __future__ import annotations

from typing import Any

import pytest

from sparkring.conf.manifest import Column, DataFile
from sparkring.pipelines.report.inputs import ReportInputs
from sparkring.training.worker.result import MODEL, FailedAttempt, FamilyChoice, LabelBalance, Promotion
from tests.helpers.datasets import manifest_of
from tests.pipelines.results import rank_result, train_result

MANIFEST = manifest_of(
    columns=(Column(name="late", dtype="int8", role="label"),),
    files=tuple(
        DataFile(path=f"{n}.parquet", split="train", rows=5, bytes=100 + n, sha256="ab" * 32, row_groups=(5,))
        for n in range(2)
    ),
    name="again",
)
LOST = {"name": "again", "dataset": "/d", "report": {"must_beat": ["loss"]}}
UNTRACKED = {"name": "again", "dataset": "/d", "tracking": {"enabled": False}}
BEATEN = {MODEL: {"loss": 0.5}, "majority rate": {"loss": 0.4}}


def test_facts_name_the_model_and_the_step_whose_weights_it_has() -> None:
    given = ReportInputs(train_result(train=rank_result(steps=12_000, exported_step=900)), MANIFEST)
    facts = given.facts
    assert given.places["engine"] == "torch-gloo, 3 ranks" and not {*facts} & {*given.places}
    assert facts["steps"] == "12,000 (100 samples), best at step 10; the model is step 900's"
    assert "MLflow" not in facts and "not good enough" not in facts and "baselines" not in facts
    scores = {"this model": {"auc": 0.8}, "majority rate": {"auc": 0.5}}
    found = train_result(scores=scores, labels={"train": LabelBalance(rows=1200, shares={"1": 1.0})})
    assert ReportInputs(found, MANIFEST).facts["baselines"] == "fitted on 1,200 training rows"
    choice = FamilyChoice(metric="loss", winner="both", values={}, half_width=None, train_s={}, share=0.5)
    assert "the network, steps" in ReportInputs(train_result(choice=choice), MANIFEST).facts, "trees have rounds"
    averaging = {"name": "again", "dataset": "/d", "optim": {"ema": 0.99}}
    facts = ReportInputs(train_result(config=averaging), MANIFEST).facts
    assert facts["steps"].endswith("'s, its weights averaged over steps (optim.ema = 0.99)")
    of_trees = averaging | {"model": {"family": "trees"}}
    assert ReportInputs(train_result(config=of_trees), MANIFEST).facts["rounds"].endswith("the model is round 10's")


def test_facts_say_why_a_model_did_not_get_the_alias() -> None:
    facts = ReportInputs(train_result(config=LOST, scores=BEATEN, missing={"other": "no memory"}), MANIFEST).facts
    assert "champion" not in facts["model"]
    assert "loss 0.5000 does not beat 0.4000 of majority rate" in facts["not good enough"]
    assert facts["baselines without scores"] == "other (no memory)"


@pytest.mark.parametrize(
    ("changes", "model"),
    [
        ({"version": "7"}, "models:/again/7, given the alias 'champion'"),
        ({"version": "7", "config": LOST, "scores": BEATEN}, "models:/again/7"),
        ({"promotion": Promotion(decision="rejected", reasons=[], alias="champion", version="8")}, "models:/again/8"),
        ({}, "models:/again, whose version the tracking store had not given when this was written"),
        ({"config": UNTRACKED}, "/runs/again/1/model, not registered"),
    ],
)
def test_the_model_is_named_by_its_version_and_an_alias_is_what_it_was_given(changes: Any, model: str) -> None:
    assert ReportInputs(train_result(**changes), MANIFEST).facts["model"] == model


def test_stages_add_up_to_the_whole_job_which_is_none_of_them() -> None:
    timings = {"spark_s": 2.0, "launch_s": 3.0, "train_s": 4.0, "total_s": 10.0}
    given = ReportInputs(train_result(timings=timings), MANIFEST)
    assert given.stages == {"spark": 2.0, "launch": 3.0, "train": 4.0, "other": 1.0}
    assert given.rates["whole job"] == "10.0 s"
    assert ReportInputs(train_result(), MANIFEST).stages == {"launch": 1.0}


def test_splits_that_differ_are_named_with_the_label_and_losses_that_are_known() -> None:
    labels = {
        "train": LabelBalance(rows=900, shares={"0": 0.9, "1": 0.1}),
        "test": LabelBalance(rows=900, shares={"0": 1.0}),
    }
    changes = {"labels": labels, "history": {"train/loss": [(1, 0.9), (2, 0.3)]}, "scores": {MODEL: {"loss": 0.31}}}
    assert ReportInputs(train_result(**changes), MANIFEST).differences == (
        "The splits differ: late = 1 is 10.0% of train, 0.0% of test; "
        "the loss is 0.3 in train, 0.5 in valid, 0.31 in test."
    )
    assert ReportInputs(train_result(), MANIFEST).differences == ""


def test_rates_have_units_and_tell_seconds_per_step_from_those_of_the_beginning() -> None:
    result = train_result(per_step_s={"decode_s": 0.002}, once_s={"first_batch_s": 0.75})
    assert ReportInputs(result, MANIFEST).rates == {
        "whole job": "1.0 s",
        "training": "50 rows/s", "launch": "1.0 s", "first batch": "0.75 s", "decode, a step": "2.0 ms",
    }  # fmt: skip


def test_the_parts_of_a_window_are_named_with_those_that_were_written_and_those_missing() -> None:
    assert ReportInputs(train_result(), MANIFEST).window == {}
    window = MANIFEST.model_copy(update={"missing": ("2024-03-02",)})
    result = train_result(parts=["2024-03-01", "2024-03-03"], written_parts=["2024-03-03"])
    assert ReportInputs(result, window).window == {
        "parts": "2: 2024-03-01, 2024-03-03", "written for this run": "2024-03-03", "missing": "2024-03-02",
    }  # fmt: skip
    assert ReportInputs(train_result(parts=["2024-03-01"]), MANIFEST).window["written for this run"] == "none"


def test_a_failed_attempt_has_no_column_for_what_is_not_known() -> None:
    failed = FailedAttempt(
        attempt=1, world=3, cause="lost", message="", step=None, steps_lost=0, decision="stop", next_world=0
    )
    (row,) = ReportInputs(train_result(failed_attempts=[failed]), MANIFEST).attempts
    assert row["cause"] == "lost" and row["steps_lost"] == 0 and not {"step", "recover_s"} & row.keys()


def test_labels_splits_and_settings_come_from_the_manifest_and_the_resolved_configuration() -> None:
    given = ReportInputs(train_result(origins={"name": "again.yaml:1"}), MANIFEST)
    assert given.positive == "late" and given.splits == [("train", 10, 2, 201)]
    assert ("name", "again", "again.yaml:1") in given.settings
