from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path

import pytest

from sparkring.conf.storage import Storage
from sparkring.conf.stored import StoredError
from sparkring.pipelines.schedule.ledger import DateRecord, Ledger

RECORD = DateRecord(
    ds="2024-03-05",
    status="succeeded",
    attempts=2,
    exit_code=0,
    parts={"2024-03-04": "ab", "2024-03-05": "cd"},
    run="20240306-020000-abcdef12",
    scores={"this model": {"auc": 0.7}},
    promotion={"decision": "promoted", "reasons": []},
)


def test_an_entry_is_read_as_it_was_written(folder: Storage) -> None:
    ledger = Ledger(folder.uri, "sales")
    assert ledger.read(RECORD.ds) is None and ledger.records() == []
    ledger.write(RECORD)
    hour = ledger.write(replace(RECORD, ds="2024-03-05T07"))
    assert ledger.read(RECORD.ds) == RECORD
    assert ledger.records() == [RECORD, hour]
    assert folder.exists("sales/dates/2024-03-05/state.json")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"ds": "2024-03-06"}, "is of the date '2024-03-06'"),
        ({"format": 2}, "upgrade sparkring"),
        ({"status": "done"}, "status"),
        ({"of_tomorrow": 1}, "of_tomorrow"),
        ({"run": "../x"}, "run"),
    ],
)
def test_a_damaged_entry_is_named(
    tmp_path: Path, changed: dict[str, object], message: str, caplog: pytest.LogCaptureFixture
) -> None:
    ledger = Ledger(str(tmp_path), "sales")
    ledger.write(RECORD)
    file = tmp_path / "sales/dates/2024-03-05/state.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changed))
    with pytest.raises(StoredError, match=message) as error:
        ledger.read(RECORD.ds)
    assert str(file) in str(error.value) and "or delete this file" in str(error.value)
    good = ledger.write(replace(RECORD, ds="2024-03-07"))
    with caplog.at_level(logging.WARNING):
        assert ledger.records() == [good]
    assert "this date is passed over" in caplog.text
