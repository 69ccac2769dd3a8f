"""Apply fitted features in numpy: to stored columns in the reader's threads, to raw rows where a model serves.

One implementation for both, so a row gives the same bits wherever it is read. Raw rows come as Arrow arrays where a
column has one type, else as Python values, one by one: `of_raw` is what `of_arrow` must agree with. Arithmetic is IEEE
double, rounded to float32 last, as Spark's would be: categorical, hashed and numeric features are bit-equal to Spark's
expressions for them, `log1p` and `cyclic` may differ by one float32 unit in the last place (the JVM's and C's functions
round differently).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from sparkring.conf.features import EXACT_DTYPES, FIRST_CODE, NULL_CODE, UNSEEN_CODE, State, whole_number
from sparkring.conf.manifest import Column
from sparkring.conf.plain_text import count_of
from sparkring.training.data.decoding.columns import PLAIN, DataError, byte_rows, nulls_of, one_array, plain_values
from sparkring.training.data.features.raw import as_text, doubles, is_null, passthrough, passthrough_arrow
from sparkring.training.data.features.xxhash64 import NULL_ID, hash_bytes, hash_whole

Array = NDArray[Any]
RawColumn: TypeAlias = "pa.Array | Sequence[Any]"
"""A raw column: an Arrow array of any type, or Python, numpy or pandas values."""
WHOLE_TYPES = ("tinyint", "smallint", "int", "bigint")  # Spark's
TABLE_SPAN = 1 << 16  # whole numbers in so small a range are looked up in a table, others by binary search


class Transform(ABC):
    """One fitted feature of kind numeric, categorical, hashed or cyclic. Immutable: threads share it."""

    def __init__(self, state: State, spark_type: str) -> None:
        """Keep the feature's names. `spark_type`: type of its raw column."""
        self.name: str = state["name"]
        self.column: str = state["column"]
        self._type = spark_type

    @abstractmethod
    def of_stored(self, data: pa.ChunkedArray) -> dict[str, Array]:
        """Make the outputs, each (n,), of the stored column's n rows."""

    @abstractmethod
    def of_raw(self, values: Sequence[Any]) -> dict[str, Array]:
        """Make the outputs, each (n,), of n Python, numpy or pandas values; None, NaN and NaT are nulls."""

    @abstractmethod
    def of_arrow(self, array: pa.Array) -> dict[str, Array]:
        """Make what `of_raw` makes of the array's n values, whose type need not be the stored column's."""


class NumberTransform(Transform):
    """A feature of one number per row."""

    def of_stored(self, data: pa.ChunkedArray) -> dict[str, Array]:
        x, null = _numbers(one_array(data))
        return self._made(x, _with_nan(x, null))

    def of_raw(self, values: Sequence[Any]) -> dict[str, Array]:
        x = doubles(values)
        return self._made(x, _with_nan(x, None))

    def of_arrow(self, array: pa.Array) -> dict[str, Array]:
        # Past the largest int64, numbers are looked up no more: `_by_value` would not find their place.
        is_plain = array.type in PLAIN and array.type != pa.uint64()
        if is_plain or pa.types.is_boolean(array.type):
            return self.of_stored(pa.chunked_array([array]))
        return self.of_raw(array.to_pylist())

    def _made(self, x: Array, null: Array | None) -> dict[str, Array]:
        """Transform numbers x (n,) of any dtype; null: (n,) bool, or None without nulls."""
        with np.errstate(over="ignore", invalid="ignore"):  # infinities are values, as they are in Spark
            return self.made(x, null)

    @abstractmethod
    def made(self, x: Array, null: Array | None) -> dict[str, Array]: ...


def _numbers(array: pa.Array) -> tuple[Array, Array | None]:
    """Return a column's values (n,), any number for null, and a mask of nulls (n,), None without nulls."""
    return plain_values(array), nulls_of(array) if array.null_count else None


def _with_nan(x: Array, null: Array | None) -> Array | None:
    if x.dtype.kind != "f":
        return null
    nan = np.isnan(x)
    if null is not None:
        return nan | null
    return nan if nan.any() else None


