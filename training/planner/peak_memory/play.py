"""Predict one rank's peak memory: the passes' timelines in the order of the step, and what the strategy adds to them.

Weights, optimizer state and what a codec or averages keep are there all the time. A pass holds and frees activations
(timeline.py), of which tensor and context ranks have their share; where it enters and leaves modules ZeRO gathers and
frees weights and reduces gradients, in the order of torch's fully_shard; a pipeline plays its schedule's actions, with
the messages that it receives ahead and keeps until they are sent.

Between steps ranks evaluate: passes without gradients, of other rows. What is there all the time is there too, as are a
ring's buckets; outputs are put together on every rank before the loss and the metrics.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch

from sparkring.conf.blocks.parallel import ParallelConfig
from sparkring.training.data.batch import Columns
from sparkring.training.models.sparse_embedding import sparse_embeddings
from sparkring.training.parallel.mesh import Mesh
from sparkring.training.parallel.model_parallel.pipeline import AHEAD, PipelineStage
from sparkring.training.parallel.model_parallel.schedules import Action, schedule_table
from sparkring.training.parallel.precision import DTYPES
from sparkring.training.planner.equal_blocks import shortened
from sparkring.training.planner.memory import StageMemory
from sparkring.training.planner.peak_memory.codec import BucketCoding, trace_codec
from sparkring.training.planner.peak_memory.timeline import GRADIENT, LOSS, PART, Pass, PassEvent, Timeline, trace_pass
from sparkring.training.planner.trace import Trace, Untraceable, repeated
from sparkring.training.planner.workload import RankParameters, Workload

CUT_LOSS = 3  # tensors like the logits that torch's loss_parallel makes besides the log-softmax
# cuBLAS's, of forward's thread and of backward's: 32 MiB each on Hopper, 8 MiB on other GPUs
# (https://docs.pytorch.org/docs/stable/notes/cuda.html, "cuBLAS workspaces")
WORKSPACES = {"cuda": 2 * 32 * 2**20}
ID_BYTES = 8  # of an id of a sparse table
PASSES = 3  # of a step that are played: the first, one like all between, and the last


class Level:
    """Bytes held now, by kind, and at their peak."""

    def __init__(self, held: dict[str, int]) -> None:
        self.held = Counter(held)
        self.now = sum(held.values())
        self.peak, self.at_peak = self.now, Counter(self.held)

    def add(self, kind: str, size: float) -> None:
        self.held[kind] += size  # type: ignore[assignment]
        self.now += size  # type: ignore[assignment]
        if self.now > self.peak:
            self.peak, self.at_peak = self.now, Counter(self.held)

    def pulse(self, kind: str, size: float) -> None:
        """Hold for a moment."""
        self.add(kind, size)
        self.add(kind, -size)


class GradientMemory:
    """Whole gradients, in the tensors that backward makes: one process."""

    def __init__(self, rank: RankParameters, level: Level) -> None:
        self.rank, self.level, self.element = rank, level, rank.workload.element_bytes
        self.complete: set[str] = set()  # parameters whose gradient is there

    def begin_pass(self, last: bool) -> None:
        """Start a pass; the gradients of a `last` pass are reduced."""

    def event(self, event: PassEvent) -> None:
        """Handle an event of the pass; a complete gradient is held from here on."""
        if event.kind == "gradient" and event.name not in self.complete:
            self.complete.add(event.name)
            self.level.add("gradients", self.size(event.name))

    def size(self, name: str) -> int:
        return self.rank.local[name] * self.element

    def summed_bytes(self, name: str, is_shared: bool) -> int:
        """Return bytes of sums over passes, and over a shared weight's uses: DTensors are not added in place."""
        if self.rank.workload.mesh.tp == 1:
            return 0
        return self.size(name) * ((name in self.complete) + 2 * is_shared)

    def end_pass(self) -> None:
        """End a pass; in a pipeline, a stage's last one."""

    def end(self) -> None:
        """End the last pass."""

    def end_evaluation(self) -> None:
        """End the forward pass of an evaluation."""


