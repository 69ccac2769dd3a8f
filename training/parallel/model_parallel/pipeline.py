"""Pipeline parallelism: this rank's stages, and the run of a schedule's table over them.

A pipeline cuts the model's chain of modules into p x v stages of about equal cost; stage s lives on rank s mod p. Bytes
sent per rank and micro-batch: one activation forward and one gradient back per stage boundary. Memory: this rank's
stages, and the activations of the micro-batches alive in the schedule (1f1b: at most p - rank). The bubble is in
schedules.py, whose tables are run here as they stand: an action waits for its message, sends never block.

Accumulation is folded in: accumulate x micro_batches micro-batches make one longer pipeline with a smaller bubble. Rows
are padded with weight 0 to equal micro-batches, since a pipeline's messages have one shape.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from training.data.batch import Batch
from training.models.initial import replace_tensors, without_memory
from training.models.plan import ShardingPlan, expand
from training.parallel.batching import pad_rows, slice_batch
from training.parallel.model_parallel.messages import Link, Message
from training.parallel.model_parallel.schedules import Action, Table, balance

AHEAD = 2  # actions whose messages are received while this one computes


class Stage(nn.Module):
    """Consecutive modules of the chain under their own names, so that parameter names stay the plain model's."""

    def __init__(self, model: nn.Module, names: Sequence[str]) -> None:
        super().__init__()
        self.names = list(names)
        for name in names:
            graft(self, name, model.get_submodule(name))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for name in self.names:
            x = self.get_submodule(name)(x)
        return x


def graft(root: nn.Module, name: str, module: nn.Module) -> None:
    """Put `module` under the dotted `name`, making containers on the way."""
    *path, last = name.split(".")
    for part in path:
        if part not in root._modules:
            root.add_module(part, nn.ModuleDict())
        root = root.get_submodule(part)
    root.add_module(last, module)


def chain_names(model: nn.Module, plan: ShardingPlan | None) -> list[str]:
    """The chain, expanded. ValueError for a model without one, or with parameters outside of it."""
    if plan is None or not plan.chain:
        raise ValueError(
            f"parallel.pp > 1: {type(model).__name__} has no sharding plan with a chain; define PLAN = "
            f"ShardingPlan(chain=(...)) beside the class (training/models/plan.py says how)"
        )
    names = [name for pattern in plan.chain for name in expand(pattern, model)]
    outside = [n for n, _ in model.named_parameters() if not any(n.startswith(f"{name}.") for name in names)]
    if outside:
        raise ValueError(f"the sharding plan's chain leaves out {outside[:5]}: a pipeline would never train them")
    return names


def estimated_costs(model: nn.Module, names: Sequence[str]) -> list[float]:
    """Cost per module of the chain: its weights' multiplications per token; looking up an embedding costs nothing."""
    costs = []
    for name in names:
        module = model.get_submodule(name)
        matrices = [p for m in module.modules() if not isinstance(m, nn.Embedding) for p in m.parameters(recurse=False)]
        costs.append(float(sum(p.numel() for p in matrices)))
    return costs


def measured_costs(model: nn.Module, names: Sequence[str], x: torch.Tensor, repeats: int = 3) -> list[float]:
    """Seconds of forward and backward per module of the chain on the input `x`, the fastest of `repeats`. Leaves the
    model on the meta device (one module at a time gets weights, all zero) and the random state as it was."""
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


def cut_chain(names: Sequence[str], costs: list[float], stages: int) -> list[list[str]]:
    """Names per stage, balanced by cost. ValueError with fewer modules than stages."""
    ends = balance(costs, stages)
    return [list(names[start:end]) for start, end in zip([0, *ends[:-1]], ends, strict=True)]


