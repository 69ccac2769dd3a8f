"""The scores of test rows by the values of a column: those with most rows, and the others together."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from sparkring.training.worker.result import GroupScores, Scores

Array = np.ndarray
MOST_VALUES = 10
REST = "all others"


def group_scores(
    column: str, values: Array, counted: Array, min_rows: int, score: Callable[[Array], Scores]
) -> list[GroupScores]:
    """Score the rows of each of the MOST_VALUES most frequent values, then those of the others together.

    Args:
        column: name of the column.
        values: (N,) of the test rows, as text.
        counted: (N,) bool, rows that count for something.
        min_rows: counted rows without which a value is no group; it is then among the others, which need as many.
        score: metrics of some rows, which are given as (N,) bool.
    """
    names, places = np.unique(values.astype(str), return_inverse=True)
    rows = np.bincount(places[counted], minlength=len(names))
    large = [each for each in np.argsort(-rows, kind="stable")[:MOST_VALUES].tolist() if rows[each] >= min_rows]
    groups = [(str(names[each]), counted & (places == each)) for each in large]
    rest = counted & ~np.isin(places, large)
    if rest.sum() >= min_rows:
        groups.append((f"{REST} ({int((rows > 0).sum()) - len(large)})", rest))
    return [GroupScores(column=column, value=name, rows=int(of.sum()), scores=score(of)) for name, of in groups]
