"""Find columns that say what the label is, as one that is written with it does."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

FEWEST_OF_CLASS = 10  # rows of each class: fewer may be apart by chance
ROWS_PER_VALUE = 20  # a value in fewer rows, on average, may go with one class by chance
ALIKE = 1 - 1e-9  # of the correlation of two numbers that are one


def gives_away(values: pa.ChunkedArray, label: pa.ChunkedArray, is_number: bool) -> bool:
    """Whether a column of single values decides the label in every row. `is_number`: the label is one, and no class."""
    known = pc.is_valid(label)
    values, label = values.filter(known), label.filter(known)
    if is_number:
        return _is_same_number(values, label)
    classes, of_class = np.unique(_codes(label), return_inverse=True)
    if len(classes) < 2 or np.bincount(of_class).min() < FEWEST_OF_CLASS:
        return False
    codes = _codes(values)
    return (
        _decides(values.is_null().to_numpy(), of_class)
        or (len(codes) >= ROWS_PER_VALUE * len(np.unique(codes)) and _decides(codes, of_class))
        or (len(classes) == 2 and _is_apart(values, of_class))
    )


def _codes(values: pa.ChunkedArray) -> np.ndarray:
    """A number for each distinct value, null among them."""
    encoded = values.dictionary_encode(null_encoding="encode").combine_chunks()
    whole = encoded.combine_chunks() if isinstance(encoded, pa.ChunkedArray) else encoded
    codes: np.ndarray = whole.indices.to_numpy(zero_copy_only=False)
    return codes


def _decides(codes: np.ndarray, of_class: np.ndarray) -> bool:
    """Whether each code goes with one class."""
    pairs = np.unique(np.column_stack([codes.astype(np.int64), of_class]), axis=0)
    return len(pairs) == len(np.unique(codes)) > 1


def _numbers(values: pa.ChunkedArray) -> np.ndarray | None:
    """As float64, NaN for a null; None for other types."""
    kind = values.type
    if not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind)):
        return None
    numbers: np.ndarray = values.cast(pa.float64(), safe=False).to_numpy()
    return numbers


def _is_same_number(values: pa.ChunkedArray, label: pa.ChunkedArray) -> bool:
    """Whether a number is the label times one number plus another."""
    ours, theirs = _numbers(values), _numbers(label)
    if ours is None or theirs is None:
        return False
    both = np.isfinite(ours) & np.isfinite(theirs)
    if both.sum() < FEWEST_OF_CLASS or not ours[both].std() or not theirs[both].std():
        return False
    return bool(abs(np.corrcoef(ours[both], theirs[both])[0, 1]) > ALIKE)


def _is_apart(values: pa.ChunkedArray, of_class: np.ndarray) -> bool:
    """Whether all numbers of one of two classes are above all of the other."""
    numbers = _numbers(values)
    if numbers is None:
        return False
    low, high = (numbers[(of_class == n) & np.isfinite(numbers)] for n in (0, 1))
    if min(len(low), len(high)) < FEWEST_OF_CLASS:
        return False
    return bool(low.max() < high.min() or high.max() < low.min())
