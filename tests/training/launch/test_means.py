"""Means over ranks, as the driver makes them."""

from __future__ import annotations

import math

from sparkring.training.launch.means import MeanMerger
from sparkring.training.launch.messages import MeanPart, RankMetrics


def report(rank: int, step: int, total: float, count: float = 0.0) -> RankMetrics:
    return RankMetrics(rank, 1, step, {"own": float(rank)}, None, {"loss": MeanPart(total, count)})


def test_rank_0_is_shown_with_the_mean_when_every_rank_has_reported_and_the_others_at_once() -> None:
    merger = MeanMerger(3)
    assert merger.add(report(0, 10, 1.0, 4)) == []
    assert merger.add(report(2, 10, 0.5)) == [report(2, 10, 0.5)]
    assert merger.add(report(2, 20, 0.5)) == [report(2, 20, 0.5)], "a rank that is ahead"
    shown = merger.add(report(1, 10, 2.5))
    assert shown == [report(1, 10, 2.5), RankMetrics(0, 1, 10, {"loss": 1.0, "own": 0.0}, None)]


def test_parts_are_added_in_rank_order_whoever_reports_first() -> None:
    totals = (1e16, 1.0, 1.0, -1e16)
    found = set()
    for order in ((0, 1, 2, 3), (3, 2, 1, 0), (2, 0, 3, 1)):
        merger = MeanMerger(4)
        shown = [one for rank in order for one in merger.add(report(rank, 1, totals[rank], float(rank == 0)))]
        found |= {one.values["loss"] for one in shown if "loss" in one.values}
    assert found == {0.0}, "from the last rank on it would be 2"


def test_metrics_without_parts_are_shown_as_they_come() -> None:
    plain = RankMetrics(0, 1, 3, {"valid/loss": 0.5}, None)
    assert MeanMerger(8).add(plain) == [plain]


def test_a_rank_that_repeats_a_step_already_merged_changes_nothing() -> None:
    merger = MeanMerger(2)
    merger.add(report(0, 5, 1.0, 2))
    merger.add(report(1, 5, 1.0))
    assert merger.add(report(0, 5, 9.0, 2)) == [] and merger.add(report(1, 5, 9.0)) == [report(1, 5, 9.0)]
    assert not merger._open


def test_a_part_that_a_rank_leaves_out_counts_for_nothing_and_no_count_is_not_a_number() -> None:
    merger = MeanMerger(2)
    merger.add(RankMetrics(0, 1, 1, {}, None, {"a": MeanPart(1.0, 1.0), "b": MeanPart(1.0, 0.0)}))
    values = merger.add(RankMetrics(1, 1, 1, {}, None, {"c": MeanPart(1.0, 1.0)}))[-1].values
    assert values["a"] == 1.0 and math.isnan(values["b"]) and "c" not in values
