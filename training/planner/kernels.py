"""What a device's own kernels keep for backward, for tensors without memory.

torch's meta device takes operations apart that are one kernel on a device and keep less there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from sparkring.training.models import loss
from sparkring.training.models.torch_private import flash_attention_on_meta

# What CUDA's autocast computes in float32 and the CPU's does not, of operations that keep something for backward
# (https://docs.pytorch.org/docs/stable/amp.html, "CUDA Ops that can autocast to float32").
FLOAT32_ON_CUDA = frozenset({"layer_norm", "group_norm", "softplus", "exp", "expm1", "log", "log1p", "pow", "rsqrt"})
# Of these CUDA's autocast sets the result's dtype.
FLOAT32_RESULT_ON_CUDA = frozenset({"softmax", "log_softmax", "cumsum", "cumprod", "prod"})


class DeviceKernels(TorchFunctionMode):
    """Let operations keep what they keep on a device of this type."""

    def __init__(self, device_type: str = "cpu") -> None:
        super().__init__()
        self.on_cuda = device_type == "cuda"

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is functional.scaled_dot_product_attention and args[0].dim() == 4:
            return fused_attention(*args, **kwargs)
        if self.on_cuda:
            if func is functional.rms_norm and is_fused(*args, **kwargs):
                return fused_rms_norm(*args, **kwargs)
            if torch.is_autocast_enabled("cpu"):  # the trace's, which stands for CUDA's
                args, kwargs = as_cuda_autocasts(getattr(func, "__name__", ""), args, kwargs)
        return func(*args, **kwargs)


@contextmanager
def kernels_of(device_type: str) -> Iterator[None]:
    """Use a device's kernels within the block: outside of models, for loss chunks, and in backward."""
    with loss.chunks_as_on(device_type), DeviceKernels(device_type):
        yield


def with_kernels(forward: Callable[..., Any], device_type: str) -> Callable[..., Any]:
    """Wrap a module's forward to use a device's kernels, also when backward runs it again."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with DeviceKernels(device_type):
            return forward(*args, **kwargs)

    return run


def fused_attention(q: Any, k: Any, v: Any, attn_mask: Any = None, dropout_p: float = 0.0, *rest: Any, **_: Any) -> Any:
    """Compute attention as `scaled_dot_product_attention` does, with what fused kernels keep.

    Args:
        q: queries of shape (B, heads, T, D).
        k: keys of shape (B, heads, T, D).
        v: values of shape (B, heads, T, D).
        attn_mask: broadcast to (B, heads, T, T), or None.
        dropout_p: probability of dropout.
        rest: further options, which keep nothing.
    """
    return flash_attention_on_meta(q, k, v, attn_mask, dropout_p)


def is_fused(
    x: torch.Tensor, shape: Sequence[int], weight: torch.Tensor | None = None, eps: float | None = None
) -> bool:
    """Return whether CUDA has one kernel for this RMSNorm: torch decomposes it where dtypes differ."""
    return weight is None or weight.dtype == x.dtype


def fused_rms_norm(
    x: torch.Tensor, shape: Sequence[int], weight: torch.Tensor | None = None, eps: float | None = None
) -> Any:
    """Compute `rms_norm` as on CUDA, which keeps its input and one number per normalized row."""
    return _RMSNorm.apply(x, weight, math.prod(x.shape[: x.dim() - len(shape)]))


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor | None, rows: int) -> torch.Tensor:
        ctx.save_for_backward(x, weight, torch.empty(rows, dtype=torch.float32, device=x.device))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, None]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), None if weight is None else torch.empty_like(weight), None


def as_cuda_autocasts(name: str, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return a function's arguments as CUDA's autocast passes them on."""
    if name in FLOAT32_ON_CUDA:
        return tuple(map(_exact, args)), {key: _exact(value) for key, value in kwargs.items()}
    if name in FLOAT32_RESULT_ON_CUDA and kwargs.get("dtype") is None and _exact(args[0]) is not args[0]:
        return args, kwargs | {"dtype": torch.float32}
    return args, kwargs


def _exact(value: Any) -> Any:
    """Convert a half-precision tensor to float32."""
    is_half = isinstance(value, torch.Tensor) and value.dtype in (torch.bfloat16, torch.float16)
    return value.float() if is_half else value
