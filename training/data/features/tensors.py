"""Which tensors are read, and how a row group's stored columns become them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from sparkring.conf.features import output_names
from sparkring.conf.manifest import ROW_NUMBER, Column, DatasetManifest
from sparkring.training.data.decoding.columns import RaggedArray, fixed_values, is_fixed, ragged_values
from sparkring.training.data.features.transform import Transform, make_transforms

Array = NDArray[Any]
Made = tuple[Column, Array | RaggedArray, Array | None]
"""A tensor's column, its values (n, *shape), and which rows are present (n,); None: all."""


class TensorSource:
    """The tensors of a read: those stored as they are, and those that fitted features make of stored columns."""

    def __init__(self, manifest: DatasetManifest, names: Sequence[str] | None, audit: bool = False) -> None:
        """Plan which stored columns to decode for the wanted tensors.

        `columns` are the tensors: `fitted` those made by features of `inputs`, `plain` the others; `stored` is decoded.

        Args:
            manifest: manifest of the dataset.
            names: names of tensors, None for all; the KeyError lists the known ones.
            audit: add the row numbers.
        """
        wanted = manifest.tensors if names is None else [manifest.tensor(name) for name in names]
        self.columns = (*wanted, *([Column(name=ROW_NUMBER, dtype="int64")] if audit else []))
        asked = {column.name: column for column in wanted}
        made = {state["name"]: output_names(state) for state in manifest.fitted}
        self._transforms: list[tuple[Transform, list[Column]]] = [
            (transform, found)
            for transform in make_transforms(manifest.features | {"features": manifest.fitted})
            if (found := [asked[name] for name in made[transform.name] if name in asked])
        ]
        self.fitted = tuple(column for _, found in self._transforms for column in found)
        outputs = {column.name for column in self.fitted}
        self.plain = tuple(column for column in self.columns if column.name not in outputs)
        inputs = [manifest.column(transform.column) for transform, _ in self._transforms]
        self.inputs = tuple({column.name: column for column in inputs}.values())
        self.stored = tuple({column.name: column for column in (*inputs, *self.plain)}.values())

    def fitted_of(self, table: pa.Table) -> Iterator[tuple[Column, Array, None]]:
        """Make the tensors of features of their `inputs`."""
        for transform, columns in self._transforms:
            values = transform.of_stored(table.column(transform.column))
            for column in columns:
                yield column, values[column.name], None

    def made(self, table: pa.Table) -> Iterator[Made]:
        """Make every tensor of the stored columns' rows, one column after the other."""
        yield from self.fitted_of(table)
        for column in self.plain:
            data = table.column(column.name)
            yield (column, *(fixed_values if is_fixed(column) else ragged_values)(column, data))

    @property
    def scalar_names(self) -> list[str]:
        """Names of the columns of `doubles`."""
        return [name for c in self.columns for name in (*element_names(c), c.mask) if name is not None]

    def doubles(self, table: pa.Table) -> pa.RecordBatch:
        """Make the tensors of the stored columns' rows, scalars or elements of vectors, and their masks, as doubles."""
        made: dict[str, pa.Array] = {}
        for column, values, present in self.made(table):
            assert not isinstance(values, RaggedArray), column.name
            numbers = values.astype(np.float64).reshape(len(values), -1)
            made |= {name: pa.array(numbers[:, i]) for i, name in enumerate(element_names(column))}
            if column.mask is not None:
                made[column.mask] = pa.array(np.ones(len(values)) if present is None else present.astype(np.float64))
        return pa.RecordBatch.from_pydict({name: made[name] for name in self.scalar_names})


def element_names(column: Column) -> list[str]:
    """Return the tensor's name; for a vector `<name>__0` and so on, one per element."""
    if column.layout == "scalar":
        return [column.name]
    return [f"{column.name}__{i}" for i in range(int(np.prod(column.shape)))]