class Numeric(NumberTransform):
    """log1p where asked, fill for nulls, one affine; and an indicator of nulls."""

    def __init__(self, state: State, spark_type: str) -> None:
        super().__init__(state, spark_type)
        self._log = state["transform"] == "log1p"
        self._mean, self._std, self._fill = float(state["mean"]), float(state["std"]), float(state["fill"])
        self._indicator: bool = state["indicator"]

    def made(self, x: Array, null: Array | None) -> dict[str, Array]:
        if self._log:
            # Not np.maximum: it may make +0.0 of a -0.0, which Spark's greatest() keeps.
            x = _by_value(x, lambda values: np.log1p(np.where(values < 0.0, 0.0, values)))
        scaled = np.subtract(x, self._mean, dtype=np.float64)
        scaled /= self._std
        if null is not None:
            np.copyto(scaled, (self._fill - self._mean) / self._std, where=null)
        out = {self.name: scaled.astype(np.float32)}
        if self._indicator:
            out[f"{self.name}__null"] = np.zeros(len(x), np.float32) if null is None else null.astype(np.float32)
        return out


class Cyclic(NumberTransform):
    """Sine and cosine of a number's place in its period; for a null both 0, or what the state's `fill` says."""

    def __init__(self, state: State, spark_type: str) -> None:
        super().__init__(state, spark_type)
        self._step, self._fill = 2.0 * math.pi / state["period"], np.float32(state.get("fill", 0.0))

    def made(self, x: Array, null: Array | None) -> dict[str, Array]:
        sin = _by_value(x, lambda values: np.sin(values * self._step).astype(np.float32))
        cos = _by_value(x, lambda values: np.cos(values * self._step).astype(np.float32))
        made = {f"{self.name}_sin": sin, f"{self.name}_cos": cos}
        return made if null is None else {name: np.where(null, self._fill, v) for name, v in made.items()}


def _by_value(x: Array, function: Callable[[NDArray[np.float64]], Array]) -> Array:
    """Apply `function` to numbers (n,); whole ones in a small range are computed once per value and looked up."""
    if x.dtype.kind in "iu" and len(x):
        low, high = int(x.min()), int(x.max())
        if high - low < len(x) // 2:
            of_value = function(np.arange(low, high + 1, dtype=np.int64).astype(np.float64))
            return np.take(of_value, np.subtract(x, low, dtype=np.int64))
    return function(x.astype(np.float64, copy=False))


class ByValue(Transform):
    """A feature that knows a value by its text, or by the whole number behind it; nulls have a number of their own."""

    null: int  # what a null becomes
    dtype: type[np.signedinteger[Any]]

    @abstractmethod
    def of_texts(self, texts: pa.StringArray) -> Array:
        """Transform strings (n,) to (n,) of `dtype`; a null gives any value."""

    @abstractmethod
    def of_whole(self, values: Array) -> Array:
        """Transform whole numbers or booleans (n,) to (n,) of `dtype`."""

    @abstractmethod
    def of_value(self, text: str) -> int:
        """Transform one raw value, given as Spark's cast to string writes it."""

    def of_stored(self, data: pa.ChunkedArray) -> dict[str, Array]:
        parts = [self._made(chunk) for chunk in data.chunks]
        return {self.name: parts[0] if len(parts) == 1 else np.concatenate([*parts, np.zeros(0, self.dtype)])}

    def _made(self, array: pa.Array) -> Array:
        if pa.types.is_string(array.type):
            array = array.dictionary_encode()
        if pa.types.is_dictionary(array.type):
            if not len(array.dictionary):
                return np.full(len(array), self.null, self.dtype)
            return self._at_places(self.of_texts(array.dictionary), array.indices)
        values, null = _numbers(array.view(pa.int32()) if pa.types.is_date32(array.type) else array)
        return self._with_nulls(self.of_whole(values), null)

    def of_raw(self, values: Sequence[Any]) -> dict[str, Array]:
        made = (self.null if is_null(v) else self.of_value(as_text(v, self._type)) for v in values)
        return {self.name: np.fromiter(made, self.dtype, len(values))}

    def of_arrow(self, array: pa.Array) -> dict[str, Array]:
        if array.null_count == len(array):
            return {self.name: np.full(len(array), self.null, self.dtype)}
        if pa.types.is_large_string(array.type):
            array = array.cast(pa.string())
        is_text = pa.types.is_string(array.type) and self._type != "boolean"  # `True` is `true` there
        if self._takes_text(is_text) or self._is_stored_as(array.type):
            return {self.name: self._made(array)}
        coded = array.dictionary_encode()  # the text of a value is made once for all rows that have it
        return {self.name: self._at_places(self.of_raw(coded.dictionary.to_pylist())[self.name], coded.indices)}

    def _takes_text(self, is_text: bool) -> bool:
        """Return whether `of_texts` handles the values of a string column."""
        return is_text

    def _is_stored_as(self, kind: pa.DataType) -> bool:
        """Return whether whole numbers of this type mean the same as the stored column's: 1 is not `true`."""
        if pa.types.is_boolean(kind):
            return self._type == "boolean"
        if pa.types.is_date32(kind):
            return self._type == "date"
        return pa.types.is_integer(kind) and kind != pa.uint64() and self._type in WHOLE_TYPES

    def _at_places(self, of_dictionary: Array, indices: pa.Array) -> Array:
        """Return rows (n,) picked from a dictionary's transformed values (values,)."""
        places, null = _numbers(indices)
        return self._with_nulls(np.take(of_dictionary, places, mode="clip"), null)  # a null's place may be any

    def _with_nulls(self, made: Array, null: Array | None) -> Array:
        if null is not None:
            np.copyto(made, self.null, where=null)
        return made


