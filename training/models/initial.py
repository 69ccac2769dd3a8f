"""Record a model's constructor, and make any piece of an initial value from it.

The constructor runs on tensors that have shapes and no memory. A rank then makes its own part of each weight, the
same values on every rank and layout. Every random call of the record draws from a generator of its own, seeded by
(seed, name of the parameter, number of the call, block of rows), so a rank that holds a few rows of a matrix draws
these rows only. After torchdistx's deferred initialization
(https://pytorch.org/torchdistx/latest/deferred_init.html); differs in its seeds and in drawing by rows.

A constructor that reads values of such tensors, keeps them elsewhere than in parameters and buffers, or uses its own
generator cannot be recorded (`Unrecordable` has the reason). It is then run on real tensors, and rank 0's values are
sent to the others (training/parallel/initialize.py).
"""

from __future__ import annotations

import gc
import hashlib
import heapq
import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from sparkring.conf.errors import first_line
from sparkring.training.models.torch_private import (
    DispatchMode,
    call_name,
    call_without_memory,
    make_wrapper_tensor,
    plain_tensor_functions,
    replaced_trunc_normal,
    storage_key,
    swap_tensor,
    tree_flatten,
    tree_map,
    written_arguments,
)

META, CPU = torch.device("meta"), torch.device("cpu")
BLOCK = 2**20  # elements drawn at once, of a value that can be made by rows
MADE_BY_SIZE = {"empty", "empty_strided", "zeros", "ones", "full", "rand", "randn", "randint", "randperm", "normal"}
RANDOM_BY_ROWS = {
    *("normal_", "uniform_", "trunc_normal_", "bernoulli_", "exponential_", "log_normal_", "cauchy_", "geometric_"),
    *("random_", "rand", "randn", "randint", "rand_like", "randn_like", "randint_like"),
}
BY_ROWS = {
    *RANDOM_BY_ROWS,
    *("empty", "zeros", "ones", "full", "empty_like", "zeros_like", "ones_like", "full_like", "new_empty"),
    *("new_zeros", "new_ones", "new_full", "detach", "alias", "clone", "zero_", "fill_", "copy_", "_to_copy"),
}


class Unrecordable(Exception):
    """The constructor cannot be recorded; the message is the reason."""


