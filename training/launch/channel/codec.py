"""Dataclasses to JSON and back: encoder and checks are generated from the field types."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal, Union

Check = Callable[[Any], Any]
"""From a parsed JSON value to the field's value; ValueError where it is of another type."""


@dataclass(frozen=True)
class AtMost:
    """The bound of an annotated field: characters of a text, entries of a list."""

    size: int


@dataclass(frozen=True)
class OneLine(AtMost):
    """A text that can be printed and compared: not empty, no control characters, no lone surrogates."""


def as_json(value: Any) -> dict[str, Any]:
    """Return the fields of a dataclass, for `json.dumps(default=as_json)`. TypeError for any other object."""
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}


@cache
def check_of(kind: Any) -> Check:
    """Make the check of a field type. TypeError for a type that messages do not use."""
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return lambda value: value
    if kind is float:
        return _float
    if kind in (bool, int, str):
        return lambda value: _of_type(value, kind)
    if origin is Annotated:
        inner, bound = check_of(parts[0]), parts[1]
        return lambda value: _bounded(inner(value), bound)
    if origin is Literal:
        return lambda value: _one_of(value, parts)
    if origin in (Union, types.UnionType):
        (inner,) = (check_of(part) for part in parts if part is not types.NoneType)  # `X | None` alone is used
        return lambda value: None if value is None else inner(value)
    if origin is tuple and parts[-1] is Ellipsis:
        inner = check_of(parts[0])
        return lambda value: tuple(inner(entry) for entry in _of_type(value, list))
    if origin is dict and parts[0] is str:
        inner = check_of(parts[1])
        return lambda value: {key: inner(part) for key, part in _of_type(value, dict).items()}
    if dataclasses.is_dataclass(kind):
        return _object_check(kind)
    raise TypeError(f"{kind}: no type of a message's field")


def _of_type(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise ValueError(f"{kind.__name__}, not {type(value).__name__}")
    return value


def _float(value: Any) -> float:
    if type(value) not in (int, float):
        raise ValueError(f"a number, not {type(value).__name__}")
    try:
        return float(value)
    except OverflowError:
        raise ValueError("a number that fits into 64 bits") from None


def _bounded(value: Any, bound: AtMost) -> Any:
    if len(value) > bound.size:
        raise ValueError(f"at most {bound.size:,} long, not {len(value):,}")
    if isinstance(bound, OneLine) and not (value and value.isprintable()):
        raise ValueError("one line of printable text")
    return value


def _one_of(value: Any, choices: tuple[Any, ...]) -> Any:
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"one of {', '.join(map(repr, choices))}")
    return value


def _object_check(kind: Any) -> Check:
    hints = typing.get_type_hints(kind, include_extras=True)
    fields = dataclasses.fields(kind)
    checks = {field.name: check_of(hints[field.name]) for field in fields}
    required = {field.name for field in fields if field.default is dataclasses.MISSING}

    def check(values: Any) -> Any:
        if missing := required - _of_type(values, dict).keys():
            raise ValueError(f"without {', '.join(sorted(missing))}")
        found = {}
        for name, value in values.items():
            if name not in checks:
                raise ValueError(f"{name[:50]!r} is no field of {kind.__name__}")
            try:
                found[name] = checks[name](value)
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None
        return kind(**found)

    return check
