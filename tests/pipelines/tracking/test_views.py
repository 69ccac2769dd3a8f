from __future__ import annotations

import json
from typing import Any

import pytest

from sparkring.pipelines.tracking.tags import DECISION, REASON
from sparkring.pipelines.tracking.views import (
    VIEW,
    decision_note,
    decision_text,
    links,
    noted,
    runs_view,
    scores_of,
    view_tags,
)

VALUES = [
    "steps", "cost/core_hours_etl", "test/loss", "test/champion/loss", "test/brier", "test/auc",
    "test/logistic_regression/auc", "drift/distance/psi",
]  # fmt: skip


def states(recipe: str = "flights") -> dict[str, dict[str, Any]]:
    """Name of a view -> its state, read as MLflow's page reads them."""
    found = {}
    for tag, text in view_tags(recipe, VALUES, 5).items():
        assert tag.startswith(VIEW)
        view = json.loads(text)
        assert {name: type(value) for name, value in view.items()} == {
            "name": str, "createdAt": int, "updatedAt": int, "state": str,
        }  # fmt: skip
        found[view["name"]] = json.loads(view["state"])
    return found


def test_no_tag_is_longer_than_older_servers_take() -> None:
    """MLflow 3.0 refused the page of a recipe with eight scores: 5,000 characters are its limit."""
    scores = [f"score_of_rank_{n:02d}" for n in range(30)]
    tags = view_tags("delays-of-all-carriers", [f"test/{score}" for score in scores], 1_700_000_000_000)
    assert all(len(value) <= 5000 for value in tags.values())
    charts = json.loads(json.loads(tags[f"{VIEW}delays-of-all-carriers-history"])["state"])["compareRunCharts"]
    assert [each["uuid"] for each in charts] == scores[: len(charts)] and len(charts) >= 7
    note = "x" * 4900
    assert noted(note, "flights", {"nights": "#/" + "y" * 100}) == note
    assert len(noted(note, "flights", {"nights": "#/"})) > len(note)


@pytest.mark.parametrize(
    ("values", "scores"),
    [
        (VALUES, ["auc", "loss", "brier"]),
        (["test/loss", "test/accuracy", "test/accuracy/x", "time/total_s"], ["accuracy", "loss"]),
        (["test/mine"], ["mine"]),
        ([], []),
    ],
)
def test_scores_begin_with_the_one_to_look_at_and_the_loss(values: list[str], scores: list[str]) -> None:
    assert scores_of(values) == scores


def test_the_list_of_nights_has_the_newest_date_first_and_scores_beside_the_champions() -> None:
    state = states()["flights nights"]
    assert state["searchFilter"] == "tags.`sparkring.recipe` = 'flights'"
    assert (state["orderByKey"], state["orderByAsc"]) == ("tags.`sparkring.date`", False)
    assert state["selectedColumns"] == [
        "tags.`sparkring.decision`", "tags.`sparkring.reason`", "metrics.`test/auc`", "metrics.`test/champion/auc`",
        "metrics.`test/loss`", "metrics.`test/champion/loss`", "tags.`sparkring.drift`",
    ]  # fmt: skip
    wide = states("a-recipe-with-a-long-name")["a-recipe-with-a-long-name nights"]["columnWidths"]
    assert wide["attributes.`Run Name`"] > state["columnWidths"]["attributes.`Run Name`"], "the date is not cut off"
    assert state["columnOrder"] == ["attributes.`Run Name`", *state["selectedColumns"]]


def test_the_list_of_a_recipe_without_dates_has_whole_names_scores_and_why_one_failed() -> None:
    tag, text = runs_view("shop", VALUES, 5)
    view = json.loads(text)
    state = json.loads(view["state"])
    assert (tag, view["name"], view["createdAt"]) == (f"{VIEW}shop-runs", "shop runs", 5)
    assert state["selectedColumns"] == [
        "metrics.`test/auc`", "metrics.`test/loss`", "metrics.`test/brier`", "tags.`sparkring.error`",
    ]  # fmt: skip
    assert (state["orderByKey"], state["orderByAsc"]) == ("attributes.start_time", False)
    assert state["searchFilter"] == "tags.`sparkring.recipe` = 'shop'"
    assert state["columnWidths"]["attributes.`Run Name`"] > 8 * len("shop 2026-11-23 19:28 lr=0.02 epochs=3")


def test_the_charts_of_the_history_are_over_dates_with_the_champion_in_each() -> None:
    state = states()["flights history"]
    assert state["searchFilter"] == "tags.`sparkring.history` = 'flights'"
    assert state["globalLineChartConfig"]["xAxisKey"] == "time"
    charts = {chart["metricKey"]: chart["selectedMetricKeys"] for chart in state["compareRunCharts"]}
    assert list(charts) == ["test/auc", "test/loss", "test/brier"]
    assert charts["test/auc"] == ["test/auc", "test/champion/auc"]
    assert {chart["metricSectionId"] for chart in state["compareRunCharts"]} == {"test"}
    assert [section["uuid"] for section in state["compareRunSections"]] == ["test"]


def test_links_name_views_that_are_saved() -> None:
    """Two recipes of one experiment have views of their own."""
    for recipe in ("flights", "shop"):
        saved = {tag.removeprefix(VIEW) for tag in view_tags(recipe, VALUES, 5)}
        found = links(recipe, "7", "registered")
        linked = {part.partition("=")[2] for link in found.values() for part in link.split("&") if "viewState" in part}
        assert linked == saved and all(recipe in key for key in saved)
        assert found["nights"].startswith("#/experiments/7/runs?workflowType=machine_learning&")
        assert "compareRunsMode=CHART" in found["history"]
        assert found["model versions"].startswith("#/models/registered?")


def test_a_description_keeps_its_own_lines_and_those_of_other_recipes() -> None:
    first = noted("", "flights", {"nights": "#/a"})
    assert first == "**flights**: [nights](#/a)"
    both = noted(noted("Ours.\n\nMail Ann.", "flights", {"nights": "#/a"}), "shop", {"nights": "#/b"})
    assert both.split("\n\n") == ["Ours.", "Mail Ann.", "**flights**: [nights](#/a)", "**shop**: [nights](#/b)"]
    assert noted(both, "flights", {"nights": "#/a"}) == both
    assert noted(both, "flights", {"nights": "#/c"}) == both.replace("#/a", "#/c")


@pytest.mark.parametrize(
    ("tags", "text"),
    [
        ({"sparkring.date": "2024-03-04"}, ""),
        ({"sparkring.date": "2024-03-04", "sparkring.decision": "promoted", "sparkring.reason": ""},
         "2024-03-04 promoted"),
        ({"sparkring.decision": "held", "sparkring.reason": "drift"}, "held: drift"),
        ({"sparkring.decision": "held", "sparkring.reason": "x" * 4000}, "held: " + "x" * 994),
    ],
)  # fmt: skip
def test_a_decision_in_a_line_begins_with_its_date(tags: dict[str, str], text: str) -> None:
    assert decision_text(tags) == text


def test_a_reason_from_outside_is_shown_as_it_is() -> None:
    """A column's name in a reason was read as Markdown: a link, a headline, an image."""
    reason = "drift of [a](http://b) *c* <img src=x> | d"
    shown = "drift of \\[a\\](http://b) \\*c\\* &#60;img src=x&#62; &#124; d"
    tags = {DECISION: "held", REASON: reason}
    assert decision_text(tags) == f"held: {shown}"
    assert decision_note(tags, "m", "3").endswith(f") held: {shown}")
