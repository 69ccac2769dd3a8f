"""Find columns that say what the label is, as one that is written with it does: copied, binned, rounded, nearly always.

A column is measured by what it alone leaves open of the label: of the rows that the most frequent class gives wrong,
those that the column gives wrong too; of a number, the variance of its ranks. Features of the world leave something
open, and the next best one not much more; a leak leaves nearly nothing open, or far less than all others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from sparkring.pipelines.init.soundness.groups import Array, Values, codes_of

FEWEST_OF_CLASS = 10  # rows of each class: fewer may be apart by chance
ROWS_PER_VALUE = 20  # a value in fewer rows, on average, may go with one class by chance
MOST_ROWS = 20_000
SURE, LIKELY = 0.006, 0.025  # left open of a label: of a leak, and of one if all other columns leave far more open
FAR_MORE = 5.0  # times
OUTRIGHT_FLAG, MOST_OPEN_FLAG = 0.995, 0.15  # of rows that a flag of a rare label gives, and what it leaves open of it
MOST_BINS = 50  # of a column that says in which range a number is
NEIGHBORS = 3  # on either side
EXACT = 1e-4  # of the variance, left open by a sum or a product of columns
MOST_PAIRED, MOST_PAIR_ROWS = 10, 4000  # columns, rows: of a class two together are looked at
MOST_SUMMED, MOST_TERMS = 60, 3  # columns of a number
SHIFTED = 0.98  # of the rows have the label of a neighbor


@dataclass(frozen=True)
class Leak:
    """Columns that give the label, and how, as words after `it` or `they`."""

    columns: tuple[str, ...]
    how: str


def find_leaks(columns: Mapping[str, Values], labels: Array, is_number: bool, in_order: bool) -> Iterator[Leak]:
    """Yield the columns that give the label away alone; else two or three that do together.

    Args:
        columns: columns of N rows by name.
        labels: (N,) float64: values, or numbers of classes.
        is_number: whether the labels are values.
        in_order: whether rows are in the order in which they were written.
    """
    kept = np.flatnonzero(np.isfinite(labels))[:MOST_ROWS]
    y, some = labels[kept], {name: of.take(kept) for name, of in columns.items()}
    if len(y) < FEWEST_OF_CLASS or y.min() == y.max():
        return
    if not is_number and np.bincount(codes_of(y)).min() < FEWEST_OF_CLASS:
        return
    left = {name: left_open(of, y, is_number) for name, of in some.items()}
    found = 0
    for name in sorted(left, key=lambda name: left[name]):
        rest = min((open_ for other, open_ in left.items() if other != name and open_ > LIKELY), default=1.0)
        if how := _how_one(some[name], y, is_number, left[name], rest) or (in_order and _how_shifted(some[name], y)):
            found += 1
            yield Leak((name,), how)
    if not found:
        yield from _sums(some, y) if is_number else _pairs(some, y, left)


def _how_one(of: Values, y: Array, is_number: bool, open_: float, rest: float) -> str:
    """Describe how a column gives the label; "" if it does not.

    Args:
        of: values of the column.
        y: labels of the rows.
        is_number: whether the labels are values.
        open_: uncertainty left by the column.
        rest: uncertainty left by the best other column.
    """
    if open_ <= SURE or (open_ <= LIKELY and rest >= FAR_MORE * open_):
        return how_much(open_, y, is_number)
    if is_number:
        return "says in which range {label} is" if _says_range(of, y) else ""
    wrong = open_ * base_error(y)
    is_flag = of.codes.max() <= np.unique(y).size  # null may be one more
    if is_flag and 1 - wrong >= OUTRIGHT_FLAG and open_ <= MOST_OPEN_FLAG and rest >= FAR_MORE * open_:
        return how_much(open_, y, is_number)
    return ""


def how_much(open_: float, y: Array, is_number: bool) -> str:
    """Describe in words the uncertainty that is left."""
    if open_ < 1e-7:
        return "says what {label} is in all rows that were looked at"
    if is_number:
        return f"alone tells {1 - open_:.1%} of the order of {{label}}"
    return f"alone gives {{label}} in {1 - open_ * base_error(y):.1%} of the rows"


def base_error(y: Array) -> float:
    """Return the share of rows that are not of the most frequent class."""
    return 1 - float(np.bincount(codes_of(y)).max()) / len(y)


def left_open(of: Values, y: Array, is_number: bool) -> float:
    """Return the uncertainty about the label that a column alone leaves: 0 nothing, 1 all."""
    return left_of_ranks(of, y) if is_number else left_of_classes(of, y)


def left_of_classes(of: Values, y: Array) -> float:
    """Return the rows predicted wrong by the column, relative to the most frequent class."""
    classes, wrong = codes_of(y), []
    if len(y) >= ROWS_PER_VALUE * (of.codes.max() + 1):
        wrong.append(_wrong_by_value(of.codes, classes))
    if of.numbers is not None and np.isfinite(of.numbers).any():
        wrong.append(_wrong_by_tree(of.numbers, classes))
    return min([1.0, *(each / base_error(y) for each in wrong)])


def _wrong_by_value(codes: Array, classes: Array) -> float:
    counts = np.zeros((codes.max() + 1, classes.max() + 1))
    np.add.at(counts, (codes, classes), 1)
    return 1 - float(counts.max(axis=1).sum()) / len(codes)


def _wrong_by_tree(numbers: Array, classes: Array) -> float:
    """Return the share of rows that a tree of few leaves predicts wrong, by thresholds of one number."""
    from sklearn.tree import DecisionTreeClassifier

    tree = DecisionTreeClassifier(max_leaf_nodes=2 * (classes.max() + 1), min_samples_leaf=FEWEST_OF_CLASS // 2)
    cells = np.nan_to_num(numbers, nan=np.nan, posinf=3e38, neginf=-3e38)[:, None]
    # trees see 32 bits, in which large numbers are rounded: their order is all that counts
    ranks = np.where(np.isnan(cells), np.nan, np.unique(cells, return_inverse=True)[1].reshape(-1, 1))
    return 1 - float(np.mean(tree.fit(ranks, classes).predict(ranks) == classes))


def left_of_ranks(of: Values, y: Array) -> float:
    """Return the variance of the label's ranks the column leaves, by neighboring rows in its order."""
    ranks = _middle_ranks(y)
    spread, found = float(ranks.var()), []
    if len(y) >= ROWS_PER_VALUE * (of.codes.max() + 1):
        counts = np.bincount(of.codes)
        sums = np.bincount(of.codes, ranks)
        others = np.where(counts[of.codes] > 1, (sums[of.codes] - ranks) / np.maximum(counts[of.codes] - 1, 1), 0.5)
        found.append(float(np.mean(np.square(ranks - others))))
    if of.numbers is not None and np.isfinite(of.numbers).sum() >= max(FEWEST_OF_CLASS, len(y) / 2):
        known = ~np.isnan(of.numbers)
        found.append(_left_by_neighbors(of.numbers[known], ranks[known], y[known]))
    return min(1.0, *(each / spread for each in found)) if found else 1.0


