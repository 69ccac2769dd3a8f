"""Values that `model.args` of the built-in models may have, by the annotations of their constructors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, get_type_hints

from pydantic import Field, TypeAdapter, ValidationError
from torch import nn

Size = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]
Share = Annotated[float, Field(ge=0, lt=1)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


def argument_problems(model: type[nn.Module], args: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each of `model.args` whose value is not of the constructor's annotation."""
    allowed = get_type_hints(model.__init__, include_extras=True)
    for name in args.keys() & allowed.keys():
        try:
            TypeAdapter(allowed[name]).validate_python(args[name], strict=True)
        except ValidationError as error:
            rule = error.errors()[0]["msg"]
            yield f"model.args.{name} = {args[name]!r}: {rule[:1].lower()}{rule[1:]}"
