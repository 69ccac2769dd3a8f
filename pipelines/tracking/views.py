"""What a browser is shown of a dated recipe: two saved views of MLflow's page of runs, and links to them.

    nights    a line per date: decision, scores next to the champion's on the same rows, reason, drift
    history   the charts of the history run over dates, a score and the champion's in one chart

Without a view MLflow's page shows neither scores nor decisions, and its charts count days from 1970. A saved view is a
tag of the experiment, in the form that MLflow's own menu writes (checked against MLflow 3.17); another version shows
its usual page. The links stand in the experiment's description. Pure functions.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from sparkring.conf.plain_text import in_markdown
from sparkring.pipelines.tracking.tags import DATE, DECISION, ERROR, HISTORY, REASON, RECIPE

VIEW = "mlflow.sharedViewState."  # tag of an experiment
NOTE = "mlflow.note.content"  # tag of an experiment or run: its description, in Markdown
TRAINING = "workflowType=machine_learning"  # of a link: the pages of training, not those of agents
FIRST = ("auc", "abs_error", "perplexity", "accuracy")  # the score that a list begins with: the first a task has
PX, REASON_PX, NAME_PX = 8, 300, 420  # of a letter, of the column of reasons, of names with what differs
LONGEST_TEXT = 1000  # characters; MLflow takes 5,000
LONGEST_TAG = 5000  # characters of an experiment's tag: MLflow 2.19 to 3.0 take no more, later ones 20,000


def view_tags(recipe: str, values: Iterable[str], begun_ms: int) -> dict[str, str]:
    """Return the tags of the experiment that hold the recipe's two views.

    Args:
        recipe: name of the recipe.
        values: names of what a date adds to the history: `test/auc`, `cost/core_hours_etl`.
        begun_ms: creation time of the views, in ms since 1970.
    """
    scores = scores_of(values)
    states = {
        f"{recipe} nights": (nights_key(recipe), nights_state(recipe, scores)),
        f"{recipe} history": (history_key(recipe), fitting_history(recipe, scores, begun_ms)),
    }
    return {VIEW + key: _saved(name, state, begun_ms) for name, (key, state) in states.items()}


def _saved(name: str, state: Mapping[str, Any], begun_ms: int) -> str:
    inner = json.dumps(state, separators=(",", ":"))
    view = {"name": name, "createdAt": begun_ms, "updatedAt": begun_ms, "state": inner}
    return json.dumps(view, separators=(",", ":"))


def nights_key(recipe: str) -> str:
    """Return the key of the nights view in a link."""
    return f"{recipe}-nights"


def history_key(recipe: str) -> str:
    """Return the key of the history view in a link."""
    return f"{recipe}-history"


def scores_of(values: Iterable[str]) -> list[str]:
    """List the model's own scores, without `test/`: the main one, the loss, then the others."""
    words = [value.split("/") for value in values]
    names = {name for first, name in (each for each in words if len(each) == 2) if first == "test"}
    first = next((name for name in FIRST if name in names), "")
    return sorted(names, key=lambda name: (name != first, name != "loss", name))


def runs_key(recipe: str) -> str:
    """Return the key of the runs view in a link."""
    return f"{recipe}-runs"


def runs_view(recipe: str, scores: Iterable[str], begun_ms: int) -> tuple[str, str]:
    """Return the experiment's tag for the view of a recipe without dates: its name and value.

    Args:
        recipe: name of the recipe.
        scores: names of a job's metrics: `test/auc`.
        begun_ms: creation time of the view, in ms since 1970.
    """
    return VIEW + runs_key(recipe), _saved(f"{recipe} runs", runs_state(recipe, scores_of(scores)), begun_ms)


def runs_state(recipe: str, scores: list[str]) -> dict[str, Any]:
    """Return the list of runs: newest job first, with its whole name, scores, and failure reason."""
    run_name, error = "attributes.`Run Name`", f"tags.`{ERROR}`"
    columns = [*(f"metrics.`test/{name}`" for name in scores[:3]), error]
    widths = {column: PX * len(column.partition(".")[2]) for column in columns}
    return {
        "searchFilter": f"tags.`{RECIPE}` = '{recipe}'",
        "orderByKey": "attributes.start_time",
        "orderByAsc": False,
        "selectedColumns": columns,
        "columnOrder": [run_name, *columns],
        "columnWidths": widths | {run_name: NAME_PX, error: REASON_PX},
    }


def nights_state(recipe: str, scores: list[str]) -> dict[str, Any]:
    """Return the list of dates: newest first, with columns that tell how a date went."""
    compared = [name for score in scores[:2] for name in (f"test/{score}", f"test/champion/{score}")]
    run_name, reason = "attributes.`Run Name`", f"tags.`{REASON}`"
    metrics = [f"metrics.`{name}`" for name in compared]
    columns = [f"tags.`{DECISION}`", reason, *metrics, "tags.`sparkring.drift`"]
    widths = {column: PX * len(column.partition(".")[2]) for column in columns}  # as wide as the heading
    return {
        "searchFilter": f"tags.`{RECIPE}` = '{recipe}'",
        "orderByKey": f"tags.`{DATE}`",
        "orderByAsc": False,
        "selectedColumns": columns,
        "columnOrder": [run_name, *columns],
        "columnWidths": widths | {run_name: 80 + PX * len(f"{recipe} 2013-03-01"), reason: REASON_PX},
    }


