"""A column of Arrow as groups and leaks are looked for in it."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sparkring.pipelines.init.soundness.groups import Array, Values, codes_of

CODES = 0.9  # of the distinct texts have a digit


def codes(column: pa.ChunkedArray) -> Array:
    """Enumerate the distinct values, null among them, from 0: (N,) int64."""
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    encoded = column.dictionary_encode(null_encoding="encode").combine_chunks()
    whole = encoded.combine_chunks() if isinstance(encoded, pa.ChunkedArray) else encoded
    found: Array = whole.indices.to_numpy(zero_copy_only=False).astype(np.int64)
    return codes_of(found)


def microseconds(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Convert dates and timestamps to microseconds since 1970, truncated."""
    return column.cast(pa.timestamp("us"), safe=False).cast(pa.int64())


def numbers(column: pa.ChunkedArray) -> Array:
    """Convert numbers or dates to float64, (N,); NaN for a null."""
    if pa.types.is_temporal(column.type):
        column = microseconds(column)
    found: Array = column.cast(pa.float64(), safe=False).to_numpy()
    return found


def values_of(column: pa.ChunkedArray) -> Values:
    """Return a column's values; only codes unless they are texts, numbers or dates."""
    kind = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
    if pa.types.is_date(kind) or pa.types.is_timestamp(kind):
        return Values(codes(column), numbers(column), is_text=False, is_whole=False)
    if pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind):
        found = numbers(column)
        is_whole = pa.types.is_integer(kind) or not np.any(np.fmod(found[np.isfinite(found)], 1))
        return Values(codes(column), found, is_text=False, is_whole=bool(is_whole))
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
        return Values(codes(column), None, is_text=True, is_whole=False)
    texts = pc.unique(column.cast(pa.large_string())).drop_null()
    with_digit = pc.mean(pc.match_substring_regex(texts, "[0-9]").cast(pa.int8())).as_py() or 0.0
    return Values(codes(column), None, is_text=True, is_whole=False, is_code=with_digit > CODES)
