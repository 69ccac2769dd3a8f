"""MLflow's pages of a recipe's dates in a headless Chromium, as `sparkring ui` serves them."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from sparkring.pipelines.tracking.tags import DATE, NO_CHAMPION, RECIPE
from sparkring.pipelines.tracking.tracker import Tracker
from sparkring.pipelines.tracking.ui import pages
from sparkring.training.worker.result import Decision, Promotion
from tests.pipelines.tracking.test_mlflow_store import quick, tiny_model

ROOT = Path(__file__).resolve().parents[3]


def load_browser() -> Any:
    """The module of the benchmark, which is in no package."""
    spec = importlib.util.spec_from_file_location("browser", ROOT / "benchmarks" / "browser.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules["browser"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


browser_module = load_browser()
Browser, dates_shown, served = browser_module.Browser, browser_module.dates_shown, browser_module.served
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not any(map(shutil.which, browser_module.NAMES)), reason="no chromium on PATH"),
]
NAME = "delays-of-all-carriers"
BEGIN = datetime(2024, 3, 1, tzinfo=UTC)
DECISIONS: list[Decision] = ["promoted", "rejected", "promoted", "held"]
DAYS = [f"2024-03-0{day}" for day in range(1, 5)]


def record_night(root: Path, model: Path, number: int) -> None:
    """Record what a date has that the pages show."""
    ds, decision = DAYS[number], DECISIONS[number]
    with Tracker(quick(root, experiment=NAME), ds, NAME, {RECIPE: NAME, DATE: ds}, label=ds) as tracker:
        scores = {"test/auc": 0.61 + number / 100, "test/champion/auc": 0.605, "test/loss": 0.5}
        with tracker.part("evaluate"):
            tracker.model("evaluate", model, tiny_model(NAME, str(number) * 64, alias=None, tags={DATE: ds}))
            promotion = Promotion(decision=decision, reasons=[f"because of {ds}"], alias="champion")
            tracker.promote("evaluate", NAME, "champion", promotion, "1" if number else NO_CHAMPION)
        tracker.metrics("job", 0, scores)
        tracker.history(NAME, 19_783 + number, (BEGIN + timedelta(days=number)).timestamp(), scores)


def test_the_pages_of_a_recipes_dates(tmp_path: Path) -> None:
    """In one test: a browser starts processes whenever it likes."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model/model.json").write_text('{"factor": 2}')
    for number in range(len(DAYS)):
        record_night(tmp_path, tmp_path / "model", number)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"name: {NAME}\ndataset: somewhere\ntracking: {{experiment: {NAME}}}\n")
    with served(recipe, tmp_path) as (address, _), Browser() as browser:
        paths = pages(quick(tmp_path, experiment=NAME).named(NAME), NAME)
        found = {name: f"{address}/{path}" for name, path in paths.items()}
        assert list(found) == ["nights", "history", "model versions"]
        logged = (tmp_path / "ui.log").read_text()
        assert all(url in logged for url in found.values()), "the command says where to look"
        check_nights(browser, found["nights"])
        browser.open(found["history"], "test/auc", ready=dates_shown(len(DAYS)))
        versions = [f"{ds} {decision}" for ds, decision in zip(DAYS, DECISIONS, strict=True)]
        browser.open(found["model versions"], "@ champion", "@ previous", "@ challenger", *versions)
        browser.open(found["nights"].partition("?")[0], *found)
        linked = browser.evaluate("[...document.querySelectorAll('a')].map(link => link.href)")
        assert set(found.values()) <= set(linked), "the description of the experiment leads there"


def check_nights(browser: Browser, url: str) -> None:
    """Newest first, each with its decision, scores and reason; no parts of jobs."""
    names = [f"{NAME} {ds}" for ds in reversed(DAYS)]
    browser.open(url, *names, *DECISIONS, "test/auc", "test/champion/auc", "because of 2024-03-02")
    text = browser.text()
    assert sorted(names, key=text.index) == names
    assert "evaluate 2024" not in text
