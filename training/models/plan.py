"""The small table a module needs to be trained under pipeline, tensor and context parallelism. Data parallelism (ring,
ZeRO) needs none.

A plan lies beside its model as a module-level `PLAN`, found by the model's class; models import nothing else of this.
Names are those of `named_modules()`; `*` stands for every key of a ModuleList.

chain     the modules whose composition is the model's forward, one tensor in, one out: `head(norm(...embed(x)))`; a
          pipeline cuts this chain
tensor    module -> how its weight is cut over tp:
          `column` (Linear, output features), `row` (Linear, input features; its outputs are summed),
          `vocab` (Embedding rows), `vocab_head` (Linear whose outputs, the logits, stay cut for the loss),
          `replicate` (held whole by every rank; norms and small layers),
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


@dataclass(frozen=True)
class ShardingPlan:
    chain: tuple[str, ...] = ()
    tensor: Mapping[str, str] = field(default_factory=dict)
    heads: tuple[str, ...] = ()


def plan_of(model: nn.Module) -> ShardingPlan | None:
    """`PLAN` of the Python module the model's class is defined in."""
    found = getattr(sys.modules.get(type(model).__module__), "PLAN", None)
    return found if isinstance(found, ShardingPlan) else None


def chain_of(model: nn.Module) -> list[str]:
    """The modules of the model's chain by name, in order; none where its plan has no chain."""
    plan = plan_of(model)
    return [name for pattern in plan.chain for name in expand(pattern, model)] if plan is not None else []


def expand(pattern: str, model: nn.Module) -> list[str]:
    """`blocks.*.attn.q` -> `blocks.0.attn.q`, ...; ValueError when the model has no such module."""
    names = [""]
    for part in pattern.split("."):
        grown = []
        for prefix in names:
            # not named_children(), which names a module that stands in two places once
            children = [key for key, child in model.get_submodule(prefix)._modules.items() if child is not None]
            keys = children if part == "*" else [part] if part in children else []
            grown += [f"{prefix}.{key}" if prefix else key for key in keys]
        names = grown
    if not names:
        raise ValueError(f"the sharding plan names {pattern!r}, which {type(model).__name__} does not have")
    return names
