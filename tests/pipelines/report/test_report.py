"""The report's page: what it holds, and that it is drawn again as it was, whatever has become of the recipe."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sparkring.conf.load import Resolved, load_config
from sparkring.conf.manifest import Accounting, DatasetManifest, ManifestError
from sparkring.conf.storage import open_storage
from sparkring.conf.tasks import TASKS
from sparkring.pipelines.evaluation.evaluate import HeldOut
from sparkring.pipelines.evaluation.multilabel import scores_by_label
from sparkring.pipelines.report import figures
from sparkring.pipelines.report.drawing import draw, wrong_groups
from sparkring.pipelines.report.inputs import ReportInputs
from sparkring.pipelines.report.report import build_report, number, redraw, verdict, write_report
from sparkring.pipelines.run.runs import Runs
from sparkring.training.metrics import task_scores
from sparkring.training.model.calibration import Calibration
from sparkring.training.planner.table import format_rows
from sparkring.training.worker.result import (
    MODEL,
    SUMMARY,
    BaselineGap,
    CalibrationFit,
    FailedAttempt,
    FamilyChoice,
    GroupScores,
    IdUses,
    Importance,
    LabelBalance,
    RankedLists,
)
from tests.helpers.datasets import manifest_of, unread_file
from tests.pipelines.results import rank_result, train_result

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
    files = [unread_file(split, rows, f"{i}.parquet") for i, (split, rows) in enumerate(sizes)]
    return manifest_of(
        files=files,
        name="flights",
        accounting=Accounting(rows_in=100_010, rows_out=100_000, quarantined={"distance": 10}),
        checks=checks,
    )


def held_out() -> HeldOut:
    generator = np.random.default_rng(0)
    scores = generator.beta(2, 6, 5000)
    labels = (generator.uniform(size=5000) < scores).astype(int)
    return HeldOut(labels, scores, {"carrier": np.array(["UA", "<b>"])[generator.integers(0, 2, 5000)]})


FAILED = FailedAttempt(
    attempt=1, world=3, cause="lost", message="rank 1: SIGKILL", step=7, steps_lost=3, decision="retry", next_world=3
)


def inputs(predictions: HeldOut | None = None, model: dict[str, Any] | None = None, **changes: Any) -> ReportInputs:
    """Of a binary task that has been scored, or of one with this `model` block and without predictions."""
    held = predictions or (held_out() if model is None else None)
    task = (model or {}).get("task", "binary")
    ours = {"positive_share": 0.3} | ({} if held is None else task_scores(TASKS[task], held.labels, held.scores))
    values: dict[str, Any] = {
        "scores": {MODEL: ours, "majority rate": {"loss": 0.7, "auc": 0.5}},
        "tracking_url": "http://127.0.0.1:5000/#/runs/1",
        "history": {"train/loss": [(s, 1 / s) for s in range(1, 2000)], "valid/loss": [(500, 0.4), (1000, 0.3)]},
        "timings": {"launch_s": 30.0, "train_s": 20.0},
        "failed_attempts": [FAILED, replace(FAILED, attempt=2, step=None)],
        "origins": {"optim.lr": "flights.yaml:3"},
    }
    config = {"name": "flights", "dataset": "/d", "model": model or {}, "optim": {"lr": 0.001}}
    config |= changes.pop("config", {})
    return ReportInputs(train_result(config=config, **(values | changes)), manifest(), held)


def without_figures(**changes: Any) -> ReportInputs:
    """A run of which nothing is drawn: drawing takes most of a page's seconds."""
    return inputs(**{"model": {}, "history": {}, **changes})


def test_the_page_holds_everything_and_needs_nothing() -> None:
    given = inputs()
    html = build_report(given)
    page = Page(html)
    assert page.open == [] and "script" not in page.tags
    assert all(address.startswith("#") for address in page.fetched)  # glyphs within the figures only
    for text in ("flights", "torch-gloo", "majority rate", "0 < distance < 6000", "100,010", "90,000", "SIGKILL",
                 "50 rows/s", "optim.lr", "flights.yaml:3", "This model beats majority rate"):  # fmt: skip
        assert text in page.text, text
    assert html.count(">failed<") == 1 and '<a href="http://127.0.0.1:5000/#/runs/1">' in html
    assert page.tags.count("svg") == len(draw(given)) + 1 == 6
    auc = given.scores[MODEL]["auc"]
    assert f"AUC {auc:.4f}" in page.text and number(auc) in page.text
    assert len(html) < 400_000
    assert build_report(inputs()) == html  # the same run gives the same bytes