class Categorical(ByValue):
    """A value's code: by falling count in training, after those of a null and of a value not seen there."""

    null, dtype = NULL_CODE, np.int32

    def __init__(self, state: State, spark_type: str) -> None:
        super().__init__(state, spark_type)
        self._code_of: dict[str, int] = {value: FIRST_CODE + i for i, value in enumerate(state["values"])}
        self._code_of_bytes = {value.encode(errors="surrogatepass"): code for value, code in self._code_of.items()}
        whole = [] if spark_type not in EXACT_DTYPES else [whole_number(v, spark_type) for v in state["values"]]
        self._whole = WholeCodes(whole)

    def of_texts(self, texts: pa.StringArray) -> Array:
        # compared as bytes: no Python text is made of them
        offsets, data = byte_rows(texts)
        held, code_of = data.tobytes(), self._code_of_bytes
        codes = [code_of.get(held[a:b], UNSEEN_CODE) for a, b in pairwise(offsets.tolist())]
        return np.array(codes, np.int32)

    def of_whole(self, values: Array) -> Array:
        return self._whole.of(values)

    def of_value(self, text: str) -> int:
        return self._code_of.get(text, UNSEEN_CODE)


class Hashed(ByValue):
    """A value's 64-bit id: Spark's xxhash64 of the string, or of the whole number as a bigint."""

    null, dtype = NULL_ID, np.int64

    def of_texts(self, texts: pa.StringArray) -> Array:
        return hash_bytes(*byte_rows(texts))

    def of_whole(self, values: Array) -> Array:
        return hash_whole(values)

    def of_value(self, text: str) -> int:
        if self._type in EXACT_DTYPES:
            return int(hash_whole(np.array([whole_number(text, self._type)]))[0])
        held = np.frombuffer(text.encode(errors="surrogatepass"), np.uint8)
        return int(hash_bytes(np.array([0, len(held)]), held)[0])

    def _takes_text(self, is_text: bool) -> bool:
        return is_text and self._type not in EXACT_DTYPES  # else "7" stands for the number


class Classes(Categorical):
    """A class's place in the list, (n,) int64; DataError for a text that is none."""

    def of_stored(self, data: pa.ChunkedArray) -> dict[str, Array]:
        codes = super().of_stored(data)[self.name].astype(np.int64) - FIRST_CODE
        if (codes < 0).any():
            raise DataError(
                f"label {self.name!r}: {count_of(int((codes < 0).sum()), 'row is')} of no class that a model knows"
            )
        return {self.name: codes}


class TagFlags(Categorical):
    """For each tag of the list whether a row has it, (n, tags) float32; DataError for a text that is none."""

    def of_stored(self, data: pa.ChunkedArray) -> dict[str, Array]:
        array = one_array(data)
        rows = np.repeat(np.arange(len(array)), plain_values(pc.list_value_length(array)))
        codes = self._made(array.flatten()).astype(np.int64) - FIRST_CODE
        if (codes < 0).any():
            raise DataError(
                f"label {self.name!r}: {count_of(int((codes < 0).sum()), 'tag is')} none that a model knows"
            )
        made = np.zeros((len(array), len(self._code_of)), np.float32)
        made[rows, codes] = 1.0
        return {self.name: made}


class WholeCodes:
    """Codes of whole numbers: by a table where they are close to each other, else by binary search."""

    def __init__(self, values: Sequence[int]) -> None:
        """Build the lookup. `values`: in the order of their codes."""
        order = np.argsort(np.array(values, np.int64), kind="stable")
        self._keys = np.array(values, np.int64)[order]
        self._codes = (order + FIRST_CODE).astype(np.int32)
        low, high = (min(values), max(values)) if values else (0, 0)
        self._table, self._first = None, low - 1
        if high - low < TABLE_SPAN and low > -(1 << 62):  # a place for what is below, and one for what is above
            self._table = np.full(high - low + 3, UNSEEN_CODE, np.int32)
            self._table[self._keys - self._first] = self._codes

    def of(self, values: Array) -> NDArray[np.int32]:
        """Return the codes (n,) of whole numbers or booleans (n,)."""
        if self._table is not None:
            # A difference that overflows is no place in the table either: modulo 2^64 only equal values share one.
            return np.take(self._table, np.subtract(values, self._first, dtype=np.int64), mode="clip")
        place = np.minimum(np.searchsorted(self._keys, values), len(self._keys) - 1)
        found: NDArray[np.int32] = np.where(self._keys[place] == values, self._codes[place], np.int32(UNSEEN_CODE))
        return found


