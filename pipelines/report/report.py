"""The one page a stranger reads: what was trained on what, how good it is beside baselines, what happened on the way.

`build_report` is a pure function of its inputs; the page is self-contained (inline SVG, no script, no network), so it
opens in a browser, in MLflow's artifact viewer and in a mail.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

import jinja2
import numpy as np
from markupsafe import Markup
from matplotlib.figure import Figure

from conf.manifest import DatasetManifest, digest
from pipelines import metrics
from pipelines.report import figures
from pipelines.tracking.tracker import Tracker

Drawn = tuple[str, str, Figure, bool]
LOSSES = {
    "binary": "log loss (nats)",
    "multiclass": "log loss (nats)",
    "language_model": "loss (nats per token)",
    "regression": "mean squared error",
}
NAMES = {
    "auc": "ROC AUC",
    "average_precision": "average precision",
    "brier": "Brier score",
    "calibration_error": "calibration error",
    "abs_error": "mean absolute error",
}


@dataclass(frozen=True)
class HeldOut:
    """Predictions of every held-out row: labels (N,) 0 or 1, scores (N,); `columns`: (N,) values to group by."""

    labels: np.ndarray
    scores: np.ndarray
    columns: Mapping[str, Sequence[Any] | np.ndarray] = field(default_factory=dict)


@dataclass(frozen=True)
class ReportInputs:
    """Everything the page shows. What is left empty is left out of it."""

    name: str
    status: str
    description: str = ""
    task: str = "binary"
    positive: str = "positive"  # what a label of 1 means, for the captions
    facts: Mapping[str, str] = field(default_factory=dict)  # label -> text or http(s) link
    history: Mapping[str, Sequence[tuple[int, float]]] = field(default_factory=dict)  # metric -> (step, value)
    model_name: str = "this model"
    model_scores: Mapping[str, float] = field(default_factory=dict)  # for tasks without `held_out`
    baselines: Mapping[str, Mapping[str, float]] = field(default_factory=dict)  # name -> metric -> value
    held_out: HeldOut | None = None
    manifest: DatasetManifest | None = None
    timings_s: Mapping[str, float] = field(default_factory=dict)  # stage -> seconds, in order
    rates: Mapping[str, str] = field(default_factory=dict)  # label -> "123 rows/s"
    attempts: Sequence[Mapping[str, Any]] = ()
    config: Sequence[tuple[str, str, str]] = ()  # key, value, origin
    sample: str = ""  # language model: text it wrote
    plan: str = ""  # the table of predicted and measured quantities

    def scores(self) -> dict[str, dict[str, float]]:
        """Name -> metric -> value, ours first; computed exactly from `held_out` where there is one."""
        ours = dict(self.model_scores)
        if self.held_out is not None:
            ours |= metrics.binary_scores(self.held_out.labels, self.held_out.scores)
        if self.task == "language_model" and "loss" in ours:
            ours.setdefault("perplexity", math.exp(min(ours["loss"], 700.0)))
        return ({self.model_name: ours} if ours else {}) | {name: dict(s) for name, s in self.baselines.items()}


def publish(inputs: ReportInputs, tracker: Tracker, key: str) -> str:
    """The page, also stored with the run: `report.html` and each figure as `figures/<name>.png`."""
    drawn = draw(inputs)
    html = build_report(inputs, drawn)
    tracker.artifact(key, html.encode(), "report.html")  # of what is redacted by now: its SQL is no prose
    for name, _, figure, _ in drawn:
        tracker.artifact(key, figures.to_png(figure), f"{name}.png", "figures")
    return html


def build_report(inputs: ReportInputs, drawn: Sequence[Drawn] | None = None) -> str:
    """The page as text. `drawn`: what `draw(inputs)` gave, where it is at hand."""
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    environment.filters |= {"number": number, "count": lambda n: f"{n:,}".replace(",", " "), "megabytes": megabytes}
    template = environment.from_string(resources.files("pipelines.report").joinpath("report.html").read_text())
    shown = draw(inputs) if drawn is None else drawn
    scores = inputs.scores()
    page = template.render(
        i=inputs,
        scores=scores,
        verdict=verdict(scores),
        columns=[(name, _title(name, inputs.task)) for name in _score_columns(scores)],
        best=_best(scores),
        figures=[(caption, Markup(figures.to_svg(figure)), wide) for _, caption, figure, wide in shown],
        time_figure=Markup(figures.to_svg(figures.time_bar(inputs.timings_s))) if inputs.timings_s else "",
        attempt_columns=list(dict.fromkeys(key for attempt in inputs.attempts for key in attempt)),
        splits=_splits(inputs.manifest),
    )
    return page.encode(errors="replace").decode()  # a lone surrogate has no bytes


def draw(inputs: ReportInputs) -> list[Drawn]:
    """(file name, caption, figure, whether it is a wide one) of every figure; MLflow gets the same ones as PNG."""
    drawn: list[Drawn] = []
    for kind, caption in (("loss", "Loss"), ("perplexity", "Perplexity")):
        found = {name: points for name, points in inputs.history.items() if name.rpartition("/")[2] == kind and points}
        if found:
            drawn.append((kind, f"{caption} over steps", figures.curves(found, kind), False))
    held = inputs.held_out
    if held is None:
        return drawn
    counts = metrics.confusion(held.labels, held.scores)
    if counts.positives and counts.negatives:
        drawn.append(("roc", "ROC over all held-out rows", figures.roc(counts), False))
        drawn.append(("precision_recall", "Precision and recall", figures.precision_recall_curve(counts), False))
    bins = metrics.calibration(held.labels, held.scores)
    drawn.append(("calibration", "Calibration, slices of equal counts", figures.calibration_plot(bins), False))
    for name, values in held.columns.items():
        groups = metrics.share_by(values, held.labels, held.scores)
        drawn.append(
            (f"share_by_{file_name(name)}", f"Share of {inputs.positive} by {name}", figures.shares(groups, name), True)
        )
    return drawn


def file_name(column: str) -> str:
    """A file's name for a column, which may be named anything; different for different columns."""
    plain = re.sub(r"[^A-Za-z0-9_-]", "_", column)[:100]
    return plain if plain == column else f"{plain}-{digest(column)[:8]}"


