"""Cut a model into pipeline stages, and run a schedule over this rank's stages.

A pipeline cuts the model's layers into p x v stages of about equal cost; stage s is on rank s mod p. Bytes sent per
rank and micro-batch: one activation forward and one gradient back per stage boundary. Memory: this rank's stages, and
the activations of the micro-batches alive in the schedule (1f1b: at most p - rank). The bubble is in schedules.py,
whose tables are run unchanged: an action waits for its message, sends never block.

Accumulation is folded in: accumulate x micro_batches micro-batches make one longer pipeline with a smaller bubble. Rows
are padded with weight 0 to equal micro-batches, since a pipeline's messages have one shape.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from sparkring.training.data.batch import Batch
from sparkring.training.models.initial import replace_tensors, without_memory
from sparkring.training.models.sharding_plan import required_plan
from sparkring.training.models.torch_private import stage_backward_input, stage_backward_weight
from sparkring.training.parallel.batching import pad_rows, slice_batch
from sparkring.training.parallel.model_parallel.p2p import StageChannel, StageMessage
from sparkring.training.parallel.model_parallel.schedules import Action, Table, balance

Sent = tuple[bool, int, int]  # whether a message is a gradient, its boundary (after that stage), its micro-batch
AHEAD = 2  # actions whose messages are received while this one computes


class PipelineStage(nn.Module):
    """Run consecutive layers, under the plain model's parameter names."""

    def __init__(self, model: nn.Module, names: Sequence[str]) -> None:
        super().__init__()
        self.names = list(names)
        for name in names:
            add_submodule(self, name, model.get_submodule(name))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for name in self.names:
            x = self.get_submodule(name)(x)
        return x


def add_submodule(root: nn.Module, name: str, module: nn.Module) -> None:
    """Add `module` under the dotted `name`, creating containers on the way."""
    *path, last = name.split(".")
    for part in path:
        if part not in dict(root.named_children()):
            root.add_module(part, nn.ModuleDict())
        root = root.get_submodule(part)
    root.add_module(last, module)


def layer_names(model: nn.Module) -> list[str]:
    """List the layers of the model's plan; ValueError if parameters are outside of them."""
    plan = required_plan(model, "pp")
    if not plan.layers:
        raise ValueError(
            f"parallel.pp > 1: the sharding plan of {type(model).__name__} has no layers; define PLAN = "
            f"ShardingPlan(layers=(...)) beside the class (training/models/sharding_plan.py says how)"
        )
    names = plan.layer_names(model)
    outside = [n for n, _ in model.named_parameters() if not any(n.startswith(f"{name}.") for name in names)]
    if outside:
        raise ValueError(f"the sharding plan's layers leave out {outside[:5]}: a pipeline would never train them")
    return names


def estimated_costs(model: nn.Module, names: Sequence[str]) -> list[float]:
    """Estimate costs per layer: its weights' multiplications per token; an embedding's lookup is free."""
    costs = []
    for name in names:
        module = model.get_submodule(name)
        matrices = [p for m in module.modules() if not isinstance(m, nn.Embedding) for p in m.parameters(recurse=False)]
        costs.append(float(sum(p.numel() for p in matrices)))
    return costs


def measured_costs(model: nn.Module, names: Sequence[str], x: torch.Tensor, repeats: int = 3) -> list[float]:
    """Measure seconds of forward and backward per layer on the input `x`, the fastest of `repeats`.

    Leaves the model on the meta device (one module at a time gets weights, all zero) and the random state as it was.
    """
    costs, device = [], x.device
    with torch.random.fork_rng():
        for name in names:
            module = model.get_submodule(name)
            replace_tensors(module, lambda tensor: torch.zeros_like(tensor, device=device))
            best = float("inf")
            for _ in range(repeats):
                given = x.detach().requires_grad_(x.is_floating_point())
                began = time.perf_counter()
                out = module(given)
                out.sum().backward()
                if x.is_cuda:
                    torch.cuda.synchronize()
                best = min(best, time.perf_counter() - began)
            costs.append(best)
            x = out.detach()
            without_memory(module)
    return costs


