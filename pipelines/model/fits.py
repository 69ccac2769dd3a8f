"""Say whether a recipe's step fits in a rank's memory, and if not, which smallest change would make it fit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from sparkring.conf.clusters.cluster import GIB, Cluster
from sparkring.conf.config import RunConfig
from sparkring.conf.manifest import DatasetManifest
from sparkring.pipelines.model.plan import cost_plan, device_of, layout_problems_of, runs_here
from sparkring.training.launch.host.processes import usable_memory
from sparkring.training.parallel.mesh import resolve_mesh
from sparkring.training.planner import CostPlan
from sparkring.training.planner.table import fullest

LEAST_ROWS = 1  # of a pass, where accumulation makes passes smaller


@dataclass(frozen=True)
class Room:
    """Memory that one rank may use, and whose it is."""

    size: float  # bytes
    what: str


def rank_room(config: RunConfig, cluster: Cluster | None) -> Room | None:
    """Memory of a rank: of the cluster's device, else of this machine's if all ranks are here; None: not known."""
    if cluster is not None:
        return Room(cluster.device.memory_bytes, f"one {cluster.device.name}")
    on_gpus = device_of(config) == "cuda"
    if not runs_here(config) or (on_gpus and not torch.cuda.is_available()):
        return None
    if on_gpus:
        return Room(torch.cuda.get_device_properties(0).total_memory, torch.cuda.get_device_name(0))
    return Room(usable_memory() / config.launch.world, f"this machine's memory over {config.launch.world} ranks")


def held_bytes(plan: CostPlan) -> int | None:
    """The most that a rank holds: at the start, or in a step. None: not traced."""
    peak = fullest(plan).peak
    return None if peak is None else max(peak, *(stage.start for stage in plan.stages))


def fits_text(config: RunConfig, manifest: DatasetManifest | None, plan: CostPlan, room: Room | None) -> str:
    """Say whether the plan fits, or what would make it fit; empty where the memory is not known."""
    needed = held_bytes(plan)
    if room is None or needed is None:
        return ""
    text = f"{gib(needed)} a rank of {gib(room.size)} ({room.what})"
    if needed <= room.size:
        return f"fits: {text}"
    tried: list[tuple[int, str]] = []
    for words, changed in smaller(config):
        size = held_bytes(cost_plan(changed, manifest)) or needed
        if size <= room.size:
            return f"does not fit: {text}; with {words} it needs {gib(size)}"
        tried.append((size, words))
    least = min(tried, default=(needed, "no change"))
    return f"does not fit: {text}; nor does the smallest of what was tried, {least[1]}, which needs {gib(least[0])}"


def gib(size: float) -> str:
    return f"{size / GIB:,.2f} GiB" if size >= GIB / 10 else f"{size / GIB * 1024:,.1f} MiB"


def smaller(config: RunConfig) -> Iterator[tuple[str, RunConfig]]:
    """Recipes of the same training that hold less, those that change the least first, and the keys that differ."""
    sharded: dict[str, Any] = {"parallel.zero": 1 if config.parallel.engine == "horovod" else 3}
    recomputed: dict[str, Any] = {"parallel.activation_checkpointing": True}
    for keys in (
        recomputed,
        more_passes(config, 2),
        {"parallel.zero": 1},
        sharded,
        more_passes(config, 8),
        sharded | recomputed,
        sharded | recomputed | more_passes(config, 8),
    ):
        changed = with_keys(config, keys)
        if changed != config and not layout_problems_of(changed):
            yield " ".join(f"{key}={str(value).lower()}" for key, value in keys.items()), changed


def more_passes(config: RunConfig, times: int) -> dict[str, Any]:
    """Accumulation over so many times the passes, as far as a pass has a row."""
    mesh = resolve_mesh(config.parallel, config.launch.world)
    rows = config.train.global_batch // mesh.dp // (config.parallel.micro_batches if mesh.pp > 1 else 1)
    return {"parallel.accumulate": max(1, min(config.parallel.accumulate * times, rows // LEAST_ROWS))}


def with_keys(config: RunConfig, keys: dict[str, Any]) -> RunConfig:
    """The configuration with other keys of its parallel block."""
    update = {key.removeprefix("parallel."): value for key, value in keys.items()}
    return config.model_copy(update={"parallel": config.parallel.model_copy(update=update)})
