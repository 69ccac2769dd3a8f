"""The report on a telephone, 390 pixels wide, in a headless Chromium."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from sparkring.pipelines.report.report import build_report
from tests.pipelines.report.test_plan import RECORD
from tests.pipelines.report.test_report import classes, held_out, inputs, several, values
from tests.pipelines.tracking.test_pages import browser_module

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not any(map(shutil.which, browser_module.NAMES)), reason="no chromium on PATH"),
]
PLAN = "rank  parameters  gradients  optimizer  activations  measured\n0" + "     1,234.5 MB" * 5
CLIPPED = """[...document.querySelectorAll('table.scores td:not(.none), dd, figcaption, h1, h2')].filter(
    e => e.getBoundingClientRect().right > innerWidth + 1).map(e => e.textContent)"""
SMALL = """[...document.querySelectorAll('figure svg')].map(
    svg => svg.getBoundingClientRect().width / svg.viewBox.baseVal.width * 8)"""


@pytest.mark.parametrize("task", ["binary", "multiclass", "multilabel", "regression"])
def test_nothing_is_cut_off_and_the_text_of_figures_is_large_enough(task: str, tmp_path: Path) -> None:
    held = {"binary": held_out, "multiclass": classes, "multilabel": several, "regression": values}[task]()
    model = {"task": task, "label": "a_label_with_a_long_name"}
    (tmp_path / "report.html").write_text(build_report(inputs(held, model=model, plan=PLAN, planned=RECORD)))
    with browser_module.Browser(390, 844) as browser:
        browser.open((tmp_path / "report.html").as_uri(), "Held-out scores", "numbers")
        assert browser.evaluate("document.documentElement.scrollWidth") == 390
        assert browser.evaluate(CLIPPED) == []
        assert min(browser.evaluate(SMALL)) >= 7, "pixels of the smallest letters"
        assert browser.evaluate("document.querySelector('pre.table').scrollWidth") > 390, "scrolled, not wrapped"
        shown = "document.querySelector('figure details table').checkVisibility({contentVisibilityAuto: true})"
        assert browser.evaluate(shown) is False
        browser.evaluate("document.querySelector('figure summary').scrollIntoView()")
        browser.click("document.querySelector('figure summary')")
        assert browser.evaluate(shown) is True
