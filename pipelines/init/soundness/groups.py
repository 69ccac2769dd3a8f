"""Find columns whose rows of one value share what rows of a new value do not have: persons, devices, storms.

Trees tell whether it matters: they are cross-validated once with rows dealt at random, once with all rows of a value in
one fold. That a city or a product is of use tells the same, so a column must also look like one of groups: by its name,
by rows that stand together in the file or are a series, or as the other features alone know the value by heart.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
FOLDS, TREES, LEAF_ROWS, SEED = 4, 30, 3, 0
MOST_ROWS, MOST_CELLS = 6000, 100_000  # that trees are fitted on: a second
FEWEST_VALUES, FEWEST_ROWS, MOST_ROWS_A_VALUE = 8, 2.0, 1000.0
MOST_TESTED, MOST_UNLIKELY = 5, 2  # groupings that trees are fitted for, and those of them that nothing speaks for
SURE, LIKELY = 3.0, 2.0  # standard errors
MUCH = 0.05  # of a loss, or of what trees do not know
MOST_OF_ROWS = 0.2  # of one value, where only features speak for groups
MANY_CODES, MANY_WORDS = 40, 100
BY_HEART = 1.3  # times the loss: the features alone know which value a row is of
FEW = 0.1  # of the pairs of rows that are expected by chance
SPLIT_RUNS = 1.2  # runs of equal values in the file for each value, where rows of a value stand together
NO_EFFECT = 3.0  # times what pairs differ by beside the effects of both
SPARSE = 0.3  # of all pairs of two ids are rows
SHUFFLES = 200
BY_NAME = "by its name"
UNIT = (
    "person|patient|subject|participant|respondent|individual|user|customer|client|member|device|sensor|meter|machine|"
    "unit|store|shop|outlet|site|station|school|household|family|animal|plot|batch|lot|session|trial|run|episode|"
    "player|driver|vehicle|student|pupil|worker|employee|account|card|group|grp|cluster|storm|well|farm|hospital|"
    "clinic|doctor|physician|ward|child|mother|engine|series|recording|speaker|writer|author|case|firm|"
    "tree|mouse|rat|cow|dog|chick|rabbit|experiment|block|household|pair|litter|dam|field|team|room|bed|building|plate|"
    "tank|cage|pen|bench"
)
NAMED = re.compile(
    rf"(?!(?i:n|no|num|number|count|total|avg|mean)[_. ])(?:(?i:(?:.*[_. -])?(?:id|uid|uuid|{UNIT})"
    r"(?:[_. -]?(?:id|no|nr|num|number|code|key|name))?)|.*[a-z0-9]I[dD])"
)
TIMES = re.compile(r"(?i:.*(?:year|month|week|day|hour|minute|second|date|time|quarter|season|period|yr)s?)")


@dataclass(frozen=True)
class CellRows:
    """Rows as trees see them: N rows of K cells."""

    cells: Array  # (N, K) float64; NaN is missing
    owners: Sequence[str]  # (K,) the column that each cell is of
    labels: Array  # (N,) float64: a value, or the number of a class
    is_number: bool

    def take(self, kept: Array) -> CellRows:
        return replace(self, cells=self.cells[kept], labels=self.labels[kept])

    def without(self, columns: Sequence[str]) -> CellRows:
        """Return the rows without the cells of some columns."""
        kept = [k for k, owner in enumerate(self.owners) if owner not in columns]
        return replace(self, cells=self.cells[:, kept], owners=[self.owners[k] for k in kept])


@dataclass(frozen=True)
class Values:
    """A column's values in N rows."""

    codes: Array  # (N,) int64: a number for each distinct value, from 0
    numbers: Array | None  # (N,) float64, where they are numbers or dates
    is_text: bool
    is_whole: bool
    is_code: bool = False  # texts with digits in them

    def take(self, kept: Array) -> Values:
        return replace(
            self, codes=codes_of(self.codes[kept]), numbers=None if self.numbers is None else self.numbers[kept]
        )