def test_each_figure_has_a_name_and_its_numbers_and_each_score_its_metric() -> None:
    given = inputs()
    html = build_report(given)
    for each in draw(given):
        assert f'<svg role="img" aria-label="{each.caption}"' in html
    assert html.count("<details><summary>numbers</summary>") == len(draw(given))
    assert f'data-metric="ROC AUC" class="n best">{number(given.scores[MODEL]["auc"])}<' in html
    assert 'data-metric="Brier score" class="n none">–<' in html and '<pre class="table">' not in html
    assert '<pre class="table">bubble' in build_report(without_figures(plan="bubble"))


def test_scores_by_group_are_tables_of_the_metrics_that_some_group_has() -> None:
    one_class = GroupScores(column="carrier", value="<b>", rows=1200, scores={"loss": 0.5})
    groups = [one_class, GroupScores(column="carrier", value="UA", rows=30, scores={"loss": 0.4, "auc": 0.625})]
    html = build_report(without_figures(groups=groups))
    assert "<h2>Scores by carrier</h2>" in html and "Scores by" not in build_report(without_figures())
    table = html.partition("Scores by carrier")[2].partition("</table>")[0]
    assert [name for name in ("ROC AUC", "log loss", "Brier") if name in table] == ["ROC AUC", "log loss"]
    assert "<td>&lt;b&gt;</td>" in table and ">1,200<" in table and ">0.625<" in table and ">–<" in table


def test_of_what_the_ranking_scores_are_means_is_said() -> None:
    given = inputs()
    config = given.result.config | {"model": {"task": "binary"}, "report": {"ranking": {"group": "user", "k": [20, 5]}}}
    lists = RankedLists(column="user", counted=4100, without_positive=7, short=3, rows=90_000)
    said = ReportInputs(replace(given.result, config=config, ranking=lists), given.manifest).ranking
    assert said.startswith("Recall and NDCG are means over the 4,100 values of user with a positive test row, which ")
    assert "90,000 rows; the 7 without one do not count." in said and "3 of them have no more than 5 rows" in said
    plain = replace(lists, without_positive=0, short=0)
    said = ReportInputs(replace(given.result, config=config, ranking=plain), given.manifest).ranking
    assert "without one" not in said and "recall of 1" not in said and given.ranking == ""


def test_sparse_tables_are_among_the_facts_with_what_they_hold() -> None:
    tables = {"users": {"rows": 5100, "admitted": 6000, "evicted": 900, "bytes": 3_000_000}}
    text = Page(build_report(without_figures(train=rank_result(tables=tables)))).text
    assert "sparse table users5,100 rows, 3.0 MB" in text and "admitted 6,000, evicted 900" in text
    assert "most used" not in text
    hot = {"users": IdUses(top=[(42, 7000), (-5, 30)], total=9000, missed=11)}
    text = Page(build_report(without_figures(train=rank_result(tables=tables, hot_ids=hot)))).text
    assert "most used ids, of 9,000 uses; counts are at most 11 too low: 42 7,000, -5 30" in text
    assert "sparse table" not in build_report(without_figures())


def classes() -> HeldOut:
    generator = np.random.default_rng(0)
    labels = generator.integers(0, 3, 600)
    return HeldOut(labels.astype(float), generator.dirichlet(np.ones(3), 600) + np.eye(3)[labels])


def values() -> HeldOut:
    generator = np.random.default_rng(0)
    labels = generator.normal(50, 9, 5000)
    return HeldOut(labels, labels + generator.normal(0, 3, 5000))


def several() -> HeldOut:
    generator = np.random.default_rng(0)
    scores = generator.random((600, 3))
    return HeldOut((generator.random((600, 3)) < scores).astype(float), scores)