class BucketMemory(GradientMemory):
    """Buckets that are always there, into which the gradients of a step's last pass are copied one by one."""

    def __init__(self, rank: RankParameters, level: Level) -> None:
        super().__init__(rank, level)
        self.last = False
        self.overlap = rank.workload.mesh.pp == 1
        level.add("gradients", sum(self.size(name) for name in rank.trained) + len(rank.trained) * self.element)

    def begin_pass(self, last: bool) -> None:
        self.last = last and self.overlap

    def event(self, event: PassEvent) -> None:
        if event.kind != "gradient":
            return
        if not self.last and event.name not in self.complete:
            self.complete.add(event.name)
            self.level.add("apart", self.size(event.name))
        elif self.last and event.name in self.complete:
            self.complete.remove(event.name)
            self.level.add("apart", -self.size(event.name))

    def end(self) -> None:
        for name in self.complete:
            self.level.add("apart", -self.size(name))
        self.complete.clear()


class CodedMemory(BucketMemory):
    """Buckets that go through a codec."""

    def __init__(self, rank: RankParameters, level: Level) -> None:
        super().__init__(rank, level)
        self.codings = trace_codec(rank)

    def event(self, event: PassEvent) -> None:
        super().event(event)
        if event.kind == "gradient" and self.last:
            for coding in self.codings:
                if coding.last == event.name:
                    self._start(coding)

    def _start(self, coding: BucketCoding) -> None:
        self.level.pulse("buffers", coding.starting)
        self.level.add("buffers", coding.sending)

    def end(self) -> None:
        super().end()
        for coding in () if self.overlap else self.codings:
            self._start(coding)
        for coding in self.codings:
            self.level.pulse("buffers", coding.ending)
            self.level.add("buffers", -coding.sending)


