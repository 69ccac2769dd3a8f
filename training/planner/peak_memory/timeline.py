"""Trace on the meta device what one pass allocates and frees: forward, loss and backward, in order.

The pass is run as training runs it (LocalStep._part, Pipeline), on tensors that have shapes and no memory, so what it
holds at each moment is what torch allocates. What layouts add is put in where the pass enters and leaves modules
(play.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import nn

from sparkring.training.data.batch import Columns
from sparkring.training.models.sparse_embedding import PulledRows, SparseEmbedding
from sparkring.training.models.task import Task
from sparkring.training.models.torch_private import (
    stage_backward_input,
    stage_backward_weight,
    storage_key,
    tree_flatten,
    tree_map,
)
from sparkring.training.parallel.memory.meters import MemoryMeter
from sparkring.training.parallel.model_parallel.blocks import checkpoint_blocks, repeated_blocks
from sparkring.training.parallel.precision import autocast
from sparkring.training.parallel.state import plain_name
from sparkring.training.planner.kernels import kernels_of, with_kernels
from sparkring.training.planner.trace import Shapes, running_modules, untraceable

LOSS = "loss"  # place of what is held outside of the model
GRADIENT = "gradient of "  # and the name of a parameter: place of its gradient
PART = "part of gradient of "  # and the name of a parameter: place of what one of its uses adds to it


class PassEvent(NamedTuple):
    """One event of a pass, in bytes.

    kind: "hold" or "free" of memory in the place `name` (`inner`, `between` or `entered`, as in trace.py, LOSS, or
    GRADIENT or PART and a parameter); "enter", "leave" of a module in forward, "back", "done" in backward, whose `size`
    is that of its inputs (enter) or output; "loss" between forward and backward, or, in evaluation, between forward
    and loss; "split" between the halves of a backward; "gradient" of the parameter `name`, complete.
    """

    kind: str
    name: str
    size: int


@dataclass
class Timeline:
    """The events of a pass."""

    events: list[PassEvent] = field(default_factory=list)
    shared: set[str] = field(default_factory=set)  # parameters that have several uses
    input_bytes: int = 0  # of a stage, from the one before
    output_bytes: int = 0

    @property
    def peak(self) -> int:
        """The most bytes that are held at once."""
        held = accumulate({"hold": event.size, "free": -event.size}.get(event.kind, 0) for event in self.events)
        return max(held, default=0)

    def part(self, kind: str) -> list[PassEvent]:
        """Return events of an action: forward F, backward B (evaluation: loss), its halves I and W, all ""."""
        marks = {event.kind: index for index, event in enumerate(self.events) if event.kind in ("loss", "split")}
        loss, split = marks["loss"], marks.get("split", len(self.events))
        bounds = {"F": (0, loss), "B": (loss, None), "I": (loss, split), "W": (split, None)}
        return self.events[slice(*bounds.get(kind, (0, None)))]


class Recorder(MemoryMeter):
    """Write the events of the storages that are made and freed while it is active."""

    def __init__(self, kinds: Mapping[str, str], units: Iterable[str]) -> None:
        """Record a pass.

        Args:
            kinds: module -> how it is cut over tensor ranks.
            units: modules with recorded events.
        """
        super().__init__()
        self.kinds, self.units = kinds, set(units)
        self.timeline = Timeline()
        self.held: dict[int, int] = {}  # storage -> index of its event
        self.running: list[str] = []  # modules around the current operation of a forward pass
        self.returning: tuple[str, ...] = ()  # and of backward
        self.is_loss = False
        self.sent: Any = None  # outputs that are kept until they are sent
        self.undone: dict[str, int] = {}  # units whose backward has started, with the size of their output

    def begin(self) -> None:
        """Ignore what was there before."""
        self.timeline.events.clear()
        self.held.clear()

    def module_event(self, kind: str, name: str, size: int) -> None:
        if name in self.units:
            self.timeline.events.append(PassEvent(kind, name, size))

    def changed(self, key: int, size: int) -> None:
        events = self.timeline.events
        if size > 0:
            self.held[key] = len(events)
            events.append(PassEvent("hold", self._place(), size))
        elif key in self.held:
            events.append(PassEvent("free", events[self.held.pop(key)].name, -size))

    def _place(self) -> str:
        """Return the place of the operation; a cut layer's output or input gradient is between layers."""
        around = self.running or self.returning
        if not around:
            return LOSS if self.is_loss else "between"
        kind = self.kinds.get(around[-1], "")
        whole = ("row", "vocab") if self.running else ("column", "vocab_head")
        if kind in whole:
            return "between"
        return "inner" if kind == "vocab_head" or any(self.kinds.get(n) == "enter" for n in around) else "between"

    def place_again(self, tensor: torch.Tensor, place: str) -> None:
        """Change the place of a tensor that was made before it was known what for."""
        index = self.held.get(storage_key(tensor))
        if index is not None:
            self.timeline.events[index] = self.timeline.events[index]._replace(name=place)

    def gradient(self, name: str, parameter: torch.Tensor) -> None:
        """Pass a parameter's complete gradient to the strategy."""
        assert parameter.grad is not None
        self.place_again(parameter.grad, GRADIENT + name)
        if name in self.timeline.shared:
            self._place_parts(name, parameter.grad.untyped_storage().nbytes())
        self.timeline.events.append(PassEvent("gradient", name, parameter.grad.untyped_storage().nbytes()))
        parameter.grad = None

    def _place_parts(self, name: str, size: int) -> None:
        """Place the summands of a shared weight's gradient, one per use, as large and cut as the gradient."""
        events = self.timeline.events
        loss = next(index for index, event in enumerate(events) if event.kind == "loss")
        for index, event in enumerate(events[loss:], loss):
            if event.kind in ("hold", "free") and event.size == size and not event.name.startswith(GRADIENT):
                events[index] = event._replace(name=PART + name)

    def follow_all(self, module: nn.Module) -> None:
        """Write when passes enter and leave its modules, and when gradients are complete."""
        followed: set[str] = set()
        uses = Counter(parameter for _, parameter in module.named_parameters(remove_duplicate=False))
        for name, child in module.named_modules():
            plain = plain_name(name)
            if plain not in followed and (plain in self.units or plain in self.kinds):
                followed.add(plain)
                self.follow(plain, child)
        for name, parameter in module.named_parameters():
            if uses[parameter] > 1:
                self.timeline.shared.add(plain_name(name))
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(partial(self.gradient, plain_name(name)))

    def follow(self, name: str, module: nn.Module) -> None:
        """Write when passes enter and leave the module."""

        def before(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            tensors = [x for x in args if isinstance(x, torch.Tensor)]
            if self.kinds.get(name) in ("enter", "vocab_head"):
                for x in tensors:
                    self.place_again(x, "entered")
            self.module_event("enter", name, sum(x.numel() * x.element_size() for x in tensors))
            around = tuple(self.running)
            self.running.append(name)

            def seen(x: Any) -> Any:
                if not isinstance(x, torch.Tensor) or not x.requires_grad:
                    return x
                x = x.view_as(x)  # its gradient is there before that of the same tensor as another module's output
                x.register_hook(lambda gradient: self._done(name, around, gradient))
                return x

            return tuple(map(seen, args))

        def after(_: nn.Module, args: tuple[Any, ...], out: Any) -> None:
            self.running.remove(name)
            size = out.numel() * out.element_size() if isinstance(out, torch.Tensor) else 0
            self.module_event("leave", name, size)
            if isinstance(out, torch.Tensor) and out.requires_grad:
                path = (*self.running, name)
                out.register_hook(lambda _: self._back(name, path, size))

        module.register_forward_pre_hook(before)
        module.register_forward_hook(after, always_call=True)  # recomputation ends with an exception

    def _back(self, name: str, path: tuple[str, ...], size: int) -> None:
        self.returning = path
        self.undone[name] = size
        self.module_event("back", name, size)

    def _done(self, name: str, around: tuple[str, ...], gradient: torch.Tensor) -> None:
        self.returning = around
        if self.kinds.get(name) == "enter":  # the sum of those of several cut layers, which is made between them
            self.place_again(gradient, "between")
        self.module_event("done", name, self.undone.pop(name, 0))

    def finish(self) -> None:
        """End the backward of modules whose inputs have no gradient."""
        for name, size in reversed(self.undone.items()):
            self.module_event("done", name, size)


@dataclass(frozen=True)
class Pass:
    """A pass to trace.

    Args:
        module: the model, or a pipeline's stage.
        columns: of the batch, in the rows of the pass.
        given: makes the module's inputs of them.
        loss: outputs and columns -> what is differentiated, or added up in evaluation; None: another rank has it.
        kinds: module -> how it is cut over tensor ranks.
        units: modules whose events are written.
        checkpointing: recompute blocks in backward.
        exchanged: attention cores whose inputs and outputs context ranks exchange.
        received: what another stage has sent, instead of `given`.
        precision: of compute, parallel.precision.
        weights: dtype in which the weights are gathered; None: their own.
        is_stage: outputs are kept until they are sent, and not to the end of backward.
        is_split: backward goes to the input first, and then to the weights (zero-bubble).
        device_type: `cpu` or `cuda`, whose kernels keep what they keep there.
        is_evaluation: forward alone, without gradients, and then the loss and the metrics.
        tables: sparse embeddings -> rows that are pulled for them; of others it is not known what they keep.
    """

    module: nn.Module
    columns: Columns
    given: Callable[[Columns], tuple[Any, ...]]
    loss: Callable[[Any, Columns], Any] | None
    kinds: Mapping[str, str]
    units: Iterable[str]
    checkpointing: bool = False
    exchanged: Iterable[str] = ()
    received: torch.Tensor | None = None
    precision: str = "fp32"
    weights: torch.dtype | None = None
    is_stage: bool = False
    is_split: bool = False
    device_type: str = "cpu"
    is_evaluation: bool = False
    tables: Mapping[str, int] = field(default_factory=dict)


def trace_pass(work: Pass) -> tuple[Timeline, Any]:
    """Run the pass on a copy of its module; returns its outputs' shape too. Untraceable if it needs values."""
    shapes, recorder = Shapes(work.precision), Recorder(work.kinds, work.units)
    module = shapes.copy(work.module, work.weights).train(not work.is_evaluation)
    pulled = pull_rows(module, work, shapes)
    running = running_modules(module)
    prepare_module(module, work)
    recorder.follow_all(module)
    columns, received = tree_map(shapes.like, (work.columns, work.received))
    there = tree_flatten((columns, received, pulled))[0]
    recorder.count_existing([*module.parameters(), *module.buffers(), *filter(torch.is_tensor, there)])
    recorder.begin()
    try:
        with shapes.mode, kernels_of(work.device_type), recorder:
            run = _evaluate if work.is_evaluation else _run
            outputs = run(module, replace(work, columns=columns, received=received), recorder)
    except Exception as error:  # a user's forward may fail in any way
        raise untraceable(work.module, running, error) from error
    timeline = recorder.timeline
    return replace(timeline, events=[*timeline.events]), outputs  # what is freed from here on is no part of the pass


def pull_rows(module: nn.Module, work: Pass, shapes: Shapes) -> list[torch.Tensor]:
    """Give sparse embeddings ids and rows, as SparseTables.pull does; returns them."""
    found: list[torch.Tensor] = []
    for name, count in work.tables.items():
        embedding = module.get_submodule(name)
        assert isinstance(embedding, SparseEmbedding)
        ids = shapes.like(torch.empty(count, dtype=torch.int64, device="meta"))
        rows = shapes.like(torch.empty(count, embedding.dim, device="meta")).requires_grad_(not work.is_evaluation)
        embedding.source = PulledRows(ids, rows)
        found += [ids, rows]
    return found


def loss_bytes(task: Task, columns: Columns, output: torch.Tensor, precision: str, device_type: str) -> int:
    """Return the most bytes that the loss and its backward hold, besides the output.

    Untraceable if the loss needs values.

    Args:
        task: task that computes the loss.
        columns: columns of the batch.
        output: model output for these rows, on the meta device.
        precision: precision of compute, parallel.precision.
        device_type: either `cpu` or `cuda`.
    """
    work = Pass(
        module=nn.Identity(),
        columns=columns,
        given=lambda _: (),
        loss=lambda out, columns: task.loss(out, columns).sum(),
        kinds={},
        units=(),
        received=output.requires_grad_(),
        precision=precision,
        device_type=device_type,
    )
    return trace_pass(work)[0].peak


def prepare_module(module: nn.Module, work: Pass) -> None:
    """Make the copy's modules work as in training: fused attention, exchanges, recomputation."""
    for name in work.exchanged:
        core = module.get_submodule(name)
        core.forward = with_exchange(core.forward)
    for each in [module, *(block for _, _, block in repeated_blocks(module))]:  # backward leaves a mode around it
        each.forward = with_kernels(each.forward, work.device_type)
    if work.checkpointing:
        checkpoint_blocks(module)


def with_exchange(core: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Wrap an attention core with the copies of context.AllToAllCore, as large as what is exchanged."""

    def exchange(x: torch.Tensor) -> torch.Tensor:
        for _ in ("sent", "received", "put together"):
            x = x.clone()
        return x

    return lambda *given: exchange(core(*map(exchange, given)))


def _run(module: nn.Module, work: Pass, recorder: Recorder) -> Any:
    """Run forward, loss and backward; return shape and dtype of the outputs."""
    timeline, like = recorder.timeline, None
    with autocast(work.precision, torch.device("cpu")):
        given = work.given(work.columns) if work.received is None else (work.received,)
        outputs = module(*given)
        if isinstance(outputs, torch.Tensor):
            timeline.output_bytes = outputs.numel() * outputs.element_size()
            like = outputs.shape, outputs.dtype
        recorder.is_loss = True
        value = outputs if work.loss is None else work.loss(outputs, work.columns)
    if work.is_stage:
        recorder.sent = outputs if work.loss is None else None
        del outputs
    timeline.events.append(PassEvent("loss", "", 0))
    if work.is_split:
        _split_backward(module, value, work, given, recorder)
    elif value.requires_grad:
        torch.autograd.backward(value, None if work.loss is not None else torch.empty_like(value))
    recorder.finish()
    return like


def _evaluate(module: nn.Module, work: Pass, recorder: Recorder) -> Any:
    """Run forward, loss and metrics as Strategy.evaluate and evaluate_split do; return as `_run` does.

    What a metric does with values, on the host, is not seen.
    """
    timeline, like = recorder.timeline, None
    with torch.no_grad(), autocast(work.precision, torch.device("cpu")):
        given = work.given(work.columns) if work.received is None else (work.received,)
        outputs = module(*given)
    del given
    if isinstance(outputs, torch.Tensor):
        timeline.output_bytes = outputs.numel() * outputs.element_size()
        like = outputs.shape, outputs.dtype
    recorder.is_loss = True
    timeline.events.append(PassEvent("loss", "", 0))
    if work.loss is None:
        recorder.sent = outputs
    else:
        with suppress(Exception):  # a metric may need values; a loss that does has no training pass either
            work.loss(outputs, work.columns)
    return like


def _split_backward(module: nn.Module, value: Any, work: Pass, given: tuple[Any, ...], recorder: Recorder) -> None:
    gradients = None if work.loss is not None else [torch.empty_like(value)]
    sent, groups = stage_backward_input([value], gradients, [*given], module.parameters())
    del gradients
    recorder.timeline.events.append(PassEvent("split", "", 0))
    complete: dict[str, nn.Parameter] = {}  # by the group before, whose gradients torch keeps until those of this one
    while groups:
        stage_backward_weight(module.parameters(), [groups.pop(0)])
        reached = {name: p for name, p in module.named_parameters() if p.grad is not None and name not in complete}
        _complete(recorder, complete)
        complete = reached
    _complete(recorder, complete)
    recorder.sent = (recorder.sent, sent)


def _complete(recorder: Recorder, parameters: Mapping[str, nn.Parameter]) -> None:
    for name, parameter in parameters.items():
        recorder.gradient(plain_name(name), parameter)
