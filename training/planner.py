"""What a layout will cost before it runs, and the same quantities measured after: ranks, parameters, memory per rank by
kind, bytes sent per step by axis, bubble share.

The model is run once on the meta device, where tensors have shapes and no storage: hooks see what each module takes,
gives and keeps for backward. Everything else is the formulas at the head of each strategy's file.

Bytes are those one rank sends, averaged over the ranks, without the few bytes of norms and headers. Memory is at its
fullest moment, the optimizer's step, and separately what a pass holds beyond it.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from training.models.plan import ShardingPlan, chain_of, expand, plan_of
from training.parallel.batching import part_bounds
from training.parallel.measure import ring_share
from training.parallel.model_parallel.blocks import own_units, repeated_blocks
from training.parallel.model_parallel.pipeline import Stage, chain_names, cut_chain, estimated_costs
from training.parallel.model_parallel.schedules import schedule_table, simulate
from training.parallel.settings import ParallelSettings
from training.parallel.world import Mesh, describe, shard_groups

Numels = dict[str, int]
STATES = {"adamw": 2, "lamb": 2, "sgd": 1, "lars": 1}  # optimizer tensors as large as the parameter
RECUT = "; stages by estimated costs, training measures them"
CUT_DIM = {"column": 0, "row": 1, "vocab": 0, "vocab_head": 0}


@dataclass(frozen=True)
class StagePlan:
    """One pipeline rank's part. All in bytes on one rank, but `parameters` (of the stage, before any sharding)."""

    parameters: int
    weights: int
    gradients: int
    optimizer: int
    start: int  # its weights as they are made, and one whole parameter beside them, at most
    gathered: int  # whole weights and gradients a ZeRO pass holds beyond its shards, at most
    # what the model keeps for backward at the schedule's fullest moment (the loss's own aside); None: not traced
    activations: int | None

    @property
    def at_step(self) -> int:
        return self.weights + self.gradients + self.optimizer


@dataclass(frozen=True)
class Plan:
    mesh: Mesh
    engine: str
    parameters: int
    export: int  # bytes rank 0 holds at once beside its own part, one whole parameter; the other ranks less
    stages: tuple[StagePlan, ...]  # by pipeline rank
    sent_bytes: dict[str, int]  # axis -> per rank and step
    bubble: float  # idle over ideal time
    micro_batches: int
    recut: bool = False  # training will cut the stages by measured costs, here they are cut by estimated ones
    untraced: str = ""  # why activations, and what is sent because of them, are not planned


class Untraceable(ValueError):
    """The model cannot be run on the meta device, so what its inputs cost is not known before it runs; says why."""


@dataclass
class Trace:
    """Per module of the model, for one row of whole sequences, in elements.

    `kept` for backward, by where: `inner`, between cut layers, where a tensor rank has its part; `entered`, what goes
    into cut layers and is whole on every rank; `between`, all else, whole but under sequence parallelism.
    """

    taken: Numels = field(default_factory=dict)
    given: Numels = field(default_factory=dict)
    kept: dict[str, Numels] = field(default_factory=dict)

    def keep(self, names: Iterable[str], where: str, numel: int) -> None:
        for name in names:
            places = self.kept.setdefault(name, {})
            places[where] = places.get(where, 0) + numel


