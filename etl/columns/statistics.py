"""What features are fitted on, in exact arithmetic: statistics of parts merge to those of all their rows.

Counts are integers and sums are fractions, so any grouping and any order of the rows gives the same bits. A shard is
measured by the task that writes it; no further pass reads the rows.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import reduce
from typing import Annotated, Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from pydantic import BeforeValidator, PlainSerializer

from sparkring.conf.blocks.etl import CategoricalFeature, Feature, NumericFeature
from sparkring.conf.features import category_text
from sparkring.conf.stored import Count, Finite, Label, Stored, StoredError, parse

Doubles = NDArray[np.float64]
LIMB_BITS = 18  # 53 bits of a double in three limbs: sums of products of two limbs of 2^16 rows stay below 2^53
CHUNK_ROWS = 1 << 16
CLOSE_LIMBS = 6  # so the smallest number but 0 may be 2^55 times smaller than the largest
MOST_EXPONENT = 500  # beyond, numbers that are scaled by the largest would leave the range of doubles
MERGED_AT_ONCE, PARTS_AT_ONCE = 1 << 20, 64  # distinct values, statistics
BUCKET_BITS = 6  # of a mantissa: a bucket is at most 1.6 % of its numbers wide
SMALL = 1 << 20  # whole numbers below this are summed as integers
DIGITS = re.compile(r"-?\d{1,1500}(/[1-9]\d{0,1499})?")
METADATA = b"sparkring"
VALUES = pa.schema({"column": pa.int32(), "value": pa.large_string(), "count": pa.int64()})


def _exact(value: Any) -> Fraction:
    """Read `7/4`. ValueError for what is not written so, `1e999999999` for one."""
    if isinstance(value, Fraction):
        return value
    if not isinstance(value, str) or not DIGITS.fullmatch(value):
        raise ValueError("must be a whole number or a fraction of two")
    return Fraction(value)


Exact = Annotated[Any, BeforeValidator(_exact), PlainSerializer(str)]


class Numbers(Stored):
    """Of the numbers in one column, after a transform: exact sums of the finite ones, and their extremes.

    count: finite ones; infinite: others. Nulls and NaN are neither. histogram: (bucket, count) of the finite ones, by
    rising bucket (`bucket_of`), so by rising number.
    """

    column: Label
    transform: Literal["none", "log1p"]
    count: Count = 0
    infinite: Count = 0
    total: Exact = Fraction(0)
    squares: Exact = Fraction(0)
    low: Finite | None = None
    high: Finite | None = None
    histogram: tuple[tuple[int, Count], ...] = ()


class _Header(Stored):
    """The metadata of stored statistics. `columns`: names of the columns whose values are counted."""

    rows: Count
    numbers: tuple[Numbers, ...]
    columns: tuple[Label, ...]


@dataclass(frozen=True)
class Measured:
    """What is measured of stored columns: (column, transform) of numbers, and name -> Spark type of categories."""

    numbers: tuple[tuple[str, str], ...] = ()
    categories: Mapping[str, str] = field(default_factory=dict)

    @property
    def columns(self) -> list[str]:
        """Names of the columns that are measured."""
        return list(dict.fromkeys([*(column for column, _ in self.numbers), *self.categories]))


NOT_MEASURED = Measured()


@dataclass(frozen=True)
class Statistics:
    """Of some rows. `values`: column -> table of its distinct `value`s, as text, in any order, and their `count`."""

    rows: int
    numbers: tuple[Numbers, ...]
    values: Mapping[str, pa.Table]

    @property
    def distinct(self) -> int:
        """How many distinct values there are, of all columns together."""
        return sum(len(table) for table in self.values.values())

    @property
    def measured(self) -> tuple[tuple[tuple[str, str], ...], tuple[str, ...]]:
        """What was measured: (column, transform) of numbers, and the columns whose values were counted."""
        return tuple((n.column, n.transform) for n in self.numbers), tuple(self.values)

    def numbers_of(self, column: str, transform: str) -> Numbers:
        return next(n for n in self.numbers if (n.column, n.transform) == (column, transform))

    def to_bytes(self) -> bytes:
        """Serialize to an Arrow file; equal statistics give equal bytes."""
        header = _Header(rows=self.rows, numbers=self.numbers, columns=tuple(self.values))
        schema = VALUES.with_metadata({METADATA: header.model_dump_json().encode()})
        indexed = [
            pa.table([pa.repeat(pa.scalar(i, pa.int32()), len(t)), *t.sort_by("value").columns], schema=schema)
            for i, t in enumerate(self.values.values())
        ]
        sink = pa.BufferOutputStream()
        with pa.ipc.new_file(sink, schema) as writer:
            writer.write_table(pa.concat_tables([schema.empty_table(), *indexed]).combine_chunks())
        return bytes(sink.getvalue())

    @classmethod
    def from_bytes(cls, data: bytes, where: str) -> Statistics:
        """Read `to_bytes`. StoredError names `where` for what is damaged or not ours."""
        try:
            table = pa.ipc.open_file(pa.BufferReader(data)).read_all()
            table.validate(full=True)
        except pa.ArrowException as error:
            raise StoredError(f"{where}: no statistics of ours ({error}); delete its folder and build again") from None
        metadata = table.schema.metadata or {}
        if METADATA not in metadata or not table.schema.equals(VALUES):
            raise StoredError(f"{where}: no statistics of ours; delete its folder and build again")
        header = parse(_Header, metadata[METADATA], where)
        of_column = {name: table.filter(pc.equal(table["column"], i)) for i, name in enumerate(header.columns)}
        return cls(header.rows, header.numbers, {n: t.select(["value", "count"]) for n, t in of_column.items()})


def measured_by(features: Mapping[str, Feature], inputs: Mapping[str, str], weight: str | None = None) -> Measured:
    """List what must be measured to fit the features, and the mean `weight`; `inputs`: Spark type by column."""
    numbers, categories = dict[tuple[str, str], None](), dict[str, str]()
    for name, feature in features.items():
        column = feature.column or name
        if isinstance(feature, NumericFeature):
            numbers[column, feature.transform] = None
        elif isinstance(feature, CategoricalFeature):
            categories[column] = inputs[column]
    if weight is not None:
        numbers[weight, "none"] = None
    return Measured(tuple(numbers), categories)


def measure(table: pa.Table, wanted: Measured) -> Statistics:
    """Measure rows as they are stored."""
    numbers = tuple(_numbers(table[column], column, transform) for column, transform in wanted.numbers)
    values = {column: _counted(table[column], kind) for column, kind in wanted.categories.items()}
    return Statistics(table.num_rows, numbers, values)


def nothing(wanted: Measured) -> Statistics:
    """Return the statistics of no rows, the neutral element of merging."""
    numbers = tuple(Numbers(column=column, transform=transform) for column, transform in wanted.numbers)
    empty = pa.schema([VALUES.field("value"), VALUES.field("count")]).empty_table()
    return Statistics(0, numbers, dict.fromkeys(wanted.categories, empty))


def merge(parts: Iterable[Statistics]) -> Statistics:
    """Merge statistics of at least one part; the result does not depend on their order or grouping.

    Raises ValueError for statistics that were measured for other features.
    """
    merger = StatisticsMerger()
    for part in parts:
        merger.add(part)
    return merger.result()


class StatisticsMerger:
    """Merges many statistics at once, as soon as they hold as many values as what was merged before."""

    def __init__(self) -> None:
        self._waiting: list[Statistics] = []
        self._values, self._most = 0, MERGED_AT_ONCE

    def add(self, part: Statistics) -> None:
        self._waiting.append(part)
        self._values += part.distinct
        if self._values > self._most or len(self._waiting) > PARTS_AT_ONCE:
            self._most = max(MERGED_AT_ONCE, 2 * self.result().distinct)

    def result(self) -> Statistics:
        """Return the merged statistics; requires that something was added."""
        self._waiting = [_merged(self._waiting)]
        self._values = self._waiting[0].distinct
        return self._waiting[0]


def _merged(parts: Sequence[Statistics]) -> Statistics:
    kinds = [part.measured for part in parts]
    if other := [kind for kind in kinds if kind != kinds[0]]:
        raise ValueError(f"they are of other features: {kinds[0]} and {other[0]}")
    if len(parts) == 1:
        return parts[0]
    numbers = tuple(reduce(_added, column) for column in zip(*(part.numbers for part in parts), strict=True))
    values = {name: _summed(pa.concat_tables([part.values[name] for part in parts])) for name in parts[0].values}
    return Statistics(sum(part.rows for part in parts), numbers, values)


def _added(a: Numbers, b: Numbers) -> Numbers:
    lows, highs = [[v for v in pair if v is not None] for pair in ((a.low, b.low), (a.high, b.high))]
    return Numbers(
        column=a.column,
        transform=a.transform,
        count=a.count + b.count,
        infinite=a.infinite + b.infinite,
        total=a.total + b.total,
        squares=a.squares + b.squares,
        low=min(lows, default=None),
        high=max(highs, default=None),
        histogram=_histogram(*(np.array(n.histogram, np.int64).reshape(-1, 2) for n in (a, b))),
    )


def most_frequent(counts: pa.Table, min_count: int, max_size: int) -> list[str]:
    """List the values by falling count, those of equal count by their bytes, cut to the most frequent ones."""
    kept = counts.filter(pc.greater_equal(counts["count"], min_count))
    order = pc.sort_indices(kept, sort_keys=[("count", "descending"), ("value", "ascending")])
    values: list[str] = kept["value"].take(order.slice(0, max_size)).to_pylist()
    return values


def moments(numbers: Numbers, anchor: float = 0.0) -> tuple[float, float]:
    """Return mean and standard deviation of values less `anchor`, rounded once; infinite on overflow."""
    exact = Fraction(numbers.total) / numbers.count
    try:
        variance = Fraction(numbers.squares) / numbers.count - exact**2
        return float(exact - Fraction(anchor)), math.sqrt(variance)
    except OverflowError:
        return math.inf, math.inf


def _counted(column: pa.ChunkedArray, spark_type: str) -> pa.Table:
    found = pa.chunked_array([c.drop_null() for c in column.chunks], column.type).value_counts()
    values, counts = found.field("values"), found.field("counts")
    if not pa.types.is_string(values.type):
        whole = values.cast(pa.int32()) if pa.types.is_date(values.type) else values
        values = pa.array([category_text(int(v), spark_type) for v in whole.to_pylist()], pa.large_string())
    return pa.table({"value": values.cast(pa.large_string()), "count": counts})


def _summed(counts: pa.Table) -> pa.Table:
    coded = counts["value"].combine_chunks().dictionary_encode()  # a group_by of texts costs several times more
    sums = np.zeros(len(coded.dictionary), np.int64)
    np.add.at(sums, coded.indices.to_numpy(), counts["count"].to_numpy())
    return pa.table({"value": coded.dictionary, "count": sums})


def _numbers(column: pa.ChunkedArray, name: str, transform: str) -> Numbers:
    x = np.concatenate([np.zeros(0), *(_doubles(chunk) for chunk in column.chunks)])
    x = x[~np.isnan(x)]
    if transform == "log1p":
        x = np.log1p(np.maximum(x, 0.0))
    finite = x[np.isfinite(x)] + 0.0  # no -0.0, which equals 0.0 and would be either extreme by chance
    total, squares = exact_sums(finite)
    return Numbers(
        column=name,
        transform=transform,
        count=len(finite),
        infinite=len(x) - len(finite),
        total=total,
        squares=squares,
        low=float(finite.min()) if len(finite) else None,
        high=float(finite.max()) if len(finite) else None,
        histogram=_histogram(_counted_buckets(finite)),
    )


def bucket_of(x: Doubles) -> NDArray[np.int64]:
    """Return the histogram bucket (n,) of finite numbers (n,): monotonic, 64 buckets per doubling.

    A bucket is the sign, the exponent and the first 6 bits of a double's mantissa; 0 has its own. The grid never
    depends on the data, so histograms of several day partitions can be added.
    """
    magnitude = np.abs(x).view(np.int64) >> (52 - BUCKET_BITS)
    return np.where(x == 0, 0, np.where(x < 0, -magnitude - 1, magnitude + 1))


def _counted_buckets(x: Doubles) -> NDArray[np.int64]:
    """Count numbers by bucket: rows of (bucket, count)."""
    if not len(x):
        return np.zeros((0, 2), np.int64)
    buckets = bucket_of(x)
    low = int(buckets.min())
    counts = np.bincount(buckets - low)  # the grid has 2^18 buckets: that is less work than sorting
    found = np.flatnonzero(counts)
    return np.stack([found + low, counts[found]], axis=1)


def _histogram(*tables: NDArray[np.int64]) -> tuple[tuple[int, int], ...]:
    """Add tables (buckets, 2) of (bucket, count)."""
    rows = np.concatenate(tables)
    buckets, place = np.unique(rows[:, 0], return_inverse=True)
    counts = np.zeros(len(buckets), np.int64)
    np.add.at(counts, place, rows[:, 1])
    return tuple(zip(buckets.tolist(), counts.tolist(), strict=True))


def _doubles(array: pa.Array) -> Doubles:
    """Convert a numeric or boolean column to doubles (n,), rounded as by Spark's cast; NaN for null."""
    found: Doubles = array.cast(pa.float64(), safe=False).fill_null(math.nan).to_numpy(zero_copy_only=False)
    return found


