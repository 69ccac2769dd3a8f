"""Batch normalization over the rows of all data ranks in a pass, so that every split computes what one process does.

A layer's statistics are those of the pass's rows whose weight is not 0: padding, and rows that the loss leaves out, are
normalized and do not count. With n counted values of a channel over all ranks, and g the gradient of the output,

    dx = gamma / sigma (g - [counted] (sum(g) + x_hat sum(g x_hat)) / n),    sums over all ranks

(https://arxiv.org/abs/1502.03167). Bytes sent per layer and pass of w ranks: (w-1) (1 + 2 C) x 8 forward, and as many
less one number backward, C channels. Layers keep their class, parameters and buffers: a checkpoint or an exported model
is that of plain layers. Every rank must call the same layers in the same order, also where it has no rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from sparkring.training.data.batch import Batch
from sparkring.training.waiting import waits_for_ranks


def batch_norms(module: nn.Module) -> list[_BatchNorm]:
    """List batch normalization layers, except classes with their own forward."""
    plain = _BatchNorm.forward
    return [m for m in module.modules() if isinstance(m, _BatchNorm) and type(m).forward is plain]


class SyncedBatchNorm:
    """The layers of one model, and the rows of the pass that they see."""

    def __init__(self, layers: Sequence[_BatchNorm], group: dist.ProcessGroup | None) -> None:
        """Make the layers compute their statistics over the ranks of `group`; None: this process alone."""
        self.group = group
        self.ranks = 1 if group is None else dist.get_world_size(group)
        self.layers = layers
        self._counted: torch.Tensor | None = None  # (rows,) 1 and 0; None: all rows count
        self._rows = 0
        self._probes: list[torch.Tensor] | None = None  # of a pass without rows
        for layer in self.layers:
            layer.__dict__["forward"] = self._forward_of(layer)  # of this layer alone: its class stays

    @property
    def is_collective(self) -> bool:
        """Whether every rank must run every pass."""
        return self.ranks > 1 and bool(self.layers)

    def begin(self, batch: Batch) -> None:
        """Take the rows of the next pass."""
        weight = batch.weight if self.layers else None
        self._rows = batch.rows
        self._counted = None if weight is None or bool((weight != 0).all()) else (weight != 0)
        self._probes = None

    def begin_without_rows(self) -> None:
        """Prepare the forward of a rank without rows in this pass, while other ranks have some."""
        self._rows, self._counted, self._probes = 0, None, []

    def finish_without_rows(self, value: torch.Tensor) -> None:
        """Take part in the backward of the other ranks, with no gradient for any parameter."""
        probes, self._probes = self._probes or [], None
        if probes and value.requires_grad:  # else no rank's rows reach a parameter behind a layer
            torch.autograd.grad(value, probes, allow_unused=True)

    def _forward_of(self, layer: _BatchNorm) -> Callable[[torch.Tensor], torch.Tensor]:
        plain = layer.forward

        @torch.compiler.disable
        def forward(x: torch.Tensor) -> torch.Tensor:
            by_batch = layer.training or (layer.running_mean is None and layer.running_var is None)
            if not by_batch or (self.ranks == 1 and self._counted is None):
                return plain(x)
            layer._check_input_dim(x)
            needs_grad = x.requires_grad  # the same on every rank
            if self._probes is not None and needs_grad:
                self._probes.append(torch.zeros((), dtype=x.dtype, device=x.device, requires_grad=True))
                x = x + self._probes[-1]
            counted = self._counted_of(x)
            mean, var, count = _statistics(x.detach(), counted, self.group, self.ranks)
            if count == 1:
                raise ValueError(
                    "batch normalization of one value per channel: it takes at least two rows in each training pass; "
                    "raise train.global_batch, lower parallel.accumulate, or set data.tail=drop"
                )
            if layer.training:
                _track(layer, mean, var, count)
            out: torch.Tensor = _Normalize.apply(
                x, layer.weight, layer.bias, mean, var, layer.eps, counted, count, self.group, self.ranks, needs_grad
            )
            return out

        return forward

    def _counted_of(self, x: torch.Tensor) -> torch.Tensor | None:
        """Return a mask of the counted entries of dim 0, broadcastable over x; None: all count."""
        if self._counted is None or not self._rows or x.shape[0] % self._rows:
            return None
        each = self._counted.to(x.device).repeat_interleave(x.shape[0] // self._rows)  # rows may have been unfolded
        return each.view(-1, *[1] * (x.dim() - 1)).to(_accumulated(x))


def _accumulated(x: torch.Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _per_channel(values: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Reshape (C,) to broadcast over x (N, C, ...)."""
    return values.to(_accumulated(x)).view(1, -1, *[1] * (x.dim() - 2))