@dataclass(frozen=True)
class Gap:
    """Mean losses by trees: of rows dealt at random, and of values dealt whole. error: of the difference, standard."""

    random: float
    grouped: float
    error: float

    @property
    def is_likely(self) -> bool:
        return self.grouped - self.random > LIKELY * self.error

    @property
    def is_sure(self) -> bool:
        """Whether it is more than noise."""
        return self.grouped - self.random > SURE * self.error

    @property
    def is_clear(self) -> bool:
        """Whether it is also much."""
        return self.is_sure and self.grouped - self.random > MUCH * self.random


@dataclass(frozen=True)
class Grouping:
    """Columns that name groups together, how many these are, why they are taken for groups, and what trees lose."""

    columns: tuple[str, ...]
    groups: int
    rows: int
    why: str
    gap: Gap


def find_grouping(rows: CellRows, columns: Mapping[str, Values], in_order: bool) -> Grouping | None:
    """Find the columns that most likely name groups.

    Args:
        rows: rows with features and labels.
        columns: columns of the table, without the label.
        in_order: whether rows are in the order in which they were written.
    """
    possible = [c for c in candidates(columns, in_order) if not is_of_interactions(c, columns)]
    asked = [(c, looks_like_groups(c, columns, in_order)) for c in possible]
    likely = [(c, why) for c, why in asked if why][:MOST_TESTED]
    others = [(c, "") for c, why in asked if not why and may_be_unlikely(c, columns)][:MOST_UNLIKELY]
    found = [judged for c, why in [*likely, *others] if (judged := judge(rows, c, why))]
    if not found:
        return None
    largest = max(found, key=lambda each: each.gap.grouped - each.gap.random).gap
    least = largest.grouped - max(SURE * largest.error, MUCH * largest.random)
    return max(
        (each for each in found if each.gap.grouped >= least), key=lambda each: (each.groups, -len(each.columns))
    )


@dataclass(frozen=True)
class PossibleGroups:
    """Columns that may name groups together. codes: (N,) a number for each combination of their values.

    units: codes of two units, of which one may be numbered anew within each of the other, as rooms are in buildings.
    """

    names: tuple[str, ...]
    codes: Array
    units: tuple[Array, Array] | None = None


def candidates(columns: Mapping[str, Values], in_order: bool) -> Iterator[PossibleGroups]:
    """Yield columns that may name groups, alone or two together; those with a name for it first."""
    may = {name: each for name, each in columns.items() if _may_name(name, each)}
    for name in sorted(
        may, key=lambda name: (not NAMED.fullmatch(name), not may[name].is_text, -_many(may[name].codes))
    ):
        codes = may[name].codes
        is_name = may[name].is_text or NAMED.fullmatch(name)
        if in_order and is_name and _stands_in_parts(codes) and (both := _with_another(name, codes, columns)):
            yield both
        if FEWEST_ROWS <= len(codes) / _many(codes) <= MOST_ROWS_A_VALUE:
            yield PossibleGroups((name,), codes)
    yield from _numbered_again(columns)


def _numbered_again(columns: Mapping[str, Values]) -> Iterator[PossibleGroups]:
    """Yield two columns with names of units that together name more than either alone."""
    units = [n for n, of in columns.items() if (of.is_text or of.is_whole) and NAMED.fullmatch(n)]
    for one, other in combinations([name for name in units if _many(columns[name].codes) > 1], 2):
        codes = columns[one].codes, columns[other].codes
        both = codes_of(*codes)
        is_finer = max(map(_many, codes)) < _many(both) and _many(both) >= FEWEST_VALUES
        if is_finer and FEWEST_ROWS <= len(both) / _many(both) <= MOST_ROWS_A_VALUE:
            yield PossibleGroups((one, other), both, codes)


def _may_name(name: str, values: Values) -> bool:
    return (values.is_text or values.is_whole) and _many(values.codes) >= FEWEST_VALUES and not TIMES.fullmatch(name)


