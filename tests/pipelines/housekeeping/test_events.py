"""Which event the end of a job is, and what is sent about it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sparkring.pipelines.housekeeping.events import (
    JobEnd,
    decide_event,
    is_before,
    make_event,
    next_command,
    outcome_of,
    ping_suffix,
)
from sparkring.pipelines.run.exit_codes import Exit

COMMAND = ["sparkring", "run", "flights", "train.steps=9", "--date", "2026-02-01"]


def test_a_success_of_an_earlier_date_mends_nothing() -> None:
    assert is_before(end(0, ds="2026-01-31"), "2026-02-01")
    assert not is_before(end(0, ds="2026-02-01"), "2026-02-01") and not is_before(end(0), "2026-02-01")
    assert not is_before(end(0, ds="2026-01-31"), None)


def end(code: int, **changes: Any) -> JobEnd:
    return JobEnd(recipe="flights", code=code, **changes)


@pytest.mark.parametrize(
    ("job", "previous", "event"),
    [
        (end(Exit.OK), None, None),
        (end(Exit.OK), "ok", None),
        (end(Exit.OK), "failed", "recovered"),
        (end(Exit.OK), "rejected", None),
        (end(Exit.OK), "held", None),
        (end(Exit.OK, decision="promoted"), "failed", "recovered"),
        (end(Exit.OK, decision="dry_run"), None, None),
        (end(Exit.OK, decision="older_date"), None, None),
        (end(Exit.OK, late=True), "failed", "late"),
        *[(end(code), "ok", "failed") for code in (Exit.BUG, Exit.USAGE, Exit.DATA, Exit.TRAINING, Exit.RESOURCES)],
        (end(Exit.TERMINATED), "ok", "failed"),
        (end(Exit.TRAINING, late=True), "failed", "failed"),
        (end(Exit.DATA, decision="held"), "ok", "failed"),
        (end(Exit.QUALITY), "ok", "rejected"),
        (end(Exit.QUALITY, decision="rejected"), "failed", "rejected"),
        (end(Exit.QUALITY, decision="held"), "ok", "held"),
        (end(Exit.OK, decision="held"), "ok", "held"),
        (end(Exit.TRY_LATER), "failed", None),
        (end(Exit.TRY_LATER, late=True), "ok", "late"),
        (end(Exit.INTERRUPTED), "failed", None),
        (end(Exit.PIPE), "failed", None),
    ],
)
def test_the_event_of_an_end(job: JobEnd, previous: str | None, event: str | None) -> None:
    assert decide_event(job, previous) == event


@pytest.mark.parametrize(
    ("code", "outcome"),
    [(0, "ok"), (1, "failed"), (3, "failed"), (143, "failed"), (6, "rejected"), (75, None), (130, None), (141, None)],
)
def test_an_end_that_tells_nothing_leaves_the_outcome_before_it(code: int, outcome: str | None) -> None:
    assert outcome_of(code, None) == outcome


@pytest.mark.parametrize(
    ("code", "suffix"), [(0, ""), (6, ""), (1, "/fail"), (3, "/fail"), (143, "/fail"), (75, None), (130, None)]
)
def test_a_ping_says_whether_the_night_ran(code: int, suffix: str | None) -> None:
    assert ping_suffix(code) == suffix


def test_the_line_to_run_next() -> None:
    assert (
        next_command("failed", end(Exit.TRAINING), COMMAND) == "sparkring run flights train.steps=9 --date 2026-02-01"
    )
    assert next_command("late", end(0, late=True), COMMAND) == "sparkring run flights train.steps=9 --date 2026-02-01"
    assert next_command("failed", end(Exit.USAGE), COMMAND) == "sparkring config validate flights train.steps=9"
    assert next_command("rejected", end(Exit.QUALITY), COMMAND) == "sparkring ui flights"
    assert next_command("held", end(Exit.QUALITY), COMMAND) == "sparkring ui flights"
    assert next_command("recovered", end(0), COMMAND) == ""


def test_what_is_sent_has_both_scores_links_and_no_secrets() -> None:
    job = end(
        Exit.QUALITY,
        ds="2026-02-01",
        decision="rejected",
        reasons=["auc 0.61 is below the champion's 0.70"],
        scores={"auc": 0.61},
        champion_scores={"auc": 0.7},
        links={"report": "/runs/1/report.html", "mlflow": "https://user:hunter2@mlflow.example/#/1"},
        error="no room at s3://k:hunter2@bucket/x, password=hunter2",
    )
    event = make_event(
        "rejected", job, [*COMMAND, "spark.conf.spark.hadoop.fs.s3a.secret.key=hunter2 x"], "2026-02-02T03:00:00+00:00"
    )
    shown = event.payload()
    assert shown["event"] == "rejected" and shown["ds"] == "2026-02-01" and shown["exit_code"] == 6
    assert shown["scores"] == {"auc": 0.61} and shown["champion_scores"] == {"auc": 0.7}
    assert shown["links"]["report"] == "/runs/1/report.html" and shown["reasons"] == job.reasons
    assert "hunter2" not in json.dumps(shown) and "bucket/x" in shown["error"]


def test_the_line_to_run_next_hides_the_whole_value_of_a_secret() -> None:
    command = [*COMMAND, "spark.conf.fs.s3a.secret.key=two words", "train.seed=3"]
    line = next_command("failed", end(1), command)
    assert (
        "two" not in line and "words" not in line and "fs.s3a.secret.key=**********" in line and "train.seed=3" in line
    )
