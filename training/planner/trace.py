"""Trace on the meta device what modules take, return and keep for backward."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from sparkring.conf.errors import first_line
from sparkring.training.data.batch import Ragged
from sparkring.training.models.sparse_embedding import PulledRows, sparse_embeddings
from sparkring.training.models.torch_private import fake_tensors, storage_key, tree_map
from sparkring.training.parallel.precision import DTYPES, autocast
from sparkring.training.planner.kernels import DeviceKernels

CASTS = {"ToCopyBackward0", "TBackward0", "TransposeBackward0", "PermuteBackward0", "ViewBackward0"}  # autograd's names
INDEX_BYTES = 4  # what an element counts for: integers and masks, as of pooling, are larger or smaller than a float


class Untraceable(ValueError):
    """The model cannot run on the meta device; the message is the reason."""


def running_modules(model: nn.Module) -> list[str]:
    """Track the names of modules in a forward pass, in an updated list; an error leaves those it was in."""
    running: list[str] = []

    def leave(*_: Any) -> None:
        running.pop()

    for name, module in model.named_modules():
        module.register_forward_pre_hook(lambda _, __, name=name: running.append(name))
        module.register_forward_hook(leave)
    return running


def untraceable(model: nn.Module, running: list[str], error: Exception) -> Untraceable:
    """Name the module that could not be run, and the reason."""
    where = f" at module {running[-1]!r}" if running and running[-1] else ""
    return Untraceable(
        f"{type(model).__name__}'s forward cannot be run on the meta device{where}, which has shapes and no values: "
        f"{type(error).__name__}: {first_line(error)}"
    )


class Shapes:
    """Makes tensors without memory: on the meta device, or, where autocast must see a CPU, torch's fake tensors."""

    def __init__(self, precision: str) -> None:
        self.mode = fake_tensors() if precision != "fp32" else nullcontext()
        self.device = "cpu" if precision != "fp32" else "meta"

    def like(self, tensor: Any, dtype: torch.dtype | None = None) -> Any:
        """Return a tensor without memory for each tensor of a tree."""
        if not isinstance(tensor, torch.Tensor):
            return tensor
        with self.mode:
            made = torch.empty(tensor.shape, dtype=dtype or tensor.dtype, device=self.device)
        return made.requires_grad_(tensor.requires_grad)

    def copy(self, module: nn.Module, weights: torch.dtype | None) -> nn.Module:
        """Copy a module, keeping shared weights shared. `weights`: dtype of floating-point weights."""
        memo: dict[int, Any] = {id(b): self.like(b) for b in module.buffers()}
        for p in module.parameters():
            made = self.like(p.detach(), weights if p.is_floating_point() else None)
            memo[id(p)] = nn.Parameter(made, p.requires_grad)
        return copy.deepcopy(module, memo)


def is_cast_weight(saved: torch.Tensor) -> bool:
    """Return whether a tensor is a weight cast to another dtype by autocast, or a view of one."""
    node, is_cast = saved.grad_fn, False
    while node is not None and node.name() in CASTS:
        is_cast |= node.name() == "ToCopyBackward0"
        node = node.next_functions[0][0]
    return is_cast and node is not None and node.name() == "torch::autograd::AccumulateGrad"


@dataclass
class Trace:
    """Elements per module of the model, for one row of whole sequences; a row's part of what is there once for all.

    Under autocast elements of the dtype of compute: one in float32 counts twice.
    """

    taken: dict[str, int] = field(default_factory=dict)  # of its inputs
    returned: dict[str, int] = field(default_factory=dict)  # of its output
    # kept for backward, by place: `inner`, between cut layers, where a tensor rank has its part; `entered`, the inputs
    # of cut layers, whole on every rank; `between`, all else, whole unless under sequence parallelism
    kept: dict[str, dict[str, float]] = field(default_factory=dict)
    output: torch.Size | None = None  # shape of the model's for one row, if that is one tensor

    def keep(self, names: Iterable[str], place: str, numel: float) -> None:
        for name in names:
            places = self.kept.setdefault(name, {})
            places[place] = places.get(place, 0) + numel


@dataclass(frozen=True)
class MeanRow(Ragged):
    """One row of a ragged column, as long as whole values can be. mean: values of a row, over many."""

    mean: float = 0.0

    @classmethod
    def of(cls, mean: float, dtype: torch.dtype) -> MeanRow:
        values = torch.zeros(math.ceil(mean), dtype=dtype, device="meta")
        return cls(values, (torch.tensor([0, len(values)]),), mean)


