"""Figures of the report and of MLflow's artifacts. Each function takes numbers and returns a matplotlib Figure.

No pyplot: it keeps figures in module-level state and would pick a screen's backend.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any
from xml.sax.saxutils import escape

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Text

from sparkring.pipelines.evaluation.binary import Group, ThresholdCurves
from sparkring.training.metrics import Bin
from sparkring.training.worker.result import Importance

INK, MUTED, GRID = "#1c2430", "#6b7585", "#e3e7ed"
COLORS = ("#2f6fdb", "#e07b26", "#2a9d74", "#9b5cc9", "#c8435a", "#5b6b7f")
MOST_POINTS = 800  # of a curve: more cannot be seen at this size
MOST_BARS = 40
MOST_LABEL = 52  # characters of a bar's name
MOST_FEATURE = 32
MOST_TICK = 20  # characters of a name below an axis
WIDE = 4.0  # times the smallest value, from which an axis is logarithmic
FEW_CLASSES = 12  # a confusion matrix of no more has its shares written into it
OF_SCREENS = {"backend", "backend_fallback", "toolbar", "interactive"}
STYLE: Any = {
    # A `matplotlibrc` of the working directory may be another's, and can start programs (text.usetex).
    **{name: value for name, value in matplotlib.rcParamsDefault.items() if name not in OF_SCREENS},
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9,
    "svg.fonttype": "none",
    "svg.hashsalt": "sparkring",  # the same numbers give the same bytes
    "text.parse_math": False,  # `$x$` is a value of a user's column, not mathematics
    "axes.edgecolor": "#b4bcc8",
    "axes.labelcolor": MUTED,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
}
History = Mapping[str, Sequence[tuple[int, float]]]


def to_svg(figure: Figure, title: str = "") -> str:
    """Return the `<svg>` element for use in a page. `title`: content for screen readers."""
    text = _saved(figure, format="svg", transparent=True, metadata={"Date": None, "Creator": None}).decode()
    text = text[text.index("<svg") :]
    label = escape(_printable(title), {'"': "&quot;"})
    return text.replace("<svg", f'<svg role="img" aria-label="{label}"', 1) if title else text


def to_png(figure: Figure, title: str = "") -> bytes:
    """Return the figure as a PNG file. `title` is drawn above it, and stays with the figure."""
    if title:
        figure.suptitle(title)
    return _saved(figure, format="png", dpi=160, facecolor="white")


def _saved(figure: Figure, **how: Any) -> bytes:
    buffer = io.BytesIO()
    for text in figure.findobj(Text):  # those made while it is drawn follow STYLE
        text.set_parse_math(False)
    with matplotlib.rc_context(STYLE):
        figure.savefig(buffer, **how)
    return buffer.getvalue()


def curves(history: History, ylabel: str) -> Figure:
    """Draw one line per name over steps, with dots where the points are few."""
    figure, axes = _new(ylabel=ylabel, xlabel="step")
    for color, (name, points) in zip(_cycle(len(history)), history.items(), strict=True):
        steps, values = _thin(*np.array(points, dtype=float).reshape(-1, 2).T)
        few = len(steps) <= 30
        axes.plot(steps, values, color=color, label=name, marker="o" if few else None, markersize=3.5, linewidth=1.6)
    if len(history) > 1:
        axes.legend(frameon=False)
    return figure


def roc(curves: ThresholdCurves) -> Figure:
    """Draw the ROC curve, with the diagonal of chance."""
    figure, axes = _new("false positive rate", "true positive rate")
    axes.plot([0, 1], [0, 1], color=GRID, linestyle="--", linewidth=1.2)
    axes.plot(*_thin(curves.false_positive_rate, curves.true_positive_rate), color=COLORS[0], linewidth=1.8)
    axes.text(0.97, 0.05, f"AUC {curves.auc:.4f}", ha="right", color=INK, transform=axes.transAxes)
    return _unit_square(figure, axes)


def precision_recall(curves: ThresholdCurves) -> Figure:
    """Draw precision over recall, with the precision of chance: the share of positive rows."""
    chance = curves.positive_share
    figure, axes = _new("recall", "precision")
    axes.axhline(chance, color=GRID, linestyle="--", linewidth=1.2)
    axes.plot(*_thin(curves.recall, curves.precision), color=COLORS[0], linewidth=1.8)
    text = f"average precision {curves.average_precision:.4f}\nchance {chance:.4f}"
    axes.text(0.97, 0.93, text, ha="right", va="top", color=INK, transform=axes.transAxes)
    return _unit_square(figure, axes)


def calibration_plot(bins: Sequence[Bin], xlabel: str, ylabel: str) -> Figure:
    """Draw observed over predicted share; the area of a dot grows with the slice's rows."""
    figure, axes = _new(xlabel, ylabel)
    predicted, observed = np.array([b.predicted for b in bins]), np.array([b.observed for b in bins])
    rows = np.array([b.rows for b in bins])
    top = min(1.0, 1.08 * max(predicted.max(), observed.max(), 0.05))
    axes.plot([0, top], [0, top], color=GRID, linestyle="--", linewidth=1.2)
    axes.plot(predicted, observed, color=COLORS[0], linewidth=1.2, alpha=0.6)
    axes.scatter(predicted, observed, s=18 + 30 * rows / rows.max(), color=COLORS[0], zorder=3)
    axes.set(xlim=(0, top), ylim=(0, top))
    return figure