TRANSFORMS: dict[str, type[Transform]] = {
    "numeric": Numeric,
    "categorical": Categorical,
    "hashed": Hashed,
    "cyclic": Cyclic,
    "classes": Classes,
    "tags": TagFlags,
}


def make_transforms(features: State) -> list[Transform]:
    """Make the transforms of `manifest.features`, in its order; columns that are passed through have none."""
    inputs, states = features.get("inputs", {}), features.get("features", [])
    return [
        TRANSFORMS[state["kind"]](state, inputs.get(state["column"], "string"))
        for state in states
        if state["kind"] in TRANSFORMS
    ]


class RawFeatures:
    """Fitted features of raw columns. Immutable; made once for any number of batches."""

    def __init__(self, features: State, decoders: Mapping[str, str] | None = None) -> None:
        """Build the transforms. `features`: `manifest.features`; `decoders`: `data.decoders` of the recipe."""
        self._images = _image_columns(features["features"], decoders or {})
        self._states, self._inputs = features["features"], features.get("inputs", {})
        self._transforms = {transform.name: transform for transform in make_transforms(features)}

    @property
    def columns(self) -> list[str]:
        """The raw columns that are read."""
        return list(dict.fromkeys(state["column"] for state in self._states))

    def of(self, rows: Mapping[str, RawColumn]) -> dict[str, Array]:
        """Make the feature columns, each (rows,), as the reader serves them.

        A null is None, NaN or NaT. Raises KeyError naming a raw column that is not given, ValueError one with values
        that are none of its type.
        """
        out: dict[str, Array] = {}
        for state in self._states:
            name, column = state["name"], state["column"]
            if column not in rows:
                raise KeyError(f"feature {name!r} needs the column {column!r}; given: {sorted(rows)}")
            values = rows[column]
            if name in self._images:
                out[name] = self._images[name](values)
            elif state["kind"] == "passthrough":
                convert = passthrough_arrow if isinstance(values, pa.Array) else passthrough
                out |= convert(state, values, self._inputs[column])
            else:
                out |= self._transformed(self._transforms[name], values)
        return out

    def decoded(self, name: str, cells: pa.Array) -> NDArray[np.uint8]:
        """Decode the stored cells of the feature `name`, which is of images."""
        return self._images[name](cells)

    def _transformed(self, transform: Transform, values: RawColumn) -> dict[str, Array]:
        try:
            return transform.of_arrow(values) if isinstance(values, pa.Array) else transform.of_raw(values)
        except (ValueError, TypeError) as error:
            raise ValueError(f"column {transform.column!r}: {error}") from error


def _image_columns(
    states: Sequence[State], named: Mapping[str, str]
) -> dict[str, Callable[[RawColumn], NDArray[np.uint8]]]:
    """Map each image feature to the function that decodes its raw values, (n, height, width, channels)."""
    images = [state for state in states if "fit" in state]
    if not images:
        return {}
    from sparkring.training.data.decoding.cells import decoded, make_decoders  # Pillow: models without images need none

    def of(state: State, values: RawColumn) -> NDArray[np.uint8]:
        cells = values.to_pylist() if isinstance(values, pa.Array) else list(values)
        if odd := [cell for cell in cells if not isinstance(cell, (bytes, bytearray, memoryview))]:
            raise ValueError(f"column {state['column']!r}: {type(odd[0]).__name__} where an image's bytes must be")
        column = Column(name=state["name"], dtype="binary", layout="binary", shape=tuple(state["shape"]))
        return decoded(column, decoders[state["name"]], [bytes(cell) for cell in cells])

    decoders = make_decoders(images, [state["name"] for state in images], named)
    return {state["name"]: partial(of, state) for state in images}


def apply_numpy(features: State, rows: Mapping[str, RawColumn]) -> dict[str, Array]:
    """Convert raw columns to feature columns as `RawFeatures` does. `features`: `manifest.features`."""
    return RawFeatures(features).of(rows)
