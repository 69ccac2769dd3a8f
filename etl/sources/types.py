"""Read the names of Spark's types without Spark, as far as recipes need them. Spark's own parser has the last word."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping

from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    ByteType,
    DataType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    MapType,
    ShortType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
)

SIMPLE: dict[str, type[DataType]] = {
    **dict.fromkeys(("tinyint", "byte"), ByteType),
    **dict.fromkeys(("smallint", "short"), ShortType),
    **dict.fromkeys(("int", "integer"), IntegerType),
    **dict.fromkeys(("bigint", "long"), LongType),
    **dict.fromkeys(("float", "real"), FloatType),
    **dict.fromkeys(("timestamp", "timestamp_ltz"), TimestampType),
    **dict.fromkeys(("decimal", "dec", "numeric"), DecimalType),
    "double": DoubleType,
    "boolean": BooleanType,
    "string": StringType,
    "binary": BinaryType,
    "date": DateType,
    "timestamp_ntz": TimestampNTZType,
}
DECIMALS = ("decimal", "dec", "numeric")
OTHERS = ("interval", "void", "variant", "time", "char", "character", "varchar", "geometry", "geography", "collate")
FOREIGN = {
    "int8": "tinyint",
    "int16": "smallint",
    "int32": "int",
    "int64": "bigint",
    "uint8": "smallint",
    "uint16": "int",
    "uint32": "bigint",
    "uint64": "decimal(20,0)",
    "float32": "float",
    "float64": "double",
    "number": "double",
    "bool": "boolean",
    "datetime": "timestamp",
    "str": "string",
    "text": "string",
    "object": "string",
    "category": "string",
    "bytes": "binary",
}
"""Names that other tools give to types -> Spark's."""
_TOKEN = re.compile(r"\s*(`(?:[^`]|``)*`|\w+|[<>(),:])")


class NoSuchType(ValueError):
    """Spark has no type of that name; the message says what is wrong, and what was probably meant."""


def parse_type(text: str) -> DataType | None:
    """Parse a type's name; None if only Spark can tell. Raises NoSuchType for certainly wrong names."""
    words = re.findall(r"\w+", text.lower())
    if any(word in OTHERS for word in words) or "'" in text:
        return None
    tokens, at, text = list[str](), 0, text.strip()
    while at < len(text):
        if (found := _TOKEN.match(text, at)) is None:
            raise NoSuchType(f"{text[at:]!r} is in no name of a type")
        tokens.append(found[1])
        at = found.end()
    if len(tokens) > 1 and (tokens[1] == ":" or tokens[1] not in "<>(),"):
        return None  # `a int, b string`: the fields of a struct
    try:
        kind, rest = _type(tokens)
    except RecursionError as error:
        raise NoSuchType(f"types are nested too deeply in it, {text.count('<')} of them") from error
    if rest:
        raise NoSuchType(f"{''.join(rest)!r} is too much")
    return kind


def known_schema(columns: Mapping[str, str]) -> StructType:
    """Return the columns whose types are known without Spark. Raises NoSuchType."""
    kinds = {name: parse_type(text) for name, text in columns.items()}
    return StructType([StructField(name, kind) for name, kind in kinds.items() if kind is not None])


def _type(tokens: list[str]) -> tuple[DataType, list[str]]:
    """Read one type; returns it and the tokens behind it."""
    if not tokens:
        raise NoSuchType("a type is missing")
    word, rest = tokens[0].lower(), tokens[1:]
    if word == "array":
        element, rest = _type(_behind("<", rest, word))
        return ArrayType(element), _behind(">", rest, word)
    if word == "map":
        key, rest = _type(_behind("<", rest, word))
        value, rest = _type(_behind(",", rest, word))
        return MapType(key, value), _behind(">", rest, word)
    if word == "struct":
        fields, rest = _fields(_behind("<", rest, word))
        return StructType(fields), _behind(">", rest, word)
    if word not in SIMPLE:
        near = FOREIGN.get(word) or next(iter(difflib.get_close_matches(word, [*SIMPLE, "array", "map"], n=1)), None)
        raise NoSuchType(f"Spark knows no {tokens[0]!r}" + (f"; did you mean {near!r}?" if near else ""))
    if word in DECIMALS:
        return _decimal(rest)
    return SIMPLE[word](), rest


def _decimal(rest: list[str]) -> tuple[DataType, list[str]]:
    if rest[:1] != ["("]:
        return DecimalType(), rest
    end = rest.index(")") if ")" in rest else len(rest)
    numbers = [word for word in rest[1:end] if word != ","]
    if end == len(rest) or not 1 <= len(numbers) <= 2 or not all(map(str.isdecimal, numbers)):
        raise NoSuchType("a decimal is decimal(digits, digits behind the point)")
    digits, scale = int(numbers[0]), int([*numbers, "0"][1])
    if not 1 <= digits <= 38 or scale > digits:
        raise NoSuchType(f"decimal({digits},{scale}): at most 38 digits, the second number of them behind the point")
    return DecimalType(digits, scale), rest[end + 1 :]


def _fields(tokens: list[str]) -> tuple[list[StructField], list[str]]:
    """Read the fields of a struct; returns them and the tokens behind them."""
    fields: list[StructField] = []
    while tokens[:1] != [">"]:
        if not tokens or tokens[0] in "<(),:":
            raise NoSuchType("the name of a field is missing")
        name, rest = tokens[0], tokens[1:]
        kind, rest = _type(rest[1:] if rest[:1] == [":"] else rest)
        not_null = [word.lower() for word in rest[:2]] == ["not", "null"]
        fields.append(StructField(name.strip("`").replace("``", "`"), kind, not not_null))
        rest = rest[2:] if not_null else rest
        if rest[:1] != [","]:
            return fields, rest
        tokens = rest[1:]
    return fields, tokens


def _behind(sign: str, tokens: list[str], word: str) -> list[str]:
    if tokens[:1] != [sign]:
        raise NoSuchType(f"{sign!r} is missing in {word}<...>")
    return tokens[1:]
