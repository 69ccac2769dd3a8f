"""Read one file of JSON lines as typed Arrow batches; report by line what does not match the declaration.

Each line is one object. A value is kept as the same value in a CSV file would be (`values`), or refused: numbers and
booleans are not texts, texts are not numbers. A missing key is null. Knows nothing of a Spark session: workers use it.
"""

from __future__ import annotations

import io
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import pyarrow as pa
from pyspark.sql.types import ArrayType, BooleanType, DataType, MapType, NumericType, StringType, StructType

from sparkring.conf.plain_text import count_of
from sparkring.etl.sources.files.csv_file import Opener, Wrong
from sparkring.etl.sources.values import arrow_type, convert

BATCH_RECORDS = 8192
BATCH_BYTES = 8 << 20
Records = list[tuple[int, Any]]  # line, what it holds
Column = tuple[str, str]  # name, Spark type; `tags[]` names what is in the lists of `tags`


class Number(str):
    """A number as the file writes it: `1.50`."""


@dataclass
class Findings:
    """What is wrong with a file, and in how many records it has keys that are not declared."""

    problems: list[str] = field(default_factory=list)
    unknown: Counter[str] = field(default_factory=Counter)


def read(opener: Opener, schema: StructType) -> Iterator[pa.RecordBatch]:
    """Read typed batches of a file that `check` accepted. ValueError if it has a fault now."""
    for records in _batches(opener, _refuse):
        converter = Converter()
        columns = converter.columns(records, schema)
        if converter.wrong:
            _refuse(0, "")
        yield pa.RecordBatch.from_arrays(columns, names=schema.names)


def check(opener: Opener, schema: StructType) -> Findings:
    """List every way in which the file does not match the declared columns, each with its first line and value."""
    lines: dict[str, Wrong] = {}
    converter = Converter()
    for records in _batches(opener, lambda line, what: lines.setdefault(what, Wrong()).add(line, "")):
        converter.columns(records, schema)
    problems = [f"line {w.first}: {what}" + w.others() for what, w in lines.items()]
    problems += [
        f"line {w.first}: column {name!r} is {kind}, and cannot keep {w}" for (name, kind), w in converter.wrong.items()
    ]
    problems += [
        f"has a key {key!r} (in {count_of(converter.unknown[key], 'record')}), which differs from the declared "
        f"{name!r} by case alone; rename one"
        for key, name in converter.other_case.items()
    ]
    return Findings(problems, converter.unknown)


def check_type(kind: DataType) -> str | None:
    """Explain why no value of a JSON file is read as this type; None where it can be."""
    if isinstance(kind, ArrayType):
        return check_type(kind.elementType)
    if isinstance(kind, MapType):
        return check_type(kind.valueType) if kind.keyType == StringType() else "the keys of an object are strings"
    if isinstance(kind, StructType):
        return next((why for field in kind if (why := check_type(field.dataType))), None)
    name = kind.simpleString()
    return None if arrow_type(name) is not None and name != "binary" else f"{name} is no type of a JSON value"


def _refuse(line: int, what: str) -> None:
    raise ValueError("the file changed while it was read")


def _batches(opener: Opener, on_fault: Callable[[int, str], None]) -> Iterator[Records]:
    """Read the objects of a file, in batches; `on_fault(line, what)` gets each line that is not one."""
    decoder = json.JSONDecoder(object_pairs_hook=_object, parse_int=Number, parse_float=Number, parse_constant=Number)
    records: Records = []
    size = 0
    for number, line in enumerate(io.BufferedReader(opener()), start=1):
        if not line.strip():
            continue
        try:
            found = decoder.decode(line.decode("utf-8-sig" if number == 1 else "utf-8"))
            if type(found) is not dict:
                raise ValueError("is no JSON object; a json file has one object on each line")
        except UnicodeDecodeError:
            on_fault(number, "is not UTF-8; convert the file")
        except json.JSONDecodeError as error:
            on_fault(number, f"is not JSON ({error.msg}); a json file has one object on each line")
        except (ValueError, RecursionError) as error:
            on_fault(number, str(error))
        else:
            records.append((number, found))
            size += len(line)
            if len(records) == BATCH_RECORDS or size > BATCH_BYTES:
                yield records
                records, size = [], 0
    yield records


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise ValueError(f"has the key {twice!r} twice")
    return found


