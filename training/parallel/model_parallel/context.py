"""Cut sequences over ranks (DeepSpeed-Ulysses, https://arxiv.org/abs/2309.14509).

Each of c ranks holds T/c tokens of every row; around attention the tokens are exchanged for heads, so each rank attends
over the whole sequence with H/c heads. Bytes sent per rank, block and pass: (c-1)/c^2 x bytes of q, k, v and the output
over the full sequence, forward and again backward. Parameters are whole; their gradients are summed over c with dp.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from sparkring.training.models.sharding_plan import ShardingPlan


class _Exchange(torch.autograd.Function):
    """All-to-all over dim 0 of (c, ...), its own transpose: backward is the same call."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return _all_to_all(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _all_to_all(grads[0], ctx.group), None


def _all_to_all(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    x = x.contiguous()
    out = torch.empty_like(x)
    dist.all_to_all_single(out, x, group=group)
    return out


def heads_for_tokens(x_BtHD: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Exchange (B, T/c, H, D) for (B, T, H/c, D)."""
    parts = dist.get_world_size(group)
    x_cBthD = x_BtHD.unflatten(2, (parts, -1)).movedim(2, 0)
    return _Exchange.apply(x_cBthD, group).movedim(0, 1).flatten(1, 2)


def tokens_for_heads(x_BThD: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Exchange (B, T, H/c, D) for (B, T/c, H, D)."""
    parts = dist.get_world_size(group)
    x_cBthD = x_BThD.unflatten(1, (parts, -1)).movedim(1, 0)
    return _Exchange.apply(x_cBthD, group).movedim(0, 2).flatten(2, 3)


class AllToAllCore(nn.Module):
    """Wrap an attention core: q, k, v and the output become (B, T/c, heads, D)."""

    def __init__(self, core: nn.Module, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.core, self.group = core, group
        self.whole_sequences = False  # inputs are (B, T, heads, D): nothing is exchanged

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if self.whole_sequences:
            return self.core(q, k, v)
        whole = self.core(*(heads_for_tokens(x, self.group) for x in (q, k, v)))
        return tokens_for_heads(whole, self.group)


def apply_context(model: nn.Module, plan: ShardingPlan, group: dist.ProcessGroup) -> None:
    """Wrap every attention core that the plan names in the exchange."""
    for name in plan.attention_names(model):
        attention = model.get_submodule(name)
        attention.core = AllToAllCore(attention.core, group)  # type: ignore[arg-type]


def gather_sequence(outputs: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Gather (B, T/c, ...) of each rank to (B, T, ...) on all (evaluation only)."""
    parts = [torch.empty_like(outputs) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, outputs.contiguous(), group=group)
    return torch.cat(parts, dim=1)
