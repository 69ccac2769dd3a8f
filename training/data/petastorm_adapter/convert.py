"""Converts petastorm's rows and columns: to batches of equal size, and to tensors."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from itertools import islice
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from sparkring.conf.manifest import Column
from sparkring.training.data.batch import Ragged
from sparkring.training.data.decoding.columns import DataError, numpy_dtype

Array = NDArray[Any]
NULLS = "column {!r} holds nulls, which petastorm cannot give to torch; fill them, or use reader: native"
UNITS = {"date": "D", "timestamp": "us", "timestamp_ntz": "us"}


def stack_rows(rows: Iterator[Any], at_once: int = 256) -> Iterator[dict[str, Array]]:
    """Turn rows (named tuples of arrays) into columns, `at_once` rows at a time."""
    while part := [row._asdict() for row in islice(rows, at_once)]:
        yield {name: _as_column([row[name] for row in part]) for name in part[0]}


def _as_column(values: list[Any]) -> Array:
    """Stack values to (n, ...) if all rows have one shape, else return (n,) objects."""
    arrays = [np.asarray(v) for v in values]
    if len({(a.shape, a.dtype.kind in "OSU") for a in arrays}) == 1 and arrays[0].dtype.kind not in "OSU":
        return np.stack(arrays)
    out = np.empty(len(values), object)
    out[:] = values
    return out


def rebatch(blocks: Iterator[dict[str, Array]], rows: int) -> Generator[dict[str, Array], None, None]:
    """Cut blocks of any size into blocks of `rows` rows; the last may be shorter."""
    held: list[dict[str, Array]] = []
    count = 0
    for block in blocks:
        held.append(block)
        count += len(next(iter(block.values())))
        if rows and count >= rows:
            joined = {name: np.concatenate([b[name] for b in held]) for name in block}
            for at in range(0, count - rows + 1, rows):
                yield {name: values[at : at + rows] for name, values in joined.items()}
            rest = count % rows
            held = [{name: values[count - rest :] for name, values in joined.items()}] if rest else []
            count = rest
    if count and rows:
        yield {name: np.concatenate([b[name] for b in held]) for name in held[0]}


def tensor_of(name: str, values: Array | list[Any]) -> torch.Tensor | Ragged | list[Any]:
    """Convert a column to a tensor, a `Ragged` or a list.

    `Ragged` for lists of unequal length, a list for strings and bytes. DataError for a null, which no tensor can hold.
    """
    array = values if isinstance(values, np.ndarray) else _as_column(values)
    kind = array.dtype.kind
    if kind == "M":  # dates and timestamps: microseconds, as everywhere here
        return torch.from_numpy(since_1970(name, array, "us"))
    if kind == "u" and array.dtype.itemsize > 1:
        return torch.from_numpy(array.astype(np.int64))
    if kind not in "OSU":
        return torch.from_numpy(np.ascontiguousarray(array))
    if any(v is None for v in array):
        raise DataError(NULLS.format(name))
    rows = list(array)
    if rows and all(isinstance(v, np.ndarray) and v.dtype.kind not in "OSU" for v in rows):
        if len({v.shape for v in rows}) == 1:
            return torch.from_numpy(np.stack(rows))
        offsets = np.concatenate(([0], np.cumsum([len(v) for v in rows])))
        return Ragged(torch.from_numpy(np.concatenate(rows)), (torch.from_numpy(offsets),))
    if rows and all(hasattr(v, "as_tuple") for v in rows):  # decimal.Decimal
        return torch.tensor([float(v) for v in rows], dtype=torch.float64)
    return [str(v) if kind == "U" else v for v in rows]


def since_1970(name: str, values: Array, unit: str) -> Array:
    """Convert dates or timestamps, or arrays of them, to whole days (`unit` D) or microseconds (us) since 1970.

    Whole numbers stay as they are: a feature's codes. DataError for a null.
    """
    array = np.asarray(values)
    if array.dtype == object and len(array) and isinstance(array[0], np.ndarray):
        rows = np.empty(len(array), object)
        rows[:] = [since_1970(name, row, unit) for row in array]
        return rows
    if array.dtype.kind in "iu":
        return array
    moments = array.astype(f"datetime64[{unit}]")
    if np.isnat(moments).any():
        raise DataError(NULLS.format(name))
    return moments.astype(np.int64)


def declared_tensor(column: Column, values: Array) -> torch.Tensor | Ragged | list[Any]:
    """Convert a column to its declared dtype and shape, or raise DataError."""
    if unit := UNITS.get(column.logical.replace("array<", "").rstrip(">")):
        values = since_1970(column.name, values, unit)
    made = tensor_of(column.name, values)
    wanted = torch.from_numpy(np.zeros(0, numpy_dtype(column))).dtype
    if not isinstance(made, torch.Tensor):
        return made if len(values) else torch.zeros((0, *column.shape), dtype=wanted)
    if made.is_floating_point() and not wanted.is_floating_point:
        raise DataError(
            f"column {column.name!r} is declared {column.dtype}, petastorm gives {made.dtype}: it turns "
            "integers with nulls into floats; fill or drop the nulls, or use reader: native"
        )
    return made.to(wanted).reshape(len(made), *column.shape)
