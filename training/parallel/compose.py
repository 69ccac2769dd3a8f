"""From settings to a strategy: which engine carries the gradients, and what is wrapped around what.

The order, outermost last: context (attention) -> tensor (DTensors) -> pipeline cut -> activation checkpointing ->
batch axes (ring, ZeRO) -> optimizer. ZeRO shards what tensor parallelism has left on the rank, a pipeline's
stages are sharded one by one, and the optimizer sees only what the rank owns.
"""

from __future__ import annotations

import logging
from dataclasses import asdict
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from conf.capabilities import strategy_notes, strategy_problems
from conf.rank_info import RankInfo
from training.parallel.backend import GPU_BACKENDS, device_backend
from training.parallel.core import MeshStrategy
from training.parallel.data_parallel.base import DataAxis, NoAxis
from training.parallel.data_parallel.ddp import TorchRing, host_groups
from training.parallel.data_parallel.horovod_ring import HorovodRing, available, start_horovod
from training.parallel.data_parallel.horovod_zero import HorovodZero1
from training.parallel.data_parallel.reduce import Transport
from training.parallel.data_parallel.zero import Zero
from training.parallel.layout import Layout, MeshLayout
from training.parallel.precision import autocast
from training.parallel.settings import ParallelSettings
from training.parallel.world import AXES, Mesh, describe, resolve_mesh, shard_groups

log = logging.getLogger(__name__)


def choose_engine(settings: ParallelSettings, mesh: Mesh) -> str:
    """`none`, `horovod` or `torch`. `auto` takes Horovod where it can do the job and is there, and says what it took.

    ValueError when Horovod is asked for and cannot be had.
    """
    if mesh.world == 1:
        return "none"
    unfit = None
    if mesh.pp * mesh.tp * mesh.cp > 1:
        unfit = f"Horovod has no send and receive between ranks and no groups for {describe(mesh)}"
    elif settings.zero > (1 if settings.engine == "horovod" else 0):
        unfit = f"Horovod's collectives carry ZeRO-1 at most, not parallel.zero={settings.zero}"
    if settings.engine == "torch":
        return "torch"
    reason = unfit or available()
    if reason is None:
        return "horovod"
    if settings.engine == "horovod":
        raise ValueError(f"parallel.engine=horovod: {reason}; use parallel.engine=torch")
    log.info("parallel.engine=auto: torch.distributed carries the gradients, since %s", reason)
    return "torch"


def start_process_group(rank_info: RankInfo, device: torch.device, timeout: timedelta) -> None:
    """The torch process group every multi-rank run has: control values and checkpoints use it under Horovod too."""
    if dist.is_initialized():
        return
    gpu = device.type == "cuda"
    dist.init_process_group(
        GPU_BACKENDS if gpu else "gloo",
        init_method="env://",
        rank=rank_info.rank,
        world_size=rank_info.world_size,
        timeout=timeout,
        device_id=device if gpu else None,  # else NCCL guesses this rank's GPU from its rank
    )


def build_strategy(
    settings: ParallelSettings,
    rank_info: RankInfo,
    device: torch.device,
    clip_norm: float | None = None,
    timeout: timedelta = timedelta(minutes=5),
) -> MeshStrategy:
    """The strategy `settings` ask for, with its collectives formed. Collective; ValueError names what does not fit."""
    mesh = resolve_mesh(rank_info.world_size, dp=settings.dp, cp=settings.cp, pp=settings.pp, tp=settings.tp)
    engine = choose_engine(settings, mesh)
    problems = strategy_problems(asdict(settings), asdict(mesh), engine, device.type)
    if problems:
        raise ValueError("; ".join(problems))
    for note in strategy_notes(asdict(settings), asdict(mesh), engine, device.type) if rank_info.rank == 0 else ():
        log.warning("%s", note)
    if engine == "horovod":
        start_horovod(rank_info.rank, rank_info.world_size)
    if mesh.world > 1:
        start_process_group(rank_info, device, timeout)
    replicas, shard = shard_groups(mesh, settings.shard)
    axes = device_axes(mesh, replicas, shard, device) if mesh.world > 1 else None
    axis = batch_axis(settings, mesh, engine, device, axes, rank_info)
    if axes is None or mesh.pp * mesh.cp * mesh.tp == 1:
        layout = Layout(settings, rank_info.rank)
    else:
        scope = partial(autocast, settings.precision, device)
        layout = MeshLayout(settings, rank_info.rank, mesh, axes, device, scope)
    return MeshStrategy(settings, mesh, rank_info.rank, device, clip_norm, axis, layout)


def device_axes(mesh: Mesh, replicas: int, shard: int, device: torch.device) -> DeviceMesh:
    """torch's mesh of the same world, slowest axis first; dp is two axes under hybrid sharding."""
    if replicas > 1:
        sizes, names = (mesh.pp, replicas, shard, mesh.cp, mesh.tp), ("pp", "replicate", "shard", "cp", "tp")
    else:
        sizes, names = mesh.shape, AXES  # type: ignore[assignment]
    kind = "cpu" if device.type == "meta" else device.type  # meta: built to be looked at, never run
    return init_device_mesh(kind, sizes, mesh_dim_names=names)


def batch_mesh(axes: DeviceMesh, mesh: Mesh) -> DeviceMesh:
    """The axes gradients are combined over: (replicate, shard), dp, or dp and cp as one."""
    names = axes.mesh_dim_names or ()
    if "shard" in names:
        return axes["replicate", "shard"]
    return axes["dp", "cp"]._flatten("batch") if mesh.cp > 1 else axes["dp"]


def batch_axis(
    settings: ParallelSettings,
    mesh: Mesh,
    engine: str,
    device: torch.device,
    axes: DeviceMesh | None,
    rank_info: RankInfo,
) -> DataAxis:
    size = mesh.dp * mesh.cp
    if axes is None:
        return NoAxis()
    if engine == "horovod":
        return (
            HorovodZero1(axes["dp"], settings.bucket_bytes)
            if settings.zero
            else HorovodRing(size, settings.bucket_bytes)
        )
    name = f"torch-{device_backend(device)}"
    if size == 1:
        return NoAxis(name)
    batch = batch_mesh(axes, mesh)
    if settings.zero:
        whole = axes["replicate", "shard"]._flatten("batch") if batch.ndim == 2 else batch
        return Zero(
            settings.zero,
            batch,
            whole.get_group(),
            offload=settings.offload,
            precision=settings.precision,
            bucket_bytes=settings.bucket_bytes,
            device=device,
            split_backward=mesh.pp > 1 and settings.schedule == "zero-bubble",
        )
    hosts: Transport | None = None
    if mesh.pp * mesh.tp * mesh.cp == 1 and device.type == "cpu":
        hosts = host_groups(rank_info.rank, rank_info.world_size, rank_info.local_rank, rank_info.local_size)
    return TorchRing(size, batch.get_group(), settings.bucket_bytes, mesh.pp == 1, name, transport=hosts)
