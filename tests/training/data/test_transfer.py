"""Batches on their way to a device."""

from __future__ import annotations

import threading
from collections.abc import Generator

import torch

from sparkring.training.data.batch import Batch, Meter, Ragged
from sparkring.training.data.transfer import map_tensors, staged, to_device


def test_every_tensor_in_a_batch_is_mapped() -> None:
    one = torch.ones(2)
    value = {"a": one, "r": Ragged(one, (one,)), "images": [one, one], "bytes": [b"x"], "empty": []}
    out = map_tensors(value, lambda t: t + 1)
    assert out["a"].tolist() == [2, 2] and out["r"].values.tolist() == [2, 2] and out["r"].offsets[0] is one
    assert [i.tolist() for i in out["images"]] == [[2, 2], [2, 2]] and out["bytes"] == [b"x"] and out["empty"] == []
    batch = Batch({"a": one}, 2, 2, 2)
    assert next(to_device(iter([batch]), None, Meter())) is batch
    assert next(to_device(iter([batch]), torch.device("cpu"), Meter())) is batch


def test_what_works_on_the_host_finds_its_columns_there_behind_a_move() -> None:
    ids, offsets = torch.arange(3), torch.tensor([0, 1, 3])
    batch = Batch({"ids": Ragged(ids, (offsets,)), "x": torch.ones(2)}, 2, 2, 2)
    assert batch.on_host is batch.columns
    (moved,) = to_device(iter([batch]), torch.device("meta"), Meter())
    assert moved.columns["x"].is_meta and moved.columns["ids"].values.is_meta
    assert moved.columns["ids"].offsets[0] is offsets
    assert moved.on_host["ids"].values is ids and moved.on_host["x"].device.type == "cpu"


def test_batches_are_sent_ahead_by_a_thread_of_their_own() -> None:
    """What pins and copies for a GPU, with a plain function in place of the copy."""
    sent_by, left = [], []

    def batches() -> Generator[Batch, None, None]:
        try:
            for number in range(6):
                yield Batch({}, 0, 1, number)
        finally:
            left.append(threading.current_thread().name)

    def send(batch: Batch) -> int:
        sent_by.append(threading.current_thread().name)
        return batch.consumed_samples

    assert list(staged(batches(), send)) == [0, 1, 2, 3, 4, 5]
    some = staged(batches(), send)
    assert next(some) == 0
    some.close()
    assert set(sent_by) == {"sparkring-reader"} and left == ["sparkring-reader"] * 2
