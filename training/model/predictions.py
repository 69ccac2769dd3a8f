"""What a model predicts for the rows of a split, on a rank and where the driver scores a champion."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from sparkring.conf.storage import Storage
from sparkring.training.data.batch import Batch
from sparkring.training.models.task import Task


class Predictions:
    """Collects this rank's scores of a split: `id` (row number in the split), `prediction`, `label`.

    `weighted`: and each row's `weight`.
    """

    def __init__(self, task: Task, weighted: bool = False) -> None:
        self.task, self.weighted = task, weighted
        self.parts: list[tuple[np.ndarray, ...]] = []

    def add(self, batch: Batch, outputs: Any) -> None:
        """Keep the scores of a batch's real rows, where the task has any; outputs and labels (B,) or (B, values)."""
        probabilities = self.task.probabilities(outputs)
        labels = self.task.labels(batch.columns)
        if probabilities is None or labels is None:
            return
        real = batch.real_rows()  # ids are the host's, outputs the device's
        assert batch.ids is not None, "evaluation readers carry ids"
        scores = probabilities.cpu()[real].numpy()
        part = (batch.ids[real].numpy(), scores, labels.cpu()[real].numpy())
        self.parts.append((*part, batch.row_weights().cpu()[real].numpy()) if self.weighted else part)

    def write(self, run: Storage, name: str) -> str | None:
        """Write one Parquet file below the run folder; its path, None where this rank scored nothing."""
        if not self.parts:
            return None
        columns = zip(("id", "prediction", "label", "weight"), zip(*self.parts, strict=True), strict=False)
        sink = pa.BufferOutputStream()
        pq.write_table(pa.table({column: stored_values(np.concatenate(part)) for column, part in columns}), sink)
        run.put_atomic(name, sink.getvalue().to_pybytes())
        return name


def stored_values(values: np.ndarray) -> pa.Array:
    """Convert values (N,), or (N, values) as lists."""
    return pa.array(values) if values.ndim == 1 else pa.FixedSizeListArray.from_arrays(values.ravel(), values.shape[1])
