"""Cross entropy over a vocabulary with a bounded peak of memory.

torch's own casts all logits to float32 and keeps their log-softmax for backward: two float32 copies of (N, V) next to
the logits, where the logits of a language model are the largest tensor of the step. Here, of more than one chunk, only
the logits, which the head has made anyway, and one float32 number per target are kept; backward recomputes the softmax
by chunks of targets (the idea of https://arxiv.org/abs/2410.10989, section 3.2, without its fusion with the head). One
chunk or less goes through torch's own, whose kernels take half the time.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch.nn import functional

from sparkring.training.models.torch_private import has_memory, is_dtensor

Tensor = torch.Tensor
# Elements of the logits worked on at a time: 16 MiB in float32 on the CPU, whose caches they pass through. A GPU needs
# 256 MiB to be busy: at 2^22 a step of gpt-124m would be 790 chunks of kernels that take less than their launch.
CHUNK_ELEMENTS = {"cpu": 1 << 22, "cuda": 1 << 26}
_planned_for: ContextVar[str] = ContextVar("planned_for", default="")


def token_cross_entropy(logits: Tensor, target: Tensor, ignored: int) -> Tensor:
    """Compute -log softmax(logits)[target] per target, 0 where the target is `ignored`.

    logits (..., V), target (...) int64 -> (...), float32 (float64 for float64 logits). Logits cut over the vocabulary
    (a DTensor under torch's `loss_parallel`) go through torch's own cross entropy.
    """
    flat_NV, target_N = logits.flatten(0, -2), target.flatten()
    if is_dtensor(flat_NV) or flat_NV.numel() <= chunk_elements(flat_NV.device):
        exact_NV = flat_NV.to(torch.promote_types(flat_NV.dtype, torch.float32))
        loss_N = functional.cross_entropy(exact_NV, target_N, reduction="none", ignore_index=ignored)
    else:
        loss_N = _ChunkedCrossEntropy.apply(flat_NV, target_N, ignored)
    return loss_N.unflatten(0, target.shape)


def chunk_elements(device: torch.device) -> int:
    """Return how many elements of the logits the loss works on at a time."""
    return CHUNK_ELEMENTS.get(_planned_for.get() or device.type, CHUNK_ELEMENTS["cpu"])


@contextmanager
def chunks_as_on(device_type: str) -> Iterator[None]:
    """Use the chunk size of a device, wherever the logits are: the planner's have no memory."""
    token = _planned_for.set(device_type)
    try:
        yield
    finally:
        _planned_for.reset(token)


def _chunks(logits_NV: Tensor) -> Iterator[slice]:
    rows = max(1, chunk_elements(logits_NV.device) // logits_NV.shape[1])
    starts = range(0, len(logits_NV), rows)
    # the planner's tensors have no values: one chunk shows what all of them hold
    return (slice(start, start + rows) for start in (starts if has_memory(logits_NV) else starts[:1]))


class _ChunkedCrossEntropy(torch.autograd.Function):
    """loss_n = logsumexp(logits_n) - logits_n[target_n]; d loss / d logits = softmax(logits) - onehot(target)."""

    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, target_N: Tensor, ignored: int) -> Tensor:
        dtype = torch.float64 if logits_NV.dtype == torch.float64 else torch.float32
        kept_N = target_N != ignored
        index_N = target_N.where(kept_N, torch.zeros_like(target_N))
        norm_N = torch.empty(len(target_N), dtype=dtype, device=logits_NV.device)
        loss_N = torch.empty_like(norm_N)
        for rows in _chunks(logits_NV):
            chunk_CV = logits_NV[rows].to(dtype)
            torch.logsumexp(chunk_CV, dim=1, out=norm_N[rows])
            loss_N[rows] = norm_N[rows] - chunk_CV.gather(1, index_N[rows, None]).squeeze(1)
            del chunk_CV  # not together with the next one
        ctx.save_for_backward(logits_NV, index_N, kept_N, norm_N)
        return loss_N.masked_fill_(~kept_N, 0.0)

    @staticmethod
    def backward(ctx: Any, grad_N: Tensor) -> tuple[Tensor, None, None]:
        logits_NV, index_N, kept_N, norm_N = ctx.saved_tensors
        weight_N = grad_N.to(norm_N.dtype) * kept_N
        gradient_NV = torch.empty_like(logits_NV)
        for rows in _chunks(logits_NV):
            chunk_CV = (logits_NV[rows].to(norm_N.dtype) - norm_N[rows, None]).exp_()
            chunk_CV.scatter_add_(1, index_N[rows, None], chunk_CV.new_full((len(chunk_CV), 1), -1.0))
            gradient_NV[rows] = chunk_CV.mul_(weight_N[rows, None])
            del chunk_CV
        return gradient_NV, None, None
