"""Cut, pad and move a rank's batch, and weight its losses, for every strategy."""

from __future__ import annotations

from typing import Any

import torch

from sparkring.conf.plain_text import count_of
from sparkring.training.data.batch import Batch, Columns, Ragged
from sparkring.training.models.torch_private import is_dtensor


def part_bounds(rows: int, parts: int) -> list[tuple[int, int]]:
    """Split `rows` into `parts` contiguous ranges, equal to within one, longer first; some may be empty."""
    base, longer = divmod(rows, parts)
    stops = [base * (i + 1) + min(i + 1, longer) for i in range(parts)]
    return list(zip([0, *stops[:-1]], stops, strict=True))


def longest_part(rows: int, parts: int) -> int:
    """Return the rows of the longest range of `part_bounds`."""
    return -(-rows // parts)


def slice_column(column: Any, start: int, stop: int) -> Any:
    """Slice rows start..stop of a tensor, a Ragged or a list."""
    return column.rows(start, stop) if isinstance(column, Ragged) else column[start:stop]


def slice_batch(batch: Batch, start: int, stop: int) -> Batch:
    """Slice rows start..stop; `global_rows` and `consumed_samples` stay those of the global batch."""
    return Batch(
        columns={name: slice_column(column, start, stop) for name, column in batch.columns.items()},
        rows=stop - start,
        global_rows=batch.global_rows,
        consumed_samples=batch.consumed_samples,
        weight=None if batch.weight is None else batch.weight[start:stop],
        real=None if batch.real is None else batch.real[start:stop],
        ids=None if batch.ids is None else batch.ids[start:stop],
    )


def split_batch(batch: Batch, parts: int) -> list[Batch]:
    """Split into exactly `parts` batches, so that all ranks make equally many passes; some may be empty."""
    if parts == 1:
        return [batch]
    return [slice_batch(batch, start, stop) for start, stop in part_bounds(batch.rows, parts)]


def pad_rows(batch: Batch, rows: int) -> Batch:
    """Repeat the last row with weight 0 up to `rows` rows: pipelines exchange tensors of one fixed shape.

    A real row's values are valid inputs of the model and its loss, zeros may not be; an empty batch is padded with
    zeros all the same.
    """
    missing = rows - batch.rows
    if missing < 0:
        raise ValueError(f"a batch of {count_of(batch.rows, 'row')} cannot be padded to {rows}")
    if missing == 0:
        return batch
    for name, column in batch.columns.items():
        if not isinstance(column, torch.Tensor):
            raise ValueError(
                f"column {name!r} is a {type(column).__name__}: only tensor columns can be padded, which pp and tp need"
            )
    columns = {name: _pad(column, missing) for name, column in batch.columns.items()}
    weight = batch.row_weights()
    weight = torch.cat([weight, weight.new_zeros(missing)])
    real = torch.cat([batch.real_rows(), torch.zeros(missing, dtype=torch.bool)])
    return Batch(columns, rows, batch.global_rows, batch.consumed_samples, weight, real=real)


def _pad(column: torch.Tensor, missing: int) -> torch.Tensor:
    last = column[-1:] if len(column) else column.new_zeros(1, *column.shape[1:])
    return torch.cat([column, last.expand(missing, *column.shape[1:])])


def to_device(columns: Columns, device: torch.device) -> Columns:
    """Move tensors and Ragged columns to `device`; lists stay where they are."""
    if device.type == "cpu":
        return columns

    def move(column: Any) -> Any:
        if isinstance(column, Ragged):
            return Ragged(column.values.to(device, non_blocking=True), column.offsets)
        return column.to(device, non_blocking=True) if isinstance(column, torch.Tensor) else column

    return {name: move(column) for name, column in columns.items()}


def weighted_sum(row_losses: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Compute sum(weight_i * loss_i) over the rank's rows, 0-dim, in the losses' dtype."""
    if is_dtensor(row_losses):
        row_losses = row_losses.full_tensor()
    if row_losses.shape != (batch.rows,):
        raise ValueError(
            f"the task's loss has shape {tuple(row_losses.shape)}, expected ({batch.rows},): one unreduced loss per row"
        )
    if batch.weight is None:
        return row_losses.sum()
    return (row_losses * batch.weight.to(row_losses)).sum()
