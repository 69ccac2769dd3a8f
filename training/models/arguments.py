"""Values that `model.args` of the built-in models may have, by the annotations of their constructors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, get_type_hints

from pydantic import Field, TypeAdapter, ValidationError
from torch import nn

from sparkring.training.models.torch_private import meta_device

MOST = 10_000_000  # of a size: more overflow the number of elements of a layer
MOST_LAYERS = 1000

Size = Annotated[int, Field(ge=1, le=MOST)]
Count = Annotated[int, Field(ge=0, le=MOST)]
Layers = Annotated[int, Field(ge=1, le=MOST_LAYERS)]
Blocks = Annotated[int, Field(ge=0, le=MOST_LAYERS)]
Share = Annotated[float, Field(ge=0, lt=1)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Finite = Annotated[float, Field(allow_inf_nan=False)]


@dataclass(frozen=True)
class FromDataset:
    """Marks an argument that `from_manifest` takes from the dataset.

    smallest: its value for the smallest dataset.
    may_be_set: the recipe may give it too.
    names_columns: the recipe's value needs the dataset's columns, so that a model without a dataset has `smallest`.
    """

    smallest: Any
    may_be_set: bool = False
    names_columns: bool = False


def argument_problems(
    model: type[nn.Module], args: Mapping[str, Any], element_bytes: int = 4, memory: int | None = None
) -> Iterator[str]:
    """Yield a line for each of `model.args` that no dataset could be trained with.

    Args:
        model: class of a built-in model.
        args: value of `model.args`.
        element_bytes: bytes per weight.
        memory: memory of the training machine in bytes; None if unknown.
    """
    wrong = list(_set_by_dataset(model, args)) or list(_annotation_problems(model, args))
    yield from wrong or _smallest_problems(model, args, element_bytes, memory)


def _set_by_dataset(model: type[nn.Module], args: Mapping[str, Any]) -> Iterator[str]:
    for name, mark in _marks(model).items():
        if name in args and not mark.may_be_set:
            yield f"model.args.{name} = {args[name]!r}: is taken from the dataset; remove it"


def _annotation_problems(model: type[nn.Module], args: Mapping[str, Any]) -> Iterator[str]:
    allowed = get_type_hints(model.__init__, include_extras=True)
    for name in args.keys() & allowed.keys():
        try:
            TypeAdapter(allowed[name]).validate_python(args[name], strict=True)
        except ValidationError as error:
            rule = error.errors()[0]["msg"]
            yield f"model.args.{name} = {args[name]!r}: {rule[:1].lower()}{rule[1:]}"


def _smallest_problems(
    model: type[nn.Module], args: Mapping[str, Any], element_bytes: int, memory: int | None
) -> Iterator[str]:
    """Make the model of the smallest dataset without memory: do its arguments go together, do its weights fit?"""
    fixed = {name: mark.smallest for name, mark in _marks(model).items() if name not in args or mark.names_columns}
    try:
        with meta_device():
            weights = sum(parameter.numel() for parameter in model(**{**args, **fixed}).parameters())
    except ValueError as error:  # names model.args, and which of them do not go together
        yield str(error)
        return
    except (RuntimeError, OverflowError):
        yield f"model.args = {dict(args)}: a layer has more weights than a tensor can hold; make them smaller"
        return
    if memory is not None and weights * element_bytes > memory:
        yield (
            f"model.args = {dict(args)}: the weights alone take {weights * element_bytes / 1e9:,.0f} GB or more, and "
            f"this machine, which trains, has {memory / 1e9:,.0f} GB of memory; make them smaller"
        )


def _marks(model: type[nn.Module]) -> dict[str, FromDataset]:
    hints = get_type_hints(model.__init__, include_extras=True)
    return {
        name: mark
        for name, hint in hints.items()
        for mark in getattr(hint, "__metadata__", ())
        if isinstance(mark, FromDataset)
    }
