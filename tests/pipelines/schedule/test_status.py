from __future__ import annotations

import datetime as dt
import json
from dataclasses import replace
from pathlib import Path

from sparkring.conf.schedule.block import ScheduleConfig
from sparkring.pipelines.run.exit_codes import Exit
from sparkring.pipelines.schedule.ledger import DateRecord, Ledger
from sparkring.pipelines.schedule.status import STALE, status_of, status_text, table
from sparkring.training.worker.result import MODEL

NOW = dt.datetime(2024, 3, 6, 2, tzinfo=dt.UTC)
DAYS = ScheduleConfig(begin="2024-03-02")


def done(ds: str, finished_at: str, status: str = "succeeded") -> DateRecord:
    return DateRecord(ds=ds, status=status, attempts=1, exit_code=0, finished_at=finished_at)  # type: ignore[arg-type]


def test_the_last_dates_are_shown_with_those_that_are_missing() -> None:
    records = [done("2024-03-03", "2024-03-04T02:00:00+00:00"), done("2024-03-05", "2024-03-06T01:00:00+00:00")]
    status = status_of(DAYS, records, 3, NOW)
    assert status.records == {"2024-03-03": records[0], "2024-03-04": None, "2024-03-05": records[1]}
    assert (status.newest, status.age_s) == ("2024-03-05", 3600.0)
    all_dates = ["2024-03-02", "2024-03-03", "2024-03-04", "2024-03-05"]
    assert [*status_of(DAYS, [], 14, NOW).records] == [*status_of(DAYS, [], 10**8, NOW).records] == all_dates
    assert [*status_of(DAYS, [], 1, NOW).records] == ["2024-03-05"]
    assert not status_of(ScheduleConfig(begin="2024-03-07"), [], 14, NOW).records


def test_after_a_backfill_of_old_dates_those_are_shown_and_missing_ones_take_one_line() -> None:
    records = [done(f"2024-03-0{day}", "2024-06-01T02:00:00+00:00") for day in (2, 3, 5)]
    status = status_of(DAYS, records, 14, dt.datetime(2024, 6, 1, 2, tzinfo=dt.UTC))
    lines = table(status.records)
    assert [text.split()[0] for text in lines[:3]] == ["2024-03-02", "2024-03-03", "2024-03-05"]
    assert lines[3:] == ["2024-05-18 to 2024-05-31  missing, 14 dates"]
    assert len(table(status_of(DAYS, records, 2, dt.datetime(2024, 6, 1, 2, tzinfo=dt.UTC)).records)) == 4


def test_scores_are_shown_in_any_unit() -> None:
    scored = replace(done("2024-03-05", "2024-03-06T02:00:00+00:00"), scores={MODEL: {"loss": 2e-12, "rmse": 1.5}})
    assert "  loss 2e-12  rmse 1.5000" in table({scored.ds: scored})[0]


def test_what_is_not_a_success_does_not_count() -> None:
    records = [
        done("2024-03-03", "2024-03-04T02:00:00+00:00"),
        done("2024-03-04", "2024-03-06T01:00:00+00:00", "failed"),
        done("2024-03-05", "2024-03-06T01:00:00+00:00", "built"),
    ]
    status = status_of(DAYS, records, 3, NOW)
    assert status.newest == "2024-03-03"
    assert status.is_stale(47 * 3600) and not status.is_stale(48 * 3600) and not status.is_stale(None)


def test_a_backfill_of_old_dates_makes_nothing_fresh() -> None:
    records = [done("2024-03-02", "2024-03-06T01:59:00+00:00"), done("2024-03-03", "2024-03-04T02:00:00+00:00")]
    assert status_of(DAYS, records, 3, NOW).is_stale(24 * 3600)


def test_a_clock_that_is_behind_makes_nothing_old() -> None:
    assert status_of(DAYS, [done("2024-03-05", "2024-03-06T03:00:00+00:00")], 3, NOW).age_s == 0.0


def test_without_a_success_everything_is_too_old(tmp_path: Path) -> None:
    ledger = Ledger(str(tmp_path), "sales")
    code, text = status_text(DAYS, ledger, 2, 3600.0, as_object=True)
    assert code == STALE == Exit.BUG
    assert json.loads(text)["newest"] is None and json.loads(text)["stale"]
    assert status_text(DAYS, ledger, 2, None, as_object=False)[0] == 0
    assert "no date has succeeded" in status_text(DAYS, ledger, 2, None, as_object=False)[1]


def test_a_line_has_what_a_person_asks_first() -> None:
    record = DateRecord(
        ds="2024-03-05",
        status="failed",
        attempts=2,
        exit_code=3,
        late=True,
        error="no file\nmore",
        scores={"this model": {"auc": 0.71234}},
        promotion={"decision": "rejected"},
    )
    assert table({"2024-03-05": record}) == [
        "2024-03-05  failed       attempts 2  exit 3  late  auc 0.7123  rejected  no file"
    ]
    assert table({"2024-03-04": None}) == ["2024-03-04  missing"]
    assert "  late  trees  auc 0.7123  " in table({"2024-03-05": replace(record, family="trees")})[0]


def test_the_newest_success_that_is_too_old_is_named(tmp_path: Path) -> None:
    ledger = Ledger(str(tmp_path), "sales")
    ledger.write(done("2024-03-05", "2024-03-06T01:00:00+00:00"))
    code, text = status_text(DAYS, ledger, 2, 26 * 3600.0, as_object=False)
    assert code == STALE and "2024-03-05 ended" in text.splitlines()[-1] and "more than 93600 s" in text
    assert text.startswith("2024-03-05  succeeded") and len(text.splitlines()) == 4, "and two that are missing"
