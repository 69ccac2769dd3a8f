"""Trace a model of many equal blocks by two of each kind.

Which blocks are equal is known from a trace of the whole model: they are of one class, with weights of the same shapes,
keep as much, and return as much as they take. The second of a kind stands for those after it: the first takes what is
no block's.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

from torch import nn

from sparkring.training.models.torch_private import replace_child
from sparkring.training.parallel.model_parallel.blocks import repeated_blocks
from sparkring.training.planner.trace import Trace
from sparkring.training.planner.workload import Workload

STAYING = 2  # blocks of a kind


class Passes(nn.Module):
    """Takes the place of a block: returns what it is given."""

    def forward(self, x: Any, *_: Any, **__: Any) -> Any:
        return x


def stand_ins(model: nn.Module, trace: Trace) -> dict[str, str]:
    """Map each block that another one represents to that block. `trace`: trace of the model."""
    names = {module: name for name, module in model.named_modules()}
    kinds: dict[Any, list[str]] = {}
    for _, _, block in repeated_blocks(model):
        name = names[block]
        taken, kept = trace.taken.get(name), sum(trace.kept.get(name, {}).values())
        if taken == trace.returned.get(name):
            shapes = tuple(parameter.shape for parameter in block.parameters())
            kinds.setdefault((type(block), shapes, taken, kept), []).append(name)
    return {name: found[STAYING - 1] for found in kinds.values() for name in found[STAYING:]}


def shortened(workload: Workload, trace: Trace) -> Workload:
    """Return the step of the model without represented blocks. `trace`: trace of the model."""

    def make() -> nn.Module:
        model, absent = copy.deepcopy(workload.model), stand_ins(workload.model, trace)
        names = {module: name for name, module in model.named_modules()}
        for container, key, block in repeated_blocks(model):
            if names[block] in absent:
                replace_child(container, key, Passes())
        return model

    return replace(workload, model=workload.once("shortened", make), known={})


def lengthened(short: Trace, absent: dict[str, str]) -> Trace:
    """Extend a trace to the whole model.

    Args:
        short: trace of the shortened model.
        absent: names of its absent blocks, from `stand_ins`.
    """
    found = Trace({**short.taken}, {**short.returned}, {n: {**places} for n, places in short.kept.items()})
    found.output = short.output
    for name, stand_in in absent.items():
        inside = [key for key in short.taken if f"{key}.".startswith(f"{stand_in}.")]
        for key in inside:
            copied = name + key.removeprefix(stand_in)
            found.taken[copied], found.returned[copied] = short.taken[key], short.returned[key]
            if key in short.kept:
                found.kept[copied] = {**short.kept[key]}
        for around in short.kept:
            if around == "" or name.startswith(f"{around}."):
                for place, numel in short.kept.get(stand_in, {}).items():
                    found.keep([around], place, numel)
    return found
