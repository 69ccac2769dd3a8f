from __future__ import annotations

import re
from html.parser import HTMLParser
from typing import Any

import numpy as np
import pytest

from conf.manifest import Accounting, DataFile, DatasetManifest, Lineage, SplitInfo
from pipelines import metrics
from pipelines.report import figures
from pipelines.report.report import HeldOut, ReportInputs, build_report, draw, number, publish, verdict

VOID = {"meta", "br", "link", "path", "use", "rect", "img", "hr", "input"}


class Page(HTMLParser):
    """Text, tags left open, and every address the page would fetch."""

    def __init__(self, html: str):
        super().__init__()
        self.text, self.open, self.fetched, self.tags = "", [], [], []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in VOID:
            self.open.append(tag)
        self.fetched += [v for k, v in attrs if k in ("src", "xlink:href") or (k == "href" and tag != "a") if v]

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_data(self, data: str) -> None:
        self.text += data


def manifest() -> DatasetManifest:
    checks: list[dict[str, Any]] = [
        {"name": "distance", "rule": "0 < distance < 6000", "level": "row", "rows": 110, "failing": 10, "passed": True},
        {"name": "late", "rule": "share", "level": "dataset", "rows": 100, "failing": 60, "passed": False},
    ]
    sizes = [("train", 22_500)] * 4 + [("test", 10_000)]
    files = [
        DataFile(path=f"{i}.parquet", split=split, rows=rows, bytes=1, sha256="ab" * 32, row_groups=(rows,))
        for i, (split, rows) in enumerate(sizes)
    ]
    return DatasetManifest(
        name="flights", fingerprint="ab" * 32, created_at="", columns=(), files=tuple(files),
        splits={"train": SplitInfo(rows=90_000, files=4), "test": SplitInfo(rows=10_000, files=1)},
        accounting=Accounting(rows_in=100_010, rows_out=100_000, quarantined={"distance": 10}),
        checks=checks, lineage=Lineage(sources={}),
    )  # fmt: skip


def inputs(**changes: Any) -> ReportInputs:
    generator = np.random.default_rng(0)
    scores = generator.beta(2, 6, 5000)
    labels = (generator.uniform(size=5000) < scores).astype(int)
    columns = {"carrier": np.array(["UA", "<b>"])[generator.integers(0, 2, 5000)]}
    values: dict[str, Any] = {
        "name": "flights",
        "status": "FINISHED",
        "facts": {"MLflow run": "http://127.0.0.1:5000/#/runs/1", "engine": "horovod"},
        "history": {"train/loss": [(s, 1 / s) for s in range(1, 2000)], "valid/loss": [(500, 0.4), (1000, 0.3)]},
        "held_out": HeldOut(labels, scores, columns),
        "baselines": {"majority rate": {"loss": 0.7, "auc": 0.5}},
        "manifest": manifest(),
        "timings_s": {"etl": 30.0, "train": 20.0},
        "rates": {"training": "40 000 rows/s"},
        "attempts": [{"attempt": 1, "cause": "rank 1: SIGKILL", "steps_lost": 3}, {"attempt": 2, "cause": "finished"}],
        "config": [("optim.lr", "0.001", "flights.yaml:3")],
    }
    return ReportInputs(**(values | changes))


def test_the_page_holds_everything_and_needs_nothing() -> None:
    given = inputs()
    html = build_report(given)
    page = Page(html)
    assert page.open == [] and "script" not in page.tags
    assert all(address.startswith("#") for address in page.fetched)  # glyphs within the figures only
    for said in ("flights", "horovod", "majority rate", "0 < distance < 6000", "100 010", "90 000", "rank 1: SIGKILL",
                 "40 000 rows/s", "optim.lr", "flights.yaml:3", "This model beats majority rate"):  # fmt: skip
        assert said in page.text, said
    assert html.count(">failed<") == 1 and '<a href="http://127.0.0.1:5000/#/runs/1">' in html
    assert page.tags.count("svg") == len(draw(given)) + 1 == 6
    held = given.held_out
    assert held is not None
    auc = metrics.roc_auc(metrics.confusion(held.labels, held.scores))
    assert f"AUC {auc:.4f}" in page.text and number(auc) in page.text
    assert len(html) < 400_000
    assert build_report(inputs()) == html  # the same run gives the same bytes