def partition(names: Sequence[str], costs: list[float], stages: int) -> list[list[str]]:
    """Split names into stages, balanced by cost. ValueError with fewer layers than stages."""
    ends = balance(costs, stages)
    return [list(names[start:end]) for start, end in zip([0, *ends[:-1]], ends, strict=True)]


@dataclass(frozen=True)
class PassFunctions:
    """What one training pass needs of the strategy.

    Args:
        inputs: rows -> the first stage's input.
        loss: outputs, rows -> (to differentiate, sum of weighted row losses).
        before_backward: called with (stage, whether it is the stage's last backward).
        measuring: (stage, its inputs from the batch) -> context around the stage's forward.
    """

    inputs: Callable[[Batch], torch.Tensor]
    loss: Callable[[Any, Batch], tuple[torch.Tensor, torch.Tensor]]
    before_backward: Callable[[nn.Module, bool], None]
    measuring: Callable[[nn.Module, tuple[Any, ...]], AbstractContextManager[object]] = lambda stage, batch: (
        nullcontext()
    )


def sent_to(rank: int, table: Table, peer: int, stages: int) -> list[Sent]:
    """List what `peer` sends to `rank` in a pass, in order: an activation per F, a gradient per B or I."""
    found: list[Sent] = []
    for kind, stage, micro in table[peer]:
        if kind == "F" and stage < stages - 1 and (stage + 1) % len(table) == rank:
            found.append((False, stage, micro))
        if kind in "BI" and stage > 0 and (stage - 1) % len(table) == rank:
            found.append((True, stage - 1, micro))
    return found