def history_state(recipe: str, scores: list[str]) -> dict[str, Any]:
    """Return the charts over time, by a point's date; a score and the champion's together."""
    return {
        "searchFilter": f"tags.`{HISTORY}` = '{recipe}'",
        "globalLineChartConfig": {"xAxisKey": "time", "lineSmoothness": 0, "selectedXAxisMetricKey": ""},
        "runListHidden": True,  # a list of one
        "isAccordionReordered": True,  # sections in our order; those that MLflow adds come behind
        "compareRunSections": [{"uuid": "test", "name": "test", "display": True, "isReordered": True}],
        "compareRunCharts": [chart(score) for score in scores],
    }


def fitting_history(recipe: str, scores: list[str], begun_ms: int) -> dict[str, Any]:
    """Return the charts of as many scores, from the first on, as fit in a tag."""
    states = (history_state(recipe, scores[:count]) for count in range(len(scores), -1, -1))
    return next(state for state in states if len(_saved(f"{recipe} history", state, begun_ms)) <= LONGEST_TAG)


def chart(score: str) -> dict[str, Any]:
    """Return one chart of MLflow's page: the score, and the champion's on the same rows."""
    return {
        "type": "LINE",
        "uuid": score,
        "metricSectionId": "test",
        "displayName": score,
        "metricKey": f"test/{score}",
        "selectedMetricKeys": [f"test/{score}", f"test/champion/{score}"],
        "xAxisKey": "time",
        "useGlobalXaxisKey": True,
        "useGlobalLineSmoothing": True,
        "lineSmoothness": 0,
        "selectedXAxisMetricKey": "",
        "xAxisScaleType": "linear",
        "scaleType": "linear",
        "range": {},
        "yAxisKey": "metric",
        "yAxisExpressions": [],
        "ignoreOutliers": False,
        "runsCountToCompare": 10,
        "deleted": False,
        "isGenerated": False,
    }


def runs_page(experiment: str) -> str:
    """Return the page with all runs of an experiment."""
    return f"#/experiments/{experiment}/runs?{TRAINING}"


def links(recipe: str, experiment: str, model: str) -> dict[str, str]:
    """Return pages of a recipe with dates, by name: paths behind the server's address.

    Args:
        recipe: name of the recipe.
        experiment: id of the experiment.
        model: name of the registered model.
    """
    runs = runs_page(experiment)
    return {
        "nights": f"{runs}&viewStateShareKey={nights_key(recipe)}",
        "history": f"{runs}&compareRunsMode=CHART&viewStateShareKey={history_key(recipe)}",
        "model versions": f"#/models/{model}?{TRAINING}",
    }


def undated_links(recipe: str, experiment: str, model: str) -> dict[str, str]:
    """Return pages of a recipe without dates, as `links`."""
    runs = f"{runs_page(experiment)}&viewStateShareKey={runs_key(recipe)}"
    return {"runs": runs, "model versions": f"#/models/{model}?{TRAINING}"}


def history_note(recipe: str, experiment: str) -> str:
    """Describe the history run: its own page draws steps, the view dates."""
    return f"A point per date of {recipe}. [Over dates]({links(recipe, experiment, recipe)['history']})"


def noted(note: str, recipe: str, found: Mapping[str, str]) -> str:
    """Write the line of a recipe's links to the experiment's description; keep other lines.

    A description that would become longer than MLflow takes stays without them.

    Args:
        note: present description of the experiment.
        recipe: name of the recipe.
        found: pages from `links`.
    """
    start = _links_begin(recipe)
    line = start + " · ".join(f"[{name}]({path})" for name, path in found.items())
    lines = note.splitlines()
    if any(each.startswith(start) for each in lines):
        with_links = "\n".join(line if each.startswith(start) else each for each in lines)
    else:
        with_links = "\n\n".join(filter(None, [note, line]))
    return with_links if len(with_links) <= LONGEST_TAG else note


def has_links(note: str, recipe: str) -> bool:
    """Return whether the experiment's description has the line of the recipe's links."""
    return any(line.startswith(_links_begin(recipe)) for line in note.splitlines())


def _links_begin(recipe: str) -> str:
    return f"**{recipe}**: "


def decision_text(tags: Mapping[str, str]) -> str:
    """Describe a version's decision in a line, its date first; "" without a decision."""
    if DECISION not in tags:
        return ""
    text = " ".join(filter(None, [tags.get(DATE), tags[DECISION]]))
    return (f"{text}: {in_markdown(tags[REASON])}" if tags.get(REASON) else text)[:LONGEST_TEXT]


def decision_note(tags: Mapping[str, str], model: str, version: str) -> str:
    """Describe a run's decision on the version that it has registered, with a link."""
    reason = f": {in_markdown(tags[REASON])}" if tags.get(REASON) else ""
    return f"[{model} version {version}](#/models/{model}/versions/{version}?{TRAINING}) {tags[DECISION]}{reason}"
