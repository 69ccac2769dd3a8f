"""Where a training begins that starts from the champion: decided once, kept with the run."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sparkring.conf.load import Resolved
from sparkring.conf.manifest import WindowPart
from sparkring.conf.storage import open_storage
from sparkring.conf.stored import StoredError
from sparkring.pipelines.promotion.champion import Champion, NotComparable, read_champion
from sparkring.pipelines.promotion.start import StartDecision, corrected_intervals, is_due, number_of, resolve_start
from sparkring.pipelines.run.runs import training_digest
from sparkring.pipelines.tracking.alias import Version
from sparkring.training.model.folder import model_files
from sparkring.training.model.starting import starting_model
from tests.pipelines.promotion import nights

WARM = {"warm_start": {"from": "champion", "retrain_every": 7}}
DAY = "2024-03-05"  # not a date of retrain_every


def part(day: str, letter: str) -> WindowPart:
    return WindowPart(interval=day, fingerprint=letter * 64, folder="p", rows=1)


@pytest.fixture
def night(tmp_path: Path) -> tuple[Champion, Any]:
    before = nights.write_dataset(tmp_path / "before", ["a", "b", "c"], 5.0)
    now = nights.write_dataset(tmp_path / "now", ["c", "a", "new"], 7.0)
    model = nights.write_model(tmp_path / "model", nights.config(), before.manifest)
    version = Version("nightly", "3", at_ms=1)
    return read_champion(version, open_storage(str(model)), nights.config()), now.manifest


def started(run: Path, manifest: Any, champion: Any, day: str = DAY, **blocks: Any) -> tuple[Any, StartDecision]:
    resolved = Resolved(nights.config(**(WARM | blocks)), {})
    own, start = resolve_start(resolved, manifest, open_storage(str(run)), day, champion)
    assert start is not None
    return own.config.warm_start, start


def test_a_run_starts_from_a_copy_of_the_champion(night: Any, tmp_path: Path) -> None:
    champion, manifest = night
    block, start = started(tmp_path / "run", manifest, lambda: champion)
    assert block.model == open_storage(str(tmp_path / "run/start")).uri and block.from_alias is None
    assert start.version == "3" and start.text.startswith("from version 3: shop: 1 new values, 1 gone")
    copied = [path.name for path in (tmp_path / "run/start").iterdir() if path.name[0] != "."]
    assert sorted(copied) == sorted(model_files(champion.folder))
    shutil.rmtree(champion.folder.root)
    starting_model(nights.config(warm_start={"model": block.model}), block)


def test_a_resumed_run_keeps_its_start_whatever_is_promoted_meanwhile(night: Any, tmp_path: Path) -> None:
    champion, manifest = night

    def must_not_be_asked() -> Champion:
        raise AssertionError("the start is known")

    first = started(tmp_path / "run", manifest, lambda: champion)
    assert started(tmp_path / "run", manifest, must_not_be_asked) == first
    scratch = started(tmp_path / "other", manifest, lambda: None)
    assert scratch[0] is None and scratch[1].text == "from scratch: no version has the alias 'champion' yet"
    assert started(tmp_path / "other", manifest, lambda: champion) == scratch
    (tmp_path / "other/start.json").write_text(json.dumps({"version": None, "why": "", "format": 9}))
    with pytest.raises(StoredError, match="this sparkring reads 1 to 1"):
        started(tmp_path / "other", manifest, lambda: champion)


def test_the_champion_does_not_change_which_run_is_continued() -> None:
    assert training_digest(nights.config(**WARM)) == training_digest(nights.config(**WARM))
    assert training_digest(nights.config(**WARM)) != training_digest(nights.config())


def test_a_model_that_does_not_fit_is_left(night: Any, tmp_path: Path) -> None:
    champion, manifest = night
    wider = {"model": {"args": nights.RECIPE["model"]["args"] | {"width": 8}}}
    block, start = started(tmp_path / "run", manifest, lambda: champion, **wider)
    assert block is None and "was trained with model.args" in start.why

    def away() -> Champion:
        raise NotComparable("the tracking store does not answer")

    assert started(tmp_path / "away", manifest, away)[1].text == "from scratch: the tracking store does not answer"


def test_the_network_of_both_families_starts_from_a_network_and_not_from_trees(night: Any, tmp_path: Path) -> None:
    champion, manifest = night
    both = {"model": nights.RECIPE["model"] | {"family": "both"}}
    block, start = started(tmp_path / "run", manifest, lambda: champion, **both)
    assert block is not None and start.version == "3"
    file = Path(champion.folder.path("config.json"))
    file.write_text(file.read_text().replace('"family": "net"', '"family": "trees"'))
    block, start = started(tmp_path / "after trees", manifest, lambda: champion, **both)
    assert block is None and "was trained with model.family = 'trees', the recipe says 'net'" in start.why


def test_a_correction_is_left_behind(night: Any, tmp_path: Path) -> None:
    champion, manifest = night
    trained = champion.model.manifest.model_copy(update={"parts": (part("2024-03-01", "a"), part("2024-03-02", "b"))})
    champion = replace(champion, model=replace(champion.model, manifest=trained))
    now = manifest.model_copy(update={"parts": (part("2024-03-02", "c"), part("2024-03-03", "d"))})
    block, start = started(tmp_path / "run", now, lambda: champion)
    assert block is None and start.why == "version 3 was trained on 2024-03-02 as before a correction"
    keep = {"warm_start": {"from": "champion", "after_correction": "warm"}}
    assert started(tmp_path / "warm", now, lambda: champion, **keep)[1].version == "3"
    new = manifest.model_copy(update={"parts": (part("2024-03-02", "b"), part("2024-03-03", "d"))})
    assert corrected_intervals(trained, new) == []
    assert corrected_intervals(trained, now) == ["2024-03-02"]


def test_every_so_many_dates_from_scratch(night: Any, tmp_path: Path) -> None:
    champion, manifest = night
    config = nights.config()
    due = [day for day in range(1, 29) if is_due(7, number_of(f"2024-02-{day:02d}", config))]
    assert len(due) == 4 and due[1] - due[0] == 7
    block, start = started(tmp_path / "run", manifest, lambda: champion, day=f"2024-02-{due[0]:02d}")
    assert block is None and start.why == f"2024-02-{due[0]:02d} is a date of warm_start.retrain_every = 7"
    assert not is_due(None, 0) and is_due(1, 5)


@pytest.mark.parametrize(
    ("every", "days"),
    [
        ("day", ["2024-02-28", "2024-02-29", "2024-03-01"]),
        ("week", ["2023-12-25", "2024-01-01", "2024-01-08"]),
        ("month", ["2023-11-01", "2023-12-01", "2024-01-01"]),
        ("day", ["2024-02-29T22", "2024-02-29T23", "2024-03-01T00"]),
    ],
)
def test_neighboring_intervals_have_neighboring_numbers(every: str, days: list[str]) -> None:
    interval = {"column": "day", "every": every, "last": "2024-01-01", "window": 1}
    etl = {"sources": {"s": {"path": "s", "format": "parquet", "columns": {"x": "double", "day": "date"}}}, "rows": "s",
           "features": {"x": {"kind": "numeric"}}, "interval": interval}  # fmt: skip
    config = nights.config(dataset=None, etl=etl)
    numbers = [number_of(day, config) for day in days]
    assert numbers == [numbers[0], numbers[0] + 1, numbers[0] + 2]


def test_other_recipes_start_as_they_say(tmp_path: Path) -> None:
    for block in (None, {"model": "/somewhere"}):
        resolved = Resolved(nights.config(warm_start=block), {})
        manifest = nights.write_dataset(tmp_path / str(block is None), ["a"], 1.0).manifest
        assert resolve_start(resolved, manifest, open_storage(str(tmp_path)), DAY, lambda: None) == (resolved, None)