def _sums(values: torch.Tensor) -> torch.Tensor:
    """Sum (N, C, ...) to (C,) float64."""
    return values.double().sum(dim=[0, *range(2, values.dim())])


@waits_for_ranks
def _gathered(mine: torch.Tensor, group: dist.ProcessGroup | None, ranks: int) -> torch.Tensor:
    """Gather (k,) of each rank to (ranks, k) in rank order, so that all ranks sum in one order."""
    if group is None:
        return mine[None]
    every = [torch.empty_like(mine) for _ in range(ranks)]
    dist.all_gather(every, mine.contiguous(), group=group)
    return torch.stack(every)


def _statistics(
    x: torch.Tensor, counted: torch.Tensor | None, group: dist.ProcessGroup | None, ranks: int
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Compute mean and biased variance (C,) float64 over all ranks, and the values per channel."""
    values = x.to(_accumulated(x))
    each = x[0, 0].numel() if len(x) else 0  # values of a row in a channel
    own = each * (len(x) if counted is None else int(counted.sum()))
    mean = _sums(values if counted is None else values * counted) / max(own, 1)
    off = (values - _per_channel(mean, x)).square()
    squares = _sums(off if counted is None else off * counted)
    found = _gathered(torch.cat([mean.new_tensor([own]), mean, squares]), group, ranks)
    counts, (means, off_squares) = found[:, :1], found[:, 1:].chunk(2, dim=1)
    count = int(counts.sum())
    whole = (counts * means).sum(dim=0) / max(count, 1)
    total = (off_squares + counts * (means - whole).square()).sum(dim=0)
    return (whole, total / count, count) if count else (whole, torch.ones_like(whole), 0)


def _track(layer: _BatchNorm, mean: torch.Tensor, var: torch.Tensor, count: int) -> None:
    """Update what a layer keeps for evaluations as torch does; a pass without counted values changes nothing."""
    if not count or not layer.track_running_stats:
        return
    if layer.num_batches_tracked is not None:
        layer.num_batches_tracked.add_(1)
    kept = layer.num_batches_tracked
    share = layer.momentum if layer.momentum is not None else 1.0 / float(kept if kept is not None else 1)
    for running, value in ((layer.running_mean, mean), (layer.running_var, var * count / (count - 1))):
        if running is not None:
            running.mul_(1 - share).add_(value.to(running), alpha=share)


class _Normalize(torch.autograd.Function):
    """(x - mean) / sqrt(var + eps) * weight + bias, whose mean and variance are functions of all ranks' x."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: Any, bias: Any, *rest: Any) -> torch.Tensor:
        mean, var, eps, counted, count, group, ranks, needs_grad = rest
        ctx.more = counted, count, group, ranks, needs_grad
        inverse = (var + eps).rsqrt()
        ctx.save_for_backward(x, weight, mean, inverse)
        normal = (x.to(_accumulated(x)) - _per_channel(mean, x)) * _per_channel(inverse, x)
        if weight is not None:
            normal = normal * _per_channel(weight, x)
        return (normal if bias is None else normal + _per_channel(bias, x)).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (grad,), (x, weight, mean, inverse) = grads, ctx.saved_tensors
        counted, count, group, ranks, needs_grad = ctx.more
        grad = grad.to(_accumulated(x))
        normal = (x.to(_accumulated(x)) - _per_channel(mean, x)) * _per_channel(inverse, x)
        own = torch.cat([_sums(grad), _sums(grad * normal)])
        grad_bias, grad_weight = own.chunk(2)
        grad_x = None
        if needs_grad:
            sums = _gathered(own, group, ranks).sum(dim=0)
            if count:
                total, total_normal = (_per_channel(each / count, x) for each in sums.chunk(2))
                shift = total + normal * total_normal
                grad = grad - (shift if counted is None else shift * counted)
            scale = inverse if weight is None else inverse * weight.double()
            grad_x = (grad * _per_channel(scale, x)).to(x.dtype)
        weights = (None, None) if weight is None else (grad_weight.to(weight), grad_bias.to(weight))
        return grad_x, *weights, *[None] * 8


def torch_synced(module: nn.Module, group: dist.ProcessGroup) -> nn.Module:
    """Replace layers of `module` by torch's own, for GPUs; rows of weight 0 count there."""
    found: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(module, group)
    return found