def exact_sums(x: Doubles) -> tuple[Fraction, Fraction]:
    """Sum finite numbers (n,) and their squares, without rounding."""
    total, squares = Fraction(0), Fraction(0)
    for start in range(0, len(x), CHUNK_ROWS):
        piece = x[start : start + CHUNK_ROWS]
        sums = _small_sums(piece) if _is_small(piece) else _close_sums(piece) or _limb_sums(piece)
        total, squares = total + sums[0], squares + sums[1]
    return total, squares


def _is_small(x: Doubles) -> bool:
    return bool((np.abs(x) < SMALL).all() and (np.rint(x) == x).all())


def _small_sums(x: Doubles) -> tuple[Fraction, Fraction]:
    whole = x.astype(np.int64)
    return Fraction(int(whole.sum())), Fraction(int((whole * whole).sum()))


def _close_sums(x: Doubles) -> tuple[Fraction, Fraction] | None:
    """Sum numbers of like size, in a third of the time: x = (a 2^-18 + b 2^-36 + ...) 2^top, cut at the same places.

    None where the last bit of a number would be beyond the last limb.
    """
    sizes = np.abs(x)
    top = int(np.frexp(sizes.max())[1])
    least = int(np.frexp(sizes.min(initial=math.inf, where=sizes > 0))[1])
    if top - least > CLOSE_LIMBS * LIMB_BITS - 53 or abs(top) > MOST_EXPONENT:
        return None
    rest = x * 2.0**-top
    limbs = np.zeros((CLOSE_LIMBS, len(x)))  # each of whole numbers below 2^18, and of the number's sign
    used = 0
    while rest.any():
        rest *= 1 << LIMB_BITS
        np.trunc(rest, out=limbs[used])
        rest -= limbs[used]
        used += 1
    sums, products = limbs[:used].sum(axis=1).tolist(), (limbs[:used] @ limbs[:used].T).tolist()
    places = [LIMB_BITS * (used - 1 - i) for i in range(used)]
    total = sum(int(limb) << place for limb, place in zip(sums, places, strict=True))
    squares = sum(
        int(product) << place + other
        for row, place in zip(products, places, strict=True)
        for product, other in zip(row, places, strict=True)
    )
    unit = Fraction(2) ** (top - LIMB_BITS * used)
    return total * unit, squares * unit * unit


