"""Describe the machine that ranks run on, where no cluster is named: by what this process sees of it."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass

import torch

from sparkring.conf.blocks.launch import LaunchConfig
from sparkring.conf.clusters.catalog import cluster_names, load_cluster
from sparkring.conf.clusters.cluster import GIB, Cluster, Device
from sparkring.conf.config import RunConfig
from sparkring.pipelines.model.plan import device_of, runs_here
from sparkring.training.launch.host.processes import usable_cores, usable_memory
from sparkring.training.launch.join.placement import find_placement
from sparkring.training.worker.hardware import processor_name

SHOWN = "this machine, estimated"
CPU = "cpu"  # built-in cluster
UNSEEN = "not seen from the driver"  # devices of executors and Ray's nodes elsewhere
ANY_GPU = "a100-80gb-ethernet"  # stands for a GPU that no built-in cluster has


@dataclass(frozen=True)
class RankCluster:
    """The cluster that a job's ranks run on: what it is called, and what it is for so many ranks."""

    name: str
    of_ranks: Callable[[int], Cluster]

    @classmethod
    def fixed(cls, name: str, cluster: Cluster) -> RankCluster:
        """Return a cluster with the same devices for any number of ranks."""
        return cls(name, lambda world: cluster)


def cluster_of_recipe(config: RunConfig) -> RankCluster:
    """Return the cluster that the recipe names, or the machine its ranks run on."""
    if config.launch.cluster is not None:
        return RankCluster.fixed(config.launch.cluster, load_cluster(config.launch.cluster))
    if device_of(config) == "cuda":
        seen = torch.cuda.get_device_properties(0) if torch.cuda.is_available() else None
        name = ANY_GPU if seen is None else gpu_cluster(seen.name, seen.total_memory)
        cluster = with_host_memory(load_cluster(name), usable_memory() * runs_here(config))
        if name == ANY_GPU:
            return assumed(name, cluster, UNSEEN if seen is None else seen.name)
        return RankCluster.fixed(name, cluster)
    usual = load_cluster(CPU)
    if config.launch.on == "hosts":
        per_host = ranks_per_host(config.launch)
    elif runs_here(config):
        per_host = config.launch.world
    else:
        return assumed(CPU, usual, UNSEEN)
    return RankCluster(SHOWN, lambda world: cpu_machine(usual, min(world, per_host)))


def assumed(name: str, cluster: Cluster, device: str) -> RankCluster:
    """Rename a built-in cluster that stands for other devices, so that their jobs do not count as its own."""
    named = cluster.device.model_copy(update={"name": device})
    other = cluster.model_copy(update={"device": named, "fitted_on": "", "error": None})
    return RankCluster.fixed(f"{name}, assumed", other)


def ranks_per_host(launch: LaunchConfig) -> int:
    """Return the ranks per host that started this command, assuming equal hosts."""
    return launch.ranks_per_host or math.ceil(launch.world / find_placement(os.environ).count)


def with_host_memory(cluster: Cluster, memory_bytes: float) -> Cluster:
    """Return the cluster with this memory per machine, for offloading; 0 if unknown."""
    node = cluster.node.model_copy(update={"memory_gib": memory_bytes / GIB})
    return cluster.model_copy(update={"node": node})


def gpu_cluster(name: str, memory_bytes: float) -> str:
    """Return the built-in cluster of a GPU such as `NVIDIA H100 80GB HBM3`, by family and memory size."""
    words = name.upper().replace("-", " ").split()
    known = {each: load_cluster(each) for each in cluster_names()}
    same = {each: cluster for each, cluster in known.items() if cluster.device.name.split("-")[0] in words}
    return min(same, key=lambda each: abs(same[each].device.memory_bytes - memory_bytes), default=ANY_GPU)


def cpu_machine(usual: Cluster, ranks: int) -> Cluster:
    """Describe this machine's cores and memory shared by its ranks, at `usual`'s speed per core."""
    cores = usable_cores()
    share = max(1, cores // ranks) / usual.device.processors  # of the usual device, that a rank has
    device = Device(
        name=processor_name(),
        type="cpu",
        peak_tflops={dtype: peak * share for dtype, peak in usual.device.peak_tflops.items()},
        memory_gib=usable_memory() / ranks / GIB,
        memory_gb_per_s=usual.device.memory_gb_per_s * share,
        processors=max(1, cores // ranks),
    )
    node = usual.node.model_copy(update={"devices": ranks, "cores": cores, "price_per_hour": 0.0})
    estimated = {"description": SHOWN, "device": device, "node": node, "fitted_on": "", "error": None}
    return usual.model_copy(update=estimated)
