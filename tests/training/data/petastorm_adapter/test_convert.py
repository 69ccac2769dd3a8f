"""petastorm's columns as tensors, and its blocks as batches."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from sparkring.conf.manifest import Column
from sparkring.training.data.petastorm_adapter.convert import declared_tensor, rebatch, tensor_of


def test_tensors_of_petastorms_columns() -> None:
    assert tensor_of("t", np.array(["1970-01-01T00:00:01"], "datetime64[ns]")).tolist() == [1_000_000]  # type: ignore[union-attr]
    ragged = tensor_of("r", [np.array([1, 2]), np.array([3])])
    assert ragged.offsets[0].tolist() == [0, 2, 3]  # type: ignore[union-attr]
    assert tensor_of("s", np.array(["a", "b"])) == ["a", "b"]
    with pytest.raises(ValueError, match="column 's' holds nulls"):
        tensor_of("s", ["a", None])


def test_blocks_of_any_size_become_blocks_of_one_size() -> None:
    edges = [0, 3, 4, 11, 12]
    blocks = iter([{"x": np.arange(a, b)} for a, b in itertools.pairwise(edges)])
    assert [block["x"].tolist() for block in rebatch(blocks, 5)] == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9], [10, 11]]


def test_a_declared_column_has_its_dtype_and_shape_or_is_refused() -> None:
    vector = Column(name="v", dtype="float32", layout="vector", shape=(2, 1))
    made = declared_tensor(vector, np.arange(6.0).reshape(3, 2))
    assert isinstance(made, torch.Tensor) and made.dtype == torch.float32 and made.shape == (3, 2, 1)
    with pytest.raises(ValueError, match=r"column 'n' is declared int64, petastorm gives torch\.float64"):
        declared_tensor(Column(name="n", dtype="int64"), np.array([1.0, np.nan]))
