"""Steps whose weights are on servers (docs/explanation/asynchronous.md): pull, compute, push.

A rank pulls weights and rows for each step, computes the gradient of  n x sum over its rows of
weight_i * loss_i / global_rows,  n ranks, and pushes it; servers apply it (training/servers/shard.py). With bound 0 a
step is that of one process: the pushes of all ranks are added, clipped by their global norm, skipped by all where it
is not finite. Else each rank clips its own gradient by its own norm, and skips its own.

Bytes a rank receives and sends in a step: those of training/servers/protocol.py. A rank holds weights and gradients;
what an optimizer keeps is on the servers, and here only while a checkpoint is copied.

Ranks synchronize to evaluate and to write a checkpoint: in rounds at the first server. Buffers are each
rank's own; rank 0's are evaluated and saved.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from hashlib import sha256
from typing import Any

import torch
from torch import nn

from sparkring.training.data.batch import Batch
from sparkring.training.models.initial import EagerValue, InitialModel, eager_model, named_tensors
from sparkring.training.models.sparse_embedding import SparseEmbedding
from sparkring.training.models.task import Task
from sparkring.training.parallel.data_parallel.base import SingleProcess
from sparkring.training.parallel.gradients import REACH_STEPS, clip_factor, square_sum
from sparkring.training.parallel.local import LocalStep, OptimizerFactory, StepInfo
from sparkring.training.parallel.model_parallel.placement import ModelPlacement
from sparkring.training.parallel.process_groups import RankContext
from sparkring.training.parallel.servers.late import LateNotes
from sparkring.training.parallel.servers.link import ServerLink
from sparkring.training.parallel.servers.tables import ServedTables
from sparkring.training.parallel.sparse import TableSettings, distinct_ids
from sparkring.training.parallel.state import TensorInfo, optimizer_tensors, plain_name, stream_tensors
from sparkring.training.parallel.strategy import Strategy
from sparkring.training.servers.client import Gradient, Pulled, cut_gradient, global_squares, statuses
from sparkring.training.servers.definition import Definition
from sparkring.training.servers.messages import PushReply, ShardStatus
from sparkring.training.tables.hashing import Ids


class ServersStrategy(Strategy):
    """See strategy.Strategy."""

    meets_each_step = False
    replaces_ranks = True
    backup = 0  # ranks that a step does not wait for

    def __init__(
        self,
        context: RankContext,
        placement: ModelPlacement,
        clip_norm: float | None,
        link: ServerLink,
        tables: TableSettings,
    ) -> None:
        """Combine the components that compose.py has made.

        Args:
            context: context of a world with this process alone.
            placement: placement of the model, which is whole.
            clip_norm: largest norm of a step's gradient with bound 0, else of a rank's; None disables clipping.
            link: connection to the servers.
            tables: settings of the model's SparseEmbeddings.
        """
        local = LocalStep(context, SingleProcess("servers"), placement, clip_norm, None, tables)
        super().__init__(local, link, link.rank, link.world)
        self.link, self.settings = link, context.config.servers
        self.late = LateNotes(link.client, local.residuals)
        local.averaged_ranks, local.is_alone = self.parts, False
        local.make_tables = self._make_tables
        self._served = self._make_tables({})
        self.attempt = 0  # number of the try at the next one
        self._pulled: Pulled | None = None  # of the step that is being made
        self._ids: list[Ids] = []
        self._batch: Batch | None = None
        self._unreached: set[str] = set()
        self._sent_before = 0  # bytes, when the step began
        self._skipped = 0  # steps of this rank since the last synchronization point
        self._to_count = 0  # skipped steps of all ranks, at the last synchronization point

    def _make_tables(self, modules: Mapping[str, SparseEmbedding]) -> ServedTables:
        self._served = ServedTables(modules, self.local.table_settings, self.link, self.local.device)
        return self._served

    @property
    def clock(self) -> int:
        """Steps that this rank has made since the run began."""
        return self.link.clock

    @property
    def definition(self) -> Definition:
        return self.link.client.definition

    @property
    def is_replacement(self) -> bool:
        """Whether this rank takes the place of one that died, while the others went on."""
        return self.link.is_replacement

    # --- prepare -------------------------------------------------------------------------------------------------

    def prepare(
        self,
        model: nn.Module | InitialModel,
        task: Task,
        make_optimizer: OptimizerFactory,
        sample: Batch | None = None,
        compiled: bool = False,
    ) -> None:
        initial = model if isinstance(model, InitialModel) else eager_model(model, "it has memory", self.rank == 0)
        super().prepare(with_all_values(initial), task, make_optimizer, sample, compiled)
        self._unreached = {plain_name(name) for name, _ in self.prepared.named}
        self.link.define(self._defined([table.table.spec for table in self.tables.tables.values()]))
        self._take_fixed_values()
        if self.rank == 0 and not self.is_replacement:
            self.link.client.load_dense(self._flat_weights(), {})

    def _defined(self, tables: Sequence[Any]) -> Definition:
        """Describe what the servers hold. ValueError if weights have several dtypes."""
        shapes = {plain_name(name): list(p.shape) for name, p in self.prepared.named}
        dtypes = {str(p.dtype).removeprefix("torch.") for _, p in self.prepared.named} or {"float32"}
        if len(dtypes) > 1:
            raise ValueError(
                f"parallel.servers: the model's trained parameters have the dtypes {', '.join(sorted(dtypes))}, and "
                "servers hold weights of one: convert the model to one, or freeze the others"
            )
        share = self.local.table_settings.lr_share
        settings = {name: getattr(self.settings, name) for name in ("bound", "max_lag", "damp")}
        return Definition(self.link.world, shapes, dtypes.pop(), tables, share, **settings, backup=self.backup)

    def _take_fixed_values(self) -> None:
        """Take what is not trained (frozen parameters, buffers) from rank 0: other ranks may have no values."""
        trained = {id(p) for _, p in self.prepared.named}
        fixed = {n: t.detach() for n, t in named_tensors(self.prepared.module).items() if id(t) not in trained}
        copy_into(fixed, self.link.of_first(fixed))

    # --- one step ------------------------------------------------------------------------------------------------

    def forward_backward(self, batch: Batch) -> torch.Tensor:
        if self.link.met_at == self.clock:
            self._go_on()
        self.expect_step()
        self._batch, self._sent_before = batch, self.link.client.sent_bytes
        self._ids = self._served.distinct(batch.on_host)
        return self._computed(batch)

    def _computed(self, batch: Batch) -> torch.Tensor:
        """Pull, and compute the gradient of this try."""
        with self.local.data_parallel.waiting():
            pulled = self.link.client.pull(self.clock, self.attempt, self._ids)
        return self.compute(batch, pulled, self._ids)

    def distinct_ids(self, batch: Batch) -> list[Ids]:
        """Return the distinct ids of a batch, by table."""
        return [distinct_ids(name, module, batch.on_host)[0] for name, module in self._served.modules.items()]

    def compute(self, batch: Batch, pulled: Pulled, ids: list[Ids]) -> torch.Tensor:
        """Accumulate the gradient of a batch with what was pulled: a function of these, the seed, rank and step."""
        self._pulled, self._ids = pulled, ids
        self._write_weights(pulled.weights)
        self._served.take(ids, pulled.rows)
        torch.manual_seed(draws_seed(self.local.table_settings.seed, *self._draws_at()))
        return self.local.compute(batch)

    def _draws_at(self) -> tuple[int, int]:
        """Return the (rank, step) that seeds random numbers."""
        return self.rank, self.clock

    def step(self, lr: float) -> StepInfo:
        self.awaits_step = False
        info = self._step(lr)
        self.local.end_step(info.skipped)
        return info

    def _step(self, lr: float) -> StepInfo:
        while True:
            frames, own = self._pushed(lr)
            if self.definition.synchronous:
                norm, bad = norm_of(global_squares(frames))
                self.link.client.settle(self.clock, self.settled_factor(norm))
                return self._made(StepInfo(norm, skipped=not math.isfinite(norm), first_bad_rank=bad))
            if ShardStatus.REJECTED not in statuses(frames):
                return self._made(self._own_info(own))
            self.attempt += 1
            self.prepared.optimizer.zero_grad(set_to_none=True)
            assert self._batch is not None
            self._computed(self._batch)

    def _pushed(self, lr: float) -> tuple[list[PushReply], float]:
        """Push this rank's gradient; the servers' answers, and its norm before it was clipped."""
        gradient, own = self.gradient(lr)
        assert self._pulled is not None
        self.late.before_push(self.clock, self._pulled.versions[0], self._batch, math.isfinite(own))
        pushes = cut_gradient(gradient, self.definition, self.rank, self.clock, self.attempt, self._pulled.versions)
        with self.local.data_parallel.waiting():
            frames = self.link.client.push(pushes)
        if self.local.is_measured:
            self.local.data_parallel.step_bytes = float(self.link.client.sent_bytes - self._sent_before)
        return frames, own

    def _made(self, info: StepInfo) -> StepInfo:
        self.local.count_memory()
        if info.counted and not info.skipped:
            self.late.commit(self.clock, self._batch)
        self.link.clock, self.attempt = self.clock + 1, 0
        return info

    def _own_info(self, norm: float) -> StepInfo:
        """Return the info of this rank's own step; all ranks' steps are counted at synchronization points."""
        skipped = not math.isfinite(norm)
        self._skipped += skipped
        counted, self._to_count = self._to_count, 0
        return StepInfo(norm, skipped, self.rank if skipped else None, counted_skips=counted)

    def gradient(self, lr: float) -> tuple[Gradient, float]:
        """Return this rank's gradient as pushed, and its norm before clipping."""
        prepared = self.prepared
        names = [plain_name(name) for name, _ in prepared.named]
        self._unreached -= {name for name, (_, p) in zip(names, prepared.named, strict=True) if p.grad is not None}
        self.local.residuals.add_late(prepared.named, self.aliases, self.local.scaler.scale * self.definition.parts)
        grads = [p.grad for _, p in prepared.named]
        squares = square_sum([g for g in grads if g is not None], self.local.device, holders=1)
        norm = math.sqrt(float(squares) + self._served.squares()) / self.local.scaler.scale
        share = 1.0 if self.definition.synchronous else clip_factor(norm, self.local.clip_norm)
        factor = share / self.local.scaler.scale
        parts = [
            (torch.zeros_like(p) if grad is None else grad).detach().reshape(-1)
            for (_, p), grad in zip(prepared.named, grads, strict=True)
        ]
        dense = torch.cat(parts).cpu() if parts else torch.zeros(0, dtype=getattr(torch, self.definition.dtype))
        if factor != 1.0:
            dense = dense * factor
        absent = frozenset(name for name, grad in zip(names, grads, strict=True) if grad is None)
        return Gradient(dense, absent, self._ids, self._served.gradients(factor), norm * share, lr), norm

    def settled_factor(self, norm: float) -> float:
        """Return the factor on a step's gradient with bound 0; NaN if the step is skipped."""
        return clip_factor(norm, self.local.clip_norm) if math.isfinite(norm) else math.nan

    # --- weights -------------------------------------------------------------------------------------------------

    def _flat_weights(self) -> torch.Tensor:
        parts = [p.detach().reshape(-1).cpu() for _, p in self.prepared.named]
        return torch.cat(parts) if parts else torch.zeros(0, dtype=getattr(torch, self.definition.dtype))

    @torch.no_grad()
    def _write_weights(self, flat: torch.Tensor) -> None:
        """Copy weights (elements,) into the model."""
        pieces = flat.split([p.numel() for _, p in self.prepared.named]) if self.prepared.named else ()
        for (_, parameter), piece in zip(self.prepared.named, pieces, strict=True):
            parameter.copy_(piece.view(parameter.shape))

    def _buffers_of_first(self) -> None:
        buffers = {str(number): buffer for number, buffer in enumerate(self.prepared.buffers)}
        copy_into(buffers, self.link.of_first(buffers))

    # --- between steps -------------------------------------------------------------------------------------------

    def begin(self, step: int, meets_after: Callable[[int], bool] = lambda step: False) -> tuple[int, bytes] | None:
        """See Strategy.begin."""
        self.link.meet(b"")  # every server knows by now that no step is made yet
        if self.rank == 0 and not self.is_replacement:
            self.late.begin(self.clock)
            self.link.client.begin(step)
        self.link.meet(b"")  # others may wait here for a rank that has died between the two
        if self.is_replacement:
            self.link.clock, self.attempt, version = self.link.client.restart()
            self.link.go_on(self.clock, self.clock > step and meets_after(self.clock))
            self.late.take_over(self.clock, version)
            return self.clock, self.link.kept()
        self.link.clock, self.link.begun = step, True
        return None

    def _go_on(self) -> None:
        """Continue after a synchronization point: no rank pushes while another still reads. Collective."""
        mine = json.dumps([self._skipped, sorted(self._unreached)]).encode()
        answers = [json.loads(answer) for answer in self.link.part(mine)]
        self._skipped = 0
        self._to_count += sum(skipped for skipped, _ in answers)
        missing = sorted(set.intersection(*(set(names) for _, names in answers)))
        if self.clock >= REACH_STEPS and missing:
            more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
            raise ValueError(
                f"no gradient reached {missing[:5]}{more} in the first {self.clock} steps: the loss does not depend "
                "on them. Use them in forward, remove them, or freeze them with requires_grad_(False)"
            )
        self.prepared.optimizer.state.clear()  # was filled for a checkpoint

    def evaluate(self, batch: Batch) -> Any:
        outputs = super().evaluate(batch)
        self._served.drop()
        return outputs

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Use the servers' weights within the block, at the step that all ranks have made. Collective."""
        self.link.wait_for_all()
        self._write_weights(self.link.client.weights())
        self._buffers_of_first()
        yield

    # --- checkpoints ---------------------------------------------------------------------------------------------

    def state_dict(self, stored: Mapping[str, Sequence[int] | None] | None = None) -> dict[str, Any]:
        """See Strategy.state_dict. Without `stored` a cut: what the servers hold, at the step of all ranks."""
        if stored is None:
            self.link.wait_for_all()
            if self.rank == 0:
                self.link.client.write_logs(self.clock)
            weights, parts = self.link.client.dense_state()
            self._write_weights(weights)
            self._buffers_of_first()
            optimizer_tensors(self.prepared.optimizer, self.prepared.named, self.aliases)  # makes room
            by_name = {plain_name(name): parameter for name, parameter in self.prepared.named}
            for part in parts:
                self._write_state(by_name[part.slice.name], part)
        return self.local.state_dict(stored)

    @torch.no_grad()
    def _write_state(self, parameter: nn.Parameter, part: Any) -> None:
        """Copy a slice's optimizer state into the local optimizer's."""
        state = self.prepared.optimizer.state[parameter]
        target = state[part.key]
        if not isinstance(target, torch.Tensor):
            state[part.key] = type(target)(part.value.item())
        elif target.shape == parameter.shape:
            target.view(-1)[part.slice.start : part.slice.stop].copy_(part.value.reshape(-1))
        else:
            target.copy_(part.value.reshape(target.shape))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.local.load_state_dict(state)
        if self.rank:  # rank 0 adds them for all, and saves those that wait
            self.local.residuals.late = {}
        if self.rank == 0 and not (self.is_replacement and not self.link.begun):
            optimizer = self.prepared.optimizer
            states = {
                plain_name(name): {
                    key: torch.as_tensor(value).cpu() for key, value in optimizer.state[p].items() if value is not None
                }
                for name, p in self.prepared.named
            }
            self.link.client.load_dense(self._flat_weights(), states)
            if self.link.begun:  # else the servers are new: what they hold, others have loaded before this rank died
                self.link.client.clear_tables()
        self.prepared.optimizer.state.clear()
        self.link.meet(b"")

    def stream_model(self) -> tuple[list[TensorInfo], Iterator[torch.Tensor | None]]:
        self._served.fetch()
        described, values = stream_tensors(self.local.own_state()["model"], self.prepared.plain_keys, 0, 1)
        return described, values if self.rank == 0 else iter([None] * len(described))


def norm_of(answer: tuple[float, int | None]) -> tuple[float, int | None]:
    """Return the norm of a step's gradient, NaN if a rank's was not finite, and that rank."""
    squares, bad = answer
    return (math.sqrt(squares) if bad is None else math.nan), bad


def draws_seed(seed: int, rank: int, clock: int) -> int:
    """Return the seed of a rank's random numbers in a step, the same when it is recomputed."""
    return int.from_bytes(sha256(f"{seed} {rank} {clock}".encode()).digest()[:7], "big")


def with_all_values(initial: InitialModel) -> InitialModel:
    """Fill zeros where this rank has no initial values: it gets rank 0's."""
    values = dict(initial.values)
    for name, value in values.items():
        if isinstance(value, EagerValue) and value.tensor is None:
            values[name] = replace(value, tensor=torch.zeros(value.size, dtype=value.dtype))
    return replace(initial, values=values)


@torch.no_grad()
def copy_into(targets: Mapping[str, torch.Tensor], sources: Mapping[str, torch.Tensor]) -> None:
    for name, source in sources.items():
        targets[name].copy_(source)