def shares(groups: Sequence[Group], column: str) -> Figure:
    """Draw the observed share (bars) and the mean prediction (dots) per value; of many, the most frequent ones."""
    common = sorted(groups, key=lambda g: -g.rows)[:MOST_BARS]
    shown = [group for group in groups if group in common]
    figure, axes = _new(_printable(column), "positive share", width=9.4, height=2.9)
    places = np.arange(len(shown))
    axes.bar(places, [g.observed for g in shown], color="#bcd0f2", width=0.72, label="observed")
    axes.scatter(places, [g.predicted for g in shown], color=COLORS[1], s=20, zorder=3, label="predicted")
    names = [_short(group.value, MOST_TICK) for group in shown]
    axes.set_xticks(places, names, rotation=0 if len(shown) <= 26 else 90, fontsize=8)
    axes.set_xlim(-0.6, len(shown) - 0.4)
    axes.set_ylim(0, 1.18 * max([g.observed for g in shown] + [g.predicted for g in shown] + [0.01]))
    axes.legend(frameon=False, ncols=2, loc="upper right")
    return figure


def predicted_and_actual(labels: np.ndarray, predictions: np.ndarray, label: str) -> Figure:
    """Draw a dot per row at (actual, predicted), with the line where they are equal; of many rows every n-th.

    labels, predictions (N,).
    """
    figure, axes = _new(f"actual {_printable(label)}", "predicted")
    low, high = float(min(labels.min(), predictions.min())), float(max(labels.max(), predictions.max()))
    axes.plot([low, high], [low, high], color=GRID, linestyle="--", linewidth=1.2)
    some = every_nth(len(labels))
    axes.scatter(labels[some], predictions[some], s=7, color=COLORS[0], alpha=0.45, linewidths=0)
    return figure


