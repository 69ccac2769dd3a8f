"""Search the layouts of a recipe on a cluster, and show them with seconds, price and advice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from sparkring.conf.blocks.parallel import PLANNED, ParallelConfig
from sparkring.conf.clusters.catalog import cluster_names, load_cluster
from sparkring.conf.clusters.cluster import GIB, Cluster, Precision
from sparkring.conf.config import RunConfig
from sparkring.conf.errors import ConfigError
from sparkring.conf.manifest import DatasetManifest
from sparkring.conf.plain_text import count_of
from sparkring.conf.recipe_file import EXTENDS, is_path
from sparkring.pipelines.model.plan import UNPLANNED_TREES, known_manifest, plan_workload
from sparkring.pipelines.model.sizes import size_text, too_large_text
from sparkring.training.models.gpt import LanguageModelTask
from sparkring.training.parallel.mesh import AXES, Mesh, resolve_mesh, used_axes
from sparkring.training.parallel.model_parallel.schedules import schedule_problem
from sparkring.training.planner import Untraceable
from sparkring.training.planner.advice import (
    PAYS,
    Distribution,
    checkpoint_plan,
    distribute_advice,
    link_advice,
    paying_batch,
)
from sparkring.training.planner.search import (
    AskedLayout,
    LayoutCosts,
    Objective,
    PlannedLayout,
    SearchResult,
    StateLayout,
    TracedModel,
    distinct,
    layout_variants,
    least_bytes,
    mesh_layouts,
    order,
    possible_layouts,
    search,
    traced_model,
)
from sparkring.training.planner.workload import Workload
from sparkring.training.worker.plan_record import LayoutCost, PlanRecord, pareto

SHOWN = 5
MOST_REASONS = 3  # of a mesh that cannot run
LITTLE = 0.02  # share of a step that no recipe is changed for
MOST_POINTS = 300  # of a figure
SEARCHED = (*(key for key in PLANNED if key not in AXES), "accumulate", "precision")


@dataclass(frozen=True)
class Planned:
    """A recipe on a cluster. steps: of the whole recipe; None: its dataset, which says how many, is not there."""

    config: RunConfig
    cluster: Cluster
    costs: LayoutCosts
    steps: int | None


def planned(config: RunConfig, cluster: Cluster, manifest: DatasetManifest | None) -> Planned:
    """Trace the recipe's model for a cluster. Untraceable, or ManifestError, if that cannot be done."""
    costs = LayoutCosts(traced_recipe(config, manifest), cluster)
    return Planned(config, cluster, costs, total_steps(config, manifest))


def traced_recipe(config: RunConfig, manifest: DatasetManifest | None) -> TracedModel:
    """Trace the recipe's model, whatever its layout. Untraceable, or ManifestError, if that cannot be done."""
    if config.model.is_trees:
        raise Untraceable(f"model.family = trees: {UNPLANNED_TREES}")
    return traced_model(plan_workload(config, manifest, Mesh(dp=config.launch.world), "torch"))


