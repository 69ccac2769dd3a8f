"""Whether a model that is cut computes what the whole one does, tried on a few rows before anything is trained.

Under pp: the model's forward against the composition of its plan's chain, as it trains (dropout by the same seed).
Values do not matter for that, so small models get some on the CPU of rank 0; of those beyond NUMBERS elements, and
only of those, operations and shapes are compared on the meta device. Under cp: the model as it is placed on its ranks,
on whole sequences against its stretches, in evaluation. Neither the model nor its buffers or the random state change.

Not compared: a forward that differs only in `requires_grad` or `detach`, or for other rows than these; a larger
model under pp whose forward needs values (`if x.any()`); what tensor ranks compute.
"""

from __future__ import annotations

import copy
import logging
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from training.data.batch import Batch
from training.parallel.batching import slice_batch
from training.parallel.model_parallel.pipeline import Stage

log = logging.getLogger(__name__)
ROWS = 4
NUMBERS = 2**27  # parameters and buffers of a model that is tried with values: 0.5 GiB in fp32
SHORTEST = 1024  # at most so many times shorter a sequence is tried


def few_rows(sample: Batch, task: Any, ranks: int) -> Batch:
    """The first rows, their sequences as short as `ranks` can still cut, where the task can cut any."""
    rows = slice_batch(sample, 0, min(ROWS, sample.rows))
    cut = getattr(task, "slice_sequence", None)
    for parts in range(SHORTEST, 1, -1):
        if cut is None:
            break
        try:
            shorter = cut(rows.columns, 0, parts)
            cut(shorter, 0, 4 * ranks)
        except ValueError:  # does not divide
            continue
        return Batch(shorter, rows.rows, rows.global_rows, rows.consumed_samples, rows.weight)
    return rows


def chain_problem(model: nn.Module, names: list[str], x: torch.Tensor) -> str | None:
    """Why a pipeline over the chain `names` would train another model than `model`, or None."""
    small = sum(t.numel() for t in (*model.parameters(), *model.buffers())) <= NUMBERS
    run = outputs_of if small else calls_of
    try:
        whole = run(_twin(model, small), x)
    except (RuntimeError, NotImplementedError) as error:
        log.warning("the sharding plan's chain is not compared with forward, which cannot be tried here: %s", error)
        return None
    try:
        composed = run(Stage(_twin(model, small), names), x)
        if equal(whole, composed):
            return None
        found = f"they compute {_told(whole)} and {_told(composed)}"
    except (RuntimeError, TypeError, ValueError) as error:
        found = f"the chain fails: {error}"
    return (
        f"{type(model).__name__}'s forward is not the composition of its sharding plan's chain "
        f"({', '.join(names[:6])}{', ...' if len(names) > 6 else ''}), so parallel.pp > 1 would train another model: "
        f"on the same rows {found}; put all that forward does (scaling, dropout, reshaping) into modules of the chain"
    )


def _twin(model: nn.Module, small: bool) -> nn.Module:
    """A copy with tensors of its own, which forward may write to: values on the CPU, or none on the meta device."""
    memo: dict[int, Any] = {}
    for number, tensor in enumerate((*model.parameters(), *model.buffers())):
        copied = _value(number, tensor.detach()) if small else tensor.detach().to("meta")
        memo[id(tensor)] = nn.Parameter(copied, False) if isinstance(tensor, nn.Parameter) else copied
    return copy.deepcopy(model, memo)


def _value(number: int, tensor: torch.Tensor) -> torch.Tensor:
    """What is there, else something that neither vanishes nor grows."""
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
    """Every operation of a forward on the meta device."""
    with torch.no_grad(), Calls() as calls:
        module(x.to("meta"))
    return calls.made


class Calls(TorchDispatchMode):
    """Notes every operation and the shapes and numbers it takes."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [tuple(a.shape) if isinstance(a, torch.Tensor) else a for a in (*args, *(kwargs or {}).values())]
        self.made.append(f"{func} {given}")
        return func(*args, **(kwargs or {}))


def equal(a: Any, b: Any) -> bool:
    """To the bit: the same operations on the same values, if they are the same."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a.nan_to_num(), b.nan_to_num())
    return isinstance(a, list) and isinstance(b, list) and a == b


def close(a: Any, b: Any, dtype: torch.dtype | None = None) -> bool:
    """Equal in half of the digits of `dtype` (None: their own): the same sums may be made in another order."""
    if not (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)):
        return False
    if a.shape != b.shape or a.dtype != b.dtype or not a.is_floating_point():
        return torch.equal(a, b)
    tolerance = torch.finfo(dtype or a.dtype).eps ** 0.5
    scale = float(b.nan_to_num().abs().max()) if b.numel() else 0.0
    return torch.allclose(a, b, rtol=0, atol=tolerance * scale, equal_nan=True)


def _told(outputs: Any) -> str:
    if isinstance(outputs, torch.Tensor):
        return f"{tuple(outputs.shape)} with mean {float(outputs.double().mean()):.6g}"
    return f"{len(outputs)} operations" if isinstance(outputs, list) else type(outputs).__name__
