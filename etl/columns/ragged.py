"""Arrow list arrays from and to the lengths of their rows, with numpy."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray


def list_lengths(lists: pa.ListArray) -> NDArray[np.int32]:
    """Count the values of each row, (rows,). A null row may have any; `lists.flatten()` omits its values."""
    if not len(lists):  # an empty array may have no offsets at all
        return np.zeros(0, np.int32)
    lengths: NDArray[np.int32] = np.diff(lists.offsets.to_numpy())
    return lengths


def lists_of(
    values: pa.Array | NDArray[np.generic], lengths: NDArray[np.int32], mask: pa.Array | None = None
) -> pa.ListArray:
    """Make the list array whose row i has the next lengths[i] of `values`; null where `mask` is true."""
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)  # (rows + 1,)
    values = values if isinstance(values, pa.Array) else pa.array(values)
    return pa.ListArray.from_arrays(pa.array(offsets), values, mask=mask)