@pytest.mark.parametrize(
    ("task", "held", "names", "texts"),
    [
        ("multiclass", classes(), ["loss", "confusion", "calibration", "classes"], ["macro F1", "F1", "predicted"]),
        ("multilabel", several(), ["loss", "calibration", "labels"], ["macro ROC AUC", "micro F1", "recall"]),
        ("regression", values(), ["loss", "predicted_and_actual", "residuals"], ["RMSE", "R²", "715 of 5,000 rows"]),
    ],
)
def test_classes_and_values_have_their_own_figures_and_scores(
    task: str, held: HeldOut, names: list[str], texts: list[str]
) -> None:
    given = inputs(held, model={"task": task, "label": "kind"})
    page = Page(build_report(given))
    assert [each.name for each in draw(given)] == names and page.open == []
    assert not [text for text in texts if text not in page.text]
    assert build_report(given) == build_report(inputs(held, model={"task": task, "label": "kind"}))
    assert all(figures.to_png(each.figure)[:4] == b"\x89PNG" for each in draw(given))


def test_splits_that_differ_are_said_at_the_top() -> None:
    sentence = "The splits differ: the loss is 0.1 in train, 0.5 in valid"
    assert sentence in Page(build_report(inputs(model={}))).text
    assert "splits differ" not in Page(build_report(without_figures(scores={MODEL: {}}))).text


def test_what_speaks_against_the_scores_is_said_at_the_top() -> None:
    page = Page(build_report(without_figures(cautions=["rows of one user are in train and test", "too good <b>"])))
    assert "rows of one user are in train and test." in page.text and "too good <b>." in page.text


def test_what_users_write_is_text_not_markup() -> None:
    config = {"description": "<script>alert(1)</script>"}
    html = build_report(without_figures(config=config, sample="</pre><img src=x onerror=alert(1)>"))
    page = Page(html)
    assert "script" not in page.tags and "img" not in page.tags and "b" not in page.tags
    assert "<script>alert(1)</script>" in page.text


def test_a_result_without_scores_has_a_page_without_figures() -> None:
    given = inputs(model={"task": "regression"}, scores={MODEL: {}}, history={})
    page = Page(build_report(given))
    assert draw(given) == [] and "Held-out" not in page.text and "finished" in page.text and page.open == []


def test_a_language_model_shows_its_loss_curve_its_perplexity_and_its_sample() -> None:
    given = inputs(
        model={"task": "language_model"}, scores={MODEL: {"loss": 2.0}}, sample="def f(x):\n    return",
        history={"valid/loss": [(1, 3.0), (2, 2.0)], "valid/accuracy": [(1, 20.0), (2, 7.4)]},
    )  # fmt: skip
    page = Page(build_report(given))
    assert "7.389" in page.text and "loss (nats per token)" in page.text and "def f(x):\n    return" in page.text
    assert [each.name for each in draw(given)] == ["loss"]


def test_one_class_only_has_no_curves_but_a_report() -> None:
    names = [each.name for each in draw(inputs(HeldOut(np.zeros(9), np.linspace(0, 1, 9))))]
    assert "roc" not in names and "calibration" in names


@pytest.mark.parametrize(
    ("scores", "said"),
    [
        ({"ours": {"loss": 0.4, "auc": 0.8}, "b": {"loss": 0.5, "auc": 0.7}}, "Ours beats b in loss and ROC AUC."),
        ({"ours": {"loss": 0.4, "auc": 0.6}, "b": {"loss": 0.5, "auc": 0.7}}, "Ours does not beat b in ROC AUC."),
        ({"ours": {"loss": 0.5}, "b": {"loss": 0.5}}, "Ours does not beat b in loss."),
        (
            {"ours": {"loss": 0.5, "auc": 0.6}, "b": {"loss": 0.4, "auc": 0.7}, "c": {"loss": 0.3, "auc": 0.5}},
            "Ours does not beat b in loss or ROC AUC, or c in loss.",
        ),
        ({"ours": {"loss": 0.5}}, ""),
        ({"ours": {"loss": 0.5}, "b": {"other": 1.0}}, ""),
        (
            {"ours": {"loss": 0.4, "ndcg_at_5": 0.3}, "b": {"loss": 0.5}, "popularity": {"ndcg_at_5": 0.2}},
            "Ours beats b in loss, and popularity in NDCG at 5.",
        ),
        (
            {"ours": {"loss": 0.4, "ndcg_at_5": 0.1}, "b": {"loss": 0.5}, "popularity": {"ndcg_at_5": 0.2}},
            "Ours does not beat popularity in NDCG at 5.",
        ),
    ],
)  # fmt: skip
def test_the_verdict(scores: dict[str, dict[str, float]], said: str) -> None:
    assert verdict(scores) == said