def total_steps(config: RunConfig, manifest: DatasetManifest | None) -> int | None:
    """Return the steps of the recipe, if known."""
    if config.train.steps is not None:
        return config.train.steps
    if manifest is None or config.train.epochs is None:
        return None
    rows = manifest.splits["train"].rows if "train" in manifest.splits else manifest.accounting.rows_out
    return config.train.epochs * (rows // config.train.global_batch)


def layout_text(layout: PlannedLayout) -> str:
    """Describe a layout in the words of a recipe."""
    config, words = layout.config, [cut_words(layout.config, layout.mesh)]
    words += [config.schedule] if layout.mesh.pp > 1 else []
    words += ["recompute"] if config.activation_checkpointing else []
    words += ["sequence parallel"] if config.sequence_parallel else []
    rows = f"{count_of(layout.counts.cut.rows, 'row')} a pass"
    words += [f"{layout.counts.micro} passes", rows] if layout.counts.micro > 1 else [rows]
    return ", ".join(words)


def cut_words(config: ParallelConfig, mesh: Mesh) -> str:
    """Describe how ranks split the model and its optimizer's state, in the words of a recipe."""
    words = [used_axes(mesh)]
    words += [f"zero {config.zero}"] if config.zero else []
    words += ["offload"] if config.offload else []
    words += [f"shards on {config.shard} ranks"] if config.shard else []
    words += [config.precision] if config.precision != "fp32" else []
    return ", ".join(words)


def layout_facts(plan: Planned, layout: PlannedLayout) -> dict[str, Any]:
    """Return what is known of a layout, for `--json`."""
    time, mesh, cluster = layout.time, layout.mesh, plan.cluster
    batch = plan.config.train.global_batch
    exchanged = time.exchange + time.hidden
    hours = None if plan.steps is None else plan.steps * time.total / 3600
    peak = cluster.device.peak_flops(layout.config.precision)
    tokens = tokens_of(plan)
    return {
        "layout": {axis: getattr(mesh, axis) for axis in AXES} | layout.config.model_dump(include={*SEARCHED}),
        "rows_per_pass": layout.counts.cut.rows,
        "passes": layout.counts.micro,
        "memory_gib": round(layout.memory / GIB, 4),
        "host_gib": round(layout.host / GIB, 4),
        "step_s": time.total,
        "seconds_by_cause": time.causes,
        "hidden_share": time.hidden / exchanged if exchanged else None,
        "bubble_share": time.bubble / time.total,
        "mfu": layout.counts.flops / (mesh.world * peak * time.total),
        "rows_per_s": batch / time.total,
        "tokens_per_s_per_device": None if tokens is None else batch * tokens / time.total / mesh.world,
        "hours": hours,
        "price": None if hours is None else hours * layout.machines * cluster.node.price_per_hour,
    }


def tokens_of(plan: Planned) -> int | None:
    """Return the tokens of a row; None unless it is a language model."""
    workload = plan.costs.traced.workload
    is_language = isinstance(workload.task, LanguageModelTask) and not isinstance(workload.inputs, Untraceable)
    return int(workload.inputs[0].shape[-1]) if is_language else None  # type: ignore[index]


def search_facts(
    plan: Planned, cluster: str, result: SearchResult, devices: int, asked: Sequence[str] = ()
) -> dict[str, Any]:
    """Return a search as one object, for `--json`.

    Args:
        plan: recipe on its cluster.
        cluster: name of the cluster.
        result: result of the search.
        devices: number of requested devices.
        asked: lines from `why_lines` on the requested mesh; () without one.
    """
    best = distinct(result.best, SHOWN)
    behind = [why_behind(layout, best[0]) for layout in best]
    return {
        "cluster": cluster_facts(cluster, plan.cluster, devices),
        "model": model_facts(plan.config, plan.costs.traced.workload) | {"steps": plan.steps},
        "tried": {"layouts": result.tried, "fit": len(result.best), "limit_gib": round(plan.costs.limit / GIB, 4)},
        "layouts": [layout_facts(plan, layout) for layout in best],
        "why": {"asked": bool(asked), "reasons": [*asked] or behind},
    }


def cluster_facts(name: str, cluster: Cluster, devices: int) -> dict[str, Any]:
    """Describe the cluster of a search for `--json`."""
    return {
        "name": name,
        "device": cluster.device.name,
        "network": f"{cluster.network.kind}, {cluster.network.gbit_per_s:g} Gbit",
        "devices": devices,
        "fitted_on": cluster.fitted_on,
        "error": cluster.error,
        "basis": cluster.basis,
    }


def model_facts(config: RunConfig, workload: Workload) -> dict[str, Any]:
    """Describe the model of a search for `--json`."""
    parameters = sum(parameter.numel() for parameter in workload.model.parameters())
    return {"recipe": config.name, "parameters": parameters, "global_batch": config.train.global_batch}


def plan_record(name: str, cluster: Cluster, used: PlannedLayout, layouts: tuple[PlannedLayout, ...]) -> PlanRecord:
    """Return the plan record for summary.json and its figures.

    Args:
        name: name of the cluster.
        cluster: machines of the cluster.
        used: layout that is used.
        layouts: layouts that fit, best first.
    """
    return PlanRecord(
        cluster=name,
        machines=cluster.machines,
        basis=cluster.basis,
        world=used.mesh.world,
        limit=int(used.costs.limit),
        used=cost_of(used),
        others=[cost_of(each) for each in distinct((used, *layouts), SHOWN)[1:]],
        tried=points_of(layouts),
    )


def cost_of(layout: PlannedLayout) -> LayoutCost:
    """Return a layout's cost, for summary.json and its figures."""
    return LayoutCost(layout=layout_text(layout), causes=layout.time.causes, memory=layout.memory)


def points_of(layouts: Sequence[PlannedLayout]) -> list[tuple[float, int]]:
    """Return (seconds, bytes) of layouts; of many, the Pareto front and a sample of the others."""
    points = [(layout.time.total, layout.memory) for layout in layouts]
    rest = points[:: -(-len(points) // MOST_POINTS) or 1]
    return sorted({*pareto(points), *rest})


def recipe_text(recipe: str, config: RunConfig, layout: PlannedLayout) -> str:
    """Return a recipe that extends another and trains it in a layout."""
    world, least = layout.mesh.world, config.launch.min_world
    launch = {"world": world} if least is None or least <= world else {"world": world, "min_world": None}
    parallel = layout.config.model_dump(mode="json", include={*AXES, *SEARCHED})
    base = str(Path(recipe).resolve()) if is_path(recipe) else recipe
    return str(yaml.safe_dump({EXTENDS: base, "launch": launch, "parallel": parallel}, sort_keys=False))


def searched(plan: Planned, devices: int, objective: Objective, precisions: Sequence[Precision] = ()) -> SearchResult:
    """Search. ConfigError if nothing fits; it says how much is missing."""
    result = search(plan.costs, plan.config.parallel, devices, objective, precisions)
    if result.best:
        return result
    limit, smallest = plan.costs.limit, result.smallest
    if smallest is None:
        state = size_text(least_bytes(plan.costs.traced.workload, devices))
        need = f"weights, gradients and optimizer state alone, spread over all devices, are {state} of each"
    else:
        need = f"the smallest layout, {layout_text(smallest)}, needs {size_text(smallest.memory)}"
    remedy = "take more devices, or ones with more memory"
    if plan.cluster.device.type != "cpu" and not plan.cluster.node.memory_gib:
        remedy += ", or say how much memory a machine has, node.memory_gib of the cluster, to offload to it"
    where = f"{plan.config.name} on {devices} x {plan.cluster.device.name}"
    raise ConfigError(where, [f"no layout fits in {size_text(limit)} per device: {need}; {remedy}"])


def ending_within(plan: Planned, result: SearchResult, limit_s: float) -> SearchResult:
    """Keep layouts that finish the recipe in time. ConfigError if none does, or its steps are unknown."""
    where = f"--within {duration_text(limit_s)}"
    if plan.steps is None:
        remedy = "build the dataset with `sparkring etl`, or set train.steps"
        raise ConfigError(where, [f"only the dataset says how many steps an epoch of {plan.config.name} has; {remedy}"])
    in_time = tuple(layout for layout in result.best if plan.steps * layout.time.total <= limit_s)
    if in_time:
        return replace(result, best=in_time)
    quickest = min(result.best, key=order("time"))
    raise ConfigError(
        where,
        [
            f"no layout makes the {count_of(plan.steps, 'step', ',')} of {plan.config.name} in that time; the "
            f"quickest, {layout_text(quickest)} on {count_of(quickest.mesh.world, 'device')}, takes "
            f"{duration_text(plan.steps * quickest.time.total)}; take more devices, faster ones, or more time "
            f"({plan.cluster.basis})"
        ],
    )


def duration_text(seconds: float) -> str:
    """Format a long time in the largest unit of which there are two."""
    units = {"years": 31_557_600.0, "days": 86_400.0, "hours": 3600.0, "minutes": 60.0}
    name, size = next(((name, size) for name, size in units.items() if seconds >= 2 * size), ("seconds", 1.0))
    return f"{seconds / size:,.3g} {name}"


def price_text(dollars: float) -> str:
    if dollars >= 1e6:
        return f"{dollars / 1e6:,.2f} million US dollars"
    return f"{dollars:,.0f} US dollars" if dollars >= 10 else f"{dollars:.2f} US dollars"


def search_report(plan: Planned, result: SearchResult, devices: int, order_words: str) -> str:
    """Report the best layouts, why each loses, and advice. `order_words`: names the objective."""
    best = distinct(result.best, SHOWN)
    tried = f"{len(result.best):,} of {result.tried:,}"
    head = (
        f"{plan.config.name} on {devices} x {plan.cluster.device.name}: {tried} layouts that can run fit in "
        f"{size_text(plan.costs.limit)}{order_words}"
    )
    alone = f"do not distribute: of 1 to {count_of(devices, 'device')} one is the best"
    blocks = [_numbered(plan, number, layout, best[0]) for number, layout in enumerate(best, 1)]
    found = advice(plan, best[0], one_device(plan))
    return "\n\n".join(
        [head, plan.cluster.basis, *blocks, *([alone] if best[0].mesh.world == 1 < devices else []), *found]
    )


def _numbered(plan: Planned, number: int, layout: PlannedLayout, best: PlannedLayout) -> str:
    lines = [f"{number}. {layout_text(layout)}", *fact_lines(plan, layout)]
    return "\n   ".join([*lines, why_behind(layout, best)] if layout is not best else lines)


def fact_lines(plan: Planned, layout: PlannedLayout, with_memory: bool = True) -> list[str]:
    """List seconds, memory, rates and price of a layout."""
    facts = layout_facts(plan, layout)
    causes = ", ".join(f"{name} {seconds_text(value)}" for name, value in layout.time.causes.items() if value > 0)
    bubble = f", bubble {facts['bubble_share']:.1%}" if layout.mesh.pp > 1 else ""
    per_device = facts["tokens_per_s_per_device"]
    tokens = "" if per_device is None else f", {rate_text(per_device)} tokens/s and device"
    hidden = "" if facts["hidden_share"] is None else f", {facts['hidden_share']:.0%} of the exchange hidden"
    offloaded = f" and {size_text(layout.host)} of its host" if layout.host else ""
    memory = f"{size_text(layout.memory)} per device{offloaded}, " if with_memory else ""
    lines = [
        f"step {seconds_text(layout.time.total)} = {causes}",
        f"{memory}MFU {facts['mfu']:.1%}{bubble}{hidden}, {rate_text(facts['rows_per_s'])} rows/s{tokens}",
    ]
    if facts["hours"] is not None and plan.steps is not None:
        price = f", {price_text(facts['price'])}" if plan.cluster.node.price_per_hour else ""
        lines.append(f"{duration_text(3600 * facts['hours'])} for {count_of(plan.steps, 'step', ',')}{price}")
    return lines


def rate_text(per_s: float) -> str:
    """Format rows per second: whole ones, or three digits for few."""
    return f"{per_s:,.0f}" if per_s >= 100 else f"{per_s:.3g}"


def seconds_text(value: float) -> str:
    """Format seconds, or milliseconds below a tenth."""
    if value >= 1000:
        return f"{value:,.0f} s"
    return f"{value:.3g} s" if value >= 0.1 else f"{1000 * value:.3g} ms"


def time_text(value: float) -> str:
    """Format seconds in the unit that a person reads."""
    return seconds_text(value) if value < 120 else duration_text(value)


def why_behind(layout: PlannedLayout, best: PlannedLayout) -> str:
    """Explain why a layout is not the best one."""
    if layout == best:
        return "the best"
    behind, other = layout.time.causes, best.time.causes
    cause = max(behind, key=lambda name: behind[name] - other[name])
    slower = layout.time.total / best.time.total - 1
    if slower <= 0.0005:
        return "as fast as the best; it needs more memory, or is less simple"
    times = f"{slower:.1%} slower than" if slower < 2 else f"{slower + 1:.1f} times as long as"
    return f"{times} the best: {cause} takes {seconds_text(behind[cause] - other[cause])} more"


def one_device(plan: Planned) -> PlannedLayout | None:
    """Return the fastest layout of one device that fits."""
    found = search(plan.costs, plan.config.parallel, 1)
    return found.best[0] if found.best else None


def advice(plan: Planned, layout: PlannedLayout, alone: PlannedLayout | None) -> list[str]:
    """List paragraphs a person can act on."""
    devices = layout.mesh.world
    found = [apart_advice(alone, layout, plan.steps)]
    found.append(
        link_advice(
            layout.time,
            lambda times: _faster(plan, layout, times),
            lambda n: _larger(plan, layout, n),
            lambda: _with_codec(plan, layout),
        )
    )
    if devices > 1:
        found += [networks_table(plan, layout), _batch_line(plan, layout)]
    found += [precision_line(plan, layout), checkpoint_line(plan, layout)]
    return [text for text in found if text]


def apart_advice(alone: PlannedLayout | None, layout: PlannedLayout, steps: int | None) -> str | None:
    """Explain why not to distribute. `alone`: fastest layout of one device that fits, or None."""
    if alone is None:
        return None
    found = Distribution(alone.time.total, layout.time.total, layout.mesh.world, steps)
    return distribute_advice(found, time_text)


def _with_codec(plan: Planned, layout: PlannedLayout) -> float | None:
    """Return the step's seconds with gradients in bf16; None if forbidden or no gain."""
    compress = layout.config.compress.model_copy(update={"codec": "bf16"})
    config = layout.config.model_copy(update={"compress": compress})
    if layout.config.compress.codec != "none" or plan.costs.problems(config, layout.mesh):
        return None
    seconds = plan.costs.layout(config, layout.mesh).time.total
    return seconds if seconds < layout.time.total else None


def precision_line(plan: Planned, layout: PlannedLayout) -> str:
    """Suggest bfloat16 for a layout that computes in fp32; "" without a gain.

    It changes what is learned, so a search keeps the recipe's precision by default.
    """
    if layout.config.precision != "fp32":
        return ""
    config = layout.config.model_copy(update={"precision": "bf16"})
    other = plan.costs.layout(config, layout.mesh)
    if layout.time.total < PAYS * other.time.total:
        return ""
    return (
        f"with parallel.precision=bf16, which rounds differently, this layout takes {seconds_text(other.time.total)} a "
        f"step, {other.time.total / layout.time.total:.2f} times, and {size_text(other.memory)} in place of "
        f"{size_text(layout.memory)}"
    )


def _faster(plan: Planned, layout: PlannedLayout, times: float) -> float:
    network = plan.cluster.network.model_copy(update={"gbit_per_s": plan.cluster.network.gbit_per_s * times})
    return _on(plan, layout, plan.cluster.model_copy(update={"network": network}))


def _on(plan: Planned, layout: PlannedLayout, cluster: Cluster) -> float:
    return LayoutCosts(plan.costs.traced, cluster).layout(layout.config, layout.mesh).time.total


def _larger(plan: Planned, layout: PlannedLayout, times: int) -> float:
    """Return rows per second with a larger batch, relative to now."""
    return times * layout.time.total / _with_batch(plan, layout, plan.config.train.global_batch * times)


def _with_batch(plan: Planned, layout: PlannedLayout, rows: int) -> float:
    traced = plan.costs.traced
    workload = traced.workload.with_layout(layout.config, layout.mesh, traced.workload.engine, rows)
    other = LayoutCosts(type(traced)(workload, traced.work, traced.trace), plan.cluster)
    return other.layout(layout.config, layout.mesh).time.total


def networks_table(plan: Planned, layout: PlannedLayout) -> str:
    """Format the layout's step over each network of a named cluster with these devices."""
    if plan.cluster.node.devices >= layout.mesh.world:
        return ""
    named = {name: load_cluster(name) for name in cluster_names()}
    same = {name: each.network for name, each in named.items() if each.device.name == plan.cluster.device.name}
    lines = ["this layout over other networks, all else as here:"]
    for name, network in sorted(same.items(), key=lambda each: each[1].gbit_per_s):
        seconds = _on(plan, layout, plan.cluster.model_copy(update={"network": network}))
        lines.append(
            f"  {network.kind:<10} {network.gbit_per_s:>6,.0f} Gbit  step {seconds_text(seconds):>8}  "
            f"{seconds / layout.time.total:.2f} times  ({name})"
        )
    return "\n".join(lines) if len(lines) > 1 else ""


def _batch_line(plan: Planned, layout: PlannedLayout) -> str:
    """Describe the batch beyond which scaling stops paying on these devices."""
    now = plan.config.train.global_batch
    rows = paying_batch(now, lambda rows: rows / _with_batch(plan, layout, rows))
    if rows == now:
        return (
            f"a batch of {count_of(2 * now, 'row', ',')} in place of {now:,} would gain less than 5 % in rows per "
            "second"
        )
    return (
        f"a larger batch pays on these devices up to {count_of(rows, 'row', ',')} a step, here {now:,} (memory not "
        "looked at)"
    )


def checkpoint_line(plan: Planned, layout: PlannedLayout) -> str:
    workload = plan.costs.traced.workload
    numel = sum(parameter.numel() for parameter in workload.model.parameters())
    state = numel * workload.element_bytes * (1 + workload.states)
    found = checkpoint_plan(state, plan.cluster, layout.mesh.world)
    return (
        f"a checkpoint of {size_text(state)} takes {seconds_text(found.write_s)}; best every "
        f"{duration_text(found.interval_s)} (checkpoint.every_s: {found.interval_s:.0f}), and "
        f"{found.goodput:.2%} of the time then trains"
    )


def why_lines(
    plan: Planned, result: SearchResult, asked: AskedLayout, objective: Objective, precisions: Sequence[Precision] = ()
) -> list[str]:
    """Explain where the requested layouts rank, or why they are impossible.

    Args:
        plan: recipe on its cluster.
        result: result of the search.
        asked: the requested layouts.
        objective: quantity to optimize.
        precisions: precisions of the search; empty for the recipe's.
    """
    rank, best = order(objective), result.best[0]
    precisions = (asked.precision,) if asked.precision is not None else precisions
    found = [layout for layout in _possible(plan, asked, precisions) if plan.costs.fits(layout)]
    if found:
        first = min(found, key=rank)
        place = 1 + sum(rank(each) < rank(first) for each in result.best)
        lines = [f"{asked_text(asked)}: place {place:,} of {len(result.best):,}: {layout_text(first)}"]
        return [*lines, *fact_lines(plan, first), why_behind(first, best), plan.cluster.basis]
    lines = [f"{asked_text(asked)}: not among the layouts that can run and fit", *_refusals(plan, asked, precisions)]
    forced = sorted(_forced(plan, asked, precisions), key=rank)
    if not forced:
        return lines
    closest = next(filter(plan.costs.fits, forced), None) or min(forced, key=lambda layout: layout.memory)
    lines += [f"it would be at best {layout_text(closest)}", *fact_lines(plan, closest)]
    return [*lines, *missing_room(plan.costs, closest), why_behind(closest, best), plan.cluster.basis]


def _refusals(plan: Planned, asked: AskedLayout, precisions: Sequence[Precision]) -> list[str]:
    """Return why no requested layout can run: problems of the mesh, else its layouts' most frequent one.

    [] if one can run, and does not fit.
    """
    base, mesh, costs = plan.config.parallel, asked.mesh, plan.costs
    if found := costs.mesh_problems(base, mesh):
        return found
    counted: Counter[str] = Counter()
    for config in _configs(plan, mesh):
        for variant in _asked_variants(config, asked, precisions):
            if not (problems := costs.problems(variant, mesh)):
                return []
            counted.update(problems)
    if not counted and asked.offload:
        return ["nothing can be offloaded: it takes ZeRO, and so several ranks of dp or cp (parallel.zero)"]
    return [problem for problem, _ in counted.most_common(MOST_REASONS)]


def _asked_variants(
    config: ParallelConfig, asked: AskedLayout, precisions: Sequence[Precision]
) -> Iterator[ParallelConfig]:
    """Yield a configuration in each precision, offloaded if requested."""
    for precision in precisions or (config.precision,):
        variant = config.model_copy(update={"offload": bool(asked.offload and config.zero), "precision": precision})
        if asked.includes(variant):
            yield variant


def missing_room(costs: LayoutCosts, layout: PlannedLayout | StateLayout) -> Iterator[str]:
    """Describe how far a layout exceeds the memory of a device, or of its machine."""
    if layout.memory > costs.limit:
        yield too_large_text(layout.memory, costs.limit)
    if not costs.has_host_for(layout):
        limit = costs.host_limit(layout.mesh.world)
        known = f"{size_text(limit)} for each device" if limit else "0, since node.memory_gib is not known"
        yield f"the host has no room: {size_text(layout.host)} of {known}"


def asked_text(asked: AskedLayout) -> str:
    words = [used_axes(asked.mesh)]
    words += [] if asked.offload is None else ["offload" if asked.offload else "no offload"]
    return ", ".join([*words, *([] if asked.precision is None else [asked.precision])])


def _possible(plan: Planned, asked: AskedLayout, precisions: Sequence[Precision]) -> Iterator[PlannedLayout]:
    """Yield the requested layouts that can run."""
    if plan.costs.mesh_problems(plan.config.parallel, asked.mesh):
        return
    for config in _configs(plan, asked.mesh):
        for layout in layout_variants(plan.costs, config, asked.mesh, precisions):
            if asked.includes(layout.config):
                yield layout


def _configs(plan: Planned, mesh: Mesh) -> Iterator[ParallelConfig]:
    return mesh_layouts(plan.config.parallel, mesh, plan.config.train.global_batch, plan.cluster.node.devices)


def _forced(plan: Planned, asked: AskedLayout, precisions: Sequence[Precision]) -> Iterator[PlannedLayout]:
    """Yield the requested layouts with predictable passes and schedule, even if the rules forbid them."""
    batch, mesh = plan.config.train.global_batch, asked.mesh
    for config in _configs(plan, mesh):
        is_refused = schedule_problem(config.schedule, mesh.pp, config.passes, config.stages_per_rank)
        if batch % (mesh.dp * config.passes) or (mesh.pp > 1 and is_refused):
            continue
        for variant in _asked_variants(config, asked, precisions):
            with suppress(ValueError):  # fewer layers than stages, or heads that do not divide
                yield plan.costs.layout(variant, mesh)


def show_on_cluster(config: RunConfig, cluster: Cluster) -> str:
    """Format seconds, price and advice of the recipe's own layout."""
    mesh = resolve_mesh(config.parallel, config.launch.world)
    plan = planned(config, cluster, known_manifest(config))
    layout = plan.costs.layout(config.parallel, mesh)
    facts = fact_lines(plan, layout, with_memory=False)  # `show_plan` has it, from a trace of whole passes
    head = "\n   ".join([f"on {cluster.device.name}: {layout_text(layout)}", *facts])
    return "\n\n".join([head, cluster.basis, *advice(plan, layout, one_device(plan)), found_line(plan, layout)])


def found_line(plan: Planned, layout: PlannedLayout) -> str:
    """Compare a layout with the best one of a search on as many devices."""
    world = layout.mesh.world
    every = possible_layouts(plan.costs, plan.config.parallel, world)
    best = min(filter(plan.costs.fits, every), key=order("time"), default=None)
    if best is None:
        return f"a search finds no layout that fits on {count_of(world, 'device')}"
    gain = layout.time.total / best.time.total - 1
    step = f"{layout_text(best)}: {seconds_text(best.time.total)} a step"
    if gain < LITTLE:
        return f"a search finds none that is more than {LITTLE:.0%} faster on {count_of(world, 'device')}; best {step}"
    return (
        f"a search finds {step}, {gain + 1:.2f} times as fast; `sparkring plan search` with --devices {world} and "
        "--write FILE makes it a recipe"
    )
