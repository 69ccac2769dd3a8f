"""Trace on the meta device what a forward computes: matrix products with their shapes, and the bytes of all else.

Backward is derived: of y = x W both x' = y' W^T and W' = x^T y', two products of the same size; fused attention
computes 5 products where forward has 2 (https://arxiv.org/abs/2205.14135, section 3.1); what only moves memory reads
the gradient and what was kept, and writes a gradient: 3 tensors where forward has 2.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

from sparkring.conf.errors import first_line
from sparkring.training.models.sparse_embedding import sparse_embeddings
from sparkring.training.models.torch_private import DispatchMode, call_without_memory, storage_key
from sparkring.training.planner.kernels import DeviceKernels
from sparkring.training.planner.trace import Untraceable, repeated, tensors_in

# Operations of aten that only make another view of a tensor, or no work at all
UNCOUNTED = ("detach", "empty", "lift_fresh", "alias", "arange", "zeros", "ones", "scalar_tensor")


class Operation(NamedTuple):
    """One kernel of the forward of one row (a whole sequence).

    kind: `matmul` by a weight, `product` of two activations, `attention` (fused), or `memory`.
    place: `column` or `row`, the weight is cut over tensor ranks; `inner`, between cut layers; `between`, all else.
    batch, m, k, n: of a matmul m grows with the rows, of the others the batch.
    elements: read and written, of activations.
    per_row: False: it reads none of the rows, such as a mask of positions, so that a pass does it once.
    has_backward: False: no gradient goes through it, such as the hash of a dropout mask.
    """

    kind: str
    place: str
    batch: int = 1
    m: int = 0
    k: int = 0
    n: int = 0
    elements: float = 0.0
    per_row: bool = True
    has_backward: bool = True

    @property
    def flops(self) -> float:
        return 2.0 * self.batch * self.m * self.k * self.n


class ModelWork(NamedTuple):
    """Operations of one row's forward by layer: a module of the sharding plan, a block, or "" for the rest."""

    layers: dict[str, tuple[Operation, ...]]

    def flops(self) -> float:
        """Count operations of forward and backward, which has two products for each of forward's."""
        operations = [op for layer in self.layers.values() for op in layer if op.per_row]
        return sum(op.flops * (3 if op.has_backward else 1) for op in operations)


