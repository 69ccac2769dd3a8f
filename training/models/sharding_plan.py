"""Describe how a model may be cut over pipeline, tensor and context ranks.

A plan is a module-level `PLAN` next to its model, found by the model's class; models import nothing else of this. It is
of the classes of that file that have every module it names, with what is listed below; the others have no plan.
Names are those of `named_modules()`; `*` stands for every key of a ModuleList.

layers    the modules whose composition is the model's forward, one tensor in, one out: `head(norm(...embed(x)))`; a
          pipeline cuts between them
tensor    module -> how its weight is cut over tp:
          `column` (Linear, output features), `row` (Linear, input features; its outputs are summed),
          `vocab` (Embedding rows), `vocab_head` (Linear whose outputs, the logits, stay cut for the loss),
          `replicate` (whole on every rank; norms and small layers),
          `enter` (no weight of its own: a module whose `column` layers, and nothing else in it, use its input, which is
          exchanged once for all of them)
heads     attention modules with `heads` and `kv_heads`, checked to be divisible by tp x cp; each one's `core` module
          takes q, k, v (B, T, heads, D) and is what context parallelism wraps
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import nn

from sparkring.training.models.torch_private import direct_children

CUT_KINDS = ("column", "row", "vocab", "vocab_head")  # of modules with a weight
KINDS = (*CUT_KINDS, "replicate", "enter")


@dataclass(frozen=True)
class ShardingPlan:
    """How a model may be cut; the module's docstring says what each field lists."""

    layers: tuple[str, ...] = ()
    tensor: Mapping[str, str] = field(default_factory=dict)
    heads: tuple[str, ...] = ()

    def layer_names(self, model: nn.Module) -> list[str]:
        return [name for pattern in self.layers for name in expand(pattern, model)]

    def kinds(self, model: nn.Module) -> dict[str, str]:
        """Map each module's name to the way its weight is split over tp."""
        return {name: kind for pattern, kind in self.tensor.items() for name in expand(pattern, model)}

    def attention_names(self, model: nn.Module) -> list[str]:
        return [name for pattern in self.heads for name in expand(pattern, model)]

    def check_fits(self, model: nn.Module, axis: str | None = None) -> None:
        """Raise ValueError where a module that the plan names is not there, or is not of a kind that `axis` can cut."""
        heads = ("heads", "kv_heads") if axis in ("tp", "cp") else ()
        weight = ("weight",) if axis == "tp" else ()
        wanted: list[tuple[str, tuple[str, ...]]] = [(pattern, ()) for pattern in self.layers]
        wanted += [(pattern, heads) for pattern in self.heads]
        wanted += [(pattern, weight if kind in CUT_KINDS else ()) for pattern, kind in self.tensor.items()]
        for pattern, attributes in wanted:
            for name, module in expand(pattern, model).items():
                for attribute in attributes:
                    if not hasattr(module, attribute):
                        raise ValueError(
                            f"the sharding plan names {name!r}, which has no {attribute!r} in {type(model).__name__}; "
                            "change PLAN, or move the class to another file"
                        )


def plan_of(model: nn.Module, axis: str | None = None) -> ShardingPlan | None:
    """Return the model's plan; None where it has none, also next to another class's, or none to cut it along `axis`."""
    plan = _plan_beside(model)
    try:
        if plan is not None:
            plan.check_fits(model, axis)
    except ValueError:
        return None
    return plan


def _plan_beside(model: nn.Module) -> ShardingPlan | None:
    """Return `PLAN` of the Python module that defines the model's class, or None."""
    found = getattr(sys.modules.get(type(model).__module__), "PLAN", None)
    return found if isinstance(found, ShardingPlan) else None


def required_plan(model: nn.Module, axis: str) -> ShardingPlan:
    """Return the model's plan; the ValueError says how to write one, or which names are unknown."""
    plan = _plan_beside(model)
    if plan is None:
        raise ValueError(
            f"parallel.{axis} > 1: {type(model).__name__} has no sharding plan; define PLAN = ShardingPlan(...) beside "
            f"the class (training/models/sharding_plan.py says how)"
        )
    plan.check_fits(model, axis)
    return plan


def expand(pattern: str, model: nn.Module) -> dict[str, nn.Module]:
    """Expand `blocks.*.attn.q` to `blocks.0.attn.q`, ..., with modules; ValueError without a match."""
    found: list[tuple[str, nn.Module]] = [("", model)]
    for part in pattern.split("."):
        grown = []
        for prefix, module in found:
            # not named_children(), which has a module that is in two places once
            children = direct_children(module, part)
            grown += [(f"{prefix}.{key}" if prefix else key, child) for key, child in children.items()]
        found = grown
    if not found:
        raise ValueError(f"the sharding plan names {pattern!r}, which {type(model).__name__} does not have")
    return dict(found)