def _with_another(name: str, codes: Array, columns: Mapping[str, Values]) -> PossibleGroups | None:
    """Combine the column with the one that best tells its runs apart, such as the year of a reused name."""
    found = []
    for other, values in columns.items():
        if other != name and (values.is_text or values.is_whole) and _together(values.codes, 3.0):
            both = codes_of(codes, values.codes)
            if (
                _together(both)
                and max(FEWEST_ROWS * _many(both) / len(both), 2 * _many(values.codes) / _many(both)) <= 1
            ):
                found.append(PossibleGroups((name, other), both))
    return min(found, key=lambda each: _many(each.codes), default=None)


def may_be_unlikely(candidate: PossibleGroups, columns: Mapping[str, Values]) -> bool:
    """Return whether features alone may indicate groups: many codes such as K17, or many rare texts.

    With few words, such as towns, features predict the value too, and rows of new ones are unlikely.
    """
    values = columns[candidate.names[-1]]
    if not values.is_text or _many(candidate.codes) < (MANY_CODES if values.is_code else MANY_WORDS):
        return False
    return float(np.bincount(candidate.codes).max()) < MOST_OF_ROWS * len(candidate.codes)


def codes_of(*codes: Array) -> Array:
    """Enumerate the distinct combinations, (N,)."""
    found = np.zeros(len(codes[0]), np.int64)
    for each in codes:
        found = np.unique(found * (each.max() + 1) + each, return_inverse=True)[1]
    return found


def _many(codes: Array) -> int:
    return int(codes.max()) + 1


def _runs(codes: Array) -> int:
    return 1 + int(np.count_nonzero(np.diff(codes)))


def _by_chance(codes: Array) -> float:
    """Estimate the runs of equal values in random order."""
    return len(codes) * (1 - float(np.square(np.bincount(codes) / len(codes)).sum()))


def _together(codes: Array, most: float = SPLIT_RUNS) -> bool:
    """Return whether equal values are adjacent in the file."""
    return _runs(codes) <= most * (codes.max() + 1) and _runs(codes) < 0.5 * _by_chance(codes)


def _stands_in_parts(codes: Array) -> bool:
    """Return whether equal values are adjacent, but some in several places."""
    return not _together(codes) and _runs(codes) < 0.3 * _by_chance(codes)