class _Recorder(DispatchMode):
    """Record operations by the module they run in."""

    def __init__(
        self,
        weights: Sequence[torch.Tensor],
        inputs: Iterable[torch.Tensor],
        layers: Iterable[str],
        kinds: Mapping[str, str],
    ) -> None:
        """Start without recorded operations.

        Args:
            weights: weights of the model; frozen ones have no gradient.
            inputs: input rows of the model.
            layers: modules by which operations are grouped.
            kinds: module name -> how it is cut over tensor ranks.
        """
        super().__init__()
        self.layers, self.kinds = set(layers), kinds
        self.weights, self.of_rows = set(map(storage_key, weights)), set(map(storage_key, inputs))
        self.with_gradient = {storage_key(w) for w in weights if w.requires_grad}  # and what is made of them
        self.alive: list[torch.Tensor] = []  # all that was made, so that no other storage has its key
        self.running: list[str] = []  # names of the modules around the current operation
        self.causal = False
        self.found: dict[str, list[Operation]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = call_without_memory(func, args, kwargs or {})
        name = func.overloadpacket.__name__
        if name in UNCOUNTED or getattr(func, "is_view", False):
            return out
        given, made = list(tensors_in((args, kwargs))), list(tensors_in(out))
        if made and not ({storage_key(t) for t in made} & {storage_key(t) for t in given} and not name.endswith("_")):
            layer = next((each for each in self.running if each in self.layers), "")
            operation = self._operation(name, given, made, args)
            per_row, has_backward = self._follow(given, made)
            operation = operation._replace(per_row=per_row, has_backward=has_backward)
            self.found.setdefault(layer, []).append(operation)
        return out

    def pulled(self, rows: torch.Tensor) -> torch.Tensor:
        """Record rows of a sparse table: a weight for each id of the batch."""
        self.alive.append(rows)
        self.of_rows.add(storage_key(rows))
        self.with_gradient.add(storage_key(rows))
        return rows

    def _follow(self, given: list[torch.Tensor], made: list[torch.Tensor]) -> tuple[bool, bool]:
        """Return (whether an operation reads rows, has a gradient), and mark its outputs likewise."""
        self.alive += made
        keys = {storage_key(t) for t in given}
        per_row, has_backward = bool(keys & self.of_rows), bool(keys & self.with_gradient)
        if per_row:
            self.of_rows.update(map(storage_key, made))
        if has_backward := has_backward and any(t.is_floating_point() for t in made):
            self.with_gradient.update(map(storage_key, made))
        return per_row, has_backward

    def _reads_rows(self, tensor: torch.Tensor) -> bool:
        return storage_key(tensor) in self.of_rows

    def _operation(self, name: str, given: list[torch.Tensor], made: list[torch.Tensor], args: Any) -> Operation:
        place = self._place()
        if name in ("mm", "addmm", "bmm", "baddbmm"):
            x, y = args[1:3] if "add" in name else args[:2]
            return self._product(place, x, y, made[0])
        if "scaled_dot_product" in name:
            (b, heads, t, width), keys = args[0].shape, args[1].shape[2]
            # q k^T and p v, of a causal mask half of each: t x keys x width
            products = 1 if self.causal else 2
            return Operation("attention", place, b * heads * products, t, width, keys, 4.0 * args[0].numel())
        if name == "convolution":
            x, w = args[0], args[1]
            size = made[0].numel() // made[0].shape[1]
            return Operation(
                "matmul", place, 1, size, math.prod(w.shape[1:]), w.shape[0], float(x.numel() + made[0].numel())
            )
        moved = sum(t.numel() for t in given if storage_key(t) not in self.weights) + sum(t.numel() for t in made)
        if name == "embedding":
            moved = 2 * made[0].numel()
        return Operation("memory", place, elements=float(moved))

    def _product(self, place: str, x: torch.Tensor, y: torch.Tensor, made: torch.Tensor) -> Operation:
        """Describe (..., m, k) by (..., k, n). With the weight on the left, rows are the other's columns."""
        batch, (m, k), n = math.prod(x.shape[:-2]), x.shape[-2:], y.shape[-1]
        activations = float(made.numel()) + sum(t.numel() for t in (x, y) if self._reads_rows(t))
        if self._reads_rows(x) and self._reads_rows(y):
            return Operation("product", place, batch, m, k, n, activations)
        if self._reads_rows(y):
            m, n = n, m
        return Operation("matmul", place, batch, m, k, n, activations)

    def _place(self) -> str:
        kinds = [self.kinds.get(name, "") for name in self.running]
        for kind in reversed(kinds):
            if kind in ("column", "vocab_head"):
                return "column"
            if kind in ("row", "vocab"):
                return "row"
        return "inner" if "enter" in kinds else "between"


class _PulledRows(NamedTuple):
    """A sparse table whose look-ups are counted elsewhere (sparse_tables.py)."""

    dim: int
    recorder: _Recorder

    def rows_of(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the rows (n, dim) of ids (n,)."""
        return self.recorder.pulled(torch.empty(len(ids), self.dim, device="meta"))


class _FusedKernels(DeviceKernels):
    """Record as one kernel what is one on a device and many on meta; causal attention skips half of the work."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is functional.scaled_dot_product_attention:
            self.recorder.causal = bool((kwargs or {}).get("is_causal", len(args) > 5 and args[5]))
        if func in (functional.rms_norm, functional.batch_norm):  # the latter refuses to train on one row
            return args[0].clone()
        return super().__torch_function__(func, types, args, kwargs)


def trace_operations(
    model: nn.Module, inputs: tuple[Any, ...], layers: Iterable[str], kinds: Mapping[str, str]
) -> ModelWork:
    """Trace one row's forward of a copy of `model`. Untraceable if the forward needs values.

    Args:
        model: on any device.
        inputs: positional, for one row.
        layers: modules by which operations are grouped; one within another belongs to the outer one.
        kinds: module name -> how it is cut over tensor ranks (models/sharding_plan.py).
    """
    traced = copy.deepcopy(model).to("meta")
    given = [repeated(each, 1) for each in inputs]
    recorder = _Recorder([*traced.parameters()], tensors_in(given), layers, kinds)
    for embedding in sparse_embeddings(traced).values():
        embedding.source = _PulledRows(embedding.dim, recorder)
    try:
        with _named_modules(traced, recorder.running), _FusedKernels(recorder), recorder:
            traced(*given)
    except Exception as error:  # a user's forward may fail in any way
        raise Untraceable(
            f"{type(model).__name__}'s forward cannot be run on the meta device, which has shapes and no values: "
            f"{type(error).__name__}: {first_line(error)}"
        ) from error
    return ModelWork({name: tuple(operations) for name, operations in recorder.found.items()})


@contextmanager
def _named_modules(model: nn.Module, running: list[str]) -> Iterator[None]:
    """Keep in `running` the names of modules in forward, outermost first, within the block."""
    hooks = []
    for name, module in model.named_modules():
        hooks.append(module.register_forward_pre_hook(lambda _, __, name=name: running.append(name)))
        hooks.append(module.register_forward_hook(lambda _, __, ___: running.pop() and None, always_call=True))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
