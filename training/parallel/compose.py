"""Compose a strategy: what is wrapped around what.

The order, outermost last: context (attention) -> tensor (DTensors) -> pipeline cut -> activation checkpointing ->
batch axes (ring, ZeRO) -> optimizer. ZeRO shards what tensor parallelism has left on the rank, a pipeline's
stages are sharded one by one, and the optimizer sees only what the rank owns.
"""

from __future__ import annotations

import logging
from datetime import timedelta

import torch

from sparkring.conf.blocks.parallel import ParallelConfig
from sparkring.conf.rank_info import RankInfo
from sparkring.conf.rules.rule import find_notes, find_problems
from sparkring.conf.rules.strategies import LAYOUT
from sparkring.training.parallel.averaging.hosts import HostCollectives, find_hosts
from sparkring.training.parallel.averaging.links import Links
from sparkring.training.parallel.averaging.strategy import AveragedStrategy
from sparkring.training.parallel.data_parallel.base import DataParallel, SingleProcess
from sparkring.training.parallel.data_parallel.ddp import GroupTransport, TorchRing, host_transport
from sparkring.training.parallel.data_parallel.horovod_ring import HorovodCollectives, HorovodRing, start_horovod
from sparkring.training.parallel.data_parallel.horovod_zero import HorovodZero1
from sparkring.training.parallel.data_parallel.zero import TorchZero
from sparkring.training.parallel.engine import choose_engine
from sparkring.training.parallel.local import LocalStep
from sparkring.training.parallel.mesh import Mesh, layout_of, resolve_mesh
from sparkring.training.parallel.model_parallel.placement import make_placement
from sparkring.training.parallel.process_groups import (
    RankContext,
    device_backend,
    make_device_mesh,
    start_process_group,
)
from sparkring.training.parallel.servers.backup import BackupStrategy, usable_backup
from sparkring.training.parallel.servers.link import ServerLink, ServersAt
from sparkring.training.parallel.servers.strategy import ServersStrategy
from sparkring.training.parallel.sparse import TableSettings
from sparkring.training.parallel.step import MeshStrategy
from sparkring.training.parallel.strategy import Strategy
from sparkring.training.servers.client import Client

log = logging.getLogger(__name__)
TIMEOUT = timedelta(minutes=5)


def build_strategy(
    config: ParallelConfig,
    info: RankInfo,
    device: torch.device,
    clip_norm: float | None = None,
    timeout: timedelta = TIMEOUT,
    ema: float | None = None,
    tables: TableSettings | None = None,
    servers: ServersAt | None = None,
) -> Strategy:
    """Build the strategy and form its collectives. Collective; ValueError on misfits.

    Args:
        config: block `parallel` of the recipe.
        info: this process among all.
        device: device of the parameters.
        clip_norm: largest global norm of the gradients; None disables clipping.
        timeout: timeout of a collective.
        ema: decay of the average of the weights; None disables averaging.
        tables: settings of the model's SparseEmbeddings; None for defaults.
        servers: addresses and secret of the servers, if parallel.servers has any.
    """
    mesh = resolve_mesh(config, info.world_size)
    engine = choose_engine(config, mesh, device.type)
    layout = layout_of(config, mesh, device.type)
    if problems := find_problems(LAYOUT, layout):
        raise ValueError("; ".join(problems))
    for note in find_notes(LAYOUT, layout) if info.rank == 0 else ():
        log.warning("%s", note)
    if config.servers.per_host:
        return make_served(config, info, device, clip_norm, timeout, tables or TableSettings(), servers)
    if engine == "horovod":
        start_horovod(info.rank, info.world_size)
    device_mesh = None
    if mesh.world > 1:
        start_process_group(info, device, timeout)
        device_mesh = make_device_mesh(mesh, config.shard, device)
    context = RankContext(config, mesh, info, device, device_mesh, timeout)
    if config.averaging.kind != "none" and mesh.dp > 1:
        assert ema is None, "refused when a recipe is loaded (conf/rules/recipe.py)"
        if replicas := make_replicas(context, engine):
            return AveragedStrategy(context, replicas[0], make_placement(context), clip_norm, replicas[1])
    data_parallel = make_data_parallel(context, engine)
    return MeshStrategy(LocalStep(context, data_parallel, make_placement(context), clip_norm, ema, tables))


def make_served(
    config: ParallelConfig,
    info: RankInfo,
    device: torch.device,
    clip_norm: float | None,
    timeout: timedelta,
    tables: TableSettings,
    servers: ServersAt | None,
) -> ServersStrategy:
    """Make the strategy of a rank whose weights are on servers. ValueError where no server was started.

    Args:
        config: see build_strategy's `config`.
        info: this process among all.
        device: device of the parameters.
        clip_norm: see build_strategy's `clip_norm`.
        timeout: timeout of a request.
        tables: settings of the model's SparseEmbeddings.
        servers: addresses and secret of the servers.
    """
    if servers is None or not servers.addresses:
        raise ValueError(
            f"parallel.servers.per_host = {config.servers.per_host}: no server was started; `sparkring run` starts them"
        )
    client = Client(servers.addresses, servers.secret, info.rank, info.world_size, timeout.total_seconds())
    alone = RankContext(config, Mesh(), RankInfo(), device)
    link = ServerLink(client, info.rank, info.world_size)
    kind = BackupStrategy if usable_backup(config.servers.backup, info.world_size) else ServersStrategy
    return kind(alone, make_placement(alone), clip_norm, link, tables)


def make_replicas(context: RankContext, engine: str) -> tuple[DataParallel, Links] | None:
    """Make the gradient engine within a replica and the links between replicas; None for one. Collective."""
    config = context.config
    alone = SingleProcess(engine_name(context, engine))
    if config.averaging.groups == "host":
        hosts = find_hosts(context.info)
        if len(hosts) == 1:
            log.warning("parallel.averaging.groups=host: has no effect, since all ranks are on one host")
            return None
        between = HostCollectives(hosts, context.rank)
        return TorchRing(context, config.bucket_bytes, group=between.inside), Links(between, config.bucket_bytes)
    if engine == "horovod":
        return alone, Links(HorovodCollectives(context.rank, context.mesh.dp), config.bucket_bytes)
    return alone, Links(GroupTransport(context.batch_mesh().get_group()), config.bucket_bytes)


def engine_name(context: RankContext, engine: str) -> str:
    return "horovod" if engine == "horovod" else f"torch-{device_backend(context.device)}"


def make_data_parallel(context: RankContext, engine: str) -> DataParallel:
    """Make the engine that combines gradients over the batch axes."""
    config, mesh = context.config, context.mesh
    if mesh.world == 1:
        return SingleProcess()
    if engine == "horovod":
        if config.zero:
            return HorovodZero1(context.axis("dp"), config.bucket_bytes)
        return HorovodRing(context.rank, mesh.dp, config.bucket_bytes, config.compress)
    if mesh.dp * mesh.cp == 1:
        return SingleProcess(engine_name(context, engine))
    if config.zero:
        return TorchZero(context)
    dense = config.compress.codec == "none"  # a codec's exchange has one level
    two_levels = dense and mesh.pp * mesh.tp * mesh.cp == 1 and context.device.type == "cpu"
    return TorchRing(context, config.bucket_bytes, host_transport(context.info) if two_levels else None)
