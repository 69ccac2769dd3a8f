"""Check on a few rows that a cut model computes what the whole one does.

Under pp: the model's forward against the composition of its plan's layers, as it trains (dropout by the same seed).
Values do not matter for that, so models of up to MAX_ELEMENTS get some on the CPU of rank 0; of larger models, and only
of those, operations and shapes are compared on the meta device. Under cp: the model as it is placed on its ranks, on
whole sequences against its stretches, in evaluation. Neither the model nor its buffers or the random state change.

Not compared: a forward that differs only in `requires_grad` or `detach`, or for other rows than these; a larger
model under pp whose forward needs values (`if x.any()`); what tensor ranks compute.
"""

from __future__ import annotations

import copy
import logging
from typing import Any

import torch
from torch import nn

from sparkring.conf.plain_text import count_of
from sparkring.training.data.batch import Batch
from sparkring.training.models.task import Task
from sparkring.training.models.torch_private import TorchDispatchMode
from sparkring.training.parallel.batching import slice_batch
from sparkring.training.parallel.model_parallel.pipeline import PipelineStage

log = logging.getLogger(__name__)
ROWS = 4
MAX_ELEMENTS = 2**27  # parameters and buffers of a model that is run with values: 0.5 GiB in fp32
MAX_SHORTENING = 1024  # a sequence is cut to at least 1 / this of its length


def few_rows(sample: Batch, task: Task, ranks: int) -> Batch:
    """Return the first rows, with sequences as short as `ranks` can still split, if the task can."""
    rows = slice_batch(sample, 0, min(ROWS, sample.rows))
    for parts in range(MAX_SHORTENING, 1, -1):
        try:
            shorter = task.slice_sequence(rows.columns, 0, parts)
            task.slice_sequence(shorter, 0, 4 * ranks)
        except ValueError:  # does not divide, or the task cannot cut sequences
            continue
        return Batch(shorter, rows.rows, rows.global_rows, rows.consumed_samples, rows.weight, real=rows.real)
    return rows


def partition_problem(model: nn.Module, names: list[str], x: torch.Tensor) -> str | None:
    """Return why a pipeline over the layers `names` would train a different model, or None."""
    small = sum(t.numel() for t in (*model.parameters(), *model.buffers())) <= MAX_ELEMENTS
    run = outputs_of if small else calls_of
    try:
        whole = run(_copy(model, small), x)
    except (RuntimeError, NotImplementedError) as error:
        log.warning("the sharding plan's layers are not compared with forward, which cannot run here: %s", error)
        return None
    try:
        composed = run(PipelineStage(_copy(model, small), names), x)
        if equal(whole, composed):
            return None
        found = f"they compute {_summary(whole)} and {_summary(composed)}"
    except (RuntimeError, TypeError, ValueError) as error:
        found = f"the layers fail: {error}"
    return (
        f"{type(model).__name__}'s forward is not the composition of its sharding plan's layers "
        f"({', '.join(names[:6])}{', ...' if len(names) > 6 else ''}), so parallel.pp > 1 would train another model: "
        f"on the same rows {found}; put all that forward does (scaling, dropout, reshaping) into modules of the plan"
    )


def _copy(model: nn.Module, small: bool) -> nn.Module:
    """Copy the model, with writable values on the CPU if `small`, else on the meta device."""
    memo: dict[int, Any] = {}
    for number, tensor in enumerate((*model.parameters(), *model.buffers())):
        copied = _value(number, tensor.detach()) if small else tensor.detach().to("meta")
        memo[id(tensor)] = nn.Parameter(copied, False) if isinstance(tensor, nn.Parameter) else copied
    return copy.deepcopy(model, memo)


def _value(number: int, tensor: torch.Tensor) -> torch.Tensor:
    """Copy the tensor's value; a meta tensor gets random values that keep the scale of activations."""
    if not tensor.is_meta:
        return tensor.to("cpu", copy=True)
    if not tensor.is_floating_point():
        return torch.zeros(tensor.shape, dtype=tensor.dtype)
    draw = torch.rand(tensor.shape, generator=torch.Generator().manual_seed(number))
    if tensor.ndim > 1:
        draw = (2 * draw - 1) * (3 / tensor.shape[-1]) ** 0.5
    return draw.to(tensor.dtype)


def outputs_of(module: nn.Module, x: torch.Tensor) -> Any:
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return module(x.cpu())


def calls_of(module: nn.Module, x: torch.Tensor) -> list[str]:
    """List every operation of a forward on the meta device."""
    with torch.no_grad(), OperationLog() as log_of_calls:
        module(x.to("meta"))
    return log_of_calls.calls


class OperationLog(TorchDispatchMode):
    """Record every operation with the shapes and numbers it takes."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [tuple(a.shape) if isinstance(a, torch.Tensor) else a for a in (*args, *(kwargs or {}).values())]
        self.calls.append(f"{func} {given}")
        return func(*args, **(kwargs or {}))


def equal(a: Any, b: Any) -> bool:
    """Return whether values are bit-equal, as the same operations on the same values are."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a.nan_to_num(), b.nan_to_num())
    return isinstance(a, list) and isinstance(b, list) and a == b


def close(a: Any, b: Any, dtype: torch.dtype | None = None) -> bool:
    """Return whether values agree in half the digits of `dtype` (None: their own); sums may be reordered."""
    if not (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)):
        return False
    if a.shape != b.shape or a.dtype != b.dtype or not a.is_floating_point():
        return torch.equal(a, b)
    tolerance = torch.finfo(dtype or a.dtype).eps ** 0.5
    scale = float(b.nan_to_num().abs().max()) if b.numel() else 0.0
    return torch.allclose(a, b, rtol=0, atol=tolerance * scale, equal_nan=True)


def _summary(outputs: Any) -> str:
    if isinstance(outputs, torch.Tensor):
        return f"{tuple(outputs.shape)} with mean {float(outputs.double().mean()):.6g}"
    return f"{count_of(len(outputs), 'operation')}" if isinstance(outputs, list) else type(outputs).__name__