def _limb_sums(x: Doubles) -> tuple[Fraction, Fraction]:
    """Sum by exponent: each number is (a 2^36 + b 2^18 + c) 2^e, the sums of limbs and of their products are exact."""
    mantissa, exponent = np.frexp(x)  # x = mantissa * 2^exponent
    whole, low = np.abs(np.ldexp(mantissa, 53)).astype(np.int64), int(exponent.min()) - 53
    bins = exponent - exponent.min()
    mask = (1 << LIMB_BITS) - 1
    a, b, c = (((whole >> shift) & mask).astype(np.float64) for shift in (2 * LIMB_BITS, LIMB_BITS, 0))
    sign = np.sign(x)
    total = _weighed(bins, (sign * c, sign * b, sign * a))
    squares = _weighed(2 * bins, (c * c, 2 * b * c, 2 * a * c + b * b, 2 * a * b, a * a))
    return total * Fraction(2) ** low, squares * Fraction(2) ** (2 * low)


def _weighed(bins: NDArray[np.int64], limbs: Sequence[Doubles]) -> Fraction:
    """Sum limbs, lowest first, each row's times 2^bin."""
    total = 0
    for place, limb in enumerate(limbs):
        sums = np.bincount(bins, limb)
        for number in np.flatnonzero(sums).tolist():
            total += int(sums[number]) << (number + place * LIMB_BITS)
    return Fraction(total)
