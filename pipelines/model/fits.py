"""Say whether a recipe's step fits in a rank's memory, and if not, which smallest change would make it fit."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from sparkring.conf.clusters.cluster import Cluster
from sparkring.conf.config import RunConfig
from sparkring.conf.manifest import DatasetManifest
from sparkring.conf.plain_text import count_of
from sparkring.conf.rules.rule import find_notes
from sparkring.conf.rules.strategies import LAYOUT
from sparkring.pipelines.model.fed import fed_notes
from sparkring.pipelines.model.plan import (
    UNPLANNED,
    UNPLANNED_TREES,
    cost_plan,
    device_of,
    known_dataset,
    known_manifest,
    layout_problems_of,
    own_workload,
    runs_here,
)
from sparkring.pipelines.model.sizes import size_text
from sparkring.pipelines.model.table_work import table_notes
from sparkring.training.launch.host.processes import usable_memory
from sparkring.training.parallel.mesh import layout_of, resolve_mesh
from sparkring.training.planner import CostPlan, format_rows, make_plan, table_rows
from sparkring.training.planner.table import fullest

LEAST_ROWS = 1  # of a pass, where accumulation makes passes smaller


@dataclass(frozen=True)
class Room:
    """Memory that one rank may use, and whose it is.

    host: bytes of the machine's own memory per rank; None if unknown.
    """

    size: float  # bytes
    what: str
    is_host: bool = False  # the host's too: a rank on CPUs reads and keeps its tables there
    host: float | None = None


def show_plan(config: RunConfig, cluster: Cluster | None = None) -> str:
    """Format the table, whether it fits, what is not planned and why, and settings without effect.

    `cluster`: where the recipe would run; None: on this machine, if its ranks would be here.
    """
    if config.model.is_trees:
        return f"model.family = trees: {UNPLANNED_TREES}"
    manifest = known_manifest(config)
    workload = own_workload(config, manifest)
    plan = make_plan(workload)
    fits = fits_text(config, manifest, plan, rank_room(config, cluster))
    notes = find_notes(LAYOUT, layout_of(config.parallel, plan.mesh, device_of(config)))
    untraced = [f"{UNPLANNED}: {plan.untraced}"] if plan.untraced else []
    tables = table_notes(config, workload)
    trees = [f"this is the network's; trees use nothing of `parallel`: {UNPLANNED_TREES}"]
    notes = [*notes, *(trees if config.model.family == "both" else [])]
    if cluster is not None:
        folder = None if manifest is None else (known_dataset(config) or (None,))[0]
        notes = [*fed_notes(workload, cluster, runs_here(config), folder), *notes]
    return "\n\n".join(filter(None, [format_rows(table_rows(plan)), fits, *untraced, *tables, *notes]))


def rank_room(config: RunConfig, cluster: Cluster | None) -> Room | None:
    """Return a rank's memory: the cluster device's, else this machine's if all ranks are here, or None."""
    if cluster is not None:
        host = cluster.node.memory_bytes / min(cluster.node.devices, config.launch.world) or None
        return Room(cluster.device.memory_bytes, f"one {cluster.device.name}", cluster.device.type == "cpu", host)
    on_gpus = device_of(config) == "cuda"
    if not runs_here(config) or (on_gpus and not torch.cuda.is_available()):
        return None
    if on_gpus:
        size, name = torch.cuda.get_device_properties(0).total_memory, torch.cuda.get_device_name(0)
        return Room(size, name, host=usable_memory() / config.launch.world)
    return Room(
        usable_memory() / config.launch.world,
        f"this machine's memory over {count_of(config.launch.world, 'rank')}",
        True,
    )


def held_bytes(plan: CostPlan, is_host: bool = False) -> int | None:
    """Return the most bytes a rank holds: at the start, in a step, or in evaluation. None: not traced.

    `is_host`: whether its reader and its sparse tables are in the same memory.
    """
    peak = fullest(plan).peak
    host = host_bytes(plan) if is_host else 0
    others = [stage.start for stage in plan.stages] + [stage.evaluation or 0 for stage in plan.stages]
    return None if peak is None else host + max(peak, *others)