class InitialValue(Protocol):
    """The initial value of one parameter or buffer."""

    @property
    def size(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def digest(self) -> str:
        """A hash that is equal on two ranks that make the same value."""
        ...

    def pieces(self, start: int, stop: int) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield (first row, rows on the CPU) that together cover rows start to stop of dim 0; a 0-dim value whole."""
        ...


@dataclass(frozen=True)
class InitialModel:
    """A model without memory, and the initial values of its parameters and buffers."""

    module: nn.Module  # on the meta device
    values: Mapping[str, InitialValue]  # by the first name of each parameter and buffer
    aliases: Mapping[str, str]  # further names of shared ones -> the first
    not_recorded: str = ""  # why the constructor was not recorded: rank 0 alone has the values


@dataclass(frozen=True)
class EagerValue:
    """A value that exists already."""

    tensor: torch.Tensor | None  # None on the ranks that receive it from rank 0
    size: tuple[int, ...]
    dtype: torch.dtype
    digest: str

    def pieces(self, start: int, stop: int) -> Iterator[tuple[int, torch.Tensor]]:
        assert self.tensor is not None
        yield 0, self.tensor


@dataclass(frozen=True)
class StorageView:
    """A recorded tensor as part of a storage; equal views are the same elements."""

    storage: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @property
    def part(self) -> tuple[Any, ...]:
        return self.dtype, self.size, self.stride, self.offset


@dataclass(frozen=True)
class ConstantTensor:
    """A tensor with values that the constructor made from a list, numpy or a file."""

    tensor: torch.Tensor


@dataclass
class RecordedCall:
    """One recorded call of torch. Storages are given by number."""

    name: str
    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outs: list[Any]
    reads: set[int]  # storages whose elements it reads
    writes: set[int]
    overwrites: bool  # writes every element of its storages without reading them
    random: bool
    key: str = ""  # what its seed is made of, for a random call

    def touches(self) -> set[int]:
        return self.writes | {out.storage for out in self.outs if isinstance(out, StorageView)}

    def can_run_by_rows(self, size: tuple[int, ...]) -> bool:
        """Return whether it can run on a few rows of a tensor of this size at a time."""
        tensors = [
            x
            for x in tree_flatten((self.args, self.kwargs, self.outs))[0]
            if isinstance(x, StorageView | ConstantTensor)
        ]
        pointwise = torch.Tag.pointwise in getattr(self.func, "tags", ())
        return (self.name in BY_ROWS or (pointwise and not self.random)) and all(
            isinstance(x, StorageView) and x.size == size and x.offset == 0 and x.stride == contiguous(size)
            for x in tensors
        )


def covers(tensor: torch.Tensor) -> bool:
    """Return whether the tensor is all of its storage, in order."""
    return tensor.is_contiguous() and tensor.nbytes == tensor.untyped_storage().nbytes()


def on_meta_device(x: Any) -> Any:
    """Move an argument of a call to the meta device."""
    if isinstance(x, DeferredTensor):
        return x.meta
    return torch.empty_like(x, device=META) if isinstance(x, torch.Tensor) else x


def contiguous(size: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor."""
    return tuple(math.prod(size[dim + 1 :]) for dim in range(len(size)))


class DeferredTensor(torch.Tensor):
    """A tensor with a shape and no memory, which reports the CPU as its device.

    On the meta device much code, torch's own `nn.init` too, would skip it.
    """

    meta: torch.Tensor

    @staticmethod
    def __new__(cls, meta: torch.Tensor) -> DeferredTensor:
        wrapper: DeferredTensor = make_wrapper_tensor(cls, meta, CPU)
        wrapper.meta = meta
        return wrapper

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in READS_MEMORY:
            raise Unrecordable(f"it reads values: Tensor.{func.__name__}")
        with plain_tensor_functions():
            if func == SET_DATA:
                if not isinstance(args[1], DeferredTensor):
                    raise Unrecordable("it sets the data of a parameter to a tensor that was made elsewhere")
                args[0].meta = args[1].meta
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise Unrecordable(f"{func} is called after the constructor")

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        if id(self) not in memo:
            copied = self.detach().clone()
            if isinstance(self, nn.Parameter):
                copied = nn.Parameter(copied, self.requires_grad)
            memo[id(self)] = copied
        found: torch.Tensor = memo[id(self)]
        return found


SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]
READS_MEMORY = {torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__, torch.Tensor.data_ptr}
READS_MEMORY |= {torch.Tensor.untyped_storage, torch.Tensor.storage}