class ZeroMemory(GradientMemory):
    """What fully_shard gathers, reduces and frees at each unit of a stage; "" is all of it that is in no unit."""

    def __init__(self, rank: RankParameters, level: Level, names: Sequence[str]) -> None:
        """Start with sharded weights. `names`: the stage's layers; "" is the whole model."""
        super().__init__(rank, level)
        self.names = names
        self.gathered: set[str] = set()
        self.order: list[str] = []  # units as forward passes have left them
        self.left: dict[str, list[int]] = {}  # unit -> its indices there, of the passes whose backward is to come
        self.received: set[str] = set()  # units that are gathered, and not copied out yet
        self.copied: str | None = None  # the unit that forward has copied out last, whose flat buffer is there
        self.reducing = 0.0  # bytes that the last reduction has sent
        self.whole: dict[str, float] = {}  # bytes of a unit's gradients of this pass
        self.summed: dict[str, float] = {}  # and of those of passes before, where these are not reduced
        self.reduced: set[str] = set()
        self.last = True

    def begin_pass(self, last: bool) -> None:
        self.last = last

    def event(self, event: PassEvent) -> None:
        if event.kind == "gradient":
            unit = self.unit_of(event.name)
            if event.name in self.complete and self.rank.gather_bytes == self.element:
                return  # added in place
            self.complete.add(event.name)
            size = self.rank.local[event.name] * self.rank.gather_bytes
            self.whole[unit] = self.whole.get(unit, 0) + size
            self.level.add("gathered", size)
        elif event.name in self.units and event.kind in ("enter", "leave", "back", "done"):
            getattr(self, f"on_{event.kind}")(event.name)

    @cached_property
    def parameters(self) -> dict[str, list[str]]:
        """The stage's parameters by unit, in fully_shard's order: what is in no unit comes first."""
        units = [unit for unit in self.rank.units if is_in(f"{unit}.", self.names)]
        found: dict[str, list[str]] = {unit: [] for unit in ("", *units)}
        for name in self.rank.local:
            if is_in(name, self.names):
                found[self.unit_of(name)].append(name)
        return found

    @cached_property
    def units(self) -> dict[str, int]:
        """Elements by unit."""
        return {unit: sum(self.rank.local[name] for name in names) for unit, names in self.parameters.items()}

    def unit_of(self, parameter: str) -> str:
        return next((unit for unit in self.rank.units if parameter.startswith(f"{unit}.")), "")

    def weights(self, unit: str) -> int:
        return self.units[unit] * self.rank.gather_bytes

    def _receive(self, unit: str) -> None:
        if unit not in self.gathered and unit not in self.received and self.weights(unit):
            self.level.add("buffers", self.weights(unit))
            if self.rank.is_offloaded:  # the shard's copy on the device, which is sent
                self.level.pulse("buffers", self.units[unit] * self.element / self.rank.shard)
            self.received.add(unit)

    def _free_flat(self, unit: str) -> None:
        self.level.add("buffers", -self.weights(unit))

    def _copy_out(self, unit: str) -> None:
        self.received.remove(unit)
        self.gathered.add(unit)
        self.level.add("gathered", self.weights(unit))

    def _free(self, unit: str) -> None:
        if unit in self.gathered:
            self.gathered.remove(unit)
            self.level.add("gathered", -self.weights(unit))

    def _free_copied(self) -> None:
        if self.copied is not None:
            self._free_flat(self.copied)
        self.copied = None

    def on_enter(self, unit: str) -> None:
        self._receive(unit)
        if unit in self.received:
            self._copy_out(unit)
            self._free_copied()  # wait_for_unshard has a variable that keeps it until it returns
            self.copied = unit

    def on_leave(self, unit: str) -> None:
        if self.weights(unit):
            self.left.setdefault(unit, []).append(len(self.order))
            self.order.append(unit)
        if unit == "":
            self._free_copied()
        elif self.rank.zero == 3 and unit not in self.kept:
            self._free(unit)

    @property
    def kept(self) -> list[str]:
        """The stage's last layer, if it is no block, stays gathered from its forward to its backward."""
        layers = [unit for unit in self.rank.layers if is_in(f"{unit}.", self.names)]
        return [unit for unit in layers[-1:] if unit not in self.rank.workload.block_names]

    def on_back(self, unit: str) -> None:
        """Gather the unit, and the one whose forward came before that of the unit's last pass."""
        self._receive(unit)
        if unit in self.received:
            self._copy_out(unit)
            self._free_flat(unit)
        at = self.left[unit].pop() if self.left.get(unit) else 0
        if at > 0:
            self._receive(self.order[at - 1])

    def on_done(self, unit: str) -> None:
        if not self.reduces(unit):
            if self.rank.zero == 3:
                self._free(unit)
            self._sum(unit)
            return
        if unit in self.summed:
            self.level.add("gathered", -self.whole.pop(unit, 0))
            self.whole[unit] = self.summed.pop(unit)
        if self.last or self.rank.zero == 3:
            self._free(unit)
        self._reduce(unit)

    def _sum(self, unit: str) -> None:
        """Keep the gradients that are there; of a split backward they come after this."""
        size = self.whole.pop(unit, 0)
        if not size:
            return
        wide = size * self.element / self.rank.gather_bytes
        if unit not in self.summed:
            self.summed[unit] = wide
            self.level.add("gathered", wide - size)
        else:
            self.level.add("gathered", -size)

    def reduces(self, unit: str) -> bool:
        return self.last or (self.rank.zero >= 2 and self.rank.workload.mesh.pp == 1)

    def _reduce(self, unit: str) -> None:
        size = self.units[unit] * self.element
        if not size:
            return
        self.level.add("buffers", -self.reducing)
        self.level.add("buffers", size)
        self.reducing = size
        whole = self.whole.pop(unit, 0.0)
        self.complete.difference_update(self.parameters[unit])
        last = whole * self.rank.local[self.parameters[unit][-1]] / self.units[unit]
        self.level.add("gathered", last - whole)  # a variable of fully_shard's keeps the last one to the end
        self.level.add("gradients", size / self.rank.shard)
        self.level.pulse("buffers", size)
        self.level.add("gathered", -last)
        if unit in self.reduced or self.rank.is_offloaded:  # added to what an earlier pass has left, or copied
            self.level.add("gradients", -size / self.rank.shard)
        self.reduced.add(unit)

    def end(self) -> None:
        """Reduce what no pass has."""
        self.last = True
        for unit in self.parameters:
            if unit in self.summed or unit in self.whole:
                self.on_done(unit)
        self.end_pass()

    def end_pass(self) -> None:
        """Free what was gathered without use and what was sent, after the last backward."""
        self.level.add("buffers", -self.reducing)
        self.reducing = 0.0
        for unit in self.received:
            self._free_flat(unit)
        self.received.clear()
        self.order.clear()
        self.left.clear()

    def end_evaluation(self) -> None:
        """Free the weights: a later pass gathers them again."""
        self._free_copied()
        for unit in self.received:
            self._free_flat(unit)
        self.received.clear()
        for unit in [*self.gathered]:
            self._free(unit)