def host_bytes(plan: CostPlan) -> int:
    """Return the known bytes of a rank's reader, its share of sparse tables and its offloaded shards."""
    return (plan.reader or 0) + plan.tables + max(stage.offloaded for stage in plan.stages)


def fits_text(config: RunConfig, manifest: DatasetManifest | None, plan: CostPlan, room: Room | None) -> str:
    """Describe whether the plan fits, or what would make it fit; empty where the memory is not known."""
    needed = held_bytes(plan, room is not None and room.is_host)
    if room is None or needed is None:
        return ""
    text = f"{size_text(needed)} a rank of {size_text(room.size)} ({room.what}){host_text(plan, room)}"
    if needed <= room.size:
        return f"fits: {text}" if has_host_room(plan, room) else f"does not fit: {text}"
    tried: list[tuple[int, str]] = []
    for words, changed in smaller(config):
        other = cost_plan(changed, manifest)
        size = held_bytes(other, room.is_host) or needed
        if size <= room.size and has_host_room(other, room):
            return f"does not fit: {text}; with {words} it needs {size_text(size)}{host_text(other, room)}"
        tried.append((size, words))
    least = min(tried, default=(needed, "no change"))
    return (
        f"does not fit: {text}; nor does the smallest of what was tried, {least[1]}, which needs {size_text(least[0])}"
    )


def host_text(plan: CostPlan, room: Room) -> str:
    """Describe what rows and sparse tables take of the device's memory, or of the host's."""
    offloaded = max(stage.offloaded for stage in plan.stages)
    held = [("the reader", plan.reader or 0), ("sparse tables", plan.tables), ("offloaded shards", offloaded)]
    parts = " and ".join(f"{size_text(size)} of {what}" for what, size in held if size)
    if not parts:
        return ""
    known = "" if room.host is None else f", of {size_text(room.host)} that it has for each"
    return f", with {parts}" if room.is_host else f"; the host holds {parts} a rank beside it{known}"


def has_host_room(plan: CostPlan, room: Room) -> bool:
    """Return whether the host next to a device has room for what a rank holds there, if known."""
    return room.is_host or room.host is None or host_bytes(plan) <= room.host


def smaller(config: RunConfig) -> Iterator[tuple[str, RunConfig]]:
    """Yield recipes of the same training that need less memory, smallest change first, with changed keys."""
    as_trained: dict[str, Any] = {"train.eval_batch": None}  # not more rows than a pass of training has
    sharded: dict[str, Any] = {"parallel.zero": 1 if config.parallel.engine == "horovod" else 3}
    recomputed: dict[str, Any] = {"parallel.activation_checkpointing": True}
    smallest = sharded | recomputed | more_passes(config, 8)
    on_gpus = device_of(config) == "cuda"
    for keys in (
        as_trained,
        recomputed,
        more_passes(config, 2),
        {"parallel.zero": 1},
        sharded,
        more_passes(config, 8),
        sharded | recomputed,
        *([smallest] if config.train.eval_batch is None else [smallest, smallest | as_trained]),
        *([smallest | as_trained | {"parallel.offload": True}] if on_gpus else []),
    ):
        changed = with_keys(config, keys)
        if changed != config and not layout_problems_of(changed):
            differing = {key: value for key, value in keys.items() if key_of(config, key) != value}
            yield " ".join(f"{key}={json.dumps(value)}" for key, value in differing.items()), changed


def more_passes(config: RunConfig, times: int) -> dict[str, Any]:
    """Accumulate over `times` as many passes, as far as a pass has a row."""
    mesh = resolve_mesh(config.parallel, config.launch.world)
    rows = config.train.global_batch // mesh.dp // config.parallel.micro_batches
    return {"parallel.accumulate": max(1, min(config.parallel.accumulate * times, rows // LEAST_ROWS))}


def with_keys(config: RunConfig, keys: dict[str, Any]) -> RunConfig:
    """Return the configuration with changed keys of its blocks."""
    for key, value in keys.items():
        block, _, name = key.partition(".")
        changed = getattr(config, block).model_copy(update={name: value})
        config = config.model_copy(update={block: changed})
    return config


def key_of(config: RunConfig, key: str) -> Any:
    """Return the value of a block's key."""
    block, _, name = key.partition(".")
    return getattr(getattr(config, block), name)
