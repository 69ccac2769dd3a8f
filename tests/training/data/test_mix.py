"""Mixing by weight: shares, stop rules, the same batches from any step and on any world."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkring.conf.blocks.data import DataConfig, MixConfig
from sparkring.conf.manifest import Column, DatasetManifest
from sparkring.conf.storage import open_storage
from sparkring.training.data.batch import Batch
from sparkring.training.data.mix import MixedReader, MixPlan, make_mix
from sparkring.training.data.reader import ParquetReader
from sparkring.training.data.request import DataRank, ReadRequest

MakeDataset = Callable[..., DatasetManifest]
ROWS = (90, 40, 250)


def plan_of(rows: Sequence[int], weights: Sequence[float], gb: int, stop: str) -> MixPlan:
    parts = [{"dataset": "d", "weight": weight} for weight in weights]
    return make_mix(rows, MixConfig.model_validate({"parts": parts, "stop": stop}), gb)


@settings(max_examples=200)
@given(
    st.lists(st.integers(1, 400), min_size=2, max_size=5),
    st.data(),
    st.integers(1, 50),
    st.sampled_from(["first_exhausted", "all_exhausted", "forever"]),
)
def test_every_batch_is_whole_and_every_share_is_kept(rows: list[int], data: st.DataObject, gb: int, stop: str) -> None:
    weights = data.draw(st.lists(st.floats(0.05, 10), min_size=len(rows), max_size=len(rows)))
    try:
        plan = plan_of(rows, weights, gb, stop)
    except ValueError as error:
        assert "before one global batch" in str(error)
        return
    given_by = plan.given_after(np.arange(plan.epochs.steps + 1) * gb)
    assert (np.diff(given_by, axis=0) >= 0).all() and (given_by.sum(1) == np.arange(len(given_by)) * gb).all()
    shares = np.array(weights) / sum(weights)
    assert (np.abs(given_by - np.arange(len(given_by))[:, None] * gb * shares) < len(rows) + 0.5).all()
    if stop == "first_exhausted":
        assert (given_by[-1] <= rows).all()
        assert (plan.given_after(np.array([(plan.epochs.steps + 1) * gb]))[0] > rows).any()
    if stop == "all_exhausted":
        assert (given_by[-1] >= rows).all() and (given_by[-2] < rows).any()


@pytest.fixture
def make_mixed(make_dataset: MakeDataset, tmp_path: Path) -> Callable[..., MixedReader]:
    columns = [
        Column(name="source", dtype="int32"),
        Column(name="id", dtype="int64"),
        Column(name="r", dtype="int64", layout="ragged"),
    ]
    manifests = []
    for number, rows in enumerate(ROWS):

        def make(ids: np.ndarray, number: int = number) -> dict[str, pa.Array]:
            ragged = pa.array([[int(i)] * (int(i) % 3) for i in ids], pa.list_(pa.int64()))
            return {"source": pa.array([number] * len(ids), pa.int32()), "id": ids, "r": ragged}

        manifests.append(make_dataset(tmp_path / str(number), [[10] * (rows // 10)], columns, make))

    def build(stop: str, rank: int = 0, size: int = 1, gb: int = 16, seed: int = 3) -> MixedReader:
        parts = []
        for number, manifest in enumerate(manifests):
            request = ReadRequest(open_storage(str(tmp_path / str(number))), manifest, "train", None, gb)
            config = DataConfig(lanes=4, seed=seed + number, tail="pad")
            parts.append(ParquetReader(request, DataRank(rank, size), config))
        return MixedReader(parts, plan_of(ROWS, (1, 1, 2), gb, stop))

    return build


def all_ids(batches: list[Batch]) -> list[int]:
    """Rows counted through the parts."""
    pairs = [(s, i) for b in batches for s, i in zip(b.columns["source"], b.columns["id"], strict=True)]
    return [(0, 90, 130)[int(s)] + int(i) for s, i in pairs]


def read(reader: MixedReader, epoch: int, start: int = 0) -> list[Batch]:
    try:
        return list(reader.batches(epoch * reader.epochs.samples + start * 16))
    finally:
        reader.close()


def test_first_exhausted_repeats_nothing(make_mixed: Callable[..., MixedReader]) -> None:
    batches = read(make_mixed("first_exhausted"), 0)
    ids = all_ids(batches)
    assert len(ids) == len(set(ids)) == 16 * len(batches) == 160  # 40 rows at a quarter: 160 samples
    for batch in batches:
        assert Counter(batch.columns["source"].tolist()) == {0: 4, 1: 4, 2: 8}
        lengths = batch.columns["r"].offsets[0].diff().tolist()
        local = batch.columns["id"].tolist()
        assert lengths == [i % 3 for i in local]
        assert batch.columns["r"].values.tolist() == [i for i in local for _ in range(i % 3)]


def test_all_exhausted_serves_every_row_and_small_ones_again_in_another_order(
    make_mixed: Callable[..., MixedReader],
) -> None:
    ids = all_ids(read(make_mixed("all_exhausted"), 0))
    assert set(ids) == set(range(sum(ROWS)))
    second = [i for i in ids if 90 <= i < 130]
    assert sorted(second[:40]) == sorted(second[40:80]) and second[:40] != second[40:80]


@pytest.mark.parametrize("stop", ["first_exhausted", "all_exhausted", "forever"])
def test_a_pass_that_an_epoch_ends_in_is_no_other_epochs_pass(
    make_mixed: Callable[..., MixedReader], stop: str
) -> None:
    """Each pass over a dataset has an order of its own, also those of which an epoch takes a part."""
    reader = make_mixed(stop)
    for number, rows in enumerate(ROWS):
        turns = [
            [span.epoch for steps in reader.epochs.ranges(0, 3 * reader.steps_per_epoch) if steps.epoch == epoch
             for span in reader._spans(number, steps)]
            for epoch in range(3)
        ]  # fmt: skip
        used = [set(each) for each in turns]
        if stop == "forever":  # a pass goes on in the next epoch, where it was left
            assert sorted(set.union(*used)) == list(range(max(set.union(*used)) + 1)), rows
        else:
            assert not used[0] & used[1] and not used[1] & used[2] and not used[0] & used[2], rows
    reader.close()


def test_forever_goes_on_across_epochs(make_mixed: Callable[..., MixedReader]) -> None:
    first, second = (all_ids(read(make_mixed("forever"), epoch)) for epoch in (0, 1))
    large = [i for i in first + second if i >= 130]
    assert len(set(large[:250])) == 250  # a pass over the large part is whole, though it crosses the epoch


@pytest.mark.parametrize("stop", ["first_exhausted", "all_exhausted", "forever"])
def test_any_world_and_any_restart_serve_the_same_batches(make_mixed: Callable[..., MixedReader], stop: str) -> None:
    for epoch in (0, 1):
        whole = read(make_mixed(stop), epoch)
        start = len(whole) // 2
        parts = [read(make_mixed(stop, rank, 3), epoch, start) for rank in range(3)]
        for batch, *shares in zip(whole[start:], *parts, strict=True):
            assert sorted(all_ids([batch])) == sorted(all_ids(shares))
            assert {b.consumed_samples for b in shares} == {batch.consumed_samples} and {
                b.global_rows for b in shares
            } == {16}
        reader = make_mixed(stop)
        assert all_ids(list(reader.batches(whole[0].consumed_samples))) == all_ids(whole[1:])
        reader.close()


@pytest.mark.parametrize("stop", ["first_exhausted", "all_exhausted", "forever"])
def test_reading_on_serves_what_the_epochs_do_one_by_one(make_mixed: Callable[..., MixedReader], stop: str) -> None:
    epochs = [batch for epoch in range(3) for batch in read(make_mixed(stop), epoch)]
    reader = make_mixed(stop)
    served = list(reader.batches(3 * 16, len(epochs) - 5))
    reader.close()
    assert len(served) > 5
    for batch, alone in zip(served, epochs[3:-2], strict=True):
        assert all_ids([batch]) == all_ids([alone]) and batch.consumed_samples == alone.consumed_samples


@pytest.mark.parametrize(
    ("weights", "gb", "message"),
    [
        ((1, 0), 4, "greater than 0"),
        ((1,), 4, "at least 2 items"),
        ((1, 1e-9), 4, "less than 1/65536"),
        ((1, 1), 500, "before one global batch"),
    ],
)
def test_impossible_mixes_say_why(weights: tuple[float, ...], gb: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan_of([10, 10], weights, gb, "first_exhausted")