def every_nth(rows: int) -> slice:
    """Return a slice of at most MOST_POINTS rows, evenly spaced."""
    return slice(None, None, max(1, -(-rows // MOST_POINTS)))


def residuals(counts: np.ndarray, edges: np.ndarray, unit: str) -> Figure:
    """Draw how many rows have which error. counts (bars,), edges (bars + 1,); unit: of the label."""
    figure, axes = _new(f"predicted - actual {_printable(unit)}", "rows")
    axes.bar(edges[:-1], counts, np.diff(edges), align="edge", color="#bcd0f2", edgecolor="white", linewidth=0.4)
    axes.axvline(0, color=MUTED, linestyle="--", linewidth=1.0)
    return figure


def confusion_matrix(counts: np.ndarray, names: Sequence[str]) -> Figure:
    """Draw the share of each class's rows by predicted class. counts (classes, classes), in the order of `names`."""
    few = len(names) <= FEW_CLASSES
    size = 4.6 if few else 9.4
    figure, axes = _new("predicted", "actual", width=size, height=size * 0.8)
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    axes.imshow(shares, cmap="Blues", vmin=0, vmax=1, interpolation="nearest")
    axes.grid(False)
    shown, places = [_short(name, MOST_TICK) for name in names], np.arange(len(names))
    axes.set_xticks(places, shown, rotation=90 if max(map(len, shown)) > 3 else 0, fontsize=8)
    axes.set_yticks(places, shown, fontsize=8)
    for (row, column), share in np.ndenumerate(shares) if few else ():
        color = "white" if share > 0.55 else INK
        axes.text(column, row, f"{share:.2f}", ha="center", va="center", color=color, fontsize=8)
    return figure


def class_bars(precision: np.ndarray, recall: np.ndarray, names: Sequence[str]) -> Figure:
    """Draw precision (bars) and recall (dots) of each class, (classes,); NaN: not defined."""
    figure, axes = _new("class", "share", width=9.4, height=2.9)
    places = np.arange(len(names))
    axes.bar(places, np.nan_to_num(precision), color="#bcd0f2", width=0.72, label="precision")
    axes.scatter(places, recall, color=COLORS[1], s=20, zorder=3, label="recall")
    axes.set_xticks(
        places, [_short(name, MOST_TICK) for name in names], rotation=0 if len(names) <= 16 else 90, fontsize=8
    )
    axes.set_xlim(-0.6, len(names) - 0.4)
    axes.set_ylim(0, 1.18)
    axes.legend(frameon=False, ncols=2, loc="upper right")
    return figure


def share_bars(shares: Mapping[str, Sequence[float]], names: Sequence[str]) -> Figure:
    """Draw a bar for each class in each split. shares: split -> (classes,)."""
    figure, axes = _new("", "share of rows", width=4.6 if len(names) <= 6 else 9.4, height=3.3)
    places, width = np.arange(len(names)), 0.8 / max(len(shares), 1)
    for n, (color, (split, values)) in enumerate(zip(_cycle(len(shares)), shares.items(), strict=True)):
        axes.bar(places - 0.4 + (n + 0.5) * width, values, width, color=color, label=_printable(split))
    shown = [_short(name, MOST_TICK) for name in names]
    axes.set_xticks(places, shown, rotation=0 if max(map(len, shown)) * len(shown) < 80 else 90, fontsize=8)
    axes.legend(frameon=False)
    return figure


def histograms(shares: Mapping[str, np.ndarray], edges: np.ndarray, label: str) -> Figure:
    """Draw the shares of rows between two edges, a line for each split. shares: split -> (bars,); edges (bars + 1,)."""
    figure, axes = _new(_printable(label), "share of rows")
    for color, (split, values) in zip(_cycle(len(shares)), shares.items(), strict=True):
        axes.stairs(values, edges, color=color, label=_printable(split), linewidth=1.6)
    axes.legend(frameon=False)
    return figure


def importance_bars(items: Sequence[Importance], loss: str) -> Figure:
    """Draw a bar for each column with its interval, the first on top. `loss`: its title."""
    figure, axes = _new(f"growth of the {loss}", "", width=4.6, height=0.9 + 0.24 * len(items))
    places, means = np.arange(len(items))[::-1], np.array([each.mean for each in items])
    spread = np.array([[each.mean - each.low, each.high - each.mean] for each in items]).T
    axes.barh(places, means, height=0.72, color="#bcd0f2", xerr=spread, ecolor=COLORS[1])
    axes.set_yticks(places, [_short(each.feature, MOST_FEATURE) for each in items], fontsize=8)
    return figure


def count_bars(counts: Mapping[int, int], xlabel: str) -> Figure:
    """Draw the share of each value, by how often it was counted."""
    figure, axes = _new(xlabel, "share")
    total = max(sum(counts.values()), 1)
    axes.bar(list(counts), [count / total for count in counts.values()], color="#bcd0f2", width=0.8)
    axes.set_xlim(min(counts) - 0.6, max(counts) + 0.6)
    return figure


def time_bar(seconds: Mapping[str, float]) -> Figure:
    """Draw one bar for the whole job, divided by stage."""
    figure, axes = _new("seconds", "", width=9.4, height=1.3)
    left = 0.0
    for color, (name, value) in zip(_cycle(len(seconds)), seconds.items(), strict=True):
        axes.barh(0, value, left=left, color=color, height=0.6, label=f"{name} {value:.1f} s")
        left += value
    axes.set_yticks([])
    axes.set_xlim(0, max(left, 1e-9))
    axes.grid(False)
    axes.spines["left"].set_visible(False)
    axes.legend(frameon=False, ncols=min(len(seconds), 5), loc="lower center", bbox_to_anchor=(0.5, 1.0))
    return figure


def stacked_bars(parts: Mapping[str, Sequence[float]], names: Sequence[str], mark: float | None) -> Figure:
    """Draw a bar of seconds for each name, the first on top, divided by part.

    Args:
        parts: part -> (names,).
        names: names of the bars.
        mark: measured value of the first bar, or None.
    """
    figure, axes = _new("seconds of a step", "", width=9.4, height=1.3 + 0.34 * len(names))
    places, left = np.arange(len(names))[::-1], np.zeros(len(names))
    for color, (part, values) in zip(_cycle(len(parts)), parts.items(), strict=True):
        axes.barh(places, values, left=left, color=color, height=0.62, label=_printable(part))
        left += np.array(values)
    if mark is not None:
        axes.plot([mark, mark], [places[0] - 0.42, places[0] + 0.42], color=INK, linewidth=2.2, label="measured")
    axes.set_yticks(places, [_short(name, MOST_LABEL) for name in names], fontsize=8)
    axes.legend(frameon=False, ncols=min(len(parts) + 1, 6), loc="lower center", bbox_to_anchor=(0.4, 1.0))
    return figure


def limited_bars(values: Sequence[float], names: Sequence[str], limit: float) -> Figure:
    """Draw a bar of GiB for each name, the first on top, and the limit of all of them where it is near."""
    figure, axes = _new("GiB", "", width=9.4, height=1.0 + 0.32 * len(names))
    places = np.arange(len(names))[::-1]
    axes.barh(places, values, color="#bcd0f2", height=0.62)
    axes.set_yticks(places, [_short(name, MOST_LABEL) for name in names], fontsize=8)
    right = 1.1 * max(values, default=1.0)
    axes.set_xlim(0, max(right, min(1.1 * limit, 4 * right)))
    if limit <= axes.get_xlim()[1]:
        axes.axvline(limit, color=COLORS[4], linestyle="--", linewidth=1.4)
        axes.text(limit, places[0] + 0.46, "limit ", ha="right", va="bottom", color=COLORS[4], fontsize=8)
    else:
        text = f"limit {limit:.3g} GiB, to the right"
        axes.text(0.99, 0.96, text, ha="right", va="top", color=COLORS[4], fontsize=8, transform=axes.transAxes)
    return figure


def time_and_memory(
    points: Sequence[tuple[float, float]], front: Sequence[tuple[float, float]], used: tuple[float, float]
) -> Figure:
    """Draw layouts by seconds and GiB, the front of those that are best in both, and the chosen one."""
    figure, axes = _new("seconds of a step", "GiB of the fullest rank", width=9.4, height=3.6)
    (seconds, sizes), (fastest, smallest) = np.array(points).T, np.array(front).T
    axes.scatter(seconds, sizes, s=14, color="#9db4d8", label="layouts")
    axes.plot(fastest, smallest, color=COLORS[0], linewidth=1.4, marker="o", markersize=4, label="Pareto front")
    axes.scatter([used[0]], [used[1]], s=90, marker="D", color=COLORS[1], zorder=3, label="chosen")
    for axis, scale, values in (
        (axes.xaxis, axes.set_xscale, [*seconds, used[0]]),
        (axes.yaxis, axes.set_yscale, [*sizes, used[1]]),
    ):
        if min(values) > 0 and max(values) > WIDE * min(values):
            scale("log")
            axis.set_major_formatter(lambda value, _: f"{value:.3g}")
            axis.set_minor_formatter(lambda value, _: f"{value:.3g}" if f"{value:e}"[0] in "25" else "")
    axes.legend(frameon=False)
    return figure


def _new(xlabel: str, ylabel: str, width: float = 4.6, height: float = 3.3) -> tuple[Figure, Axes]:
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(width, height), layout="constrained")
        axes = figure.add_subplot()
        axes.set(xlabel=xlabel, ylabel=ylabel)
        axes.grid(color=GRID, linewidth=0.8)
        axes.set_axisbelow(True)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    return figure, axes


def _printable(text: str) -> str:
    """Replace characters that no font or XML can hold."""
    return "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text)


def _short(name: str, most: int) -> str:
    """Return a printable name of at most so many characters: of a longer one both ends, which tell names apart."""
    tail = (most - 1) // 2
    return _printable(name if len(name) <= most else f"{name[: most - 1 - tail]}\N{HORIZONTAL ELLIPSIS}{name[-tail:]}")


def _unit_square(figure: Figure, axes: Axes) -> Figure:
    axes.set(xlim=(-0.01, 1.01), ylim=(-0.01, 1.02))
    return figure


def _thin(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    if len(x) <= MOST_POINTS:
        return x, y
    kept = np.unique(np.linspace(0, len(x) - 1, MOST_POINTS).astype(int))
    return x[kept], y[kept]


def _cycle(count: int) -> list[str]:
    return [COLORS[i % len(COLORS)] for i in range(count)]
