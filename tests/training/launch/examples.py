"""An example of every message and event, made from the fields of its dataclass."""

from __future__ import annotations

import dataclasses
import types
import typing
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from sparkring.training.launch.messages import Event, Message

MESSAGES: tuple[type, ...] = get_args(Message)
EVENTS: tuple[type, ...] = get_args(Event)


def example(kind: Any) -> Any:
    """A value of a field's type; of a dataclass, an object with all fields filled."""
    origin, parts = get_origin(kind), get_args(kind)
    if dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind, include_extras=True)
        return kind(**{field.name: example(hints[field.name]) for field in dataclasses.fields(kind)})  # type: ignore[operator]
    if origin in (Annotated, Union, types.UnionType, Literal):
        return parts[0] if origin is Literal else example(parts[0])
    if origin is tuple:
        return (example(parts[0]),)
    if origin is dict:
        return {"key": example(parts[1])}
    return {int: 3, float: 0.5, str: "text", bool: True, Any: [1, None, {"a": "b"}]}[kind]
