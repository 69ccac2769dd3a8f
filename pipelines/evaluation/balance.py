"""How train, valid and test differ: in what their labels are, and in how well the model does on them."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import pyarrow as pa

from sparkring.conf.errors import error_line
from sparkring.conf.manifest import Column
from sparkring.conf.tasks import LabelForm, TaskKind
from sparkring.pipelines.evaluation.split_rows import SplitRows
from sparkring.training.worker.result import CalibrationFit, LabelBalance, Scores, Trained

log = logging.getLogger(__name__)
MOST_CLASSES = 50  # stored by name; the rest together are OTHER
OTHER = "others"
# What is much: differences below these are usual between splits, or noise.
MUCH_SHARE, MUCH_MEAN, MUCH_LOSS = 0.05, 0.25, 0.2
SURE = 4.0  # standard errors
BARS = 24  # of a histogram of values
SHIFT = 0.1  # of log-odds: a tenth more or less


def label_balance(
    form: LabelForm, splits: Mapping[str, SplitRows], labels: Sequence[Column]
) -> dict[str, LabelBalance]:
    """Measure the label in each split, file by file; {} with a warning where it fails: the model is trained by now.

    Args:
        form: what the labels are.
        splits: rows by name of split.
        labels: its tensors: one, or those of several labels.
    """
    names = [column.name for column in labels]
    try:
        if form not in (LabelForm.FLAGS, LabelForm.NUMBER):
            counted = {split: class_rows(rows.doubles(names)) for split, rows in splits.items()}
            return class_balance({split: counts for split, counts in counted.items() if counts})
        found = {split: label_moments(rows.doubles(names)) for split, rows in splits.items()}
        if form is LabelForm.NUMBER:
            return value_balance(found, {split: partial(rows.doubles, names) for split, rows in splits.items()})
        return {
            split: LabelBalance(rows=each.rows, shares={str(n): mean for n, mean in enumerate(each.means)})
            for split, each in found.items()
            if each.rows
        }
    except Exception as error:
        log.warning("labels of %s are not compared: %s", sorted(splits), error_line(error))
        return {}


def is_constant(balance: LabelBalance) -> bool:
    """Return whether each row has the same label, or the same of several."""
    if balance.mean is not None:
        return balance.std == 0
    return all(share in (0, 1) for share in balance.shares.values())


def constant_guess(kind: TaskKind, train: LabelBalance, prediction: np.ndarray) -> np.ndarray:
    """Return the prediction that training labels alone give every row, in the form of `prediction`: (), (C,) or (L,).

    Classes that are stored together as OTHER get equal parts of their share.
    """
    if kind.form is LabelForm.NUMBER:
        return np.array(train.mean)
    if kind.form is LabelForm.FLAGS:
        return np.array([train.shares[str(number)] for number in range(len(prediction))])
    if kind.form is LabelForm.FLAG:
        return np.array(train.shares.get("1", 0.0))
    others = max(len(prediction) - len(train.shares.keys() - {OTHER}), 1)
    rest = train.shares.get(OTHER, 0.0) / others
    return np.array([train.shares.get(str(number), rest) for number in range(len(prediction))])


def class_rows(batches: Iterable[pa.RecordBatch]) -> dict[str, int]:
    """Count the rows of each class, the first column's values."""
    counted = Counter[str]()
    for batch in batches:
        classes, rows = np.unique(batch.column(0).to_numpy(), return_counts=True)
        counted.update({str(int(each)): int(n) for each, n in zip(classes, rows, strict=True)})
    return dict(counted)


@dataclass(frozen=True)
class LabelMoments:
    """Of some rows; a number for each of their columns, none without rows."""

    rows: int
    means: list[float]
    deviations: list[float]
    lows: list[float]
    highs: list[float]