def _middle_ranks(y: Array) -> Array:
    """Return ranks between 0 and 1; equal values share their middle rank."""
    _, of, counts = np.unique(y, return_inverse=True, return_counts=True)
    found: Array = ((np.cumsum(counts) - counts / 2) / len(y))[of]
    return found


def _left_by_neighbors(numbers: Array, ranks: Array, y: Array) -> float:
    """Return the mean square of ranks less their NEIGHBORS' mean on either side, ties included."""
    if _is_affine(numbers, y):
        return 0.0
    values, of, counts = np.unique(numbers, return_inverse=True, return_counts=True)
    sums = np.bincount(of, ranks)
    total, rows = np.append(0, np.cumsum(sums)), np.append(0, np.cumsum(counts))
    low = np.searchsorted(rows, rows[:-1] - NEIGHBORS, side="right") - 1
    high = np.searchsorted(rows, rows[1:] + NEIGHBORS, side="left")
    low, high = np.maximum(low, 0), np.minimum(high, len(values))
    around, weight = (total[high] - total[low])[of] - ranks, (rows[high] - rows[low])[of] - 1
    return float(np.mean(np.square(ranks - around / np.maximum(weight, 1))))


def _is_affine(numbers: Array, y: Array) -> bool:
    """Return whether numbers are the label times one number plus another."""
    both = np.isfinite(numbers)
    if both.sum() < FEWEST_OF_CLASS or not numbers[both].std() or not y[both].std():
        return False
    return bool(abs(np.corrcoef(numbers[both], y[both])[0, 1]) > 1 - 1e-9)