def judge(rows: CellRows, candidate: PossibleGroups, why: str) -> Grouping | None:
    """Decide whether groups matter to trees; None where not. `why`: they look like groups; "" where nothing says so."""
    codes = candidate.codes
    kept = sample_groups(codes, min(MOST_ROWS, MOST_CELLS // max(len(rows.owners), 1)))
    some, groups = rows.take(kept), codes[kept]
    gap, rest = gap_of(some, groups), some.without(candidate.names)
    if candidate.units is not None and not (gap.is_clear and is_nested(rows, candidate.units)):
        return None
    if not why:
        if not gap.is_clear or not rest.owners:
            return None
        alone = gap_of(rest, groups)
        if not alone.is_clear or alone.grouped < BY_HEART * alone.random:
            return None
        why = "the other features tell which value a row is of"
    elif not gap.is_clear and ((why == BY_NAME and not gap.is_likely) or not shares_hidden(rest, groups)):
        return None
    return Grouping(candidate.names, _many(codes), len(codes), why, gap)


def is_of_interactions(candidate: PossibleGroups, columns: Mapping[str, Values]) -> bool:
    """Return whether rows are sparse pairs with another id, such as users and films, known later."""
    many = _many(candidate.codes)
    for name, other in columns.items():
        if name in candidate.names or not NAMED.fullmatch(name) or TIMES.fullmatch(name):
            continue
        is_sparse = min(many, _many(other.codes)) >= MANY_CODES and len(other.codes) < SPARSE * many * _many(
            other.codes
        )
        if is_sparse and meets_seldom(candidate.codes, other.codes) and not _repeats(candidate.codes, other.codes):
            return True
    return False


def _repeats(*codes: Array) -> bool:
    """Return whether two rows have the same values."""
    found = codes_of(*codes)
    return _many(found) < len(found)


def looks_like_groups(candidate: PossibleGroups, columns: Mapping[str, Values], in_order: bool) -> str:
    """Explain why values look like groups, regardless of their worth to trees, or return ""."""
    names, codes = candidate.names, candidate.codes
    ordered = {n: each for n, each in columns.items() if each.numbers is not None and n not in names}
    if met := next((name for name, each in ordered.items() if meets_seldom(codes, each.codes)), None):
        return f"hardly two rows of one value have the same {met}"
    if in_order and (rising := next((n for n, e in ordered.items() if rises(codes, e.numbers)), None)):
        return f"{rising} rises within each value"
    is_name = any(columns[name].is_text or NAMED.fullmatch(name) for name in names)
    if in_order and is_name and _together(codes):
        return "rows of one value stand together in the file"
    return BY_NAME if any(map(NAMED.fullmatch, names)) else ""


def meets_seldom(groups: Array, other: Array) -> bool:
    """Return whether rows of a group share another column's value far less often than by chance."""

    def pairs(codes: Array) -> float:
        counts = np.bincount(codes).astype(float)
        return float((counts * (counts - 1)).sum() / 2)

    expected = pairs(groups) * pairs(other) / max(len(groups) * (len(groups) - 1) / 2, 1)
    return expected >= 1 / FEW and pairs(codes_of(groups, other)) <= FEW * expected


def rises(groups: Array, numbers: Array | None) -> bool:
    """Return whether a column rises or falls within each group in file order, but not over the file."""
    assert numbers is not None
    same, steps = groups[1:] == groups[:-1], np.sign(np.diff(numbers))
    within, across = steps[same], steps[~same]
    if len(within) < 20 or np.count_nonzero(within) < len(within) / 2:
        return False
    return any(np.mean(way * within >= 0) >= 0.98 and np.mean(way * across < 0) > 0.3 for way in (1, -1))


def is_nested(rows: CellRows, units: tuple[Array, Array]) -> bool:
    """Return whether the label's means in pairs of two units follow from neither alone, as room 3 of each house.

    By a two-way analysis of variance of the means: of units such as stores and products both have effects.
    """
    labels = (
        rows.labels[:, None] if rows.is_number else np.eye(int(rows.labels.max()) + 1)[rows.labels.astype(np.int64)]
    )
    pairs = codes_of(*units)
    first = np.unique(pairs, return_index=True)[1]
    means = np.column_stack([np.bincount(pairs, each) for each in labels.T]) / np.bincount(pairs)[:, None]
    one, other = (np.eye(_many(codes))[codes[first]] for codes in units)

    def rest(design: Array) -> float:
        return float(np.square(means - design @ np.linalg.lstsq(design, means)[0]).sum())

    both, freedom = rest(np.column_stack([one, other])), len(means) - one.shape[1] - other.shape[1] + 1
    if freedom < 1:
        return False
    effects = ((rest(b) - both) / (a.shape[1] - 1) for a, b in ((one, other), (other, one)))
    return min(effects) < NO_EFFECT * both / freedom


# --- what trees say


def sample_groups(groups: Array, most: int) -> Array:
    """Sample whole groups' rows in order, at most `most`; each group leaves room for 20 others."""
    draw = np.random.default_rng(SEED)
    order = draw.permutation(len(groups))
    by_group = order[np.argsort(groups[order], kind="stable")]
    of = groups[by_group]
    within = np.arange(len(of)) - np.searchsorted(of, of)
    kept = by_group[within < max(most // 20, 2)]
    place = draw.permutation(groups.max() + 1)
    return np.sort(kept[np.argsort(place[groups[kept]], kind="stable")][:most])


def group_folds(groups: Array) -> Array:
    """Assign folds (N,), a group's rows together: largest groups first, into the emptiest fold."""
    codes, of = np.unique(groups, return_inverse=True)
    sizes, filled, fold = np.bincount(of), np.zeros(FOLDS), np.zeros(len(codes), int)
    order = np.random.default_rng(SEED).permutation(len(codes))
    for group in order[np.argsort(-sizes[order], kind="stable")]:
        fold[group] = filled.argmin()
        filled[fold[group]] += sizes[group]
    found: Array = fold[of]
    return found


def gap_of(rows: CellRows, groups: Array) -> Gap:
    """Cross-validate both ways on the same rows."""
    dealt = np.random.default_rng(SEED).permutation(len(groups)) % FOLDS
    random, grouped = (losses_of(rows, cross_validated(rows, folds)) for folds in (dealt, group_folds(groups)))
    _, of = np.unique(groups, return_inverse=True)
    apart = grouped - random
    sums = np.bincount(of, apart - apart.mean())  # rows of a group are not independent
    error = float(np.sqrt(np.square(sums).sum() * len(sums) / max(len(sums) - 1, 1)) / len(of))
    return Gap(float(random.mean()), float(grouped.mean()), error)


def cross_validated(rows: CellRows, folds: Array) -> Array:
    """Predict each row by trees grown on the other folds: (N,) values, or (N, C) probabilities."""
    shape = len(rows.labels) if rows.is_number else (len(rows.labels), int(rows.labels.max()) + 1)
    found = np.zeros(shape)
    for fold in range(FOLDS):
        test = folds == fold
        if test.any() and not test.all():
            found[test] = predict(rows.take(~test), rows.cells[test], found[test])
    return found


def predict(train: CellRows, cells: Array, into: Array) -> Array:
    """Predict some rows by trees grown on others. `into`: zeros of the predictions' shape."""
    from sklearn.ensemble import ExtraTreesClassifier, ExtraTreesRegressor

    kind = ExtraTreesRegressor if train.is_number else ExtraTreesClassifier
    model = kind(TREES, min_samples_leaf=LEAF_ROWS, max_features=0.5, random_state=SEED)
    least = float(np.finfo(np.float32).min) / 4
    grown, seen = (
        np.nan_to_num(each, nan=least).clip(least, -least).astype(np.float32) for each in (train.cells, cells)
    )
    model.fit(grown, train.labels)
    if train.is_number:
        values: Array = model.predict(seen)
        return values
    counts = np.bincount(train.labels.astype(np.int64), minlength=into.shape[1]) + 1 / into.shape[1]
    into[:, model.classes_.astype(np.int64)] = model.predict_proba(seen)
    mixed: Array = 0.98 * into + 0.02 * counts / counts.sum()  # none is impossible
    return mixed


def losses_of(rows: CellRows, predictions: Array) -> Array:
    """Compute the squared error or the log loss of each row, (N,)."""
    if rows.is_number:
        return np.square(predictions - rows.labels)
    found: Array = -np.log(np.maximum(predictions[np.arange(len(predictions)), rows.labels.astype(np.int64)], 1e-12))
    return found


def shares_hidden(rows: CellRows, groups: Array) -> bool:
    """Return whether what trees miss in a group's rows is similar among them, beyond chance."""
    of = np.unique(groups, return_inverse=True)[1]
    if rows.owners:
        predictions = cross_validated(rows, group_folds(groups))
    else:
        predictions = (
            np.zeros(len(of)) + rows.labels.mean()
            if rows.is_number
            else np.zeros((len(of), int(rows.labels.max()) + 1))
        )
    if rows.is_number:
        rest = (rows.labels - predictions)[:, None]
    else:
        rest = np.eye(predictions.shape[1])[rows.labels.astype(np.int64)] - predictions
    rest = rest - rest.mean(axis=0)
    sizes = np.bincount(of)

    def alike(groups: Array) -> float:
        return float(sum((np.square(np.bincount(groups, column)) / sizes).sum() for column in rest.T))

    draw = np.random.default_rng(SEED)
    chance = np.array([alike(draw.permutation(of)) for _ in range(SHUFFLES)])
    spread, pairs = np.square(rest).sum(), len(of) - len(sizes)
    share = (alike(of) - chance.mean()) / max(spread - chance.mean(), 1e-300)  # of the rest's variance, about
    return alike(of) > chance.mean() + 4 * chance.std() and share > MUCH and pairs > 0