class InitRecorder(DispatchMode):
    """Make tensors made by size DeferredTensors, and record the calls on them. Other tensors are made as usual."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[RecordedCall] = []
        self.touching: dict[int, list[int]] = {}  # storage -> calls that make, view or write it
        self.numbers: dict[int, int] = {}
        self.storages: list[Any] = []  # held, so that no key is used twice
        self.constants: set[int] = set()  # storage keys of tensors with values that were used
        self.deferred: list[weakref.ref[DeferredTensor]] = []

    def defer(self, meta: torch.Tensor) -> DeferredTensor:
        tensor = DeferredTensor(meta)
        self.deferred.append(weakref.ref(tensor))
        return tensor

    def living(self) -> list[DeferredTensor]:
        """Return what something still holds; a parameter that became a meta tensor is deferred no more."""
        return [tensor for each in self.deferred if type(tensor := each()) is DeferredTensor]

    def view(self, meta: torch.Tensor) -> StorageView:
        number = self.numbers.setdefault(storage_key(meta), len(self.storages))
        if number == len(self.storages):
            self.storages.append(meta.untyped_storage())
        return StorageView(number, meta.dtype, tuple(meta.shape), meta.stride(), int(meta.storage_offset()))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, call_name(func)
        tensors = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, torch.Tensor)]
        deferred = {id(x.meta): x for x in tensors if isinstance(x, DeferredTensor)}
        written = written_arguments(func, args, kwargs)
        outside = [
            x for x in tree_flatten(written)[0] if isinstance(x, torch.Tensor) and not isinstance(x, DeferredTensor)
        ]
        if outside and (deferred or any(storage_key(x) in self.constants for x in outside)):
            raise Unrecordable(f"{name} changes a tensor that was made elsewhere")
        sizes = [x for x in args if isinstance(x, list)]  # an empty one makes a seed or a rate, which may be read
        made_by_size = name in MADE_BY_SIZE and all(size and 0 not in size for size in sizes)
        if not deferred and (tensors or not made_by_size):
            return func(*args, **kwargs)
        if kwargs.get("generator") is not None:
            raise Unrecordable(f"{name} draws from its own generator")
        on_meta = {**kwargs, "device": META, "pin_memory": False} if "device" in kwargs else kwargs
        if "device" in kwargs and "pin_memory" not in kwargs:
            del on_meta["pin_memory"]
        out = call_without_memory(func, tree_map(on_meta_device, args), tree_map(on_meta_device, on_meta))
        if any((x.shape, x.stride()) != (x.meta.shape, x.meta.stride()) for x in deferred.values()):
            raise Unrecordable(f"{name} changes the shape of a tensor in place")
        self.record(func, args, kwargs, out, written)

        def wrapped(x: Any) -> Any:  # what a call in place returns is the same tensor
            return x if not isinstance(x, torch.Tensor) else deferred[id(x)] if id(x) in deferred else self.defer(x)

        return tree_map(wrapped, out)

    def record(self, func: Any, args: Any, kwargs: Any, out: Any, written: Any, name: str = "") -> None:
        """Append a recorded call.

        Args:
            func: function that is called.
            args: positional arguments of the call.
            kwargs: keyword arguments of the call.
            out: returned value, on the meta device.
            written: arguments that the call writes to.
            name: name of a `func` that is no operator.
        """
        name = name or call_name(func)

        def located(x: Any) -> Any:
            if not isinstance(x, torch.Tensor):
                return x
            if isinstance(x, DeferredTensor) or x.is_meta:
                return self.view(x.meta if isinstance(x, DeferredTensor) else x)
            self.constants.add(storage_key(x))
            return ConstantTensor(x.detach())

        given = tree_map(located, (tuple(args), dict(kwargs)))
        outs = [located(t) for t in tree_flatten(out)[0]]
        reads = {x.storage for x in tree_flatten(given)[0] if isinstance(x, StorageView)}
        writes = {x.storage for x in tree_flatten(tree_map(located, written))[0] if isinstance(x, StorageView)}
        if not writes:  # making a view reads no element
            reads -= {x.storage for x in outs if isinstance(x, StorageView)}
        tags = getattr(func, "tags", (torch.Tag.nondeterministic_seeded,))
        random = torch.Tag.nondeterministic_seeded in tags
        overwrites = bool(writes) and (random or name in ("zero_", "fill_", "copy_")) and covers(written[0].meta)
        if overwrites:  # `x.copy_(x)` aside
            reads = {x.storage for x in tree_flatten((given[0][1:], given[1]))[0] if isinstance(x, StorageView)}
        call = RecordedCall(name, func, given[0], given[1], outs, reads, writes, overwrites, random)
        for storage in call.touches():
            self.touching.setdefault(storage, []).append(len(self.calls))
        self.calls.append(call)

    def trunc_normal(self, original: Callable[..., Any]) -> Callable[..., torch.Tensor]:
        """Return a `trunc_normal_` that is recorded as one call.

        torch's own draws again until all values are within bounds, which reads them.
        """

        def trunc_normal_(tensor: torch.Tensor, *args: Any, generator: Any = None, **kwargs: Any) -> torch.Tensor:
            if generator is not None:
                raise Unrecordable("trunc_normal_ draws from its own generator")
            self.record(original, (tensor, *args), kwargs, tensor, [tensor], "trunc_normal_")
            return tensor

        return trunc_normal_

    def program(self, view: StorageView) -> list[RecordedCall]:
        """List the calls that make the tensor's value, in order, without overwritten writes."""
        if view.storage not in self.touching:
            raise Unrecordable("a parameter or buffer was made in a way that cannot be recorded")
        wanted = {view.storage: True}  # storage -> whether its elements matter, or only that it exists
        todo = [-i for i in self.touching.get(view.storage, ())]
        heapq.heapify(todo)
        found: list[int] = []
        while todo:
            index = -heapq.heappop(todo)
            call = self.calls[index]
            if (found and found[-1] == index) or (call.writes and not any(wanted.get(s) for s in call.writes)):
                continue
            found.append(index)
            if call.overwrites:
                wanted |= dict.fromkeys(call.writes, False)
            for storage in call.reads:
                if storage not in wanted:
                    for earlier in self.touching.get(storage, ()):
                        if earlier < index:
                            heapq.heappush(todo, -earlier)
                wanted[storage] = True
        return [self.calls[index] for index in reversed(found)]


