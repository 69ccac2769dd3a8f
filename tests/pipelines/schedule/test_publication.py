from __future__ import annotations

from pathlib import Path
from typing import Any, NoReturn

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sparkring.conf.load import Resolved, load_config
from sparkring.conf.schedule.block import ScheduleConfig
from sparkring.conf.schedule.dated import DateRequest
from sparkring.etl.windows import window as window_module
from sparkring.etl.windows.window import KnownParts, PinnedWindow
from sparkring.pipelines.cli.exits import exit_code
from sparkring.pipelines.schedule.date_job import DateJob, DateOptions
from sparkring.pipelines.schedule.ledger import DateRecord, Ledger
from sparkring.pipelines.schedule.publication import DatePublication, known_before, known_parts, pin_anew
from tests.pipelines.schedule.recipe import write_recipe

DAYS = [f"2024-03-0{day}" for day in range(1, 7)]
SCHEDULE = ScheduleConfig(begin="2024-03-01", lookback=1, full_check=4)


def never() -> NoReturn:
    pytest.fail("Spark was started")


def entry(ds: str, **fields: Any) -> DateRecord:
    return DateRecord(ds=ds, status="succeeded", **fields)


def test_parts_are_known_from_the_last_date_before() -> None:
    records = [entry(DAYS[2], parts={"a": "1"}), entry(DAYS[3], parts={"a": "2"}), entry(DAYS[5], parts={"a": "3"})]
    assert known_before([*records, entry(DAYS[4])], SCHEDULE, "2024-03-06") == records[1]
    assert known_before([], SCHEDULE, "2024-03-06") is None
    assert known_before(records[:1], SCHEDULE, DAYS[2]) is None


def test_every_so_many_dates_all_parts_are_looked_at() -> None:
    records = [entry("2024-03-01", parts={"a": "1"})]
    looked_at = [day for day in range(2, 14) if known_before(records, SCHEDULE, f"2024-03-{day:02}") is None]
    assert looked_at == [5, 9, 13]


def test_late_intervals_are_looked_at_again(tmp_path: Path) -> None:
    earlier = entry(DAYS[4], parts=dict.fromkeys(DAYS[:5], "ab"))
    config = resolved(tmp_path, DAYS[5]).config
    assert sorted(known_parts(config, earlier, DAYS[3]).fingerprints) == DAYS[:3]


def resolved(folder: Path, ds: str) -> Resolved:
    return load_config(write_recipe(folder, {"lookback": 1}), [], DateRequest(ds))


@pytest.fixture
def lake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Days of files, whose parts count as written."""
    for number, day in enumerate(DAYS):
        (folder := tmp_path / f"sales/day={day}").mkdir(parents=True)
        pq.write_table(pa.table({"amount": pa.array([number], pa.int32())}), folder / "x.parquet")
    monkeypatch.setattr(window_module, "find_part", lambda *_: object())
    return tmp_path


def pinned(window: object) -> tuple[list[str], dict[str, str]]:
    """The intervals that were looked at, and the fingerprint of every part."""
    assert isinstance(window, PinnedWindow)
    looked_at = [part.interval.label for part in window.parts if part.sources is not None]
    return looked_at, {part.interval.label: part.fingerprint for part in window.parts}


def test_a_date_looks_at_its_own_interval_and_the_late_ones(lake: Path) -> None:
    schedule = SCHEDULE.model_copy(update={"lookback": 1})
    first, deciding = pin_anew(resolved(lake, DAYS[2]).config, never, None, schedule, DAYS[2])
    assert pinned(first)[0] == DAYS[:3]
    earlier = entry(DAYS[2], parts=pinned(first)[1], parts_digest=deciding)
    config = resolved(lake, DAYS[3]).config
    second, same = pin_anew(config, never, earlier, schedule, DAYS[3])
    assert same == deciding and pinned(second)[0] == DAYS[2:4]
    whole, _ = pin_anew(config, never, None, schedule, DAYS[3])
    assert pinned(second)[1] == pinned(whole)[1]
    all_late, _ = pin_anew(config, never, earlier, schedule.model_copy(update={"lookback": 2}), DAYS[3])
    assert pinned(all_late)[0] == DAYS[1:4]


def test_a_changed_recipe_makes_every_part_new(lake: Path) -> None:
    first, deciding = pin_anew(resolved(lake, DAYS[2]).config, never, None, SCHEDULE, DAYS[2])
    earlier = entry(DAYS[2], parts=pinned(first)[1], parts_digest=deciding)
    recipe = write_recipe(lake, {"lookback": 1})
    overrides = ["etl.views={more: 'SELECT amount, day FROM sales'}", "etl.rows=more"]
    changed = load_config(recipe, overrides, DateRequest(DAYS[3])).config
    found, _ = pin_anew(changed, never, earlier, SCHEDULE, DAYS[3])
    assert pinned(found)[0] == DAYS[1:4]
    assert not set(pinned(found)[1].values()) & set(earlier.parts.values())


def test_a_corrected_file_is_seen_within_the_lookback(lake: Path) -> None:
    first, deciding = pin_anew(resolved(lake, DAYS[2]).config, never, None, SCHEDULE, DAYS[2])
    earlier = entry(DAYS[2], parts=pinned(first)[1], parts_digest=deciding)
    pq.write_table(pa.table({"amount": pa.array([99], pa.int32())}), lake / f"sales/day={DAYS[2]}/x.parquet")
    found, _ = pin_anew(resolved(lake, DAYS[3]).config, never, earlier, SCHEDULE, DAYS[3])
    assert pinned(found)[1][DAYS[2]] != earlier.parts[DAYS[2]]
    assert pinned(found)[1][DAYS[1]] == earlier.parts[DAYS[1]]


def test_the_ledger_learns_which_parts_were_read(lake: Path) -> None:
    recipe, ledger = resolved(lake, DAYS[2]), Ledger(str(lake / "runs"), "sales")
    job = DateJob(recipe, DateOptions(exit_code, promote=False), ledger, DateRecord(ds=DAYS[2], status="running"))
    publication = DatePublication(job)
    assert (publication.ds, publication.may_promote, publication.leased) == (DAYS[2], False, True)
    publication.pin(recipe.config, never)
    record = ledger.read(DAYS[2])
    assert record is not None and sorted(record.parts) == DAYS[:3] and len(record.parts_digest) == 64


def test_known_parts_are_those_of_the_recipes_own_datasets(tmp_path: Path) -> None:
    config = resolved(tmp_path, DAYS[2]).config
    found = known_parts(config, entry(DAYS[1], parts={DAYS[0]: "ab"}), DAYS[1])
    assert found == KnownParts(str(tmp_path / "datasets"), "sales", {DAYS[0]: "ab"})
