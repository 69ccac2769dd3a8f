"""The files of predictions that ranks leave in a run folder."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from sparkring.conf.storage import Storage
from sparkring.conf.stored import StoredError


def read_columns(run: Storage, files: Sequence[str], names: Sequence[str]) -> dict[str, np.ndarray]:
    """Read the named columns of all rows in order of `id`, (N,), or (N, values) for lists; `id` too.

    StoredError for damaged files.
    """
    try:
        tables = [pq.read_table(run.path(f), filesystem=run.fs, columns=["id", *names]) for f in files]
        table = pa.concat_tables(tables)
    except (pa.ArrowException, OSError) as error:
        raise StoredError(f"{run.uri}: its predictions {files} cannot be read ({error}); train again") from error
    ids = table["id"].to_numpy()
    order = np.argsort(ids, kind="stable")
    return {"id": ids[order]} | {name: _values(table, name)[order] for name in names}


def _values(table: pa.Table, name: str) -> np.ndarray:
    """Return a column's values, (N,), or (N, values) for lists."""
    column: Any = table[name].combine_chunks()
    values: Any = column.to_numpy(zero_copy_only=False)
    found: np.ndarray = np.stack(values) if pa.types.is_fixed_size_list(column.type) else values
    return found