@dataclass(frozen=True)
class RecordedValue:
    """The value at `view` after the calls of `program`."""

    view: StorageView
    program: list[RecordedCall]
    seed: int

    @property
    def size(self) -> tuple[int, ...]:
        return self.view.size

    @property
    def dtype(self) -> torch.dtype:
        return self.view.dtype

    def pieces(self, start: int, stop: int) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield blocks of rows if every call can run by rows, at rows independent of `start`; else the value."""
        size = self.view.size
        if not size or not all(call.can_run_by_rows(size) for call in self.program):
            yield 0, self._run(0, None)
            return
        rows = max(1, BLOCK // max(1, math.prod(size[1:])))
        for block in range(start // rows, -(-stop // rows)):
            first = block * rows
            yield first, self._run(block, min(rows, size[0] - first))

    def _run(self, block: int, rows: int | None) -> torch.Tensor:
        size = self.view.size
        made: dict[Any, torch.Tensor] = {}

        def given(x: Any) -> Any:
            if isinstance(x, StorageView):
                return made[x]
            if isinstance(x, ConstantTensor):
                return x.tensor.clone()
            if isinstance(x, torch.device):
                return CPU
            if rows is not None and isinstance(x, list | tuple) and tuple(x) == size:
                return [rows, *size[1:]]
            return x

        def leaf(x: Any) -> bool:
            return isinstance(x, StorageView | ConstantTensor | torch.Size) or (
                isinstance(x, list | tuple) and tuple(x) == size
            )

        for call in self.program:
            args, kwargs = tree_map(given, (call.args, call.kwargs), is_leaf=leaf)
            if call.random:
                torch.random.default_generator.manual_seed(draw_seed(self.seed, call.key, block))
            out = call.func(*args, **kwargs)
            made.update(zip(call.outs, tree_flatten(out)[0], strict=True))
        return made[self.view]

    @property
    def digest(self) -> str:
        hasher = hashlib.sha256(repr(self.view.part).encode())
        for call in self.program:
            hasher.update(f"{call.name} {call.key}".encode())
            for x in tree_flatten((call.args, call.kwargs))[0]:
                if isinstance(x, ConstantTensor):
                    x = x.tensor.contiguous()
                    hasher.update(x.reshape(-1).view(torch.uint8).numpy().data if x.numel() else b"")
                else:
                    hasher.update(repr(x.part if isinstance(x, StorageView) else x).encode())
        return hasher.hexdigest()


def draw_seed(seed: int, key: str, block: int) -> int:
    """Return the seed of one random call for one block of rows."""
    return int.from_bytes(hashlib.sha256(f"{seed} {key} {block}".encode()).digest()[:8], "big") >> 1


@contextmanager
def preserved_random_state() -> Iterator[None]:
    """Disable gradients; torch's CPU random state is restored at the end."""
    state = torch.get_rng_state()
    try:
        with torch.no_grad():
            yield
    finally:
        torch.set_rng_state(state)