def repeated(given: Any, rows: int) -> Any:
    """Repeat a one-row input `rows` times on the meta device: a tensor, a ragged column, or a dict of them."""
    if isinstance(given, Mapping):
        return {name: repeated(value, rows) for name, value in given.items()}
    if isinstance(given, MeanRow):
        offsets = (torch.arange(rows + 1) * given.mean).ceil().long()
        return Ragged(given.values.new_empty(int(offsets[-1])), (offsets,))
    if isinstance(given, Ragged):
        values = given.values.new_empty(len(given.values) * rows, *given.values.shape[1:], device="meta")
        return Ragged(values, tuple(torch.arange(rows + 1) * int(level[-1]) for level in given.offsets))
    if not isinstance(given, torch.Tensor):
        return given
    one = given.to("meta")
    return one.new_empty(rows, *one.shape[1:]) if one.shape[:1] == (1,) else one


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of arguments, of a batch's columns, or of a result."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Ragged):
        yield from (value.values, *value.offsets)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from tensors_in(each)
    elif isinstance(value, Mapping):
        yield from tensors_in(list(value.values()))


class RowPerId:
    """A sparse table of which each id has a row of its own: what a model keeps of rows does not depend on how many."""

    def __init__(self, dim: int, shapes: Shapes, seen: set[int]) -> None:
        self.dim, self.shapes, self.seen = dim, shapes, seen
        self.alive: list[torch.Tensor] = []  # so that no other storage has their keys

    def rows_of(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the rows (n, dim) of ids (n,), which count as weights: pulled before the pass."""
        rows = self.shapes.like(torch.empty(len(ids), self.dim, device="meta")).requires_grad_()
        self.seen.add(storage_key(rows))
        self.alive.append(rows)
        return PulledRows(ids, rows).rows_of(ids)


def trace_model(
    model: nn.Module,
    inputs: tuple[Any, ...],
    names: Iterable[str],
    kinds: Mapping[str, str],
    rows: int = 1,
    device_type: str = "cpu",
    precision: str = "fp32",
) -> Trace:
    """Trace the named modules in one forward of a copy of `model`.

    A storage counts once; those of weights and of the batch do not count. Untraceable if the forward needs values
    (`if (x > 0).any()`).

    Args:
        model: model on any device.
        inputs: positional inputs, for one row.
        names: modules to trace.
        kinds: module name -> how it is cut over tensor ranks (models/sharding_plan.py).
        rows: rows in the forward, as in a pass: what weights alone make is kept once, for any number of rows.
        device_type: device with the kernels that decide what is kept.
        precision: autocast precision; weights that autocast converts are left out.
    """
    shapes = Shapes(precision)
    traced = shapes.copy(model, None)
    entered_modules = running_modules(traced)
    given = tree_map(shapes.like, [repeated(i, rows) for i in inputs])
    compute = DTYPES[precision].itemsize if precision in DTYPES else None
    trace = Trace()
    seen = {storage_key(t) for t in tensors_in([*traced.parameters(), *given])}
    for embedding in sparse_embeddings(traced).values():
        embedding.source = RowPerId(embedding.dim, shapes, seen)
    running: list[str] = []  # the named modules around the current operation
    entered: dict[int, torch.Tensor] = {}  # storages of the inputs of cut layers, alive so that no other has their keys

    def unit(tensor: torch.Tensor) -> int:
        """Return the bytes that count as one element."""
        return (compute or tensor.element_size()) if tensor.is_floating_point() else INDEX_BYTES

    def before(name: str) -> Any:
        def hook(_: nn.Module, args: tuple[Any, ...]) -> None:
            running.append(name)
            tensors = [a for a in args if isinstance(a, torch.Tensor)]
            floats = [a for a in tensors if a.is_floating_point()]
            ids = sum(a.numel() for a in tensors if not a.is_floating_point())
            trace.taken[name] = (ids + sum(a.numel() * a.element_size() // unit(a) for a in floats)) // rows
            if kinds.get(name) in ("enter", "vocab_head"):
                entered.update((storage_key(a), a) for a in tensors)

        return hook

    def after(name: str) -> Any:
        def hook(_: nn.Module, args: tuple[Any, ...], out: Any) -> None:
            running.remove(name)
            trace.returned[name] = out.numel() // rows if isinstance(out, torch.Tensor) else 0

        return hook

    def pack(saved: torch.Tensor) -> torch.Tensor:
        storage = storage_key(saved)
        if storage not in seen:
            seen.add(storage)
            if compute and is_cast_weight(saved):
                return saved
            cut = any(kinds.get(name) == "enter" for name in running)
            place = "entered" if storage in entered else "inner" if cut else "between"
            trace.keep(running, place, saved.untyped_storage().nbytes() / unit(saved) / rows)
        return saved

    for name in names:
        module = traced.get_submodule(name)
        module.register_forward_pre_hook(before(name))
        module.register_forward_hook(after(name))
    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved)
    with shapes.mode, autocast(precision, torch.device("cpu")), DeviceKernels(device_type), hooks:
        try:
            out = traced(*given)
        except Exception as error:  # a user's forward may fail in any way
            raise untraceable(model, entered_modules, error) from error
    if isinstance(out, torch.Tensor) and out.shape[:1] == (rows,):
        trace.output = out.shape[1:]
    return trace
