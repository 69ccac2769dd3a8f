"""The report's view of a result."""

from __future__ import annotations

from sparkring.conf.manifest import Accounting, Column, DataFile, DatasetManifest, Lineage, SplitInfo
from sparkring.pipelines.report.inputs import ReportInputs
from sparkring.training.result import MODEL, FailedAttempt
from tests.pipelines.results import rank_result, train_result

MANIFEST = DatasetManifest(
    name="again", fingerprint="a" * 64, created_at="", columns=(Column(name="late", dtype="int8", role="label"),),
    files=tuple(
        DataFile(path=f"{n}.parquet", split="train", rows=5, bytes=100 + n, sha256="ab" * 32, row_groups=(5,))
        for n in range(2)
    ),
    splits={"train": SplitInfo(rows=10, files=2)}, accounting=Accounting(rows_in=10, rows_out=10),
    lineage=Lineage(sources={}),
)  # fmt: skip
BEATEN = {MODEL: {"loss": 0.5}, "majority rate": {"loss": 0.4}}


def test_facts_name_the_model_and_the_step_whose_weights_it_has() -> None:
    facts = ReportInputs(train_result(train=rank_result(steps=12_000, exported_step=900)), MANIFEST).facts
    assert facts["model"] == "models:/again@champion" and facts["engine"] == "torch-gloo, 3 ranks"
    assert facts["steps"] == "12,000 (100 samples), best at step 10; the model is step 900's"
    assert "MLflow" not in facts and "not good enough" not in facts


def test_facts_say_why_a_model_did_not_get_the_alias() -> None:
    config = {"name": "again", "dataset": "/d", "report": {"must_beat": ["loss"]}}
    facts = ReportInputs(train_result(config=config, scores=BEATEN, missing={"other": "no memory"}), MANIFEST).facts
    assert facts["model"] == "models:/again", "no alias"
    assert "loss 0.5000 does not beat 0.4000 of majority rate" in facts["not good enough"]
    assert facts["baselines without scores"] == "other (no memory)"


def test_rates_have_units_and_tell_seconds_per_step_from_those_of_the_beginning() -> None:
    result = train_result(per_step_s={"decode_s": 0.002}, once_s={"first_batch_s": 0.75})
    assert ReportInputs(result, MANIFEST).rates == {
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