class Converter:
    """Turns parsed values into Arrow arrays, and counts what cannot be kept, by column."""

    def __init__(self) -> None:
        self.wrong: dict[Column, Wrong] = {}  # values that the column cannot keep
        self.unknown: Counter[str] = Counter()  # undeclared key -> records that have it
        self.other_case: dict[str, str] = {}  # undeclared key -> the declared one that it differs from by case alone

    def columns(self, records: Records, schema: StructType) -> list[pa.Array]:
        """Convert the records' declared keys, a column each."""
        lines = [line for line, _ in records]
        return self._fields([record for _, record in records], lines, schema, "")

    def _fields(self, objects: list[Any], lines: list[int], schema: StructType, prefix: str) -> list[pa.Array]:
        """Build a column per field of `schema`; `objects` are dicts or None, `lines` their line numbers."""
        names = set(schema.names)
        for found in objects:
            if found and not found.keys() <= names:
                self._count_unknown([key for key in found if key not in names], schema.names, prefix)
        return [
            self._array([None if o is None else o.get(f.name) for o in objects], lines, f.dataType, prefix + f.name)
            for f in schema
        ]

    def _count_unknown(self, keys: Sequence[str], declared: list[str], prefix: str) -> None:
        for key in keys:
            self.unknown[prefix + key] += 1
            if alike := [name for name in declared if name.lower() == key.lower()]:
                self.other_case[prefix + key] = prefix + alike[0]

    def _array(self, values: list[Any], lines: list[int], kind: DataType, name: str) -> pa.Array:
        column = name, kind.simpleString()
        if isinstance(kind, StructType):
            values = self._only(dict, values, lines, column)
            arrays = self._fields(values, lines, kind, f"{name}.")
            fields = [pa.field(f.name, array.type) for f, array in zip(kind, arrays, strict=True)]
            nulls = pa.array([value is None for value in values], pa.bool_())
            return pa.StructArray.from_arrays(arrays, fields=fields, mask=nulls)
        if isinstance(kind, ArrayType):
            values = self._only(list, values, lines, column)
            flat = [(line, item) for line, v in zip(lines, values, strict=True) for item in v or ()]
            items = self._array([i for _, i in flat], [n for n, _ in flat], kind.elementType, f"{name}[]")
            return pa.ListArray.from_arrays(_offsets(values), items)
        if isinstance(kind, MapType):
            values = self._only(dict, values, lines, column)
            pairs = [(line, k, item) for line, v in zip(lines, values, strict=True) for k, item in (v or {}).items()]
            where = [line for line, _, _ in pairs]
            keys = self._array([k for _, k, _ in pairs], where, StringType(), f"{name} (key)")
            items = self._array([i for _, _, i in pairs], where, kind.valueType, f"{name}[]")
            return pa.MapArray.from_arrays(_offsets(values), keys, items)
        wanted = bool if isinstance(kind, BooleanType) else Number if isinstance(kind, NumericType) else str
        return self._scalars(self._only(wanted, values, lines, column), lines, column)

    def _only(self, wanted: type, values: list[Any], lines: list[int], column: Column) -> list[Any]:
        """Replace values of another JSON type than `wanted` by None, and count them."""
        if set(map(type, values)) <= {wanted, type(None)}:
            return values
        kept = []
        for line, value in zip(lines, values, strict=True):
            fits = value is None or type(value) is wanted
            kept.append(value if fits else None)
            if not fits:
                self._add_wrong(line, value, column)
        return kept

    def _scalars(self, values: list[Any], lines: list[int], column: Column) -> pa.Array:
        """Convert booleans, or texts by the rules of `values`."""
        if column[1] == "boolean":
            return pa.array(values, pa.bool_())
        try:
            texts = pa.array(values, pa.string())
        except UnicodeEncodeError:  # `"\\ud800"`: half of a character
            for index, value in enumerate(values):
                if value is not None and not _is_text(value):
                    self._add_wrong(lines[index], value, column)
                    values[index] = None
            texts = pa.array(values, pa.string())
        array, bad = convert(texts, column[1])
        for index in bad:
            self._add_wrong(lines[index], values[index], column)
        return array

    def _add_wrong(self, line: int, value: Any, column: Column) -> None:
        shown = str(value) if type(value) is Number else json.dumps(value)
        self.wrong.setdefault(column, Wrong()).add(line, shown)


def _is_text(value: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in value)


def _offsets(values: list[Any]) -> pa.Array:
    """Return the start of each list or map, (values + 1,); None for a null one."""
    begins = [0, *accumulate(len(value or ()) for value in values)]
    return pa.array(
        [None if v is None else begin for v, begin in zip(values, begins, strict=False)] + begins[-1:], pa.int32()
    )