class Pipeline:
    """This rank's stages, and its rows of a schedule's table."""

    def __init__(
        self,
        table: Table,
        rank: int,
        stages: dict[int, nn.Module],
        stage_count: int,
        channel: StageChannel,
        autocast: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        """Create the executor of one pipeline rank.

        Args:
            table: actions of each rank, in order.
            rank: number of this rank in the pipeline.
            stages: stages of this rank, by number.
            stage_count: number of stages on all ranks.
            channel: channel to the other stages.
            autocast: context around every forward.
        """
        self.actions, self.stages, self.stage_count = table[rank], stages, stage_count
        self.channel, self.autocast = channel, autocast
        self.incoming = {peer: sent_to(rank, table, peer, stage_count) for peer in range(len(table))}
        self.micro_batches = 1 + max(action.micro for action in self.actions)
        self.last_backward = {a.stage: a for a in self.actions if a.kind in "BW"}
        self.seconds: dict[str, float] = {}  # of all passes but the first, which sets up: whole, and at work

    def train(self, batch: Batch, functions: PassFunctions) -> torch.Tensor:
        """Run one pass over the rank's rows; returns the sum of weighted losses (0 without the last stage)."""
        began, waited_s = time.monotonic(), self.channel.waited_s
        rows = -(-max(batch.rows, 1) // self.micro_batches)
        batch = pad_rows(batch, rows * self.micro_batches)
        micros = [slice_batch(batch, i * rows, (i + 1) * rows) for i in range(self.micro_batches)]
        saved: dict[tuple[int, int], list[Any]] = {}  # (stage, micro-batch) -> input and output, or the half backward
        total = torch.zeros((), dtype=torch.float64, device=self.channel.device)
        self.channel.begin({p: [self._incoming(s, rows) for s in sent] for p, sent in self.incoming.items()})
        for number, action in enumerate(self.actions):
            for later in self.actions[number : number + 1 + AHEAD]:
                if (message := self._awaited(later, rows)) is not None:
                    self.channel.expect(message)
            if action.kind == "F":
                total = total + self._forward(action, micros[action.micro], saved, functions)
            else:
                functions.before_backward(self.stages[action.stage], action == self.last_backward[action.stage])
                self._backward(action, saved, rows)
        self.channel.drain()
        self._add_seconds(time.monotonic() - began, self.channel.waited_s - waited_s)
        return total

    def _add_seconds(self, pass_s: float, waited_s: float) -> None:
        if not self.seconds:
            self.seconds = {"pass_s": 0.0, "work_s": 0.0}
            return
        self.seconds["pass_s"] += pass_s
        self.seconds["work_s"] += pass_s - waited_s

    def _activation(self, boundary: int, micro: int, rows: int | None, to_stage: int) -> StageMessage:
        """Describe the activation stage `boundary` sends to the next. `rows` None: its shape is sent too."""
        key = None if rows is None else (boundary, rows)
        return StageMessage(to_stage, key, (boundary * self.micro_batches + micro) * 2)

    def _gradient(self, boundary: int, micro: int, rows: int, to_stage: int) -> StageMessage:
        """Describe the gradient of that activation."""
        return StageMessage(to_stage, (boundary, rows, "grad"), (boundary * self.micro_batches + micro) * 2 + 1)

    def _incoming(self, sent: Sent, rows: int) -> StageMessage:
        is_gradient, boundary, micro = sent
        if is_gradient:
            return self._gradient(boundary, micro, rows, boundary + 1)
        return self._activation(boundary, micro, rows, boundary)

    def _awaited(self, action: Action, rows: int) -> StageMessage | None:
        """Return the message the action waits for: the previous stage's activation or the next one's gradient."""
        kind, stage, micro = action
        if kind == "F" and stage > 0:
            return self._incoming((False, stage - 1, micro), rows)
        if kind in "BI" and stage < self.stage_count - 1:
            return self._incoming((True, stage, micro), rows)
        return None

    def _forward(
        self, action: Action, part: Batch, saved: dict[tuple[int, int], list[Any]], functions: PassFunctions
    ) -> torch.Tensor | float:
        """Run a stage on one micro-batch; returns the sum of weighted losses of the last stage, else 0."""
        stage, micro = action.stage, action.micro
        awaited = self._awaited(action, part.rows)
        x = self.channel.receive(awaited).requires_grad_() if awaited else functions.inputs(part)
        value: torch.Tensor | float = 0.0
        with self.autocast():
            with functions.measuring(self.stages[stage], () if awaited else (x,)):
                out = self.stages[stage](x)
            if stage == self.stage_count - 1:
                out, value = functions.loss(out, part)
        if stage < self.stage_count - 1:
            self.channel.send(out, self._activation(stage, micro, part.rows, stage + 1))
        saved[stage, micro] = [x, out]
        return value

    def _backward(self, action: Action, saved: dict[tuple[int, int], list[Any]], rows: int) -> None:
        kind, stage, micro = action
        if kind == "W":
            if groups := saved.pop((stage, micro)):
                stage_backward_weight(self.stages[stage].parameters(), groups[0])
            return
        x, out = saved.pop((stage, micro))
        grad = None
        if (message := self._awaited(action, rows)) is not None:
            grad = self.channel.receive(message).to(out.dtype)
        groups, input_grad = [], None  # what is left for W, and the gradient of x
        if not out.requires_grad:  # a first stage that is frozen, or that these rows did not reach
            pass
        elif kind == "B" or stage == 0:
            torch.autograd.backward(out, grad)
            input_grad = x.grad
        else:
            found, left = stage_backward_input(
                [out], [grad] if grad is not None else None, [x], self.stages[stage].parameters()
            )
            input_grad, groups = found[0], [left]
        if kind == "I":
            saved[stage, micro] = groups
        if stage > 0:
            input_grad = torch.zeros_like(x) if input_grad is None else input_grad
            self.channel.send(input_grad, self._gradient(stage - 1, micro, rows, stage - 1))

    def evaluate(self, x: torch.Tensor) -> Any:
        """Compute outputs if the last stage is here, else None; `x` is the model's input, on every rank."""
        before = {index: self._activation(index - 1, 0, None, index - 1) for index in sorted(self.stages) if index > 0}
        self.channel.begin({self.channel.peer(message): list(before.values()) for message in before.values()})
        for index, stage in sorted(self.stages.items()):
            if index > 0:
                x = self.channel.receive(before[index])
            with self.autocast():
                x = stage(x)
            if index < self.stage_count - 1:
                self.channel.send(x, self._activation(index, 0, None, index + 1))
        self.channel.drain()
        return x if self.stage_count - 1 in self.stages else None