class Pipeline:
    """This rank's part of one table; `scope` is around every forward (precision)."""

    def __init__(
        self,
        table: Table,
        rank: int,
        group: dist.ProcessGroup,
        stages: dict[int, nn.Module],
        stage_count: int,
        device: torch.device,
        scope: Callable[[], AbstractContextManager[object]],
    ) -> None:
        self.scope = scope
        self.actions, self.stages, self.stage_count = table[rank], stages, stage_count
        self.micro_batches = 1 + max(action.micro for action in self.actions)
        self.link = Link(group, len(table), device)
        self.device = device
        self.last_action = {a.stage: a for a in self.actions if a.kind in "BW"}
        self.seconds: dict[str, float] = {}  # of all passes but the first, which sets up: whole, and at work

    def train(
        self,
        batch: Batch,
        inputs: Callable[[Batch], torch.Tensor],
        loss: Callable[[Any, Batch], tuple[torch.Tensor, torch.Tensor]],
        before_backward: Callable[[nn.Module, bool], None],
        watched: Callable[[nn.Module, tuple[Any, ...]], AbstractContextManager[object]],
    ) -> torch.Tensor:
        """One pass over the rank's rows; returns the sum of weighted losses (0 without the last stage).

        loss(outputs, rows) -> (to differentiate, sum of weighted row losses); before_backward(stage, its last one);
        watched(stage, what it takes of the batch) is around its every forward.
        """
        began, waited_s = time.monotonic(), self.link.waited_s
        rows = -(-max(batch.rows, 1) // self.micro_batches)
        batch = pad_rows(batch, rows * self.micro_batches)
        micros = [slice_batch(batch, i * rows, (i + 1) * rows) for i in range(self.micro_batches)]
        kept: dict[tuple[int, int], list[Any]] = {}
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for number, action in enumerate(self.actions):
            for later in self.actions[number : number + 1 + AHEAD]:
                if (message := self._message(later, rows)) is not None:
                    self.link.expect(message)
            where = (action.stage, action.micro)
            if action.kind == "F":
                awaited = self._message(action, rows)
                x = self.link.receive(awaited).requires_grad_() if awaited else inputs(micros[action.micro])
                with self.scope():
                    with watched(self.stages[action.stage], () if awaited else (x,)):
                        out = self.stages[action.stage](x)
                    if action.stage == self.stage_count - 1:
                        out, value = loss(out, micros[action.micro])
                if action.stage == self.stage_count - 1:
                    total = total + value
                else:
                    self.link.send(
                        out, action.stage + 1, (action.stage, rows), self._tag(action.stage, action.micro, 0)
                    )
                kept[where] = [x, out]
            else:
                before_backward(self.stages[action.stage], action == self.last_action[action.stage])
                self._backward(action, kept, rows)
        self.link.drain()
        self._clock(time.monotonic() - began, self.link.waited_s - waited_s)
        return total

    def _clock(self, pass_s: float, waited_s: float) -> None:
        if not self.seconds:
            self.seconds = {"pass_s": 0.0, "work_s": 0.0}
            return
        self.seconds["pass_s"] += pass_s
        self.seconds["work_s"] += pass_s - waited_s

    def _tag(self, boundary: int, micro: int, backward: int) -> int:
        return (boundary * self.micro_batches + micro) * 2 + backward

    def _message(self, action: Action, rows: int) -> Message | None:
        """What the action waits for: the activation of the stage before, or the gradient of the one after."""
        kind, stage, micro = action
        if kind == "F" and stage > 0:
            return Message(stage - 1, (stage - 1, rows), self._tag(stage - 1, micro, 0))
        if kind in "BI" and stage < self.stage_count - 1:
            return Message(stage + 1, (stage, rows, "grad"), self._tag(stage, micro, 1))
        return None

    def _backward(self, action: Action, kept: dict[tuple[int, int], list[Any]], rows: int) -> None:
        kind, stage, micro = action
        where = (stage, micro)
        if kind == "W":
            state = kept.pop(where)
            if state:
                stage_backward_weight(self.stages[stage].parameters(), state[0])
            return
        x, out = kept.pop(where)
        grad = None
        if (message := self._message(action, rows)) is not None:
            grad = self.link.receive(message).to(out.dtype)
        if not out.requires_grad:  # a first stage that is frozen, or that these rows did not reach
            sent, kept[where] = None, []
        elif kind == "B" or stage == 0:
            torch.autograd.backward(out, grad)
            sent, kept[where] = x.grad, []
        else:
            found, groups = stage_backward_input(
                [out], [grad] if grad is not None else None, [x], self.stages[stage].parameters()
            )
            sent, kept[where] = found[0], [groups]
        if kind == "B":
            del kept[where]
        if stage > 0:
            sent = torch.zeros_like(x) if sent is None else sent
            self.link.send(sent, stage - 1, (stage - 1, rows, "grad"), self._tag(stage - 1, micro, 1))

    def evaluate(self, x: torch.Tensor) -> Any:
        """Outputs where the last stage is, else None; `x` is the model's input, on every rank."""
        for index, stage in sorted(self.stages.items()):
            if index > 0:
                x = self.link.receive(Message(index - 1, None, self._tag(index - 1, 0, 0)))
            with self.scope():
                x = stage(x)
            if index < self.stage_count - 1:
                self.link.send(x, index + 1, None, self._tag(index, 0, 0))
        self.link.drain()
        return x if self.stage_count - 1 in self.stages else None
