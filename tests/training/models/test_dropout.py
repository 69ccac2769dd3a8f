"""Dropout's masks belong to rows: any number of ranks and of micro-batches trains the same weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sparkring.conf.blocks.data import DataConfig
from sparkring.conf.manifest import Column, DatasetManifest
from sparkring.conf.storage import open_storage
from sparkring.training.data.batch import SAMPLE, Batch
from sparkring.training.data.build import make_reader
from sparkring.training.data.request import DataRank, ReadRequest
from sparkring.training.models.dropout import Dropout, draws_masks, keep_mask
from sparkring.training.models.tabular import Tabular
from sparkring.training.parallel.batching import split_batch, weighted_sum
from sparkring.training.tasks import RegressionTask

COLUMNS = (
    Column(name="code", dtype="int32", cardinality=5),
    Column(name="x", dtype="float32"),
    Column(name="y", dtype="float32", role="label"),
)


@pytest.fixture
def dataset(make_dataset: Callable[..., DatasetManifest], tmp_path: Path) -> tuple[Path, DatasetManifest]:
    def make(ids: np.ndarray) -> dict[str, Any]:
        x = np.sin(ids).astype(np.float32)
        return {"code": (ids % 5).astype(np.int32), "x": x, "y": (x * (ids % 3)).astype(np.float32)}

    return tmp_path, make_dataset(tmp_path, [[40] * 3, [35]], COLUMNS, make)  # 155 rows


def batches_of(dataset: tuple[Path, DatasetManifest], world: int, steps: int, **data: Any) -> list[list[Batch]]:
    """Per step, every rank's batch of 24 rows in all; the last of an epoch is padded."""
    config = DataConfig.model_validate({"lanes": 7, "tail": "pad"} | data)
    names = ["code", "x", "y", SAMPLE]
    request = ReadRequest(open_storage(str(dataset[0])), dataset[1], "train", names, 24)
    readers = [make_reader(config, request, DataRank(rank, world)) for rank in range(world)]
    served = [list(reader.batches(0, steps)) for reader in readers]
    for reader in readers:
        reader.close()
    return [list(parts) for parts in zip(*served, strict=True)]


def by_rank(batch: Batch, rank: int) -> Batch:
    """What masks were seeded by before: the rank, and the row's place on it."""
    batch.columns[SAMPLE] = 1_000_003 * rank + torch.arange(batch.rows)
    return batch


def train(
    dataset: tuple[Path, DatasetManifest], world: int, accumulate: int, seed_by_rank: bool = False
) -> list[torch.Tensor]:
    """Weights after ten AdamW steps of the gradient summed over `world` ranks, each `accumulate` micro-batches."""
    torch.manual_seed(3)
    model = Tabular({"code": 5}, ["x"], width=8, blocks=2, dropout=0.3, bumps=2).double()
    task = RegressionTask(["code", "x", SAMPLE], "y")
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    for parts in batches_of(dataset, world, 10):
        for rank, batch in enumerate(parts):
            for part in split_batch(by_rank(batch, rank) if seed_by_rank else batch, accumulate):
                if part.rows:
                    losses = task.loss(model(*task.inputs(part.columns)), part.columns)
                    (weighted_sum(losses, part) / part.global_rows).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach() for p in model.parameters()]


def far(left: list[torch.Tensor], right: list[torch.Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(left, right, strict=True))


def test_any_world_and_any_micro_batches_train_the_same_weights(dataset: tuple[Path, DatasetManifest]) -> None:
    alone = train(dataset, 1, 1)
    for world, accumulate in ((1, 3), (2, 1), (3, 1), (3, 2), (4, 1), (4, 5)):
        assert far(train(dataset, world, accumulate), alone) < 1e-12, (world, accumulate)


def test_masks_of_ranks_would_be_seen(dataset: tuple[Path, DatasetManifest]) -> None:
    assert far(train(dataset, 2, 1, seed_by_rank=True), train(dataset, 1, 1, seed_by_rank=True)) > 1e-3


@pytest.mark.parametrize("mixed", [False, True])
def test_a_row_has_one_number_in_the_run_on_any_world(dataset: tuple[Path, DatasetManifest], mixed: bool) -> None:
    """Over three epochs, padding included; of a mix, over the passes of both parts."""
    parts = [{"dataset": str(dataset[0]), "weight": w} for w in (1, 2)]
    data: dict[str, Any] = {"mix": {"parts": parts, "stop": "all_exhausted"}} if mixed else {}

    def numbered(world: int) -> list[list[tuple[int, float]]]:
        steps = batches_of(dataset, world, 21, **data)
        rows = [[(b.columns[SAMPLE].tolist(), b.columns["x"].tolist()) for b in step] for step in steps]
        return [sorted(pair for one in step for pair in zip(*one, strict=True)) for step in rows]

    alone = numbered(1)
    numbers = [number for step in alone for number, _ in step]
    assert len(set(numbers)) == len(numbers) == 21 * 24
    for world in (2, 3, 5):
        assert [sorted(n for n, _ in step) for step in numbered(world)] == [[n for n, _ in step] for step in alone]
    if not mixed:  # padding repeats each rank's own last row
        whole = [step for i, step in enumerate(alone) if i % 7 != 6]
        assert [step for i, step in enumerate(numbered(4)) if i % 7 != 6] == whole
        assert numbers[:24] == list(range(24)) and numbers[7 * 24] == 7 * 24


def test_masks_drop_the_asked_share_and_are_independent() -> None:
    shape, p = torch.Size([16, 16]), 0.2
    masks = [keep_mask(torch.arange(4096) + 10**12, shape, p, seed).flatten(1).double() for seed in (5, 6)]
    for mask in masks:
        assert mask.mean() == pytest.approx(1 - p, abs=0.002)
        for dim, count in ((0, 4096), (1, 256)):  # of units over rows, and of rows over units: as of coin throws
            assert mask.mean(dim).std() == pytest.approx((p * (1 - p) / count) ** 0.5, rel=0.2)
        between = torch.corrcoef(mask.T).fill_diagonal_(0)
        assert between.std() == pytest.approx(1 / 64, rel=0.1) and between.abs().max() < 0.1
    assert abs(float(torch.corrcoef(torch.stack([m.flatten() for m in masks]))[0, 1])) < 0.005


def test_the_module_scales_what_it_keeps_and_says_what_it_needs() -> None:
    torch.manual_seed(0)
    layer, other = Dropout(0.25), Dropout(0.25)
    x, rows = torch.ones(64, 8, requires_grad=True), torch.arange(64)
    out = layer(x, rows)
    assert out.unique().tolist() == pytest.approx([0.0, 1 / 0.75])
    assert torch.equal(out, layer(x, rows)) and torch.equal(out[9:31], layer(x[9:31], rows[9:31]))
    assert not torch.equal(out, other(x, rows)) and not torch.equal(out, layer(x, rows + 64))
    out.sum().backward()
    assert torch.equal(x.grad, out)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="sparkring_sample"):
        layer(x, None)
    assert layer.eval()(x, None) is x and Dropout(0.0)(x, None) is x
    with pytest.raises(ValueError, match="p = 1"):
        Dropout(1)
    assert draws_masks(torch.nn.Sequential(layer)) and not draws_masks(torch.nn.Sequential(Dropout(0.0)))
