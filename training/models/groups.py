"""Parameters that are trained in a way of their own, by name (optim.groups)."""

from __future__ import annotations

import re
from collections.abc import Sequence

from torch import nn

from sparkring.conf.blocks.optim import ParameterGroup


def group_of(name: str, groups: Sequence[ParameterGroup]) -> ParameterGroup | None:
    """Return the first group whose pattern matches the whole name; None if no pattern does."""
    return next((group for group in groups if re.fullmatch(group.match, name)), None)


def freeze(model: nn.Module, groups: Sequence[ParameterGroup]) -> None:
    """Take the gradients from parameters of frozen groups. ValueError for a group that no parameter is of."""
    found = [(parameter, group_of(name, groups)) for name, parameter in model.named_parameters()]
    for number, group in enumerate(groups):
        if not any(of is group for _, of in found):
            names = [name for name, _ in model.named_parameters()]
            first = ", ".join(names[:8]) + (" ..." if len(names) > 8 else "")
            raise ValueError(
                f"optim.groups.{number}.match = {group.match!r}: is the whole name of no parameter that an earlier "
                f"group does not have; the model's are {first}"
            )
    for parameter, of in found:
        if of is not None and of.frozen:
            parameter.requires_grad_(False)