def gradient_memory(rank: RankParameters, level: Level) -> list[GradientMemory]:
    """Make the gradient memory of each of the rank's stages, or one for all of them."""
    mesh, workload = rank.workload.mesh, rank.workload
    if rank.zero and not rank.on_horovod:
        return [ZeroMemory(rank, level, names) for names in rank.stages]
    is_ring = mesh.dp * mesh.cp > 1 and not (workload.is_served or workload.is_averaged)
    if not is_ring:
        return [GradientMemory(rank, level)]
    return [CodedMemory(rank, level) if workload.is_coded else BucketMemory(rank, level)]


class StepPlayer:
    """Play the passes of a rank's step."""

    def __init__(self, rank: RankParameters, held: dict[str, int]) -> None:
        """Start a step. `held`: permanently held bytes by kind."""
        self.rank, self.level = rank, Level(held)
        self.of_stages = gradient_memory(rank, self.level)
        self.gradients = self.of_stages[0]  # of the pass that is played
        self.pieces: list[float] = []  # of the inputs of the cut layers that the pass is in
        config, mesh = rank.workload.config, rank.workload.mesh
        self.is_split = mesh.pp > 1 and config.schedule == "zero-bubble"
        self.has_cut_loss = "vocab_head" in rank.workload.kinds.values()
        self.shares = {
            "inner": 1 / mesh.tp / mesh.cp,
            "between": (1 / mesh.tp if config.sequence_parallel else 1.0) / mesh.cp,
            "entered": 1 / mesh.cp,
            LOSS: (1 / mesh.tp if self.has_cut_loss else 1.0) / mesh.cp,
        }

    def share(self, place: str) -> float:
        if not place.startswith((GRADIENT, PART)):
            return self.shares[place]
        name = place.removeprefix(PART).removeprefix(GRADIENT)
        return self.rank.local[name] / self.rank.parameters[name].numel()

    def play(self, timeline: Timeline, kind: str = "") -> None:
        """Play a pass, or of a stage's the part that an action of this kind runs."""
        for event in timeline.part(kind):
            if event.kind == "hold":
                self.level.add("activations", event.size * self.share(event.name))
            elif event.kind == "free":
                if not event.name.startswith(GRADIENT):  # that is when it was complete
                    self.level.add("activations", -event.size * self.share(event.name))
            elif event.kind == "gradient":
                summed = self.gradients.summed_bytes(event.name, event.name in timeline.shared)
                self.level.pulse("gradients", summed + self._uncut_bytes(event))
                self.level.add("activations", -event.size * self.share(GRADIENT + event.name))
                self.gradients.event(event)
            else:
                self._exchange(event, timeline)
                self.gradients.event(event)

    def _exchange(self, event: PassEvent, timeline: Timeline) -> None:
        """Add momentary memory of tensor ranks: gathered inputs, summed outputs, the loss of cut logits.

        Under sequence parallelism both are put together from shards: once more; and a layer's caller keeps this rank's
        shard of the input until the layer has returned.
        """
        config, mesh = self.rank.workload.config, self.rank.workload.mesh
        if mesh.tp == 1:
            return
        kind, whole = self.rank.workload.kinds.get(event.name, ""), event.size / mesh.cp
        if event.kind == "loss" and self.has_cut_loss:
            self.level.pulse("buffers", CUT_LOSS * timeline.output_bytes / mesh.tp / mesh.cp)
        elif (event.kind, kind) in (("leave", "row"), ("leave", "vocab")):
            self.level.pulse("buffers", whole * (2 if config.sequence_parallel else 1))
        elif config.sequence_parallel and (event.kind, kind) in (("enter", "enter"), ("enter", "vocab_head")):
            self.level.add("activations", whole / mesh.tp)
            self.pieces.append(whole / mesh.tp)
            self.level.pulse("buffers", whole)
        elif config.sequence_parallel and (event.kind, kind) in (("leave", "enter"), ("leave", "vocab_head")):
            self.level.add("activations", -self.pieces.pop())
        elif config.sequence_parallel and (event.kind, kind) == ("back", "row"):
            self.level.pulse("buffers", 2 * whole)

    def _uncut_bytes(self, event: PassEvent) -> int:
        """Return bytes of a gradient that is whole before tensor ranks cut it: an embedding's with cut outputs."""
        workload = self.rank.workload
        is_embedding = workload.kinds.get(event.name.rpartition(".")[0]) == "vocab"
        return event.size if is_embedding and workload.mesh.tp > 1 and workload.config.sequence_parallel else 0

    def step(self, number: int, timelines: Sequence[Timeline]) -> None:
        """Play the step of the pipeline rank `number`."""
        workload = self.rank.workload
        config, pp = workload.config, workload.mesh.pp
        if pp == 1:
            return self.whole_passes(timelines[0])
        table = schedule_table(config.schedule, pp, workload.config.passes, config.stages_per_rank)
        return self.pipeline(table[number], timelines)

    def whole_passes(self, timeline: Timeline) -> None:
        """Play the passes of an accumulation, without a pipeline."""
        passes = min(self.rank.workload.config.passes, PASSES)
        for number in range(passes):
            self.gradients.begin_pass(last=number == passes - 1)
            before = self.level.held["activations"]
            self.play(timeline)
            if self.rank.workload.tables and number:  # a pass adds its gradients of their rows to those of the first
                self.level.add("activations", before - self.level.held["activations"])
            self.gradients.end_pass()
        self.gradients.end()

    def pipeline(self, actions: Sequence[Action], timelines: Sequence[Timeline]) -> None:
        """Play the actions of this rank in a schedule."""
        last = {action.stage: action for action in actions if action.kind in "BW"}
        pp = self.rank.workload.mesh.pp
        posted: set[Action] = set()
        for number, action in enumerate(actions):
            for later in actions[number : number + 1 + AHEAD]:
                if later not in posted:
                    posted.add(later)
                    self.level.add("messages", self.message(later, timelines))
            timeline = timelines[action.stage]
            self.gradients = self.of_stages[action.stage // pp if len(self.of_stages) > 1 else 0]
            is_last = action == last[action.stage] and not self.is_split
            if action.kind in "BIW":
                self.gradients.begin_pass(is_last)
            if action.kind in "BI":  # the pass has it from here on
                self.level.add("messages", -self.message(action, timelines))
            self.play(timeline, action.kind)
            if action.kind in "BW":
                self.level.add("messages", -self.message(action._replace(kind="F"), timelines))
            if is_last:
                self.gradients.end_pass()
        for each in self.of_stages:
            each.end()

    def evaluate(self, number: int, timelines: Sequence[Timeline]) -> None:
        """Play an evaluation's pass on the pipeline rank `number`: its stages one after the other, then the loss."""
        pp, last = self.rank.workload.mesh.pp, len(timelines) - 1
        stages = range(number, len(timelines), pp)
        received = {stage: timelines[stage].input_bytes * self.shares["between"] for stage in stages}
        self.level.add("messages", sum(received.values()))
        for stage in stages:
            self.gradients = self.of_stages[stage // pp if len(self.of_stages) > 1 else 0]
            self.play(timelines[stage], "F")
            self.level.add("messages", -received[stage])
        for stage in stages:  # all is sent by now
            self.level.add("activations", -timelines[stage].output_bytes * self.shares["between"] * (stage != last))
        if last in stages:
            self._put_together(timelines[last].output_bytes)
        for each in self.of_stages:
            each.end_evaluation()
        if last in stages:
            self.play(timelines[last], "B")

    def _put_together(self, size: int) -> None:
        """Make outputs of `size` bytes whole on every tensor rank, and then on every context rank, of all ranks' parts.

        The parts are there until that is done.
        """
        mesh, part, parts = self.rank.workload.mesh, size * self.shares[LOSS], 0.0
        for ranks in (mesh.tp if self.has_cut_loss else 1, mesh.cp):
            if ranks > 1:
                parts, part = parts + part, part * ranks
                self.level.add("buffers", part)  # what is received
                self.level.add("activations", part)
                self.level.add("buffers", -part)
        self.level.add("activations", -parts)
        self.shares[LOSS], self.has_cut_loss = 1.0, False

    def message(self, action: Action, timelines: Sequence[Timeline]) -> float:
        """Return the bytes of the message that the action waits for."""
        timeline, between = timelines[action.stage], self.shares["between"]
        if action.kind == "F":
            return timeline.input_bytes * between if action.stage else 0.0
        is_last = action.stage == len(timelines) - 1
        return timeline.output_bytes * between if action.kind in "BI" and not is_last else 0.0


def with_peaks(ranks: Sequence[RankParameters], memory: Sequence[StageMemory]) -> list[StageMemory]:
    """Add the peaks of the pipeline ranks' steps and evaluations. Untraceable if a pass is."""
    workload, units = ranks[0].workload, {unit for rank in ranks for unit in rank.units}
    timelines = stage_timelines(workload, units)
    evaluation = stage_timelines(workload, units, is_evaluation=True) if workload.evaluated_rows else []
    found = []
    for number, (rank, stage) in enumerate(zip(ranks, memory, strict=True)):
        held = {"weights": stage.weights, "optimizer": stage.optimizer} if not stage.offloaded else {}
        held |= {"residuals": stage.residuals, "tables": pulled_bytes(workload, is_evaluation=False)}
        held["workspaces"] = WORKSPACES.get(workload.device_type, 0)
        player = StepPlayer(rank, held | {"batch": batch_bytes(workload, workload.rows_per_rank)})
        player.step(number, timelines)
        level = player.level
        stage = replace(stage, peak=int(level.peak), at_peak={k: int(v) for k, v in level.at_peak.items() if v})
        if evaluation:
            held |= {"batch": batch_bytes(workload, workload.evaluated_rows), **evaluated_weights(stage, workload)}
            held |= {"tables": pulled_bytes(workload, is_evaluation=True)}
            evaluating = StepPlayer(rank, held)
            evaluating.evaluate(number, evaluation)
            stage = replace(stage, evaluation=int(evaluating.level.peak))
        found.append(stage)
    return found


def pulled_rows(workload: Workload, is_evaluation: bool) -> dict[str, int]:
    """Count a rank's rows per sparse table: the distinct ids of a step, or of an evaluated batch."""
    rows = workload.evaluated_rows if is_evaluation else workload.rows_per_rank
    return {table.name: table.distinct(rows) for table in workload.tables}


def pulled_bytes(workload: Workload, is_evaluation: bool) -> int:
    """Return the bytes of these rows and their ids."""
    embeddings = sparse_embeddings(workload.model)
    return sum(
        count * (embeddings[name].dim * workload.element_bytes + ID_BYTES)
        for name, count in pulled_rows(workload, is_evaluation).items()
    )


def evaluated_weights(stage: StageMemory, workload: Workload) -> dict[str, int]:
    """Return a rank's own weights, kept while all replicas' are evaluated (AveragedStrategy.averaged)."""
    return {"own weights": stage.weights} if workload.is_averaged else {}


def row_evaluation_bytes(workload: Workload, trace: Trace) -> float:
    """Return the most bytes per row of a whole model's evaluation on one tensor and context rank.

    Weights and permanent memory do not count. Untraceable if the pass is. `trace`: trace of the model.
    """
    config, mesh = workload.config, Mesh(tp=workload.mesh.tp, cp=workload.mesh.cp)
    plain = ParallelConfig(precision=config.precision, sequence_parallel=config.sequence_parallel)
    rows = workload.evaluated_rows
    alone = replace(shortened(workload, trace), eval_batch=rows).with_layout(plain, mesh, workload.engine)
    key = ("evaluation", config.precision, mesh.cp > 1, rows, workload.device_type)
    timelines = workload.once(key, lambda: stage_timelines(alone, set(), is_evaluation=True, in_compute_dtype=True))
    player = StepPlayer(RankParameters(alone, 0), {})
    before = player.level.now
    player.evaluate(0, timelines)
    return (player.level.peak - before) / rows


def batch_bytes(workload: Workload, rows: int) -> int:
    """Return the bytes of `rows` rows."""
    tensors = [column for column in batch_columns(workload).values() if isinstance(column, torch.Tensor)]
    return rows * sum(t.numel() * t.element_size() for t in tensors)


def stage_timelines(
    workload: Workload, units: set[str], is_evaluation: bool = False, in_compute_dtype: bool = False
) -> list[Timeline]:
    """Trace the timelines of all pipeline stages, or of the whole model, in a pass or an evaluation.

    Args:
        workload: step that is traced.
        units: modules with recorded events.
        is_evaluation: trace the rows that a rank evaluates at a time.
        in_compute_dtype: weights have the dtype of compute, as if they were gathered.
    """
    model, task, count, config = workload.model, workload.task, len(workload.stages), workload.config
    rows = workload.evaluated_rows if is_evaluation else workload.rows_per_pass
    columns = {name: repeated(column, rows) for name, column in batch_columns(workload).items()}
    found: list[Timeline] = []
    like: Any = None
    is_gathered = in_compute_dtype or (config.zero > 0 and not workload.engine.startswith("horovod"))

    def loss(outputs: Any, columns: Columns) -> Any:
        assert task is not None
        return task.row_values(outputs, columns) if is_evaluation else task.loss(outputs, columns).sum()

    for number, names in enumerate(workload.stages):
        if number:
            x = torch.empty(like[0], dtype=like[1], device="meta", requires_grad=not is_evaluation)
        timeline, like = trace_pass(
            Pass(
                module=model if count == 1 else PipelineStage(model, names),
                columns=columns,
                given=lambda columns: first_inputs(workload, columns),
                received=x if number else None,
                exchanged=[n for n in workload.attention_cores if is_in(n, names)] if workload.mesh.cp > 1 else (),
                loss=loss if task and number == count - 1 else None,
                kinds=workload.kinds,
                units={"", *units, *workload.kinds},
                checkpointing=config.activation_checkpointing,
                precision=config.precision,
                weights=DTYPES.get(config.precision) if is_gathered else None,
                device_type=workload.device_type,
                is_stage=count > 1,
                is_split=number > 0 and config.schedule == "zero-bubble" and workload.mesh.pp > 1,
                is_evaluation=is_evaluation,
                tables=pulled_rows(workload, is_evaluation) if count == 1 else {},
            )
        )
        timeline.input_bytes = x.numel() * x.element_size() if number else 0
        found.append(timeline)
    return found


def batch_columns(workload: Workload) -> Columns:
    """Return one row of the batch; without a task, the model's inputs."""
    if workload.task is not None:
        return workload.columns
    assert not isinstance(workload.inputs, Untraceable)
    return {str(number): each for number, each in enumerate(workload.inputs)}


def is_in(name: str, modules: Sequence[str]) -> bool:
    return any(module == "" or name.startswith(f"{module}.") for module in modules)


def first_inputs(workload: Workload, columns: Columns) -> tuple[Any, ...]:
    if workload.task is not None:
        return workload.task.inputs(columns)
    return tuple(columns.values())