def _says_range(of: Values, y: Array) -> bool:
    """Return whether each of a few values stands for a separate range of the label."""
    bins = int(of.codes.max()) + 1
    if not 2 <= bins <= MOST_BINS or len(y) < ROWS_PER_VALUE * bins or base_error(of.codes) * len(y) < FEWEST_OF_CLASS:
        return False
    order = np.argsort(y, kind="stable")
    runs = 1 + int(np.count_nonzero(np.diff(of.codes[order])))
    if runs == bins:
        return True
    wrong = _wrong_by_tree(y, of.codes) / base_error(of.codes)
    return wrong <= SURE


def _how_shifted(of: Values, y: Array) -> str:
    """Describe how a column has the labels of adjacent rows, or return ""."""
    if of.numbers is None or np.mean(y[1:] == y[:-1]) > 0.5 or len(np.unique(y)) < 20:
        return ""
    if np.mean(of.numbers[:-1] == y[1:]) > SHIFTED:
        return "is {label} of the next row"
    if np.mean(of.numbers[1:] == y[:-1]) > SHIFTED:
        return "is {label} of the row before, which must be known by then"
    return ""


def _pairs(columns: Mapping[str, Values], y: Array, left: Mapping[str, float]) -> Iterator[Leak]:
    """Yield two numbers whose difference, sum or ratio decides a class."""
    numbers = {n: of.numbers[:MOST_PAIR_ROWS] for n, of in columns.items() if of.numbers is not None}
    numbers = {n: of for n, of in numbers.items() if np.isfinite(of).all() and len(np.unique(of)) > 2}
    classes = codes_of(y[:MOST_PAIR_ROWS])
    if len(classes) < FEWEST_OF_CLASS or not (error := base_error(classes)):
        return
    for one, two in combinations(sorted(numbers, key=lambda name: left[name])[:MOST_PAIRED], 2):
        a, b = numbers[one], numbers[two]
        ways = {"difference": a - b, "sum": a + b, "product": a * b}
        if np.all(b):
            ways["ratio"] = a / b
        for way, made in ways.items():
            open_ = _wrong_by_tree(made, classes) / error
            if open_ <= SURE and min(left[one], left[two]) > FAR_MORE * SURE:
                yield Leak((one, two), f"give {{label}} in {1 - open_ * error:.1%} of the rows by their {way}")
                return


def _sums(columns: Mapping[str, Values], y: Array) -> Iterator[Leak]:
    """Yield two or three numbers whose weighted sum, or product of powers, is the label."""
    numbers = {n: of.numbers for n, of in columns.items() if of.numbers is not None}
    numbers = {n: of for n, of in numbers.items() if np.isfinite(of).all() and of.std() > 0}
    numbers = dict([*numbers.items()][:MOST_SUMMED])
    ways = {"a sum of them": (numbers, y)}
    if y.min() > 0:
        above = {n: np.log(of) for n, of in numbers.items() if of.min() > 0}
        ways["a product or ratio of them"] = above, np.log(y)
    for way, (terms, target) in ways.items():
        if len(terms) > 1 and (names := _exact_terms(terms, target)):
            yield Leak(names, f"give {{label}} as {way}")
            return


def _exact_terms(terms: Mapping[str, Array], target: Array) -> tuple[str, ...]:
    """Return the fewest names, at most MOST_TERMS, whose weighted sum is EXACT enough, or ()."""
    table = np.column_stack([*terms.values(), target])
    table = (table - table.mean(axis=0)) / np.maximum(table.std(axis=0), 1e-300)
    products = table.T @ table / len(table)
    names, last = [*terms], len(terms)

    def open_by(chosen: tuple[int, ...]) -> float:
        inner, outer = products[np.ix_(chosen, chosen)], products[list(chosen), last]
        return 1 - float(outer @ np.linalg.lstsq(inner, outer, rcond=1e-10)[0])

    best: tuple[int, ...] = min(combinations(range(last), 2), key=open_by)
    for _ in range(MOST_TERMS - 1):
        if open_by(best) <= EXACT:
            return tuple(names[each] for each in best)
        if not (rest := [each for each in range(last) if each not in best]):
            return ()
        best = min(((*best, each) for each in rest), key=open_by)
    return ()