class Stored:
    """A tracker that keeps the artifacts and the tags it gets."""

    def __init__(self) -> None:
        self.files: dict[str, bytes | str] = {}
        self.tagged: dict[str, str] = {}
        self.dated: dict[tuple[str, int, str], bytes] = {}

    def history_figure(self, recipe: str, step: int, name: str, png: bytes) -> None:
        self.dated[recipe, step, name] = png

    def artifact(self, key: str, source: bytes | str, name: str, folder: str = "") -> None:
        self.files[f"{key}:{folder}/{name}"] = source

    def artifact_json(self, key: str, content: Any, name: str) -> None:
        self.artifact(key, json.dumps(content), name)

    def tags(self, key: str, tags: dict[str, str]) -> None:
        self.tagged |= tags


def test_the_report_is_in_the_run_folder_and_beside_the_run(tmp_path: Path) -> None:
    stored = Stored()
    write_report(stored, inputs(), open_storage(str(tmp_path)))  # type: ignore[arg-type]
    html = (tmp_path / "report.html").read_bytes()
    assert stored.files.pop("job:/report.html") == html == build_report(inputs()).encode()
    (first, *_) = json.loads(stored.files.pop("job:/thresholds.json"))
    assert [*first] == ["flagged", "from probability", "share of rows", "precision", "recall", "lift"]
    assert sorted(stored.files) == [
        f"job:figures/{name}.png" for name in ("calibration", "loss", "precision_recall", "roc", "share_by_carrier")
    ]
    assert all(isinstance(data, bytes) and data[:4] == b"\x89PNG" for data in stored.files.values())
    assert stored.tagged == {} and stored.dated == {}


def test_a_date_adds_the_figure_that_changes_over_nights_to_the_history_with_the_date_in_it(tmp_path: Path) -> None:
    stored = Stored()
    dated = inputs(config={"schedule": {"begin": "2026-11-20"}})
    write_report(stored, dated, open_storage(str(tmp_path)), "2026-11-22")  # type: ignore[arg-type]
    ((recipe, step, name), png) = stored.dated.popitem()
    assert (recipe, step, name) == (dated.config.name, 2, "test/calibration") and stored.dated == {}
    assert png[:4] == b"\x89PNG" and png != stored.files["job:figures/calibration.png"]