def record_model(build: Callable[[], nn.Module], seed: int) -> InitialModel:
    """Run `build` without memory for tensors. Unrecordable; its ValueErrors pass."""
    recorder = InitRecorder()
    try:
        with recorder, replaced_trunc_normal(recorder.trunc_normal):
            module = build()
    except (Unrecordable, ValueError):
        raise
    except Exception as error:  # missing values raise many exception types
        raise Unrecordable(f"{type(error).__name__}: {first_line(error)}") from error
    aliases = further_names(module)
    values = {name: value_of(name, tensor, recorder, seed) for name, tensor in named_tensors(module).items()}
    without_memory(module)
    if recorder.living():  # in a reference cycle or kept; a driver has a million other objects for the collector
        gc.collect()
    if left := [tuple(each.meta.shape) for each in recorder.living()]:
        raise Unrecordable(
            f"the model keeps tensors of shapes {left[:5]} that are neither parameters nor buffers; "
            "use register_buffer(..., persistent=False) for them"
        )
    return InitialModel(module, values, aliases)


def value_of(name: str, tensor: torch.Tensor, recorder: InitRecorder, seed: int) -> InitialValue:
    """Return the initial value of a parameter, recorded or as it is; Unrecordable if its calls are unknown."""
    if not isinstance(tensor, DeferredTensor):
        return EagerValue(tensor.detach(), tuple(tensor.shape), tensor.dtype, tensor_digest(tensor))
    view = recorder.view(tensor.meta)
    if (tuple(tensor.shape), tensor.stride(), tensor.dtype) != (view.size, view.stride, view.dtype):
        raise Unrecordable(f"{name} was changed in a way that cannot be recorded")
    program = recorder.program(view)
    for number, call in enumerate(call for call in program if call.random):
        call.key = call.key or f"{name} {number}"  # a call that makes two parameters has the first one's name
    return RecordedValue(view, program, seed)


def eager_model(module: nn.Module, why: str, keep: bool = True) -> InitialModel:
    """Take a model's memory: it goes to `values` if `keep` is set, else it is freed."""
    values = {
        name: EagerValue(tensor.detach() if keep else None, tuple(tensor.shape), tensor.dtype, "")
        for name, tensor in named_tensors(module).items()
    }
    aliases = further_names(module)
    without_memory(module)
    return InitialModel(module, values, aliases, why)


def further_names(module: nn.Module) -> dict[str, str]:
    """Map further names of shared parameters and buffers to their first names."""
    first = {id(tensor): name for name, tensor in named_tensors(module).items()}
    every = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    return {name: first[id(tensor)] for name, tensor in every if first[id(tensor)] != name}


def named_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return parameters and buffers by the first of their names."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def without_memory(module: nn.Module) -> None:
    """Move parameters and buffers to the meta device."""
    replace_tensors(module, lambda t: _without_values(t.meta if isinstance(t, DeferredTensor) else t))


def _without_values(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_contiguous():  # torch's `empty_like` on the meta device imports sympy
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=META)
    return torch.empty_like(tensor, device=META)


def replace_tensors(module: nn.Module, make: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Turn every parameter and buffer t into make(t).

    They stay the same objects, so shared ones stay shared and lists of them valid. Frozen ones stay frozen, and
    attributes set on one stay.
    """
    for tensor in named_tensors(module).values():
        new = make(tensor)
        if isinstance(tensor, nn.Parameter):
            new = nn.Parameter(new, requires_grad=tensor.requires_grad)
        tensor.__dict__.pop("meta", None)
        swap_tensor(tensor, new)


def tensor_digest(tensor: torch.Tensor) -> str:
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy() if tensor.numel() else b""
    return hashlib.sha256(repr((tensor.shape, tensor.dtype)).encode() + bytes(data)).hexdigest()
