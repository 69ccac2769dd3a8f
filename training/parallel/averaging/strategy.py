"""Steps of replicas that train apart: each clips and applies its own gradient, and a rule averages the weights.

A replica's gradient is that of  n x sum over its rows of weight_i * loss_i / global_rows,  n replicas, so the mean of
the replicas' gradients is the gradient of the global batch, whatever rows each has. In a checkpoint, `model` and
`optimizer` are the means over the replicas, which a run of any other world or strategy continues from; what differs
between replicas is next to them, by replica.

Bytes sent per replica and step: those of the rule, 2 (n-1)/n x bytes of the trained weights but for gossip, / every;
three times that for AdamW with inner_state: averaged. An evaluation or a checkpoint inside a window sends the mean once
more.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from sparkring.training.data.batch import Batch
from sparkring.training.models.initial import InitialModel
from sparkring.training.models.task import Task
from sparkring.training.parallel.averaging.links import Links
from sparkring.training.parallel.averaging.rules import BETWEEN_HOSTS, RULES, copy_into
from sparkring.training.parallel.data_parallel.base import DataParallel
from sparkring.training.parallel.local import LocalStep, OptimizerFactory, StepInfo
from sparkring.training.parallel.meeting import GroupMeeting
from sparkring.training.parallel.memory.meters import storage_bytes
from sparkring.training.parallel.model_parallel.placement import ModelPlacement
from sparkring.training.parallel.process_groups import RankContext
from sparkring.training.parallel.residuals import Residuals
from sparkring.training.parallel.state import (
    load_optimizer_state,
    load_tensors,
    persistent_buffers,
    plain_name,
)
from sparkring.training.parallel.strategy import Strategy

AVERAGING = "averaging"  # part of a checkpoint's state
MEAN = "mean"  # part of it: the means of the weights, where they are not what is evaluated
STEP_COUNT = "step"  # key of an optimizer's state


class AveragedStrategy(Strategy):
    """See strategy.Strategy."""

    meets_each_step = False

    def __init__(
        self,
        context: RankContext,
        data_parallel: DataParallel,
        placement: ModelPlacement,
        clip_norm: float | None,
        links: Links,
    ) -> None:
        """Combine the components that compose.py has made.

        Args:
            context: this process among the ranks.
            data_parallel: combines gradients within this rank's replica.
            placement: placement of the model, which is whole.
            clip_norm: largest norm of a replica's gradient; None disables clipping.
            links: links between the replicas.
        """
        local = LocalStep(context, data_parallel, placement, clip_norm)
        local.averaged_ranks = links.replicas
        local.residuals = Residuals(data_parallel, links.replica, links.replicas, apart=True)
        super().__init__(local, GroupMeeting(local), context.at.dp, context.mesh.dp)
        self.settings, self.links = context.config.averaging, links
        self.rule = RULES[self.settings.kind](self.settings, links)
        self.clock = 0  # steps so far, skipped ones included: the same on every rank
        self.skipped_in_window = 0  # steps, by this replica
        self._kept: list[torch.Tensor] = []  # this replica's own values, while those of all are evaluated
        self.window_bytes = 0.0  # sent by this rank when the last window ended

    @property
    def in_window(self) -> bool:
        return self.clock % self.settings.every != 0

    @property
    def own_key(self) -> str:
        """This replica's shard of a checkpoint. Of another kind it would not fit, so the kind is in the name."""
        return f"{self.settings.kind}-{self.links.replica:05d}"

    def prepare(
        self,
        model: nn.Module | InitialModel,
        task: Task,
        make_optimizer: OptimizerFactory,
        sample: Batch | None = None,
        compiled: bool = False,
    ) -> None:
        super().prepare(model, task, make_optimizer, sample, compiled)
        self.rule.begin(self._weights())

    def _weights(self) -> list[torch.Tensor]:
        return [parameter.detach() for _, parameter in self.prepared.named]

    def _names(self) -> list[str]:
        """List the checkpoint names of `_weights`."""
        names = [plain_name(name) for name, _ in self.prepared.named]
        return [self.aliases.get(name, name) for name in names]

    # --- one step ------------------------------------------------------------------------------------------------

    def forward_backward(self, batch: Batch) -> torch.Tensor:
        self.expect_step()
        return self.local.compute(batch)

    def step(self, lr: float) -> StepInfo:
        """Step this replica. All ranks count its skipped steps when the window ends."""
        self.awaits_step = False
        info = self.local.step(lr)
        if info.skipped and not math.isfinite(float(self.local.loss_sum)):
            info = replace(info, first_bad_rank=self.rank)
        self.clock += 1
        self.skipped_in_window += info.skipped
        if self.in_window:
            return replace(info, counted_skips=0)
        with self.local.data_parallel.waiting():
            return replace(info, counted_skips=self._end_window())

    def _end_window(self) -> int:
        """Average; returns the steps that replicas skipped in the window, all together."""
        sent = self.links.sent_bytes
        self.rule.end_window(self._weights(), self.clock // self.settings.every)
        copy_into(self.prepared.buffers, self.links.of_first(self.prepared.buffers))
        if self.settings.inner_state == "averaged":
            means = self._mean_optimizer(self.local.own_state()["optimizer"])
            load_optimizer_state(self.prepared.optimizer, self.prepared.named, self.aliases, means)
        self.window_bytes = self.links.sent_bytes - sent
        skipped, self.skipped_in_window = self.skipped_in_window, 0
        return self.links.total(skipped)

    def _mean_optimizer(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Average `<parameter>.<key>` over the replicas; step counts and plain numbers take the largest."""
        moments: list[str] = []
        counts: list[str] = []
        for name, value in state.items():
            is_moment = isinstance(value, torch.Tensor) and value.is_floating_point()
            (moments if is_moment and name.rpartition(".")[2] != STEP_COUNT else counts).append(name)
        means: dict[str, Any] = dict(zip(moments, self.links.mean([state[name] for name in moments]), strict=True))
        largest = self.links.largest([float(state[name]) for name in counts])
        for name, number in zip(counts, largest, strict=True):
            value = state[name]
            tensor = isinstance(value, torch.Tensor)
            means[name] = torch.full_like(value, number) if tensor else type(value)(number)
        return {name: means[name] for name in state}

    # --- between steps -------------------------------------------------------------------------------------------

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Use the weights that the rule evaluates, and rank 0's buffers, within the block. Collective."""
        weights, buffers = self._weights(), self.prepared.buffers
        with self.local.data_parallel.waiting():
            values = self.rule.evaluated(weights, self.in_window)
            firsts = self.links.of_first(buffers) if self.in_window else []
        changed = [*(weights if values is not None else []), *(buffers if firsts else [])]
        self._kept = [tensor.clone() for tensor in changed]
        copy_into(changed, [*(values or []), *firsts])
        del values, firsts  # as large as the weights, and not needed while ranks evaluate
        yield  # not in a `try`: after an error nothing is evaluated any more
        copy_into(changed, self._kept)
        self._kept = []

    def measure(self) -> dict[str, float]:
        sent = self.window_bytes / self.settings.every
        self.local.data_parallel.step_bytes = sent if self.settings.groups == "rank" else 0.0
        found = super().measure()
        if self.settings.groups == "host":
            found[f"sent_bytes {BETWEEN_HOSTS}"] = sent
        carried = storage_bytes(t for tensors in self.rule.shared().values() for t in tensors)
        return found | {"optimizer_bytes": found["optimizer_bytes"] + carried} if self.local.memory else found

    # --- checkpoints ---------------------------------------------------------------------------------------------

    def state_dict(self, stored: Mapping[str, Sequence[int] | None] | None = None) -> dict[str, Any]:
        """See Strategy.state_dict; `model` has what is evaluated, so any other strategy exports what was scored.

        `averaging` has the clock, what the rule carries, this replica's own part, and the means that another number of
        replicas begins with, where these are not `model`. Collective without `stored`: the means are made.
        """
        names = self._names()
        carried = {part: dict(zip(names, tensors, strict=True)) for part, tensors in self.rule.shared().items()}
        averaging: dict[str, Any] = {"clock": {"steps": torch.tensor(self.clock)}, **carried}
        if stored is None:
            own = self._own_part()
            if self._weights_differ() and not self.rule.evaluates_mean:
                own[MEAN] = dict(zip(names, self.links.mean(self._weights()), strict=True))
            return self._means() | self.local.residuals.tensors() | {AVERAGING: averaging | own}
        have = {name.split(".")[1] for name in stored if name.startswith(f"{AVERAGING}.")}
        room = {part: tensors for part, tensors in averaging.items() if part in have}
        replicas = [part for part in have if part.startswith(f"{self.settings.kind}-")]
        if len(replicas) == self.links.replicas:  # else each continues from the means
            room[self.own_key] = self._room(stored)
        elif MEAN in have and not self.rule.evaluates_mean and self.rule.shared().keys() <= have:  # of this kind
            room[MEAN] = dict(zip(names, (weight.clone() for weight in self._weights()), strict=True))
        return self.local.state_dict(stored) | ({AVERAGING: room} if room else {})

    def _means(self) -> dict[str, Any]:
        """Return the state saved once for all: evaluated weights, mean moments, rank 0's buffers and scale."""
        state, weights = self.local.own_state(), self._weights()
        if self._weights_differ():
            evaluated = self.rule.evaluated(weights, self.in_window)
            state["model"] |= zip(self._names(), weights if evaluated is None else evaluated, strict=True)
            buffers = self._buffers()
            state["model"] |= zip(buffers, self.links.of_first([*buffers.values()]), strict=True)
        if self._optimizers_differ():
            state["optimizer"] = self._mean_optimizer(state["optimizer"])
            state["scaler"] = dict(zip(state["scaler"], self.links.of_first([*state["scaler"].values()]), strict=True))
        return state

    def _own_part(self) -> dict[str, Any]:
        """Return the state that differs between replicas; ranks of one replica write the same."""
        state, parts = self.local.own_state(), dict[str, Any]()
        if self._weights_differ():
            parts["model"] = dict(zip(self._names(), self._weights(), strict=True)) | self._buffers()
        if self._optimizers_differ():
            parts |= {part: state[part] for part in ("optimizer", "scaler")}
        if self.in_window:
            parts["window"] = {"skipped": torch.tensor(self.skipped_in_window)}
        return {self.own_key: parts} if parts else {}

    def _room(self, stored: Iterable[str]) -> dict[str, Any]:
        """Make copies to load this replica's own state into, for the names that the model has."""
        state = self.local.own_state() | {"window": {"skipped": torch.tensor(0)}}
        parts: dict[str, Any] = {}
        for part, _, name in (n.split(".", 2)[2].partition(".") for n in stored if n.startswith(self._prefix)):
            if name in state[part]:
                parts.setdefault(part, {})[name] = copy.deepcopy(state[part][name])
        return parts

    def load_state_dict(self, state: dict[str, Any]) -> None:
        given = state.get(AVERAGING, {})
        own = given.get(self.own_key, {"model": state["model"] | given[MEAN]} if MEAN in given else {})
        self.local.load_state_dict(state | {part: state[part] | own[part] for part in own if part in state})
        self.clock = int(given["clock"]["steps"]) if "clock" in given else 0
        self.skipped_in_window = int(own["window"]["skipped"]) if "window" in own else 0
        carried = self.rule.shared()
        if carried.keys() <= given.keys():
            for part, tensors in carried.items():
                load_tensors(dict(zip(self._names(), tensors, strict=True)), given[part], part)
        else:
            self.rule.begin(self._weights())

    @property
    def _prefix(self) -> str:
        """Of the full names of this replica's own part."""
        return f"{AVERAGING}.{self.own_key}."

    def _buffers(self) -> dict[str, torch.Tensor]:
        """Return buffers by their checkpoint names."""
        plain = {plain_name(name): buffer for name, buffer in persistent_buffers(self.prepared.module).items()}
        return {self.aliases.get(name, name): buffer for name, buffer in plain.items()}

    def _weights_differ(self) -> bool:
        return self.in_window or not self.rule.meets

    def _optimizers_differ(self) -> bool:
        return self._weights_differ() or self.settings.inner_state == "local"

    def close(self, failed: bool = False) -> None:
        if not failed:
            self.links.close()
        super().close(failed)