def test_a_report_that_cannot_be_drawn_fails_nothing_and_is_named_in_a_tag(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stored = Stored()
    write_report(stored, inputs(scores={}), open_storage(str(tmp_path)))  # type: ignore[arg-type]
    assert stored.tagged == {"sparkring.report": "not drawn: KeyError: 'this model'"}
    assert "`sparkring report` draws it" in caplog.text and not (tmp_path / "report.html").exists()


ODD = ["$x^$", "$", r"a\$b$c^$", r"\frac{", "100$ & <b>", "_hidden", "a\nb", "\x00\x1b[31m", "\ud800", "", "\u202eab"]


def test_any_category_is_text() -> None:
    labels = np.arange(1100) % 2
    values = np.array(ODD, dtype=object)[np.arange(1100) % len(ODD)]
    held = HeldOut(labels, np.linspace(0, 1, 1100), {"$x^$": values})
    given = inputs(held, config={"description": "\ud800"}, plan="$x^$")
    html = build_report(given)
    html.encode()
    page = Page(html)
    assert page.open == [] and "b" not in page.tags
    assert not [value for value in ODD if value.isprintable() and value not in page.text], "as they are, not typeset"
    assert figures.to_png(draw(given)[-1].figure)[:4] == b"\x89PNG"


RECIPE = """
name: again
dataset: {folder}/dataset
storage: {{runs: {folder}/runs}}
launch: {{world: 4}}
optim: {{lr: 0.01}}
"""
URL = "http://tracking.example:5000/#/experiments/1/runs/2"


def recipe(folder: Path, *words: str) -> Resolved:
    path = folder / "again.yaml"
    path.write_text(RECIPE.format(folder=folder))
    return load_config(str(path), words)


def finished_run(folder: Path, made_with: Resolved, **changes: Any) -> Path:
    """The folder of a run that has ended, as the job leaves it."""
    (folder / "dataset").mkdir()
    (folder / "dataset/_manifest.json").write_text(manifest().to_json())
    runs = Runs(f"{folder}/runs", "again")
    with runs.begin(made_with.config, manifest().fingerprint) as (record, _):
        runs.update(record.folder, status="finished")
    values = {"config": made_with.as_dict(), "origins": made_with.origins, "config_digest": made_with.digest}
    values |= {"run": runs.at(record).uri, "dataset": f"{folder}/dataset", "tracking_url": URL, "plan": "bubble share"}
    values |= {"missing": {"logistic regression": "ValueError: no"}}
    values |= {"per_step_s": {"decode_s": 0.002}, "once_s": {"first_batch_s": 0.75}}
    runs.at(record).put_atomic(SUMMARY, train_result(**(values | changes)).to_json())
    return Path(runs.at(record).uri.removeprefix("file://"))


def test_the_report_drawn_again_shows_what_was_run(tmp_path: Path) -> None:
    made_with = recipe(tmp_path, "optim.lr=0.1")
    folder = finished_run(tmp_path, made_with)
    now = recipe(tmp_path)
    assert redraw(now).endswith("report.html")
    html = (folder / "report.html").read_text()
    assert "c0ffee" in html and "the model is step 10" in html and "bubble share" in html
    assert made_with.digest in html and now.digest not in html
    assert "<code>0.1</code>" in html and "command line" in html and URL in html
    assert "first batch" in html and "0.75 s" in html and "decode, a step" in html and "2.0 ms" in html
    assert "torch-gloo, 3 ranks" in html, "the world it ended on, not the one it was asked for"
    assert "logistic regression (ValueError: no)" in html


def test_a_configuration_of_another_version_is_named(tmp_path: Path) -> None:
    now = recipe(tmp_path)
    finished_run(tmp_path, now, config=now.as_dict() | {"gone": 1})
    with pytest.raises(ManifestError, match=r"summary.json: the run's configuration: gone = 1: extra inputs"):
        redraw(now)


def test_each_of_several_labels_has_its_positives_and_scores_in_a_table() -> None:
    held = several()
    each = scores_by_label(["red", "<b>", "blue"], held.labels, held.scores)
    page = build_report(without_figures(model={"task": "multilabel"}, by_label=each))
    table = page.partition("Scores by label")[2].partition("</table>")[0]
    assert "<td>red</td>" in table and "&lt;b&gt;" in table and "log loss (nats)" in table
    assert [int(n) for n in re.findall(r'data-metric="positives" class="n">(\d+)', table)] == [g.rows for g in each]
    assert f'data-metric="ROC AUC" class="n">{each[2].scores["auc"]:.4g}<' in table
    assert "Scores by label" not in build_report(without_figures(model={"task": "multilabel"}))


def test_the_loss_of_a_label_is_that_of_all_rows() -> None:
    held = several()
    each = scores_by_label(["red", "green", "blue"], held.labels, held.scores)
    scores = {MODEL: {"loss": 0.0}}  # so that each label is behind
    page = build_report(without_figures(model={"task": "multilabel"}, by_label=each, scores=scores))
    table = page.partition("it is worst</h2>")[2].partition("</table>")[0]
    assert re.findall(r'label = \w+</td><td class="n">(\w+)<', table) == ["all"] * 3


def test_numbers_have_an_exponent_where_zeros_would_say_nothing() -> None:
    shown = {0.0: "0", -6.743e-08: "-6.743e-08", 2.34e-05: "0.0000234", -1e-6: "-0.000001", 0.123456: "0.1235"}
    shown |= {
        9.9999e-7: "1e-06",
        123456.7: "123 457",
        999e9: "999 000 000 000",
        1e12: "1e+12",
        2.8586531e17: "2.859e+17",
    }
    assert {value: number(value) for value in shown} == shown
    assert number(float("nan")) == "–"


def luminance(color: str) -> float:
    """Relative, as WCAG 2 defines it."""
    parts = [int(color[start : start + 2], 16) / 255 for start in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def test_texts_have_the_contrast_of_aa_in_both_color_schemes_and_tables_scroll() -> None:
    folder = resources.files("sparkring.pipelines.report")
    page, report = (folder.joinpath(name).read_text() for name in ("page.html", "report.html"))
    schemes = [dict(re.findall(r"--(\w+): (#\w{6})", line)) for line in page.splitlines() if line.startswith(":root")]
    assert len(schemes) == 2 and "prefers-color-scheme: dark" in page and "@media print" in page
    for scheme in schemes:
        for ink in ("ink", "muted", "accent", "good", "bad"):
            for paper in ("paper", "soft", "badge"):
                dark, light = sorted(luminance(scheme[name]) for name in (ink, paper))
                assert (light + 0.05) / (dark + 0.05) >= 4.5, (scheme, ink, paper)
    checks = report[report.index("<h3>Checks</h3>") : report.index("<h3>Configuration</h3>")]
    titles = re.findall(r"<th[^>]*>(\w+)</th>", checks)
    assert '<table class="scores">' in checks, "on a phone a line per value, not a row that is cut"
    assert titles == ["check", *re.findall(r'data-metric="(\w+)"', checks)]


def test_the_first_screen_says_what_to_do_and_where_it_is_wrong_and_paths_come_last() -> None:
    suggested = {"longer": "sparkring run a train.epochs=2   (the last evaluation was the best)", "next": "sparkring b"}
    groups = [
        GroupScores(column="carrier", value=name, rows=500, scores={"loss": loss})
        for name, loss in [("AA", 0.5), ("UA", 0.9), ("B6", 0.1), ("<i>", 0.7)]
    ]
    gap = BaselineGap(rows=90_000, ours=0.5, theirs=0.25, half_width=0.125)
    scores = {MODEL: {"loss": 0.4, "auc": 0.8}, "majority rate": {"loss": 0.7, "auc": 0.5}}
    fit = CalibrationFit(method="Platt scaling", rows=900, loss_before=0.5, loss_after=0.4, kept=Calibration(scale=0.5))
    given = inputs(held_out(), suggested=suggested, groups=groups, trees_gap=gap, scores=scores, calibration=fit)
    html = build_report(given)
    shown = ["This model is worse than gradient-boosted trees",
             "<dt>Train longer: the last evaluation was the best</dt>", "<pre>sparkring run a train.epochs=2</pre>",
             "<td>carrier = UA</td>", "<td>carrier = &lt;i&gt;</td>", "<td>carrier = AA</td>", "Where it is wrong",
             "Calibration, slices", "Held-out scores", "calibrated by Platt scaling on 900 validation rows",
             "Rows that are flagged as", "Details of the run", given.manifest.fingerprint,
             "resolved values and where each came from"]  # fmt: skip
    places = [html.find(text) for text in shown]
    assert -1 not in places and places == sorted(places), dict(zip(shown, places, strict=True))
    assert "carrier = B6" not in html.partition("Held-out scores")[0], "it is better there than elsewhere"
    first = html.partition("Held-out scores")[0]
    assert given.result.run not in first and given.result.config_digest not in first


def test_what_it_depends_on_fills_the_column_that_has_commands_alone() -> None:
    found = [Importance(feature="carrier", mean=0.2, low=0.1, high=0.3)]
    labels = np.repeat([1.0, 0.0], 500)
    plain = HeldOut(labels, np.full(1000, 0.5), {})
    towns = HeldOut(labels, np.full(1000, 0.5), {"town": np.repeat(["A", "B"], 500)})
    for held, suggested, columns in (
        (plain, {"next": "sparkring b"}, ["to do next", "it depends on", "", "it is wrong"]),
        (towns, {"next": "sparkring b"}, ["to do next", "it is farthest off", "", "it is wrong", "it depends on"]),
        (plain, {}, ["it is wrong", "it depends on"]),
    ):
        first = build_report(inputs(held, importance=found, importance_rows=70, suggested=suggested))
        shown = re.findall(r"</section>\s*<section>|<h2>\w+ ([^<]*)</h2>", first.partition("Held-out scores")[0])
        assert shown == columns


@pytest.mark.parametrize(("many", "is_wide"), [(4, False), (16, True)])
def test_the_confusion_of_many_classes_is_as_wide_as_the_page(many: int, is_wide: bool) -> None:
    """In half of it its names would be too small to read."""
    held = HeldOut(np.arange(64) % many, np.full((64, many), 1 / many), {})
    found = build_report(inputs(held, model={"task": "multiclass"}, suggested={"next": "sparkring b"}))
    assert ('<section class="wide">' in found) == is_wide


def test_a_wide_table_is_a_line_per_value_on_a_phone() -> None:
    html = build_report(
        inputs(held_out(), plan=format_rows([{"quantity": "a", "unit": "b", "predicted": 1, "measured": None}]))
    )
    for title, names in (
        ("Rows that are flagged as", ["from probability", "share of rows", "precision", "recall", "lift"]),
        ("Layout, predicted and measured", ["unit", "predicted", "measured"]),
    ):
        table = html.partition(title)[2].partition("</table>")[0]
        row = table.rpartition("<tr>")[2]
        assert '<table class="scores">' in table and re.findall(r'<td data-metric="([^"]*)"', row) == names


def test_without_groups_the_values_that_are_farthest_off_are_shown() -> None:
    labels = np.repeat([1.0, 0.0], 500)
    held = HeldOut(labels, np.full(1000, 0.5), {"town": np.repeat(["A", "B"], [600, 400])})
    found = wrong_groups(inputs(held))
    assert found is not None
    assert found.rows == [("town = B", 400, 0.5, 0.0), ("town = A", 600, 0.5, pytest.approx(500 / 600))]
    few = HeldOut(labels[:50], np.full(50, 0.5), {"town": np.full(50, "A")})
    assert wrong_groups(inputs(few)) is None and wrong_groups(inputs(classes(), model={"task": "multiclass"})) is None


def test_the_layout_is_a_table_with_a_header() -> None:
    plan = format_rows([{"quantity": "parameters", "unit": "count", "predicted": 1234, "measured": None}])
    html = build_report(without_figures(plan=plan))
    layout = html.partition("Layout, predicted and measured")[2].partition("</table>")[0]
    assert re.findall(r"<th[^>]*>([^<]*)</th>", layout) == ["quantity", "unit", "predicted", "measured"]
    assert re.findall(r"<td[^>]*>([^<]*)</td>", layout) == ["parameters", "count", "1,234", ""] and "<pre" not in layout


@pytest.mark.parametrize("task", ["binary", "regression"])
def test_the_label_of_each_split_is_a_figure(task: str) -> None:
    of_classes = {split: LabelBalance(rows=10, shares={"0": 0.7, "1": 0.3}) for split in ("train", "test")}
    value = LabelBalance(rows=10, mean=1.0, std=1.0, counts=[4, 6], edges=[0.0, 1.0, 2.0])
    of_values = dict.fromkeys(["train", "test"], value)
    given = inputs(model={"task": task, "label": "y"}, labels=of_classes if task == "binary" else of_values)
    (label,) = (each for each in draw(given) if each.name == "label")
    assert label.caption == "y in each split" and [*label.numbers.columns][1:] == ["train", "test"]
    wanted = [("0", 0.7, 0.7), ("1", 0.3, 0.3)] if task == "binary" else [(0.0, 0.4, 0.4), (1.0, 0.6, 0.6)]
    assert label.numbers.rows == wanted


@pytest.mark.parametrize(("classes", "added"), [(20, ""), (21, ", the 20 with most rows")])
def test_a_figure_says_that_it_shows_some_of_the_classes(classes: int, added: str) -> None:
    shares = {str(number): 1 / classes for number in range(classes)}
    labels = np.arange(classes)
    given = inputs(
        HeldOut(labels, np.eye(classes), {}),
        model={"task": "multiclass", "label": "y"},
        labels={"test": LabelBalance(rows=classes, shares=shares)},
    )
    captions = {each.name: each.caption for each in draw(given)}
    assert captions["label"] == f"y in each split{added}"
    assert captions["classes"] == f"Precision and recall by class{added}"


def test_the_first_screen_says_what_it_depends_on_and_which_family_it_is() -> None:
    found = [Importance(feature="carrier", mean=0.2, low=0.1, high=0.3)]
    choice = FamilyChoice(
        metric="loss",
        winner="trees",
        values={"net": 0.5, "trees": 0.4},
        half_width=0.02,
        train_s={"net": 9, "trees": 1},
    )
    html = build_report(without_figures(importance=found, importance_rows=70, choice=choice))
    first = html.partition("Held-out scores")[0]
    assert "What it depends on" in first and "of 70 test rows" in first
    assert f"Of a network and trees, both trained: {choice.describe()}." in first