class FusedAttention(TorchFunctionMode):
    """What attention keeps under the fused kernels every device has: on the meta device it would keep all scores."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is functional.scaled_dot_product_attention and args[0].dim() == 4:
            return fused_attention(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def fused_attention(q: Any, k: Any, v: Any, attn_mask: Any = None, dropout_p: float = 0.0, *rest: Any, **_: Any) -> Any:
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, dropout_p, attn_mask=attn_mask)[0]


def storage_id(tensor: torch.Tensor) -> int:
    """Also of a tensor on the meta device, which has no address."""
    return int(tensor.untyped_storage()._cdata)


def trace_model(model: nn.Module, inputs: tuple[Any, ...], names: Iterable[str], kinds: Mapping[str, str]) -> Trace:
    """Run a copy of `model` on the meta device and note what the named modules take, give and keep.

    `kinds`: how modules are cut over tensor ranks (models/plan.py). A storage counts once; those of weights and of the
    batch do not. Untraceable where the forward needs values (`if (x > 0).any()`), which the meta device has not.
    """
    twin = copy.deepcopy(model).to("meta")
    given = [i.to("meta") if isinstance(i, torch.Tensor) else i for i in inputs]
    trace = Trace()
    seen = {storage_id(t) for t in [*twin.parameters(), *given] if isinstance(t, torch.Tensor)}
    inside: list[str] = []
    entered: set[int] = set()

    def before(name: str) -> Any:
        def hook(_: nn.Module, args: tuple[Any, ...]) -> None:
            inside.append(name)
            tensors = [a for a in args if isinstance(a, torch.Tensor)]
            trace.taken[name] = sum(a.numel() for a in tensors)
            if kinds.get(name) in ("enter", "vocab_head"):
                entered.update(storage_id(a) for a in tensors)

        return hook

    def after(name: str) -> Any:
        def hook(_: nn.Module, args: tuple[Any, ...], out: Any) -> None:
            inside.remove(name)
            trace.given[name] = out.numel() if isinstance(out, torch.Tensor) else 0

        return hook

    def keep(saved: torch.Tensor) -> torch.Tensor:
        storage = storage_id(saved)
        if storage not in seen:
            seen.add(storage)
            cut = any(kinds.get(name) == "enter" for name in inside)
            where = "entered" if storage in entered else "inner" if cut else "between"
            trace.keep(inside, where, saved.untyped_storage().nbytes() // saved.element_size())
        return saved

    for name in names:
        module = twin.get_submodule(name)
        module.register_forward_pre_hook(before(name))
        module.register_forward_hook(after(name))
    with FusedAttention(), torch.autograd.graph.saved_tensors_hooks(keep, lambda saved: saved):
        try:
            twin(*given)
        except Exception as error:  # a stranger's forward may fail in any way
            raise Untraceable(
                f"{type(model).__name__}'s forward cannot be run on the meta device, which has shapes and no values: "
                f"{first_line(error)}"
            ) from error
    return trace


def first_line(error: BaseException) -> str:
    """The error's name and the first line of what it says: torch's go on with stacks of their own."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def local_numel(name: str, parameter: torch.Tensor, kinds: dict[str, str], tp: int) -> int:
    """Elements of the parameter on one tensor rank."""
    kind = kinds.get(name.rpartition(".")[0], "")
    if tp == 1 or kind not in CUT_DIM or parameter.ndim <= CUT_DIM[kind]:
        return parameter.numel()
    rows = parameter.shape[CUT_DIM[kind]]
    return -(-rows // tp) * (parameter.numel() // rows)


def make_plan(
    model: nn.Module,
    settings: ParallelSettings,
    mesh: Mesh,
    engine: str,
    *,
    inputs: tuple[Any, ...] | Untraceable,
    global_batch: int,
    optimizer: str = "adamw",
    element_bytes: int = 4,
) -> Plan:
    """`inputs`: the model's positional inputs for any one row, e.g. (tokens (1, T),); shapes scale with the rows.

    Where there are none, or the model cannot be traced with them, activations and their traffic are left unplanned.
    """
    sharding = plan_of(model) or ShardingPlan()
    kinds = {n: kind for pattern, kind in sharding.tensor.items() for n in expand(pattern, model)}
    chain = chain_names(model, sharding) if mesh.pp > 1 else [""]
    cut = (
        cut_chain(chain, estimated_costs(model, chain), mesh.pp * settings.stages_per_rank) if mesh.pp > 1 else [chain]
    )
    micro = settings.micro_batches * settings.accumulate if mesh.pp > 1 else settings.accumulate
    rows = -(-part_bounds(global_batch, mesh.dp)[0][1] // micro)
    traced = {*kinds, *chain, *cores(model, sharding), *block_names(model)}
    trace, untraced = try_trace(model, inputs, traced, kinds)
    per_pass = rows * (2 if settings.precision != "fp32" else element_bytes)
    stages, dp_bytes = [], 0
    outcome = _outcome(settings, mesh, micro)
    for rank in range(mesh.pp):
        names = [n for stage in cut[rank :: mesh.pp] for n in stage]
        stage, sent = _stage(model, names, kinds, settings, mesh, engine, micro, element_bytes, STATES[optimizer])
        alive = outcome[1][rank] / settings.stages_per_rank
        activations = None
        if trace is not None:
            kept = activation_numel(trace, model, names, settings, mesh.tp) * per_pass / mesh.cp
            activations = int(kept * alive)
        stages.append(StagePlan(**stage, activations=activations))
        dp_bytes += sent
    sent_bytes = {"dp x cp": dp_bytes // mesh.pp}
    if trace is not None:
        sent_bytes |= _activation_bytes(trace, model, cut, kinds, sharding, settings, mesh, per_pass * micro)
    sent_bytes["pp tied weights"] = _tied_bytes(model, cut, kinds, settings, mesh) * element_bytes
    return Plan(
        mesh,
        engine,
        sum(p.numel() for p in model.parameters()),
        max(p.numel() for p in model.parameters()) * element_bytes,
        tuple(stages),
        {axis: size for axis, size in sent_bytes.items() if size},
        outcome[0],
        micro,
        recut=settings.balance == "measured",
        untraced=untraced,
    )


def try_trace(
    model: nn.Module, inputs: tuple[Any, ...] | Untraceable, names: Iterable[str], kinds: Mapping[str, str]
) -> tuple[Trace | None, str]:
    """(trace, ""), or (None, why there is none)."""
    try:
        if isinstance(inputs, Untraceable):
            raise inputs
        return trace_model(model, inputs, names, kinds), ""
    except Untraceable as error:
        return None, str(error)


def cores(model: nn.Module, sharding: ShardingPlan) -> list[str]:
    return [f"{name}.core" for pattern in sharding.heads for name in expand(pattern, model)]


def block_names(model: nn.Module) -> list[str]:
    found = {id(block) for _, _, block in repeated_blocks(model)}
    return [name for name, module in model.named_modules() if id(module) in found]


def _outcome(settings: ParallelSettings, mesh: Mesh, micro: int) -> tuple[float, list[int]]:
    if mesh.pp == 1:
        return 0.0, [1]
    table = schedule_table(settings.schedule, mesh.pp, micro, settings.stages_per_rank)
    outcome = simulate(table, mesh.pp * settings.stages_per_rank)
    return outcome.bubble, outcome.peak_alive


def activation_numel(trace: Trace, model: nn.Module, names: list[str], settings: ParallelSettings, tp: int) -> float:
    """Elements one row's pass keeps in the named modules on one rank of `tp`; with checkpointing the blocks' inputs and
    one block."""
    between = 1 / tp if settings.sequence_parallel else 1.0
    share = {"inner": 1 / tp, "entered": 1.0, "between": between}

    def kept(name: str) -> float:
        return sum(share[where] * numel for where, numel in trace.kept.get(name, {}).items())

    if not settings.activation_checkpointing:
        return sum(kept(name) for name in names)
    blocks = [b for b in block_names(model) if any(n in ("", b) or b.startswith(f"{n}.") for n in names)]
    rest = sum(kept(n) for n in names) - sum(kept(b) for b in blocks)
    return rest + between * sum(trace.taken.get(b, 0) for b in blocks) + max(map(kept, blocks), default=0.0)


def _stage(
    model: nn.Module,
    names: list[str],
    kinds: dict[str, str],
    settings: ParallelSettings,
    mesh: Mesh,
    engine: str,
    micro: int,
    element: int,
    states: int,
) -> tuple[dict[str, Any], int]:
    """Memory of one pipeline rank, and what it sends over the batch axes per step."""
    replicas, shard = shard_groups(mesh, settings.shard)
    parameters = stage_parameters(model, names)
    local = {n: local_numel(n, p, kinds, mesh.tp) for n, p in parameters.items()}
    whole = sum(local.values())
    zero = settings.zero if shard * replicas > 1 else 0
    # uneven shards differ between ranks by a row; their mean is planned
    cut = (
        sum(local[n] if p.ndim == 0 else math.ceil(local[n] / shard) for n, p in parameters.items()) if zero else whole
    )
    chain = [name for name in chain_of(model) if names == [""] or name in names] if zero == 3 else []
    units = own_units(Stage(model, names) if names != [""] else model, chain)
    horovod_zero = zero and engine == "horovod"
    weights = whole if horovod_zero else cut
    memory = {
        "parameters": sum(p.numel() for p in parameters.values()),
        "weights": weights * element,
        "start": (weights + max(p.numel() for p in parameters.values())) * element,
        "gradients": cut * element,
        "optimizer": states * cut * element,
        "gathered": _gathered(local, units, settings, mesh, engine, micro, element) if zero else 0,
    }
    reduced = 1 if mesh.pp > 1 or zero <= 1 else micro
    gathers, scatters = float(whole), float(whole * reduced)
    if zero == 3:
        twice = [name for name in units if [name] != chain[-1:] or name in block_names(model)]
        gathers = micro * (float(whole) + sum(unit_numels(local, twice)))
    batch_ranks, flags = mesh.dp * mesh.cp, len(local)  # which parameters were reached
    if not zero:
        sent = 2 * ring_share(batch_ranks) * (whole + flags) * element
    else:  # weights are gathered in the precision of compute, gradients reduced in that of the weights
        sent = ring_share(shard) * (gathers * computed_bytes(settings, engine, element) + scatters * element)
        sent += 2 * ring_share(replicas) * reduced * whole / shard * element
        sent += (batch_ranks - 1) * flags * element if horovod_zero else 2 * ring_share(batch_ranks) * flags
    return memory, int(sent)


def computed_bytes(settings: ParallelSettings, engine: str, element: int) -> int:
    """Per element of a gathered weight that is `element` bytes at rest: fully_shard sends it as compute takes it."""
    return element if settings.precision == "fp32" or engine == "horovod" else 2


def _gathered(
    local: Numels, units: list[str], settings: ParallelSettings, mesh: Mesh, engine: str, micro: int, element: int
) -> int:
    """Bytes of the weights and gradients ZeRO holds whole at once, at most.

    Horovod's: gradients, the buckets they are copied into, and what its exchange gives back. fully_shard's are most in
    backward of the largest unit (all weights, or with ZeRO-3 that unit's and those of no unit; the gradients of that
    unit and of what comes after the first), or at its end (weights and gradients of no unit). Gradients of several
    parts that add up before they are reduced are there all the time.
    """
    whole, sizes = sum(local.values()), unit_numels(local, units)
    if engine == "horovod":
        return element * (2 * whole + (whole // 2 if mesh.dp * mesh.cp == 2 else whole))
    rest, unit = whole - sum(sizes), max(sizes, default=0)
    size = computed_bytes(settings, engine, element)
    weights = size * (rest + unit if settings.zero == 3 else whole)
    gradients = size * (after_units(local, units) + unit)
    if micro > 1 and (settings.zero == 1 or mesh.pp > 1):
        # added to in place, where they need not be converted first
        return weights + element * whole + (gradients if size != element else 0)
    return max(weights + gradients, 2 * size * rest)


def after_units(local: Numels, units: list[str]) -> int:
    """Of the parameters of no unit, those after the first unit: their gradients come before a unit's."""
    inside = tuple(f"{name}." for name in units)
    names = list(local)
    first = next((i for i, name in enumerate(names) if name.startswith(inside)), len(names))
    return sum(local[name] for name in names[first:] if not name.startswith(inside))


def stage_parameters(model: nn.Module, names: list[str]) -> dict[str, nn.Parameter]:
    """Parameters of the named modules ("" is the whole model), a weight shared within them once."""
    seen: dict[int, str] = {}
    found: dict[str, nn.Parameter] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if any(n == "" or name.startswith(f"{n}.") for n in names) and id(parameter) not in seen:
            seen[id(parameter)] = name
            found[name] = parameter
    return found


def unit_numels(local: Numels, units: list[str]) -> list[int]:
    """Elements per unit that ZeRO gathers by itself."""
    return [sum(n for p, n in local.items() if p.startswith(f"{unit}.")) for unit in units]


def _activation_bytes(
    trace: Trace,
    model: nn.Module,
    cut: list[list[str]],
    kinds: dict[str, str],
    sharding: ShardingPlan,
    settings: ParallelSettings,
    mesh: Mesh,
    per_element: int,
) -> dict[str, int]:
    """Bytes one rank sends per step over pp, tp and cp; `per_element`: bytes x rows x passes."""
    blocks = tuple(f"{name}." for name in block_names(model))

    # recomputing a block stops once all it keeps is there, which is before its last layer's outputs are summed
    ends = {
        max((n for n in kinds if n.startswith(b) and kinds[n] == "row"), key=list(kinds).index, default="")
        for b in blocks
    }

    def passes(name: str) -> int:
        return 2 if settings.activation_checkpointing and name.startswith(blocks) and name not in ends else 1

    boundaries = [trace.given[stage[-1]] for stage in cut[:-1]] if mesh.pp > 1 else []
    sent = {"pp": 2 * sum(boundaries) / (mesh.pp * mesh.cp)}
    entered = tuple(f"{n}." for n, kind in kinds.items() if kind == "enter")
    volume = 0.0
    for name, kind in kinds.items():
        if kind in ("row", "vocab"):
            volume += passes(name) * trace.given[name]
        elif kind in ("enter", "vocab_head") or (kind == "column" and not name.startswith(entered)):
            volume += trace.taken[name]
    tokens = [trace.given[name] / width(model, name) for name, kind in kinds.items() if kind == "vocab_head"]
    sent["tp"] = 2 * ring_share(mesh.tp) * (volume + 3 * sum(tokens)) / (mesh.cp * mesh.pp)
    exchanged = sum((1 + passes(name)) * (trace.taken[name] + trace.given[name]) for name in cores(model, sharding))
    sent["cp"] = ring_share(mesh.cp) * exchanged / (mesh.cp * mesh.tp * mesh.pp)
    return {axis: int(value * per_element) for axis, value in sent.items()}


def _tied_bytes(
    model: nn.Module, cut: list[list[str]], kinds: dict[str, str], settings: ParallelSettings, mesh: Mesh
) -> int:
    """Elements per rank of the all-reduce that keeps a weight of two stages one."""
    whole = stage_parameters(model, [""])
    apart = [name for stage in cut for name in stage_parameters(model, stage) if name not in whole]
    shard = shard_groups(mesh, settings.shard)[1] if settings.zero else 1
    shared = sum(local_numel(n, model.get_parameter(n), kinds, mesh.tp) for n in apart)
    return int(2 * shared / shard / mesh.pp) if mesh.pp > 1 else 0


def width(model: nn.Module, name: str) -> int:
    layer = model.get_submodule(name)
    return int(layer.weight.shape[0])  # type: ignore[index]


def rows_of(plan: Plan, measured: dict[str, float] | None = None) -> list[dict[str, Any]]:
    """The table: quantity, unit, predicted (None: not planned), and measured where `measured` has the quantity."""
    rows: list[tuple[str, str, Any]] = [
        ("mesh", f"{describe(plan.mesh)} = {plan.mesh.world} ranks", plan.engine),
        ("parameters", "count", plan.parameters),
        (
            "parameters_per_stage",
            f"count, largest{RECUT if plan.recut else ''}",
            max(s.parameters for s in plan.stages),
        ),
    ]
    for kind in ("start", "weights", "gradients", "optimizer", "gathered", "activations"):
        sizes = [getattr(stage, kind) for stage in plan.stages]
        rows.append((f"{kind}_bytes", "per rank, largest", None if None in sizes else max(sizes)))
    rows += [(f"sent_bytes {axis}", "per rank and step", size) for axis, size in plan.sent_bytes.items()]
    rows.append(("export_bytes", "rank 0, beside its part", plan.export))
    rows.append(("bubble_share", "idle over ideal time", round(plan.bubble, 4)))
    known = measured or {}
    return [{"quantity": q, "unit": u, "predicted": v, "measured": known.get(q)} for q, u, v in rows]


def format_rows(rows: list[dict[str, Any]]) -> str:
    """Plain text, one line per quantity."""

    def show(value: Any) -> str:
        if value is None or isinstance(value, str):
            return value or ""
        return f"{value:,.0f}" if float(value).is_integer() or abs(value) >= 1000 else f"{value:.4f}"

    lines = [("quantity", "unit", "predicted", "measured")]
    lines += [(r["quantity"], r["unit"], show(r["predicted"]), show(r["measured"])) for r in rows]
    widths = [max(len(line[i]) for line in lines) for i in range(4)]
    return "\n".join(
        f"{a:<{widths[0]}}  {b:<{widths[1]}}  {c:>{widths[2]}}  {d:>{widths[3]}}".rstrip() for a, b, c, d in lines
    )