def verdict(scores: Mapping[str, Mapping[str, float]]) -> str:
    """One sentence on whether the first model beats every other on the metrics all have."""
    if len(scores) < 2:
        return ""
    (name, ours), *others = scores.items()
    shared = [m for m in ("loss", "auc") if m in ours and all(m in theirs for _, theirs in others)]
    lost = [
        f"{other} in {NAMES.get(m, m)}"
        for m in shared
        for other, theirs in others
        if not metrics.is_better(m, ours[m], theirs[m])
    ]
    if not shared:
        return ""
    if lost:
        return _sentence(f"{name} does not beat {' or '.join(lost)}.")
    beaten, where = " and ".join(other for other, _ in others), " and ".join(NAMES.get(m, m) for m in shared)
    return _sentence(f"{name} beats {beaten} in {where}.")


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:]


def number(value: Any) -> str:
    """Four significant digits; integers and texts as they are."""
    if isinstance(value, bool) or not isinstance(value, float):
        return str(value)
    return f"{value:.4g}" if abs(value) < 1e4 else f"{value:,.0f}".replace(",", " ")


def megabytes(size: int) -> str:
    return f"{size / 1e6:,.1f} MB".replace(",", " ")


def _title(metric: str, task: str) -> str:
    if metric == "loss":
        return LOSSES.get(task, metric)
    return NAMES.get(metric, metric.replace("_", " "))


def _score_columns(scores: Mapping[str, Mapping[str, float]]) -> list[str]:
    return list(dict.fromkeys(metric for values in scores.values() for metric in values))


def _best(scores: Mapping[str, Mapping[str, float]]) -> dict[str, str]:
    """Metric -> the name that is best in it, where at least two can be compared."""
    found = {}
    for metric in _score_columns(scores):
        named = {name: values[metric] for name, values in scores.items() if metric in values}
        if len(named) > 1:
            found[metric] = (min if metric in metrics.BEST_IS_LOW else max)(named, key=lambda name: named[name])
    return found


def _splits(manifest: DatasetManifest | None) -> list[tuple[str, int, int, int]]:
    """(split, rows, files, bytes)."""
    if manifest is None:
        return []
    return [
        (name, split.rows, split.files, sum(f.bytes for f in manifest.files if f.split == name))
        for name, split in manifest.splits.items()
    ]
