"""What a model starts from, without the model: its constructor runs on tensors that have shapes and no memory, and what
it does to them is recorded. Any piece of any weight can then be made on its own, the same on every rank and layout.

Every random call of the record draws from a generator of its own, seeded by (seed, name of the parameter, number of the
call, block of rows), so a rank that holds a few rows of a matrix draws these rows only. After torchdistx's deferred
initialization (https://pytorch.org/torchdistx/latest/deferred_init.html); differs in its seeds and in drawing by rows.

A constructor that asks for values of such tensors, keeps them elsewhere than in parameters and buffers, or uses a
generator of its own cannot be recorded (`Unrecordable` says why). It is then run as it stands, and rank 0's values are
sent to the others (training/parallel/materialize.py). Private parts of torch used here were checked against 2.13.
"""

from __future__ import annotations

import copyreg
import gc
import hashlib
import heapq
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

META, CPU = torch.device("meta"), torch.device("cpu")
BLOCK = 2**20  # elements that are drawn at once, of a value that is made by rows
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
    """The constructor cannot be recorded; says why."""


class Value(Protocol):
    """What one parameter or buffer starts from."""

    @property
    def size(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def digest(self) -> str:
        """Equal on two ranks that make the same value."""
        ...

    def pieces(self, start: int, stop: int) -> Iterator[tuple[int, torch.Tensor]]:
        """(first row, rows on the CPU) that together hold rows start to stop of dim 0; of a 0-dim value all of it."""
        ...


@dataclass(frozen=True)
class InitialModel:
    """`module` is on the meta device; `values` by the first name of each parameter and buffer, `aliases` from further
    names to the first. `whole`: rank 0 alone has the values, for this reason."""

    module: nn.Module
    values: Mapping[str, Value]
    aliases: Mapping[str, str]
    whole: str = ""


@dataclass(frozen=True)
class WholeValue:
    """A value that was made as it is; None on the ranks that get it from rank 0."""

    tensor: torch.Tensor | None
    size: tuple[int, ...]
    dtype: torch.dtype
    digest: str

    def pieces(self, start: int, stop: int) -> Iterator[tuple[int, torch.Tensor]]:
        assert self.tensor is not None
        yield 0, self.tensor


@dataclass(frozen=True)
class Spot:
    """A recorded tensor: which storage, and which part of it. Two of them that are equal are the same elements."""

    storage: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @property
    def part(self) -> tuple[Any, ...]:
        return self.dtype, self.size, self.stride, self.offset


@dataclass(frozen=True)
class Constant:
    """A tensor the constructor had from elsewhere: a list, numpy, a file."""

    tensor: torch.Tensor


@dataclass
class Call:
    """One call of torch. Storages by number: those it reads the elements of, those it writes, those it gives."""

    name: str
    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outs: list[Any]
    reads: set[int]
    writes: set[int]
    overwrites: bool  # all it writes, whatever was there
    random: bool
    key: str = ""  # of what it draws

    def touches(self) -> set[int]:
        return self.writes | {out.storage for out in self.outs if isinstance(out, Spot)}

    def by_rows(self, size: tuple[int, ...]) -> bool:
        """Whether it can be made of a tensor of this size a few rows at a time."""
        tensors = [x for x in tree_flatten((self.args, self.kwargs, self.outs))[0] if isinstance(x, Spot | Constant)]
        pointwise = torch.Tag.pointwise in getattr(self.func, "tags", ())
        return (self.name in BY_ROWS or (pointwise and not self.random)) and all(
            isinstance(x, Spot) and x.size == size and x.offset == 0 and x.stride == contiguous(size) for x in tensors
        )


def covers(tensor: torch.Tensor) -> bool:
    """Whether the tensor is all of its storage, in order."""
    return tensor.is_contiguous() and tensor.nbytes == tensor.untyped_storage().nbytes()


def without_values(x: Any) -> Any:
    """An argument as the meta device takes it."""
    if isinstance(x, Sketch):
        return x.meta
    return torch.empty_like(x, device=META) if isinstance(x, torch.Tensor) else x


def contiguous(size: Sequence[int]) -> tuple[int, ...]:
    """Strides of a contiguous tensor."""
    return tuple(math.prod(size[dim + 1 :]) for dim in range(len(size)))


class Sketch(torch.Tensor):
    """A tensor that has a shape and no memory, and says that it is on the CPU: much code, torch's own `nn.init` too,
    skips tensors on the meta device."""

    meta: torch.Tensor

    @staticmethod
    def __new__(cls, meta: torch.Tensor) -> Sketch:
        wrapper: Sketch = torch.Tensor._make_wrapper_subclass(
            cls, meta.shape, strides=meta.stride(), storage_offset=meta.storage_offset(), dtype=meta.dtype, device=CPU
        )
        wrapper.meta = meta
        return wrapper

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in READS_MEMORY:
            raise Unrecordable(f"it asks for values: Tensor.{func.__name__}")
        with torch._C.DisableTorchFunctionSubclass():
            if func == SET_DATA:
                if not isinstance(args[1], Sketch):
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


class Recorder(TorchDispatchMode):
    """Within, tensors made by size are sketches and calls on them are noted; other tensors are made as ever."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self.touching: dict[int, list[int]] = {}  # storage -> calls that make, view or write it
        self.numbers: dict[int, int] = {}
        self.kept: list[Any] = []  # storages, so that no address is used twice
        self.constants: set[int] = set()  # storages, by address, of tensors made elsewhere that were used

    def spot(self, meta: torch.Tensor) -> Spot:
        storage = meta.untyped_storage()
        number = self.numbers.setdefault(storage._cdata, len(self.kept))
        if number == len(self.kept):
            self.kept.append(storage)
        return Spot(number, meta.dtype, tuple(meta.shape), meta.stride(), int(meta.storage_offset()))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, func.overloadpacket.__name__
        tensors = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, torch.Tensor)]
        sketches = {id(x.meta): x for x in tensors if isinstance(x, Sketch)}
        written = [
            args[i] if i < len(args) else kwargs.get(argument.name)
            for i, argument in enumerate(func._schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        outside = [x for x in tree_flatten(written)[0] if isinstance(x, torch.Tensor) and not isinstance(x, Sketch)]
        if outside and (sketches or any(x.untyped_storage()._cdata in self.constants for x in outside)):
            raise Unrecordable(f"{name} changes a tensor that was made elsewhere")
        sizes = [x for x in args if isinstance(x, list)]  # of no dimensions: a seed or a rate, which may be asked for
        made_by_size = name in MADE_BY_SIZE and all(size and 0 not in size for size in sizes)
        if not sketches and (tensors or not made_by_size):
            return func(*args, **kwargs)
        if kwargs.get("generator") is not None:
            raise Unrecordable(f"{name} draws from a generator of its own")
        on_meta = {**kwargs, "device": META, "pin_memory": False} if "device" in kwargs else kwargs
        if "device" in kwargs and "pin_memory" not in kwargs:
            del on_meta["pin_memory"]
        out = func(*tree_map(without_values, args), **tree_map(without_values, on_meta))
        if any((x.shape, x.stride()) != (x.meta.shape, x.meta.stride()) for x in sketches.values()):
            raise Unrecordable(f"{name} changes the shape of a tensor in place")
        self.note(name, func, args, kwargs, out, written)

        def sketched(x: Any) -> Any:  # in place: the same tensor
            return x if not isinstance(x, torch.Tensor) else sketches[id(x)] if id(x) in sketches else Sketch(x)

        return tree_map(sketched, out)

    def note(self, name: str, func: Any, args: Any, kwargs: Any, out: Any, written: Any) -> None:
        def located(x: Any) -> Any:
            if not isinstance(x, torch.Tensor):
                return x
            if isinstance(x, Sketch) or x.is_meta:
                return self.spot(x.meta if isinstance(x, Sketch) else x)
            self.constants.add(x.untyped_storage()._cdata)
            return Constant(x.detach())

        given = tree_map(located, (tuple(args), dict(kwargs)))
        outs = [located(t) for t in tree_flatten(out)[0]]
        reads = {x.storage for x in tree_flatten(given)[0] if isinstance(x, Spot)}
        writes = {x.storage for x in tree_flatten(tree_map(located, written))[0] if isinstance(x, Spot)}
        if not writes:  # what gives a view reads no element of it
            reads -= {x.storage for x in outs if isinstance(x, Spot)}
        tags = getattr(func, "tags", (torch.Tag.nondeterministic_seeded,))
        random = torch.Tag.nondeterministic_seeded in tags
        overwrites = bool(writes) and (random or name in ("zero_", "fill_", "copy_")) and covers(written[0].meta)
        if overwrites:  # `x.copy_(x)` aside
            reads = {x.storage for x in tree_flatten((given[0][1:], given[1]))[0] if isinstance(x, Spot)}
        call = Call(name, func, given[0], given[1], outs, reads, writes, overwrites, random)
        for storage in call.touches():
            self.touching.setdefault(storage, []).append(len(self.calls))
        self.calls.append(call)

    def program(self, spot: Spot) -> list[Call]:
        """The calls that make the tensor's value, in order, without writes that a later one overwrites."""
        if spot.storage not in self.touching:
            raise Unrecordable("a parameter or buffer was made in a way that is not seen")
        wanted = {spot.storage: True}  # storage -> its elements, or only that it is there
        todo = [-i for i in self.touching.get(spot.storage, ())]
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
    """The value at `spot` after `program`."""

    spot: Spot
    program: list[Call]
    seed: int

    @property
    def size(self) -> tuple[int, ...]:
        return self.spot.size

    @property
    def dtype(self) -> torch.dtype:
        return self.spot.dtype

    def pieces(self, start: int, stop: int) -> Iterator[tuple[int, torch.Tensor]]:
        """By rows where every call can be made so, with blocks at the same rows whoever asks; else the whole value."""
        size = self.spot.size
        if not size or not all(call.by_rows(size) for call in self.program):
            yield 0, self._run(0, None)
            return
        rows = max(1, BLOCK // max(1, math.prod(size[1:])))
        for block in range(start // rows, -(-stop // rows)):
            first = block * rows
            yield first, self._run(block, min(rows, size[0] - first))

    def _run(self, block: int, rows: int | None) -> torch.Tensor:
        size = self.spot.size
        made: dict[Any, torch.Tensor] = {}

        def given(x: Any) -> Any:
            if isinstance(x, Spot):
                return made[x]
            if isinstance(x, Constant):
                return x.tensor.clone()
            if isinstance(x, torch.device):
                return CPU
            if rows is not None and isinstance(x, list | tuple) and tuple(x) == size:
                return [rows, *size[1:]]
            return x

        def leaf(x: Any) -> bool:
            return isinstance(x, Spot | Constant | torch.Size) or (isinstance(x, list | tuple) and tuple(x) == size)

        for call in self.program:
            args, kwargs = tree_map(given, (call.args, call.kwargs), is_leaf=leaf)
            if call.random:
                torch.random.default_generator.manual_seed(draw_seed(self.seed, call.key, block))
            out = call.func(*args, **kwargs)
            made.update(zip(call.outs, tree_flatten(out)[0], strict=True))
        return made[self.spot]

    @property
    def digest(self) -> str:
        hasher = hashlib.sha256(repr(self.spot.part).encode())
        for call in self.program:
            hasher.update(f"{call.name} {call.key}".encode())
            for x in tree_flatten((call.args, call.kwargs))[0]:
                if isinstance(x, Constant):
                    x = x.tensor.contiguous()
                    hasher.update(x.reshape(-1).view(torch.uint8).numpy().data if x.numel() else b"")
                else:
                    hasher.update(repr(x.part if isinstance(x, Spot) else x).encode())
        return hasher.hexdigest()


def draw_seed(seed: int, key: str, block: int) -> int:
    """The seed of one random call for one block of rows."""
    return int.from_bytes(hashlib.sha256(f"{seed} {key} {block}".encode()).digest()[:8], "big") >> 1


@contextmanager
def own_random_state() -> Iterator[None]:
    """What is drawn within changes no generator outside."""
    state = torch.get_rng_state()
    try:
        with torch.no_grad():
            yield
    finally:
        torch.set_rng_state(state)


def record_model(build: Callable[[], nn.Module], seed: int) -> InitialModel:
    """Run `build` without memory for its tensors; Unrecordable where that cannot be. Its ValueErrors are its own."""
    recorder = Recorder()
    try:
        with recorder, whole_calls(recorder):
            module = build()
    except (Unrecordable, ValueError):
        raise
    except Exception as error:  # what is said of values that are not there is of many types
        raise Unrecordable(f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}") from error
    aliases = further_names(module)
    values = {name: value_of(name, tensor, recorder, seed) for name, tensor in named_tensors(module).items()}
    without_memory(module)
    gc.collect()
    if left := [tuple(each.meta.shape) for each in gc.get_objects() if type(each) is Sketch]:
        raise Unrecordable(
            f"the model keeps tensors of shapes {left[:5]} that are neither parameters nor buffers; "
            "register_buffer(..., persistent=False) is made for them"
        )
    return InitialModel(module, values, aliases)


def value_of(name: str, tensor: torch.Tensor, recorder: Recorder, seed: int) -> Value:
    if not isinstance(tensor, Sketch):
        return WholeValue(tensor.detach(), tuple(tensor.shape), tensor.dtype, tensor_digest(tensor))
    spot = recorder.spot(tensor.meta)
    if (tuple(tensor.shape), tensor.stride(), tensor.dtype) != (spot.size, spot.stride, spot.dtype):
        raise Unrecordable(f"{name} was changed in a way that is not seen")
    program = recorder.program(spot)
    for number, call in enumerate(call for call in program if call.random):
        call.key = call.key or f"{name} {number}"  # what two parameters are both made of has the first one's name
    return RecordedValue(spot, program, seed)


def whole_model(module: nn.Module, why: str, keep: bool = True) -> InitialModel:
    """A model that was made as it is; its memory is `values`' alone, where `keep` is set."""
    values = {
        name: WholeValue(tensor.detach() if keep else None, tuple(tensor.shape), tensor.dtype, "")
        for name, tensor in named_tensors(module).items()
    }
    aliases = further_names(module)
    without_memory(module)
    return InitialModel(module, values, aliases, why)


def further_names(module: nn.Module) -> dict[str, str]:
    """Every further name of a shared parameter or buffer -> its first name."""
    first = {id(tensor): name for name, tensor in named_tensors(module).items()}
    every = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    return {name: first[id(tensor)] for name, tensor in every if first[id(tensor)] != name}


def named_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers under the first of their names."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def without_memory(module: nn.Module) -> None:
    """Move parameters and buffers to the meta device."""
    replace_tensors(module, lambda t: torch.empty_like(t.meta if isinstance(t, Sketch) else t, device=META))


def replace_tensors(module: nn.Module, make: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Make every parameter and buffer what `make` gives for it. They stay the same objects, so shared ones stay shared
    and lists of them true; frozen ones stay frozen, and attributes that were set on one stay."""
    for tensor in named_tensors(module).values():
        new = make(tensor)
        if isinstance(tensor, nn.Parameter):
            new = nn.Parameter(new, requires_grad=tensor.requires_grad)
        # torch.utils.swap_tensors does the same, but refuses tensors with weak references, which an LSTM has
        tensor.__dict__.pop("meta", None)
        tensor.__dict__.pop("_is_param", None)
        tensor.__dict__.update(new.__dict__)
        tensor.__class__ = type(new)
        for slot in copyreg._slotnames(type(new)):  # type: ignore[attr-defined]
            setattr(tensor, slot, getattr(new, slot))
        torch._C._swap_tensor_impl(tensor, new)


def tensor_digest(tensor: torch.Tensor) -> str:
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy() if tensor.numel() else b""
    return hashlib.sha256(repr((tensor.shape, tensor.dtype)).encode() + bytes(data)).hexdigest()


@contextmanager
def whole_calls(recorder: Recorder) -> Iterator[None]:
    """trunc_normal_ draws again until all is within its bounds, which asks for values: it is recorded as one call. The
    private function is torch 2.13's; where there is none, a constructor that calls it cannot be recorded."""
    original = getattr(nn.init, "_no_grad_trunc_normal_", None)
    if original is None:
        yield
        return

    def trunc_normal_(tensor: torch.Tensor, *args: Any, generator: Any = None, **kwargs: Any) -> torch.Tensor:
        if generator is not None:
            raise Unrecordable("trunc_normal_ draws from a generator of its own")
        recorder.note("trunc_normal_", original, (tensor, *args), kwargs, tensor, [tensor])
        return tensor

    nn.init._no_grad_trunc_normal_ = trunc_normal_
    try:
        yield
    finally:
        nn.init._no_grad_trunc_normal_ = original