def label_moments(batches: Iterable[pa.RecordBatch]) -> LabelMoments:
    """Count the rows, and find the moments of every column, from those of each batch (Chan 1979)."""
    rows, means, squares, lows, highs = 0, np.zeros(0), np.zeros(0), np.zeros(0), np.zeros(0)
    for batch in batches:
        if not (n := batch.num_rows):
            continue
        values = np.column_stack([column.to_numpy() for column in batch.columns])
        own, total = values.mean(axis=0), rows + n
        apart = own - (means if rows else own)
        squares = (squares if rows else 0.0) + np.square(values - own).sum(axis=0) + np.square(apart) * rows * n / total
        lows = np.minimum(lows if rows else np.inf, values.min(axis=0))
        highs = np.maximum(highs if rows else -np.inf, values.max(axis=0))
        means, rows = own - apart * rows / total, total
    deviations = np.sqrt(squares / max(rows, 1))
    return LabelMoments(rows, means.tolist(), deviations.tolist(), lows.tolist(), highs.tolist())


def value_balance(
    moments: Mapping[str, LabelMoments],
    read: Mapping[str, Callable[[], Iterable[pa.RecordBatch]]],
) -> dict[str, LabelBalance]:
    """Compute mean, deviation and histogram of a value in each split, with the first split's bars.

    Args:
        moments: moments of the value, by split.
        read: reads the rows of a split again.
    """
    known = {split: each for split, each in moments.items() if each.rows}
    edges = next(map(bar_edges, known.values()), np.zeros(0))
    return {
        split: LabelBalance(
            rows=each.rows,
            mean=each.means[0],
            std=each.deviations[0],
            counts=bar_counts(read[split](), edges).tolist(),
            edges=edges.tolist(),
        )
        for split, each in known.items()
    }


def bar_edges(of: LabelMoments) -> np.ndarray:
    """Return the edges of a value's histogram bars, (BARS + 1,).

    They span three deviations to both sides, as far as there are values.
    """
    (mean,), (deviation,), (low,), (high,) = of.means, of.deviations, of.lows, of.highs
    wide = 3 * deviation
    ends = (max(low, mean - wide), min(high, mean + wide)) if low < high else (mean - 0.5, mean + 0.5)
    edges: np.ndarray = np.linspace(*ends, BARS + 1)
    return edges


def bar_counts(batches: Iterable[pa.RecordBatch], edges: np.ndarray) -> np.ndarray:
    """Count rows in each bar, (BARS,) int64; the outermost include what is beyond them."""
    counts = np.zeros(BARS, np.int64)
    for batch in batches:
        counts += np.histogram(np.clip(batch.column(0).to_numpy(), edges[0], edges[-1]), edges)[0]
    return counts


def class_balance(counted: Mapping[str, Mapping[str, int]]) -> dict[str, LabelBalance]:
    """Compute the share of each class in each split; at most the MOST_CLASSES largest. `counted`: by split."""
    classes = {name for counts in counted.values() for name in counts}
    common = sorted(classes, key=lambda name: (-sum(counts.get(name, 0) for counts in counted.values()), name))
    balances = {}
    for split, counts in counted.items():
        rows = sum(counts.values())
        shares = {name: counts.get(name, 0) / rows for name in common[:MOST_CLASSES]}
        rest = {OTHER: 1 - math.fsum(shares.values())} if len(common) > MOST_CLASSES else {}
        balances[split] = LabelBalance(rows=rows, shares=shares | rest)
    return balances


def differences(
    balances: Mapping[str, LabelBalance], losses: Mapping[str, float], label: str, names: Mapping[str, str]
) -> str:
    """Describe in one sentence where the splits differ much; empty where they do not.

    Args:
        balances: label balance by split, train first.
        losses: loss by split, as far as known.
        label: name of the label's column.
        names: names of classes, by number.
    """
    found = [part for part in (_label_part(balances, label, names), _loss_part(losses)) if part]
    return f"The splits differ: {'; '.join(found)}." if found else ""


