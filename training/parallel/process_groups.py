"""Form torch's process groups, look up their backends, abort them on failure.

A group made for GPUs has two backends, "cpu:gloo,cuda:nccl"; `torch.distributed.get_backend` then returns that whole
string, so a comparison with "nccl" or "gloo" would never hold.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from sparkring.conf.blocks.parallel import ParallelConfig
from sparkring.conf.rank_info import RankInfo
from sparkring.training.models.torch_private import abort_together, flattened, nccl_backends, set_group_timeout
from sparkring.training.parallel.mesh import AXES, Coordinates, Mesh, shard_groups

GPU_BACKENDS = "cpu:gloo,cuda:nccl"


@dataclass(frozen=True)
class RankContext:
    """This rank: its position on the mesh, its device, and how steps are configured."""

    config: ParallelConfig
    mesh: Mesh
    info: RankInfo
    device: torch.device
    device_mesh: DeviceMesh | None = None  # torch's mesh of the same world; None in a world of one process
    timeout: timedelta = timedelta(minutes=5)  # of a collective

    @property
    def rank(self) -> int:
        return self.info.rank

    @property
    def at(self) -> Coordinates:
        return self.mesh.coordinates(self.info.rank)

    def axis(self, name: str) -> DeviceMesh:
        """Return the ranks that differ from this one on one axis only."""
        assert self.device_mesh is not None
        return self.device_mesh[name]

    def batch_mesh(self) -> DeviceMesh:
        """Return the axes that gradients are combined over: (replicate, shard), dp, or dp and cp as one."""
        assert self.device_mesh is not None
        if "shard" in (self.device_mesh.mesh_dim_names or ()):
            return self.device_mesh["replicate", "shard"]
        return flattened(self.device_mesh["dp", "cp"]) if self.mesh.cp > 1 else self.device_mesh["dp"]


def start_process_group(info: RankInfo, device: torch.device, timeout: timedelta) -> None:
    """Form the torch process group of the world; control values and checkpoints use it under Horovod too.

    Groups that are formed later have this `timeout`, too.
    """
    if dist.is_initialized():
        return
    gpu = device.type == "cuda"
    set_group_timeout(timeout)
    dist.init_process_group(
        GPU_BACKENDS if gpu else "gloo",
        init_method="env://",
        rank=info.rank,
        world_size=info.world_size,
        timeout=timeout,
        device_id=device if gpu else None,  # else NCCL guesses this rank's GPU from its rank
    )


def make_device_mesh(mesh: Mesh, shard: int, device: torch.device) -> DeviceMesh:
    """Create torch's mesh of the world, slowest axis first; dp is two axes under hybrid sharding.

    Args:
        mesh: sizes of the axes.
        shard: ranks per ZeRO shard group; 0 for all batch ranks.
        device: device of the parameters; for the meta device (inspected, never run) the groups are the CPU's.
    """
    replicas, shard = shard_groups(mesh, shard)
    sizes: tuple[int, ...] = mesh.shape
    names: tuple[str, ...] = AXES
    if replicas > 1:
        sizes, names = (mesh.pp, replicas, shard, mesh.cp, mesh.tp), ("pp", "replicate", "shard", "cp", "tp")
    return init_device_mesh("cpu" if device.type == "meta" else device.type, sizes, mesh_dim_names=names)


def backend_of(configuration: str, device_type: str) -> str:
    """Return the backend for `device_type` in torch's notation: `gloo`, or `cpu:gloo,cuda:nccl`.

    Raises ValueError if the group has none for the device.
    """
    if ":" not in configuration:
        return configuration
    backends = dict(pair.split(":", 1) for pair in configuration.split(","))
    if device_type not in backends:
        raise ValueError(f"the process group ({configuration}) has no backend for {device_type!r} tensors")
    return backends[device_type]


def device_backend(device: torch.device, group: dist.ProcessGroup | None = None) -> str:
    """Return the backend, `gloo` or `nccl`, for tensors of `device` in `group` (None: the world)."""
    return backend_of(dist.get_backend_config(group), "cpu" if device.type == "meta" else device.type)


def abort_process_groups() -> None:
    """Abort NCCL in every group. Gloo's abort does not return while a peer is dead, so its groups end with the process.

    torch's `_abort_process_group` would abort every backend of a group, Gloo's too.
    """
    abort_together(nccl_backends())