def test_what_users_write_is_text_not_markup() -> None:
    html = build_report(inputs(description="<script>alert(1)</script>", sample="</pre><img src=x onerror=alert(1)>"))
    page = Page(html)
    assert "script" not in page.tags and "img" not in page.tags and "b" not in page.tags
    assert "<script>alert(1)</script>" in page.text


def test_little_is_enough() -> None:
    page = Page(build_report(ReportInputs("empty", "FAILED")))
    assert "failed" in page.text and "svg" not in page.tags and "Held-out" not in page.text and page.open == []


def test_a_language_model() -> None:
    given = inputs(
        held_out=None, baselines={}, task="language_model", model_scores={"loss": 2.0}, sample="def f(x):\n    return",
        history={"valid/loss": [(1, 3.0), (2, 2.0)], "valid/perplexity": [(1, 20.0), (2, 7.4)]},
    )  # fmt: skip
    page = Page(build_report(given))
    assert "7.389" in page.text and "loss (nats per token)" in page.text and "def f(x):\n    return" in page.text
    assert [name for name, *_ in draw(given)] == ["loss", "perplexity"]


def test_one_class_only_has_no_curves_but_a_report() -> None:
    names = [name for name, *_ in draw(inputs(held_out=HeldOut(np.zeros(9), np.linspace(0, 1, 9))))]
    assert "roc" not in names and "calibration" in names


@pytest.mark.parametrize(
    ("scores", "said"),
    [
        ({"ours": {"loss": 0.4, "auc": 0.8}, "b": {"loss": 0.5, "auc": 0.7}}, "Ours beats b in loss and ROC AUC."),
        ({"ours": {"loss": 0.4, "auc": 0.6}, "b": {"loss": 0.5, "auc": 0.7}}, "Ours does not beat b in ROC AUC."),
        ({"ours": {"loss": 0.5}, "b": {"loss": 0.5}}, "Ours does not beat b in loss."),
        ({"ours": {"loss": 0.5}}, ""),
        ({"ours": {"loss": 0.5}, "b": {"other": 1.0}}, ""),
    ],
)  # fmt: skip
def test_the_verdict(scores: dict[str, dict[str, float]], said: str) -> None:
    assert verdict(scores) == said


def test_published_beside_the_run() -> None:
    class Stored:
        def __init__(self) -> None:
            self.files: dict[str, bytes | str] = {}

        def artifact(self, key: str, source: bytes | str, name: str, folder: str = "") -> None:
            self.files[f"{key}:{folder}/{name}"] = source

    stored = Stored()
    html = publish(inputs(), stored, "job")  # type: ignore[arg-type]
    assert stored.files.pop("job:/report.html") == html.encode() and html == build_report(inputs())
    assert sorted(stored.files) == [
        f"job:figures/{name}.png" for name in ("calibration", "loss", "precision_recall", "roc", "share_by_carrier")
    ]
    assert all(isinstance(data, bytes) and data[:4] == b"\x89PNG" for data in stored.files.values())


ODD = ["$x^$", "$", r"a\$b$c^$", r"\frac{", "100$ & <b>", "_hidden", "a\nb", "\x00\x1b[31m", "\ud800", "", "\u202eab"]


def test_any_category_is_text() -> None:
    labels = np.arange(1100) % 2
    values = np.array(ODD, dtype=object)[np.arange(1100) % len(ODD)]
    held = HeldOut(labels, np.linspace(0, 1, 1100), {"$x^$": values})
    given = ReportInputs("$x^$", "finished", description="\ud800", positive="$x^$", held_out=held)
    html = build_report(given)
    html.encode()
    page = Page(html)
    assert page.open == [] and "b" not in page.tags
    assert not [value for value in ODD if value.isprintable() and value not in page.text], "as they are, not typeset"
    assert figures.to_png(draw(given)[-1][2])[:4] == b"\x89PNG"


def test_figures_show_their_numbers() -> None:
    groups = [metrics.Group(str(i), 1000 - i, 0.5, 0.5) for i in range(60)]
    svg = figures.to_svg(figures.shares(groups, "city"))
    assert ">city<" in svg and ">39<" in svg and ">40<" not in svg  # the 40 most frequent
    assert svg.startswith("<svg") and not re.search(r"\d{4}-\d\d-\d\d", svg)
    assert figures.to_png(figures.curves({"a": [(1, 1.0)]}, "loss"))[:4] == b"\x89PNG"
