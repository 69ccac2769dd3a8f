"""Metrics of a whole split: the same however its rows are cut over ranks, padded or missing."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sparkring.conf.blocks.train import EarlyStopping, TrainConfig
from sparkring.conf.tasks import BINARY
from sparkring.training.data.batch import Batch
from sparkring.training.loop.evaluation import WholeSplit, evaluate_split, wants_whole_split
from sparkring.training.metrics import task_scores
from sparkring.training.models.task import Task
from sparkring.training.tasks import build_task

ROWS = 23
SCORES = (torch.arange(ROWS) * 7 % 10 - 4.5).double()  # logits, with ties
LABELS = (torch.arange(ROWS) % 3 == 0).long()


def batch(ids: list[int], padding: int = 0) -> Batch:
    """Rows of the table by number, and padding rows with numbers and labels that must not count."""
    rows = torch.tensor([*ids, *[0] * padding], dtype=torch.int64)
    columns = {"score": SCORES[rows], "y": LABELS[rows]}
    columns["score"][len(ids) :] = 99.0
    weight = torch.tensor([1.0] * len(ids) + [0.0] * padding)
    return Batch(columns, len(rows), ROWS, ROWS, weight=weight, ids=rows, real=weight > 0)


class Given:
    """A strategy whose model returns the column `score`, on one of several ranks without a network."""

    is_data_leader = True

    def measuring_evaluation(self, batch: Batch) -> AbstractContextManager[object]:
        return nullcontext()

    def evaluate(self, batch: Batch) -> torch.Tensor:
        return batch.columns["score"]

    @property
    def meeting(self) -> Any:
        return self

    def sum_over_data(self, values: torch.Tensor) -> torch.Tensor:
        return values


def on_ranks(shares: list[list[Batch]], task: Task, silent: tuple[int, ...] = ()) -> list[dict[str, float]]:
    """What each rank makes of the shares of all, `silent` ranks holding rows that another reports."""
    sent: list[bytes] = []

    def post(mine: bytes) -> list[bytes]:
        sent.append(mine)
        return sent

    for number, share in enumerate(shares):
        collector = WholeSplit(task, post, reports=number not in silent)
        for part in share:
            collector.add(part, part.columns["score"])
        collector.metrics()
    return [WholeSplit(task, lambda mine: sent, reports=True).metrics() for _ in shares]


CUTS: dict[str, list[list[Batch]]] = {
    "one rank": [[batch(list(range(ROWS)))]],
    "uneven, not in order": [[batch([20, 3]), batch([1])], [batch([n for n in range(ROWS) if n not in (20, 3, 1)])]],
    "padded": [[batch(list(range(12)), padding=3)], [batch(list(range(12, ROWS)), padding=5)]],
    "ranks without rows": [[], [batch(list(range(ROWS)))], [batch([], padding=4)]],
}


@pytest.mark.parametrize("cut", CUTS)
def test_every_cut_of_the_rows_gives_the_same_bits_on_every_rank(cut: str) -> None:
    task = build_task("binary", ["x"], "y", None)
    positive, negative = ([float(s) for s, y in zip(SCORES, LABELS, strict=True) if y == one] for one in (1, 0))
    pairs = [(p > n) + (p == n) / 2 for p in positive for n in negative]
    right = sum(p > 0 for p in positive)
    for found in on_ranks(CUTS[cut], task):
        assert found["auc"] == sum(pairs) / len(pairs)
        assert found["f1"] == 2 * right / (len(positive) + sum(float(s) > 0 for s in SCORES))
        assert found == on_ranks(CUTS["one rank"], task)[0]


def test_rows_that_several_ranks_hold_count_once() -> None:
    task, (first, second) = build_task("binary", ["x"], "y", None), CUTS["padded"]
    assert on_ranks([first, first, second], task, silent=(1,))[0] == on_ranks([first, second], task)[0]


def test_a_split_without_rows_and_a_model_that_diverged_have_no_numbers() -> None:
    task, odd = build_task("binary", ["x"], "y", None), batch([0, 1])
    odd.columns["score"][1] = math.nan
    for shares in ([[]], [[odd]]):
        (found,) = on_ranks(shares, task)
        assert found.keys() == {"auc", "average_precision", "f1"} and all(map(math.isnan, found.values()))


class GroupedTask(Task):
    """Ranks within groups: the share of groups whose best row is a positive one."""

    def inputs(self, columns: Any) -> tuple[Any, ...]:
        return ()

    def loss(self, outputs: torch.Tensor, columns: Any) -> torch.Tensor:
        return outputs

    def split_metric_names(self) -> tuple[str, ...]:
        return ("hit_rate", "in_order")

    def split_values(self, outputs: torch.Tensor, columns: Any) -> torch.Tensor:
        return torch.stack([outputs, columns["y"].double(), (outputs % 3).double()], dim=1)

    def split_metrics(self, values: torch.Tensor) -> dict[str, float]:
        hits = [
            bool(group[group[:, 0].argmax(), 1] > 0)
            for group in (values[values[:, 2] == g] for g in values[:, 2].unique())
        ]
        return {"hit_rate": sum(hits) / len(hits), "in_order": float(torch.equal(values[:, 0], SCORES))}


def test_a_task_of_ones_own_sees_its_rows_in_the_order_of_the_dataset() -> None:
    found = [on_ranks(shares, GroupedTask())[0] for shares in CUTS.values()]
    groups = [[n for n in range(ROWS) if SCORES[n] % 3 == rest] for rest in (SCORES % 3).unique()]
    best = [max(group, key=lambda n: (float(SCORES[n]), -n)) for group in groups]
    hits = [bool(LABELS[n]) for n in best]
    assert found == [{"hit_rate": sum(hits) / len(hits), "in_order": 1.0}] * len(CUTS)


def test_the_metrics_are_beside_the_means_where_they_are_asked_for() -> None:
    task, reader = build_task("binary", ["x"], "y", None), SimpleNamespace(batches=lambda: iter(CUTS["padded"][0]))
    means = evaluate_split(Given(), reader.batches(), task)  # type: ignore[arg-type]
    whole = WholeSplit(task, lambda mine: [mine], True)
    both = evaluate_split(Given(), reader.batches(), task, whole=whole)  # type: ignore[arg-type]
    scores, labels = torch.sigmoid(SCORES[:12]).numpy(), LABELS[:12].numpy()
    assert both == means | task_scores(BINARY, labels, scores, names=("auc", "average_precision", "f1"))


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({}, False), ({"best_metric": "accuracy"}, False), ({"best_metric": "auc"}, True),
        ({"early_stopping": EarlyStopping(metric="f1")}, True), ({"early_stopping": EarlyStopping()}, False),
    ],
)  # fmt: skip
def test_rows_are_gathered_where_a_decision_needs_them(changes: dict[str, Any], wanted: bool) -> None:
    assert wants_whole_split(TrainConfig(**changes), ("auc", "f1")) is wanted