def _label_part(balances: Mapping[str, LabelBalance], label: str, names: Mapping[str, str]) -> str:
    train = balances.get("train")
    others = {name: each for name, each in balances.items() if name != "train"}
    if train is None or not others:
        return ""
    if train.mean is not None and train.std is not None:
        means = {name: each.mean for name, each in balances.items() if each.mean is not None}
        if not any(_other_mean(train, each) for each in others.values()):
            return ""
        shown = ", ".join(f"{mean:.4g} in {name}" for name, mean in means.items())
        return f"the mean of {label} is {shown}, with a standard deviation of {train.std:.4g} in train"
    gaps = {name: max(_gap(train, each, name) for each in others.values()) for name in train.shares}
    if not any(gaps.values()):
        return ""
    most = max(gaps, key=lambda name: (round(gaps[name], 9), name))  # of two classes, which tie, the positive one
    shown = ", ".join(f"{each.shares.get(most, 0.0):.1%} of {name}" for name, each in balances.items())
    return f"{label} = {names.get(most, most)} is {shown}"


def _gap(train: LabelBalance, other: LabelBalance, name: str) -> float:
    """Return how far a class's shares are apart; 0 if within MUCH_SHARE, or what chance would give."""
    ours, theirs = train.shares[name], other.shares.get(name, 0.0)
    both = (ours * train.rows + theirs * other.rows) / (train.rows + other.rows)
    error = math.sqrt(both * (1 - both) * (1 / train.rows + 1 / other.rows))
    gap = abs(ours - theirs)
    return gap if gap > max(MUCH_SHARE, SURE * error) else 0.0


def shifted_class(train: LabelBalance, other: LabelBalance) -> str:
    """Return the class whose odds differ most between two splits, if certainly by more than SHIFT, or ""."""
    shifts = {name: _odds_shift(train, other, name) for name in {**train.shares, **other.shares}}
    most = max(shifts, key=lambda name: (shifts[name], name), default="")
    return most if shifts.get(most, 0.0) > SHIFT else ""


def _odds_shift(train: LabelBalance, other: LabelBalance, name: str) -> float:
    """Return the difference of a class's log-odds in two splits; 0 if chance would give it."""
    ours, theirs = train.shares.get(name, 0.0), other.shares.get(name, 0.0)
    both = (ours * train.rows + theirs * other.rows) / (train.rows + other.rows)
    error = math.sqrt(both * (1 - both) * (1 / train.rows + 1 / other.rows))
    if abs(ours - theirs) <= SURE * error:
        return 0.0
    odds = [(share * of.rows + 0.5) / ((1 - share) * of.rows + 0.5) for share, of in ((ours, train), (theirs, other))]
    return abs(math.log(odds[0] / odds[1]))


def _other_mean(train: LabelBalance, other: LabelBalance) -> bool:
    if train.mean is None or train.std is None or other.mean is None:
        return False
    error = train.std * math.sqrt(1 / train.rows + 1 / other.rows)
    return abs(train.mean - other.mean) > max(MUCH_MEAN * train.std, SURE * error)


def _loss_part(losses: Mapping[str, float]) -> str:
    """Describe losses in order, if a later one is much higher than an earlier one."""
    known = {name: loss for name, loss in losses.items() if math.isfinite(loss)}
    values = list(known.values())
    much = [b for i, a in enumerate(values) for b in values[i + 1 :] if b - a > MUCH_LOSS * abs(a)]
    return f"the loss is {', '.join(f'{loss:.4g} in {name}' for name, loss in known.items())}" if much else ""


def split_losses(trained: Trained, scores: Scores, fit: CalibrationFit | None = None) -> Scores:
    """Return the model's known losses in train (last logged window up to its step), valid and test.

    `scores`: of the test rows; `fit`: with a calibration that is kept, the loss in train is not known. Nor is it for a
    blend, whose curves are those of its network.
    """
    if fit is not None and fit.kept is not None:
        return {"valid": fit.loss_after} | ({"test": scores["loss"]} if "loss" in scores else {})
    last = trained.train.exported_step
    windows = [loss for step, loss in trained.history.get("train/loss", []) if last is None or step <= last]
    losses = {"train": windows[-1]} if windows and not trained.is_blend else {}
    valid = trained.model_valid()
    losses |= {"valid": valid["loss"]} if "loss" in valid else {}
    return losses | ({"test": scores["loss"]} if "loss" in scores else {})
