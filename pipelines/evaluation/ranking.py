"""Ranking scores of held-out rows: those of one value of a column, such as a user, are a list the predictions order.

`recall_at_k`: the share of a list's positive rows that are among its first k. `ndcg_at_k`: the sum of 1 / log2(1 +
place) over the positive rows among the first k, divided by that of the best order (Jarvelin and Kekalainen 2002). Rows
of equal prediction each count the mean over all orders of these rows (McSherry and Najork 2008), so the order in which
rows are stored or read changes no score. Every list counts once; lists without a positive row do not count.

Shapes: N rows, T ties (the rows of one list and one prediction), L lists with a positive row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sparkring.conf.blocks.report import RankingConfig
from sparkring.conf.manifest import DatasetManifest
from sparkring.conf.plain_text import count_of
from sparkring.pipelines.evaluation.split_rows import SplitRows
from sparkring.training.worker.result import RankedLists, Scores

Array = np.ndarray
POPULARITY = "popularity"
ALS_NAME = "ALS (Spark MLlib)"


@dataclass(frozen=True)
class Ranking:
    """The rows that count, in their lists, which any number of models may order."""

    config: RankingConfig
    counted: Array  # (all rows,) bool, N of them true
    lists: Array  # (N,) number of the row's list
    positive: Array  # (N,) bool

    def scores(self, predictions: Array) -> Scores:
        """Score predictions (all rows,), a higher value ranking earlier. ValueError without a positive row."""
        return ranking_scores(self.lists, self.positive, predictions[self.counted], self.config.k)

    @property
    def counts(self) -> RankedLists:
        """How many lists there are, and of which kind."""
        rows = np.bincount(self.lists)
        has_positive = np.bincount(self.lists[self.positive], minlength=len(rows)) > 0
        return RankedLists(
            column=self.config.group,
            counted=int(has_positive.sum()),
            without_positive=int((~has_positive).sum()),
            short=int((has_positive & (rows <= min(self.config.k))).sum()),
            rows=int(rows[has_positive].sum()),
        )


def make_ranking(config: RankingConfig, values: pa.ChunkedArray, labels: Array, weights: Array | None) -> Ranking:
    """Group the rows of a weight above 0 into lists. A row without a value is in none: its list is unknown.

    Args:
        config: the recipe's `report.ranking`.
        values: (all rows,) of the column `group`, as `places_in_order` takes them.
        labels: (all rows,) 0 or 1.
        weights: (all rows,) how much each row counts; None: all equal.
    """
    numbers = places_in_order(values)
    counted = (numbers >= 0) & (np.ones(len(labels), bool) if weights is None else weights > 0)
    _, lists = np.unique(numbers[counted], return_inverse=True)
    return Ranking(config, counted, lists, labels[counted] > 0.5)


def places_in_order(values: pa.ChunkedArray) -> Array:
    """Return each value's place among the sorted distinct ones, so no order of rows changes it; -1 for null.

    (rows,) int64. Texts may be indices of dictionaries.
    """
    coded = values if pa.types.is_dictionary(values.type) else values.dictionary_encode()
    whole = coded.unify_dictionaries().combine_chunks()
    places = np.full(len(whole.dictionary) + 1, -1)
    places[pc.array_sort_indices(whole.dictionary).to_numpy()] = np.arange(len(whole.dictionary))
    found: Array = places[whole.indices.fill_null(len(whole.dictionary)).to_numpy()]
    return found


def ranking_scores(lists: Array, positive: Array, predictions: Array, ks: Sequence[int]) -> Scores:
    """Compute recall and NDCG at each k: means over lists with a positive row. ValueError without any.

    Args:
        lists: (N,) number of the row's list, at least 0.
        positive: (N,) bool, whether the row counts as positive.
        predictions: (N,), a higher value ranking earlier.
        ks: numbers of first rows to look at.
    """
    if not positive.any():
        raise ValueError(f"of {count_of(len(lists), 'test row')} none is positive, so there is no list to judge")
    order = np.lexsort((-predictions, lists))
    lists, positive, predictions = lists[order], positive[order], predictions[order]
    is_first = np.append(True, lists[1:] != lists[:-1])
    is_tie = is_first | np.append(True, predictions[1:] != predictions[:-1])
    starts = np.flatnonzero(is_tie)  # (T,)
    size = np.diff(starts, append=len(lists))
    of_list = np.cumsum(is_first)[starts] - 1
    before = starts - np.flatnonzero(is_first)[of_list]  # rows of the list that are ahead of the tie
    found = np.add.reduceat(positive.astype(np.int64), starts)
    positives = np.bincount(of_list, found).astype(np.int64)
    counted, scores = positives > 0, Scores()

    def total(gain: Array) -> Array:
        """Add the gains of places (most,) by list (L,); a positive row has the mean gain of its tie's places."""
        added = np.append(0.0, np.cumsum(gain))
        most = len(gain)
        share = (added[np.minimum(before + size, most)] - added[np.minimum(before, most)]) / size
        return np.bincount(of_list, found * share)[counted]

    for k in ks:
        discount = 1 / np.log2(2.0 + np.arange(k))
        best = np.cumsum(discount)[np.minimum(positives[counted], k) - 1]
        scores[f"recall_at_{k}"] = float(np.mean(total(np.ones(k)) / positives[counted]))
        scores[f"ndcg_at_{k}"] = float(np.mean(total(discount) / best))
    return scores


def positive_rows(table: pa.Table, manifest: DatasetManifest, label: str) -> pa.Table:
    """Return the rows whose label is 1, or the second class, and that do not have the weight 0."""
    if manifest.classes:
        is_positive = pc.equal(table[label], manifest.classes[-1])
    else:
        is_positive = pc.greater(table[label].cast(pa.float64()), 0.5)
    if manifest.weight is not None:
        is_positive = pc.and_(is_positive, pc.greater(table[manifest.weight["column"]], 0))
    return table.filter(is_positive)


def popularity(train: SplitRows, test: SplitRows, item: str, label: str) -> Array:
    """Count the positive training rows of each test row's item, (N,) int64: a ranking without a model.

    Files are read one by one. `item`, `label`: columns; rows of weight 0 do not count.
    """
    manifest = train.manifest
    weight = [manifest.weight["column"]] if manifest.weight is not None else []
    items = test.column(item)
    counts = [pa.table({item: pa.array([], items.type), "rows": pa.array([], pa.int64())})]
    for table in train.tables([item, label, *weight]):
        grouped = positive_rows(table, manifest, label).group_by(item).aggregate([([], "count_all")])
        counts.append(grouped.select([item, "count_all"]).rename_columns([item, "rows"]))
    known = pa.concat_tables(counts).group_by(item).aggregate([("rows", "sum")])
    places = pc.index_in(items, value_set=known[item].combine_chunks())
    found: Array = pc.fill_null(known["rows_sum"].combine_chunks().take(places.combine_chunks()), 0).to_numpy()
    return found
