"""Begin with trained weights, by name and shape (model.start): a pretrained encoder, or another recipe's model.

`warm_start` follows a recipe's own model to another dataset by value; here only the file's tensors are known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from sparkring.training.model.start_match import StartMatch, some_names
from sparkring.training.models.initial import EagerValue, InitialModel, InitialValue

Shape = tuple[int, ...]


class FileTensor(Protocol):
    """A tensor of a file: checkpoint.weights.StoredTensor, of which this folder knows nothing."""

    @property
    def shape(self) -> Shape: ...
    def read(self) -> torch.Tensor: ...


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
            f"{some_names([*renamed])}{' (renamed)' if rename else ''}, the model's {some_names([*wanted])}; "
            "give model.start.rename, {beginning in the file: beginning in the model}"
        )
    return StartMatch(matched, missing, [name for new, name in renamed.items() if new not in first], shapes)


def _renamed(name: str, rename: Mapping[str, str]) -> str:
    old = max((old for old in rename if name.startswith(old)), key=len, default=None)
    return name if old is None else rename[old] + name.removeprefix(old)


@dataclass(frozen=True)
class FileValue:
    """An initial value that is read from a file when it is needed."""

    read: Callable[[], torch.Tensor]
    size: Shape
    dtype: torch.dtype
    digest: str = ""

    def pieces(self, start: int, stop: int) -> Iterator[tuple[int, torch.Tensor]]:
        yield 0, self.read().to(self.dtype)


def start_model_with(initial: InitialModel, match: StartMatch, given: Mapping[str, FileTensor] | None) -> InitialModel:
    """Replace initial values by a file's; rank 0 reads them one by one and sends them to the others.

    `given`: tensors of the file by name; None on the ranks that receive them.
    """
    values: dict[str, InitialValue] = dict(initial.values)
    for name, in_file in match.matched.items():
        value = values[name]
        if given is None:
            values[name] = EagerValue(None, value.size, value.dtype, "")
        else:
            values[name] = FileValue(given[in_file].read, value.size, value.dtype)
    return InitialModel(initial.module, values, initial.aliases, "it begins with the weights of a file")
