"""A model's tables in a step of one process, beside the same model with nn.Embedding."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from torch import nn

from sparkring.conf.blocks.parallel import ParallelConfig
from sparkring.conf.blocks.tables import TablesConfig
from sparkring.conf.rank_info import RankInfo
from sparkring.training.data.batch import Batch, Columns, Ragged
from sparkring.training.parallel.compose import build_strategy
from sparkring.training.parallel.sparse import SparseTables, TableSettings
from sparkring.training.tables.exchange import Alone
from sparkring.training.tables.sharded import ShardedTable
from sparkring.training.tables.table import TableSpec
from tests.ranks.cases_tables import Rating, Recommender, rating_batch, recommending
from tests.ranks.problem import CPU


class Dense(Recommender):
    """The same with a parameter for each of the ids that there are, in place of the tables."""

    def __init__(self, sparse: SparseTables, ids: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.ids = ids
        for name in ("users", "tags"):
            rows = torch.from_numpy(sparse.tables[name].table.pull(ids[name].numpy()))
            setattr(self, f"dense_{name}", nn.Parameter(rows))

    def forward(self, columns: dict[str, object]) -> torch.Tensor:
        for name in ("users", "tags"):
            module = self.get_submodule(name)
            module.source = _Rows(self.ids[name], getattr(self, f"dense_{name}"))  # type: ignore[assignment]
        return super().forward(columns)


class _Rows:
    def __init__(self, ids: torch.Tensor, rows: torch.Tensor) -> None:
        self.ids, self.rows = ids, rows

    def rows_of(self, ids: torch.Tensor) -> torch.Tensor:
        return self.rows[torch.searchsorted(self.ids, ids)]


def test_tables_train_as_dense_parameters_do_norms_and_clipping_included() -> None:
    strategy = recommending(0, 1, {"tables": {"optimizer": "sgd"}})
    batches = [rating_batch(step) for step in range(12)]
    parts = {"users": ["user", "friend"], "tags": ["tags"]}
    values = [{n: c.values if isinstance(c, Ragged) else c for n, c in b.columns.items()} for b in batches]
    ids = {t: torch.cat([v[c] for v in values for c in columns]).unique() for t, columns in parts.items()}
    model = Dense(strategy.tables, ids).double()
    model.head.load_state_dict(strategy.prepared.module.get_submodule("head").state_dict())
    optimizer = torch.optim.SGD([
        {"params": model.head.parameters(), "lr": 1e-2},
        {"params": [model.dense_users, model.dense_tags], "lr": 5e-2},  # TableSettings.lr_share is 5
    ], momentum=0.9)  # fmt: skip
    optimizer.param_groups[1]["momentum"] = 0.0
    task = Rating()
    for batch in batches:
        strategy.forward_backward(batch)
        norm = strategy.step(1e-2).grad_norm
        optimizer.zero_grad()
        loss = (task.loss(model(batch.columns), batch.columns) * batch.row_weights()).sum() / batch.global_rows
        loss.backward()
        whole = nn.utils.clip_grad_norm_([p for p in model.parameters() if p.grad is not None], 0.5)
        assert norm == pytest.approx(float(whole), rel=1e-12) and norm > 0.5
        optimizer.step()
    for name in parts:
        got = strategy.tables.tables[name].table.pull(ids[name].numpy())
        assert np.abs(got - getattr(model, f"dense_{name}").detach().numpy()).max() < 1e-12


def test_a_model_whose_only_trained_part_is_tables_trains_and_checkpoints() -> None:
    strategy = recommending(0, 1, {"dense": False})
    for step in range(2):
        strategy.forward_backward(rating_batch(step))
        assert strategy.step(1e-2).grad_norm > 0
    assert strategy.state_dict()["model"] == {} and strategy.tables.measured()["users"]["rows"] > 20
    strategy.load_state_dict(strategy.state_dict())


def test_layouts_and_averages_that_tables_do_not_go_with_are_refused() -> None:
    info = RankInfo(0, 1, 0, 1)
    strategy = build_strategy(ParallelConfig(), info, CPU, ema=0.9)
    with pytest.raises(ValueError, match=r"sparse tables with optim\.ema = 0\.9.*\(tables: users, tags\)"):
        strategy.prepare(Recommender(), Rating(), lambda named: torch.optim.SGD([p for _, p in named]))


@pytest.mark.parametrize(
    ("columns", "problem"),
    [
        ({"user": torch.tensor([1])}, "column 'friend' is not among those the model is given: \\['user'\\]"),
        ({"user": torch.tensor([1]), "friend": torch.tensor([0.5])}, "column 'friend' is torch.float32; ids are whole"),
        ({"user": ["a"], "friend": ["b"]}, "column 'user' is list; ids are whole numbers"),
    ],
)
def test_columns_that_hold_no_ids_are_named(columns: dict[str, object], problem: str) -> None:
    modules = {"users": Recommender().users}
    with pytest.raises(ValueError, match=f"SparseEmbedding 'users': {problem}"):
        SparseTables(modules, TableSettings(), Alone(), CPU).pull(columns, training=False)


def test_rounded_rows_are_what_a_model_sees_and_pushes() -> None:
    table = ShardedTable(TableSpec("t", 2, 1.0), Alone(), wire="bf16")
    ids = np.array([1, 2])
    rows = table.pull(ids, training=True)
    assert (rows == torch.from_numpy(table.table.pull(ids)).bfloat16().float().numpy()).all()
    assert (rows != table.table.pull(ids)).any()
    assert (table.pull(ids, training=False) == table.table.pull(ids)).all(), "serving reads rows that are not rounded"
    assert table.reduce(np.full((2, 2), 1 + 2**-12, np.float32)) == 4.0


def test_the_bytes_of_the_pull_are_measured_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """One process sends nothing: whether the rows are pulled within is what is looked at."""
    strategy, within = recommending(0, 1, {}), list[bool]()
    measuring, pull = strategy.local.measuring, strategy.tables.pull
    inside = False

    @contextmanager
    def noted(batch: Batch) -> Iterator[None]:
        nonlocal inside
        with measuring(batch):
            inside = True
            yield
            inside = False

    def pulling(columns: Columns, training: bool) -> None:
        within.append(inside)
        pull(columns, training)

    monkeypatch.setattr(strategy.local, "measuring", noted)
    monkeypatch.setattr(strategy.tables, "pull", pulling)
    strategy.forward_backward(rating_batch(0))
    assert within == [True]


def test_uses_of_ids_are_counted_in_training_and_not_in_evaluation() -> None:
    strategy = recommending(0, 1, {"tables": {}})
    batches = [rating_batch(step) for step in range(2)]
    for batch in batches:
        strategy.forward_backward(batch)
        strategy.step(1e-2)
        strategy.evaluate(batch)
    seen = torch.cat([batch.columns[name] for batch in batches for name in ("user", "friend")])
    ids, counts = np.unique(seen.numpy(), return_counts=True)
    hot = strategy.tables.hot["users"]
    assert (hot.ids == ids).all() and (hot.counts == counts).all() and hot.total == 2 * 2 * 24


def test_a_checkpoint_of_other_tables_is_refused_by_name() -> None:
    made = SparseTables({"users": Recommender().users}, TableSettings(TablesConfig()), Alone(), CPU)
    with pytest.raises(ValueError, match="'items' is another model's; the model has \\['users'\\]"):
        made.load({"items": [], "users": []})
    with pytest.raises(ValueError, match="'users' is missing"):
        made.load({})


def test_with_a_lag_evaluation_and_export_see_every_gradient() -> None:
    plain, lagged = recommending(0, 1, {}), recommending(0, 1, {"tables": {"lag": 2}, "clip_norm": None})
    ids = torch.arange(-20, 20) * (2**58 - 1)
    columns = rating_batch(0).columns | {"user": ids[:24], "friend": ids[16:]}
    try:
        for batch in lagged.ahead(iter([rating_batch(step) for step in range(4)])):
            lagged.forward_backward(batch)
            lagged.step(1e-2)
        lagged.tables.pull(columns, training=False)
        seen = lagged.tables.modules["users"].source.rows_of(ids)  # type: ignore[union-attr]
        assert lagged.tables.tables["users"].table.clock == 4
        assert torch.equal(seen, torch.from_numpy(lagged.tables.tables["users"].table.pull(ids.numpy())))
        assert lagged.tables.measured()["users"]["rows"] > 20 and plain.tables._thread is None
    finally:
        lagged.close()


def test_with_a_lag_batches_come_from_ahead_and_in_order() -> None:
    strategy = recommending(0, 1, {"tables": {"lag": 1}})
    batches = [rating_batch(step) for step in range(3)]
    try:
        with pytest.raises(RuntimeError, match=r"tables\.lag = 1: train the batches that Strategy\.ahead yields"):
            strategy.tables.pull(batches[0].columns, training=True)
        ahead = strategy.ahead(iter(batches))
        next(ahead)
        with pytest.raises(RuntimeError, match="in order"):
            strategy.tables.pull(batches[1].columns, training=True)
    finally:
        strategy.close()


def test_sums_that_are_not_finite_though_every_gradient_is_end_the_training() -> None:
    """With a lag and no clipping they are found after the step."""
    strategy = recommending(0, 1, {"tables": {"lag": 1}, "clip_norm": None}, torch.float32)
    tables, table = strategy.tables, strategy.tables.tables["users"]
    try:
        (batch,) = list(strategy.ahead(iter([rating_batch(0, torch.float32)])))
        tables.pull(batch.columns, training=True)
        table.reduce = lambda grads: float("inf")  # type: ignore[method-assign]
        assert np.isfinite(tables.reduce(1.0, exact=False))
        tables.apply(0.1, 1.0)
        with pytest.raises(ValueError, match=r"their sum is not; lower tables\.lr"):
            tables.measured()
    finally:
        strategy.close(failed=True)
