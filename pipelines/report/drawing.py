"""Which figures a result has, each with the numbers that it is drawn from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from matplotlib.figure import Figure

from sparkring.conf.plain_text import count_of
from sparkring.conf.tasks import LabelForm
from sparkring.pipelines.evaluation.binary import Group, flagged_at, share_by, threshold_curves, top_threshold
from sparkring.pipelines.evaluation.evaluate import HeldOut
from sparkring.pipelines.report import figures
from sparkring.pipelines.report.inputs import MOST_WORST, ReportInputs
from sparkring.training.metrics import Bin, ClassCounts, calibration, class_counts, top_calibration
from sparkring.training.worker.result import ServerTotals, plain_name

IMPORTANCE = "importance"  # the figure of what the model depends on
MOST_COLUMNS = 15  # whose importance is drawn
MOST_ROWS = 25  # of a table under a figure
MOST_CLASSES = 20  # of the confusion matrix; the rest together are one more
BARS = 40  # of a histogram
QUANTILES = (0.005, 0.05, 0.25, 0.5, 0.75, 0.95, 0.995)  # of the residuals; the outer two bound their figure
SLICES = 10  # of rows by their predicted value
THRESHOLDS = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
TOP_ROWS, TOP_SHARES = (10, 100, 1000), (0.01, 0.05, 0.1, 0.2)  # of the rows with the highest probabilities
Cell = str | int | float
T = TypeVar("T")


@dataclass(frozen=True)
class FigureNumbers:
    """A table under a figure."""

    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]


@dataclass(frozen=True)
class Drawn:
    """A figure. MLflow gets it as PNG under `name`, the page as SVG with its numbers."""

    name: str  # a file's
    caption: str
    figure: Figure
    numbers: FigureNumbers
    wide: bool = False


@dataclass(frozen=True)
class PageTable:
    """A table of the page without a figure. MLflow gets it as JSON under `name`, a record for each row."""

    name: str  # a file's
    caption: str
    numbers: FigureNumbers

    @property
    def records(self) -> list[dict[str, Cell]]:
        """The rows, by column."""
        return [dict(zip(self.numbers.columns, row, strict=True)) for row in self.numbers.rows]


def tables(inputs: ReportInputs) -> list[PageTable]:
    """Make every table of the page from the held-out rows."""
    held = inputs.held_out
    if held is None or inputs.config.model.kind.form is not LabelForm.FLAG:
        return []
    if not (rows := _flagged(held)):
        return []
    columns = ["flagged", "from probability", "share of rows", "precision", "recall", "lift"]
    by_weight = "; shares are of the rows' weights" if inputs.weight else ""
    caption = f"Rows that are flagged as {inputs.positive}, by threshold and by number{by_weight}"
    return [PageTable("thresholds", caption, FigureNumbers(columns, rows))]


def _flagged(held: HeldOut) -> list[tuple[str, float, float, float, float, float]]:
    """Return what is flagged from some probabilities on, and among the k highest rows."""
    rows = len(held.scores)
    named = {f"from {threshold:g}": threshold for threshold in THRESHOLDS}
    counts = {f"top {k:,}": k for k in TOP_ROWS} | {f"top {share:.0%}": round(share * rows) for share in TOP_SHARES}
    named |= {name: top_threshold(held.scores, k) for name, k in counts.items() if 0 < k <= rows}
    found = []
    for name, threshold in named.items():
        for each in flagged_at(held.labels, held.scores, [threshold], held.weights):
            found.append((name, each.threshold, each.share, each.precision, each.recall, each.lift))
    return found


def wrong_groups(inputs: ReportInputs) -> FigureNumbers | None:
    """Return the `report.share_by` values with the largest gap of predicted and observed share, or None."""
    held = inputs.held_out
    if held is None or inputs.config.model.kind.form is not LabelForm.FLAG:
        return None
    least = inputs.config.report.min_group_rows
    found = [
        (f"{name} = {group.value}", group.rows, group.predicted, group.observed)
        for name, values in held.groups.items()
        for group in share_by(values, held.labels, held.scores)
        if group.rows >= least
    ]
    farthest = sorted(found, key=lambda row: -abs(row[2] - row[3]))[:MOST_WORST]
    return FigureNumbers(["rows", "how many", "predicted share", "observed share"], farthest) if farthest else None


def draw(inputs: ReportInputs) -> list[Drawn]:
    """Draw every figure of the page, in order."""
    drawn = []
    if inputs.losses:
        drawn.append(_losses(inputs))
    drawn += _label(inputs)
    if (servers := inputs.result.train.servers) is not None and servers.gaps and servers.lags:
        drawn += _staleness(servers)
    if inputs.result.importance:
        drawn.append(_importance(inputs))
    held = inputs.held_out
    if held is None:
        return drawn
    return drawn + DRAW[inputs.config.model.kind.form](inputs, held)


def _importance(inputs: ReportInputs) -> Drawn:
    result, loss = inputs.result, inputs.config.model.kind.metric("loss").title
    some = result.importance[:MOST_COLUMNS]
    of = "" if len(some) == len(result.importance) else f", the first {len(some)} of {len(result.importance)}"
    rows = [(each.feature, each.mean, each.low, each.high) for each in some]
    return Drawn(
        IMPORTANCE,
        f"Growth of the {loss} of {count_of(result.importance_rows, 'test row', ',')} where a column has other rows' "
        f"values{of}",
        figures.importance_bars(some, loss),
        FigureNumbers(["column", "mean", "low", "high"], rows),
    )


def _staleness(servers: ServerTotals) -> list[Drawn]:
    """Draw how far ranks were ahead of the slowest, and how old their gradients were."""
    ahead, age = "steps ahead of the slowest rank", "updates between pull and push"
    parts = (
        ("clock_gap", servers.gaps, ahead, "Clock gap: how far a rank was ahead when it began a step"),
        ("version_lag", servers.lags, age, "Version lag: how often a server changed while a gradient was computed"),
    )
    return [
        Drawn(name, caption, figures.count_bars(counts, xlabel), FigureNumbers([xlabel, "times"], _most(counts)))
        for name, counts, xlabel, caption in parts
    ]


def _most(counts: dict[int, int]) -> list[tuple[int, int]]:
    """Return the most frequent values, in order of values."""
    return sorted(sorted(counts.items(), key=lambda item: -item[1])[:MOST_ROWS])


def _losses(inputs: ReportInputs) -> Drawn:
    losses, resumed_from = inputs.losses, inputs.result.resumed_from
    by_step: dict[int, dict[str, float]] = {}
    for name, points in losses.items():
        for step, value in points:
            by_step.setdefault(step, {})[name] = value
    sparse = {step for step, _ in thinned(min(losses.values(), key=len), MOST_ROWS)}  # evaluations, between log lines
    steps = sorted({*thinned(sorted(by_step), MOST_ROWS), *sparse})
    rows = [[step, *(by_step[step].get(name, "") for name in losses)] for step in steps]
    caption = "Loss over steps"
    if resumed_from is not None and min(by_step) > resumed_from:
        elsewhere = "; MLflow shows them all" if inputs.config.tracking.enabled else ""
        caption += f", from step {resumed_from} on: the steps before were an earlier command's{elsewhere}"
    elif resumed_from is not None:
        caption += f"; the last command went on at step {resumed_from}"
    return Drawn("loss", caption, figures.curves(losses, "loss"), FigureNumbers(["step", *losses], rows))


def _label(inputs: ReportInputs) -> list[Drawn]:
    """Draw the label in the rows of each split: a bar for each class, or a histogram."""
    balances = inputs.result.labels
    caption = f"{inputs.label} in each split"
    if all(each.edges for each in balances.values()) and balances:
        edges = next(iter(balances.values())).edges
        shares = {split: np.array(each.counts) / max(each.rows, 1) for split, each in balances.items()}
        rows: list[tuple[Cell, ...]] = [
            (edges[bar], *(float(each[bar]) for each in shares.values())) for bar in range(len(edges) - 1)
        ]
        figure = figures.histograms(shares, np.array(edges), inputs.label)
        return [Drawn("label", caption, figure, FigureNumbers(["from", *balances], rows))]
    every = list(dict.fromkeys(name for each in balances.values() for name in each.shares))
    if not every:
        return []
    names = every[:MOST_CLASSES]
    caption += _of_more(len(names), len(every))
    known = inputs.class_names(max((int(name) for name in names if name.isdecimal()), default=-1) + 1)
    titles = [known[int(name)] if name.isdecimal() and int(name) < len(known) else name for name in names]
    by_split = {split: [each.shares.get(name, 0.0) for name in names] for split, each in balances.items()}
    figure = figures.share_bars(by_split, titles)
    rows_of: list[tuple[Cell, ...]] = [
        (title, *(each[n] for each in by_split.values())) for n, title in enumerate(titles)
    ]
    return [Drawn("label", caption, figure, FigureNumbers(["class", *by_split], rows_of), wide=len(names) > 6)]


def _binary(inputs: ReportInputs, held: HeldOut) -> list[Drawn]:
    drawn = []
    curves = threshold_curves(held.labels, held.scores, held.weights)
    if curves is not None:
        roc = zip(curves.false_positive_rate, curves.true_positive_rate, strict=True)
        columns = ["false positive rate", "true positive rate"]
        drawn.append(Drawn("roc", "ROC over all held-out rows", figures.roc(curves), _numbers(columns, roc)))
        shown = _numbers(["recall", "precision"], zip(curves.recall, curves.precision, strict=True))
        drawn.append(Drawn("precision_recall", "Precision and recall", figures.precision_recall(curves), shown))
    bins = calibration(held.labels, held.scores, weights=held.weights)
    drawn.append(_calibration(bins, "predicted share", "observed share"))
    for name, values in held.groups.items():
        groups = share_by(values, held.labels, held.scores)
        caption = f"Share of {inputs.positive} by {name}"
        figure = figures.shares(groups, name)
        drawn.append(Drawn(f"share_by_{plain_name(name)}", caption, figure, _groups(name, groups), wide=True))
    return drawn


def _groups(column: str, groups: Sequence[Group]) -> FigureNumbers:
    rows = [(group.value, group.rows, group.observed, group.predicted) for group in groups]
    return _numbers([column, "rows", "observed", "predicted"], rows, most=figures.MOST_BARS)


def _calibration(bins: Sequence[Bin], predicted: str, observed: str) -> Drawn:
    rows = [(each.rows, each.predicted, each.observed) for each in bins]
    figure = figures.calibration_plot(bins, predicted, observed)
    return Drawn(
        "calibration", "Calibration, slices of equal counts", figure, _numbers(["rows", predicted, observed], rows)
    )


def _multiclass(inputs: ReportInputs, held: HeldOut) -> list[Drawn]:
    labels, predicted, classes = held.labels.astype(np.int64), held.scores.argmax(axis=1), held.scores.shape[1]
    names, counts = inputs.class_names(classes), class_counts(labels, predicted, classes)
    some = most_frequent(counts.rows + counts.predicted, MOST_CLASSES)
    matrix, shown = confusion_of(labels, predicted, some, classes), [names[one] for one in some]
    shown += ["others"] if len(matrix) > len(shown) else []
    bins = top_calibration(labels, held.scores, held.weights)
    by_row = [(name, *row.tolist()) for name, row in zip(shown, matrix, strict=True)]
    return [
        Drawn(
            "confusion",
            "Confusion: shares of each class's rows by predicted class; its table counts rows",
            figures.confusion_matrix(matrix, shown),
            FigureNumbers(["actual \\ predicted", *shown], by_row),
            wide=len(shown) > figures.FEW_CLASSES,
        ),
        _calibration(bins, "probability of the predicted class", "share that is right"),
        _by_class("class", "classes", names, counts, some),
    ]


def _multilabel(inputs: ReportInputs, held: HeldOut) -> list[Drawn]:
    """Draw calibration of all labels together, and precision and recall of the most frequent labels."""
    labels, predicted = held.labels > 0.5, held.scores > 0.5
    counts = ClassCounts(*(each.sum(axis=0) for each in (labels & predicted, labels, predicted)))
    names, some = inputs.class_names(labels.shape[1]), most_frequent(counts.rows, MOST_CLASSES)
    every = None if held.weights is None else np.repeat(held.weights, labels.shape[1])
    return [
        _calibration(calibration(held.labels.ravel(), held.scores.ravel(), weights=every), "probability", "share"),
        _by_class("label", "labels", names, counts, some),
    ]


def _by_class(what: str, name: str, names: Sequence[str], counts: ClassCounts, some: np.ndarray) -> Drawn:
    """Draw precision and recall of some classes or labels.

    Args:
        what: a class or a label.
        name: name of the file.
        names: names of all classes.
        counts: counts of all classes.
        some: numbers of the classes to draw.
    """
    of_each = [(names[one], int(counts.rows[one]), int(counts.predicted[one]), counts.precision[one],
                counts.recall[one], counts.f1[one]) for one in some]  # fmt: skip
    return Drawn(
        name,
        f"Precision and recall by {what}{_of_more(len(some), len(names))}",
        figures.class_bars(counts.precision[some], counts.recall[some], [names[one] for one in some]),
        FigureNumbers([what, "rows", "predicted", "precision", "recall", "F1"], of_each),
        wide=True,
    )


def _of_more(shown: int, number: int) -> str:
    """Return the caption's addition if not all classes are shown."""
    return f", the {shown} with most rows" if shown < number else ""


