"""What an evaluation holds is what torch allocates within 2 %, of three families of models and several batches."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from sparkring.conf.blocks.optim import OptimConfig
from sparkring.conf.blocks.parallel import ParallelConfig
from sparkring.conf.clusters.catalog import load_cluster
from sparkring.conf.clusters.cluster import Precision
from sparkring.conf.rank_info import RankInfo
from sparkring.training.data.batch import Batch, Columns
from sparkring.training.loop.evaluation import evaluate_split
from sparkring.training.loop.optim.build import build_optimizer
from sparkring.training.models.factors import FactorizationMachine
from sparkring.training.models.gpt import GPT, LanguageModelTask
from sparkring.training.models.sparse_embedding import sparse_embeddings
from sparkring.training.models.tabular import Tabular
from sparkring.training.models.task import Task
from sparkring.training.parallel.compose import build_strategy
from sparkring.training.parallel.mesh import Mesh
from sparkring.training.parallel.strategy import Strategy
from sparkring.training.planner import CostPlan, Workload, make_plan, table_rows
from sparkring.training.planner.search import LayoutCosts, traced_model
from sparkring.training.planner.workload import SparseTable
from sparkring.training.tasks import BinaryTask

CPU = torch.device("cpu")
ROWS = 256  # of a training step


class Family(NamedTuple):
    """A model, its task, and columns of so many rows."""

    model: Callable[[], nn.Module]
    task: Task
    columns: Callable[[int], Columns]


def table(rows: int) -> Columns:
    return {
        "c": torch.arange(rows) % 9,
        "x": torch.rand(rows),
        "y": torch.rand(rows),
        "label": torch.ones(rows),
    }


def text(rows: int) -> Columns:
    return {"tokens": torch.zeros(rows, 17, dtype=torch.int64)}


TABLE = Family(lambda: Tabular({"c": 9}, ["x", "y"], width=64), BinaryTask(["c", "x", "y"], "label"), table)
TEXT = Family(lambda: GPT(vocab=128, width=64, layers=3, heads=4), LanguageModelTask(), text)


def ids(rows: int) -> Columns:
    return table(rows) | {"c": torch.arange(rows)}


RECOMMENDER = Family(
    lambda: FactorizationMachine(["c"], [], {}, ["x", "y"], factors=16), BinaryTask(["c", "x", "y"], "label"), ids
)


def batch_of(family: Family, rows: int) -> Batch:
    return Batch(family.columns(rows), rows, rows, rows)


def planned(family: Family, evaluated: int, **settings: Any) -> CostPlan:
    row = {name: column[:1].to("meta") for name, column in family.columns(1).items()}
    model = family.model()
    return make_plan(
        Workload(
            model,
            ParallelConfig(**settings),
            Mesh(),
            "none",
            family.task.inputs(row),
            ROWS,
            task=family.task,
            columns=row,
            tables=tuple(SparseTable(name, lambda rows: rows, 68, 204) for name in sparse_embeddings(model)),
            eval_batch=evaluated,
            eval_rows=1 << 20,
        )
    )


def trained(family: Family, **settings: Any) -> Strategy:
    strategy = build_strategy(ParallelConfig(**settings), RankInfo(), CPU)
    strategy.prepare(family.model(), family.task, lambda named: build_optimizer(named, OptimConfig()))
    for _ in range(2):
        strategy.forward_backward(batch_of(family, ROWS))
        strategy.step(1e-3)
    return strategy


@pytest.mark.parametrize("times", [1, 4, 16])
@pytest.mark.parametrize("family", [TABLE, TEXT, RECOMMENDER], ids=["table", "text", "recommender"])
def test_an_evaluation_holds_what_is_planned(family: Family, times: int) -> None:
    (stage,) = planned(family, times * ROWS).stages
    strategy = trained(family)
    evaluate_split(strategy, [batch_of(family, times * ROWS) for _ in range(2)], family.task)
    measured = strategy.measure()["evaluation_bytes"]
    assert stage.evaluation == pytest.approx(measured, rel=0.02)


@pytest.mark.parametrize("passes", [1, 4])
@pytest.mark.parametrize("family", [TABLE, TEXT, RECOMMENDER], ids=["table", "text", "recommender"])
def test_a_step_holds_what_is_planned(family: Family, passes: int) -> None:
    """Of a recommender the rows that are pulled for its tables, their ids and gradients among them."""
    (stage,) = planned(family, ROWS, accumulate=passes).stages
    assert stage.peak == pytest.approx(trained(family, accumulate=passes).measure()["peak_bytes"], rel=0.02)


def test_by_default_an_evaluation_has_the_rows_of_a_pass_and_its_outputs_are_smaller_than_what_training_keeps() -> None:
    family = TEXT
    row = {"tokens": torch.zeros(1, 17, dtype=torch.int64, device="meta")}
    given = {"inputs": family.task.inputs(row), "task": family.task, "columns": row, "eval_rows": 1 << 20}
    workload = Workload(family.model(), ParallelConfig(accumulate=4), Mesh(), "none", global_batch=ROWS, **given)
    assert workload.evaluated_rows == workload.rows_per_pass == ROWS // 4
    pipeline = ParallelConfig(pp=2, micro_batches=4, accumulate=2)
    assert workload.with_layout(pipeline, Mesh(dp=2, pp=2), "torch-gloo").evaluated_rows == ROWS // 16
    assert replace(workload, eval_rows=5).evaluated_rows == 5 and replace(workload, eval_rows=0).evaluated_rows == 0
    (stage,) = make_plan(workload).stages
    assert stage.evaluation is not None and stage.peak is not None and stage.evaluation < stage.peak
    plan = make_plan(replace(workload, eval_rows=0))
    assert plan.stages[0].evaluation is None
    assert "evaluation_bytes" not in [row["quantity"] for row in table_rows(plan)]


def test_the_table_has_an_evaluation_beside_what_was_measured() -> None:
    plan = planned(TABLE, 4 * ROWS)
    (row,) = (row for row in table_rows(plan, {"evaluation_bytes": 7.0}) if row["quantity"] == "evaluation_bytes")
    assert (row["predicted"], row["measured"]) == (plan.stages[0].evaluation, 7.0)
    assert row["unit"] == "per rank, largest: 1,024 rows at a time"


def test_outputs_of_a_batch_are_gone_before_those_of_the_next() -> None:
    strategy, alive = trained(TABLE), list[Any]()

    def evaluate(batch: Batch) -> torch.Tensor:
        assert not any(reference() is not None for reference in alive)
        outputs: torch.Tensor = type(strategy).evaluate(strategy, batch)
        alive.append(weakref.ref(outputs))
        return outputs

    strategy.evaluate = evaluate  # type: ignore[method-assign]
    evaluate_split(strategy, [batch_of(TABLE, 8) for _ in range(3)], TABLE.task)
    assert len(alive) == 3


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_search_counts_the_rows_that_are_evaluated(precision: Precision) -> None:
    """Within 30 % of the traced peak, as of a step."""
    family = TEXT
    row = {"tokens": torch.zeros(1, 17, dtype=torch.int64, device="meta")}
    given = {"inputs": family.task.inputs(row), "task": family.task, "columns": row, "eval_rows": 1 << 20}
    config = ParallelConfig(precision=precision)
    workload = Workload(family.model(), config, Mesh(), "none", global_batch=ROWS, eval_batch=64 * ROWS, **given)
    memory = LayoutCosts(traced_model(workload), load_cluster("cpu")).layout(config, Mesh()).memory
    (stage,) = make_plan(workload).stages
    assert stage.evaluation is not None and stage.peak is not None and stage.evaluation > 4 * stage.peak
    assert memory == pytest.approx(stage.evaluation, rel=0.3)
