"""Scoring where batches are on an accelerator: here a fake device, said to be one, which refuses what CUDA would."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch

from sparkring.conf.storage import open_storage
from sparkring.training.data.batch import Batch
from sparkring.training.model.predictions import Predictions
from sparkring.training.tasks import BinaryTask


class OnFakeDevice(torch.Tensor):
    """A tensor that meets no tensor of the CPU in one call, and becomes one by `cpu()` only."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name == "cpu":
            return args[0].as_subclass(torch.Tensor)
        if name == "numpy":
            raise TypeError("can't convert a device's tensor to numpy")
        flat = [*args, *(args[1] if len(args) > 1 and isinstance(args[1], tuple) else ())]
        if any(isinstance(x, torch.Tensor) and not isinstance(x, OnFakeDevice) and x.ndim for x in flat):
            raise RuntimeError("tensors are on two devices")
        return super().__torch_function__(func, types, args, kwargs or {})


def on_device(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.as_subclass(OnFakeDevice)


def test_predictions_are_collected_from_a_device(tmp_path: Any) -> None:
    """Padding is left out, and rows of weight 0 are not; ids, which the audit needs, stay on the host."""
    columns = {"late": on_device(torch.tensor([True, False, True]))}
    weight = on_device(torch.tensor([1.0, 0.0, 0.0]))
    batch = Batch(columns, 3, 2, 3, weight, torch.tensor([4, 5, 6]), torch.tensor([True, False, True]))
    predictions = Predictions(BinaryTask(["x"], "late"))
    predictions.add(batch, on_device(torch.tensor([0.0, 1.0, 2.0])))
    name = predictions.write(open_storage(str(tmp_path)), "part.parquet")
    assert name is not None
    table = pq.read_table(tmp_path / name)
    assert table["id"].to_pylist() == [4, 6] and table["label"].to_pylist() == [True, True]
    np.testing.assert_allclose(table["prediction"].to_numpy(), 1 / (1 + np.exp(-np.array([0.0, 2.0]))))