def most_frequent(rows: np.ndarray, most: int) -> np.ndarray:
    """Return the most frequent classes, by number. rows (classes,)."""
    return np.sort(np.argsort(-rows, kind="stable")[:most])


def confusion_of(labels: np.ndarray, predicted: np.ndarray, some: np.ndarray, classes: int) -> np.ndarray:
    """Count rows by class and predicted class, for `some` classes and the others as the last.

    labels, predicted (N,) int64; some (chosen,) -> (chosen, chosen) or (chosen + 1, chosen + 1) int64.
    """
    place = np.full(classes, len(some))
    place[some] = np.arange(len(some))
    size = len(some) + (len(some) < classes)
    return np.bincount(place[labels] * size + place[predicted], minlength=size * size).reshape(size, size)


def _regression(inputs: ReportInputs, held: HeldOut) -> list[Drawn]:
    labels, predictions, label = held.labels, held.scores, inputs.label
    some = len(labels[figures.every_nth(len(labels))])
    of_rows = "" if some == len(labels) else f", {some:,} of {count_of(len(labels), 'row', ',')}"
    errors = predictions - labels
    quantiles = np.quantile(errors, QUANTILES)
    low, high = quantiles[0], quantiles[-1]
    counts, edges = np.histogram(errors, BARS, (low, high) if low < high else (low - 0.5, high + 0.5))
    shares = [f"{share:.1%}" for share in QUANTILES]
    columns = ["rows", "predicted, mean", "actual, mean", "absolute error, mean"]
    return [
        Drawn(
            "predicted_and_actual",
            f"Predicted against actual {label}{of_rows}",
            figures.predicted_and_actual(labels, predictions, label),
            FigureNumbers(columns, by_prediction(labels, predictions)),
        ),
        Drawn(
            "residuals",
            f"Residuals, the middle 99 % of {count_of(len(labels), 'row', ',')}",
            figures.residuals(counts, edges, label),
            FigureNumbers(["quantile", "predicted - actual"], [*zip(shares, map(float, quantiles), strict=True)]),
        ),
    ]


DRAW = {
    LabelForm.FLAG: _binary,
    LabelForm.CLASS: _multiclass,
    LabelForm.FLAGS: _multilabel,
    LabelForm.NUMBER: _regression,
}


def by_prediction(labels: np.ndarray, predictions: np.ndarray) -> list[tuple[int, float, float, float]]:
    """Summarize slices of equal counts by prediction: (rows, mean prediction, mean label, mean error)."""
    order = np.argsort(predictions, kind="stable")
    return [
        (len(part), float(predictions[part].mean()), float(labels[part].mean()),
         float(np.abs(predictions[part] - labels[part]).mean()))
        for part in np.array_split(order, min(SLICES, len(order)))
    ]  # fmt: skip


def thinned(items: Sequence[T], most: int) -> list[T]:
    """Thin items to `most`, evenly, keeping the first and the last."""
    kept = np.unique(np.linspace(0, len(items) - 1, min(most, len(items))).astype(int))
    return [items[at] for at in kept]


def _numbers(columns: Sequence[str], rows: Iterable[Sequence[Cell]], most: int = MOST_ROWS) -> FigureNumbers:
    return FigureNumbers(columns, thinned(list(rows), most))
