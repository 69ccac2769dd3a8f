"""Begin with trained weights, by name and shape (model.start): a pretrained encoder, or another recipe's model.

`warm_start` follows a recipe's own model to another dataset by value; here only the file's tensors are known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import nn

from sparkring.conf.stored import CLOSED
from sparkring.training.models.initial import EagerValue, InitialModel, InitialValue

SHOWN = 6  # names in a message
Shape = tuple[int, ...]


class Stored(Protocol):
    """A tensor of a file: checkpoint.weights.StoredTensor, of which this folder knows nothing."""

    @property
    def shape(self) -> Shape: ...
    def read(self) -> torch.Tensor: ...


@dataclass(frozen=True)
class StartMatch:
    """Which tensors of a file a model begins with."""

    __pydantic_config__ = CLOSED

    matched: dict[str, str]  # first name in the model -> name in the file
    missing: list[str] = field(default_factory=list)  # of the model, not in the file: they have initial values
    unexpected: list[str] = field(default_factory=list)  # of the file, not of the model
    other_shape: dict[str, str] = field(default_factory=dict)  # name in the model -> both shapes; initial values

    @property
    def text(self) -> str:
        """In a line."""
        total = len(self.matched) + len(self.missing) + len(self.other_shape)
        shapes = [f"{name} {shapes}" for name, shapes in self.other_shape.items()]
        parts = {"of another shape": shapes, "not in the file": self.missing, "not of the model": self.unexpected}
        rest = [f"; {len(names)} {what} ({_some(names)})" for what, names in parts.items() if names]
        return f"{len(self.matched)} of {total} tensors begin with its values" + "".join(rest)


def match_tensors(model: nn.Module, given: Mapping[str, Shape], rename: Mapping[str, str]) -> StartMatch:
    """Compare a model's parameters and persistent buffers with the tensors of a file.

    Args:
        model: whole, with or without memory.
        given: name in the file -> shape.
        rename: beginning of names in the file -> beginning in the model.

    ValueError where no tensor matches, or two of the file get one name.
    """
    first_names: dict[int, str] = {}
    wanted: dict[str, Shape] = {}
    first: dict[str, str] = {}  # every name -> the first of the same tensor
    for name, tensor in model.state_dict(keep_vars=True).items():
        first[name] = first_names.setdefault(id(tensor), name)
        wanted.setdefault(first[name], tuple(tensor.shape))
    renamed: dict[str, str] = {}
    for name in given:
        new = _renamed(name, rename)
        if new in renamed:
            raise ValueError(f"model.start.rename: {renamed[new]!r} and {name!r} of the file both become {new!r}")
        renamed[new] = name
    matched, shapes = dict[str, str](), dict[str, str]()
    for new, name in renamed.items():
        if (target := first.get(new)) is None or target in matched:
            continue
        if given[name] == wanted[target]:
            matched[target] = name
            shapes.pop(target, None)
        else:
            shapes[target] = f"{given[name]}, in the model {wanted[target]}"
    missing = [name for name in wanted if name not in matched and name not in shapes]
    if not matched:
        raise ValueError(
            f"model.start: no tensor of the file has the name and shape of one of the model's. The file's are "
            f"{_some([*renamed])}{' (renamed)' if rename else ''}, the model's {_some([*wanted])}; "
            "give model.start.rename, {beginning in the file: beginning in the model}"
        )
    return StartMatch(matched, missing, [name for new, name in renamed.items() if new not in first], shapes)


def _renamed(name: str, rename: Mapping[str, str]) -> str:
    old = max((old for old in rename if name.startswith(old)), key=len, default=None)
    return name if old is None else rename[old] + name.removeprefix(old)


def _some(names: list[str]) -> str:
    return ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")


@dataclass(frozen=True)
class FileValue:
    """An initial value that is read from a file when it is needed."""

    read: Callable[[], torch.Tensor]
    size: Shape
    dtype: torch.dtype
    digest: str = ""

    def pieces(self, start: int, stop: int) -> Iterator[tuple[int, torch.Tensor]]:
        yield 0, self.read().to(self.dtype)


def start_model_with(initial: InitialModel, match: StartMatch, given: Mapping[str, Stored] | None) -> InitialModel:
    """The initial model with values of a file, which rank 0 reads one by one and sends to the others.

    `given`: the file's tensors by name; None on the ranks that receive them.
    """
    values: dict[str, InitialValue] = dict(initial.values)
    for name, in_file in match.matched.items():
        value = values[name]
        if given is None:
            values[name] = EagerValue(None, value.size, value.dtype, "")
        else:
            values[name] = FileValue(given[in_file].read, value.size, value.dtype)
    return InitialModel(initial.module, values, initial.aliases, "it begins with the weights of a file")
