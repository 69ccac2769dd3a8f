"""Which library carries a process group's collectives on a device, and how NCCL is ended after a failure.

A group made for GPUs has two backends, "cpu:gloo,cuda:nccl"; `torch.distributed.get_backend` then gives that whole
string, so a comparison with "nccl" or "gloo" would never hold.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist

GPU_BACKENDS = "cpu:gloo,cuda:nccl"


def backend_of(configuration: str, device_type: str) -> str:
    """The backend for `device_type` in torch's notation: `gloo`, or `cpu:gloo,cuda:nccl`.

    Raises ValueError where the group has none for the device.
    """
    if ":" not in configuration:
        return configuration
    backends = dict(pair.split(":", 1) for pair in configuration.split(","))
    if device_type not in backends:
        raise ValueError(f"the process group ({configuration}) has no backend for {device_type!r} tensors")
    return backends[device_type]


def device_backend(device: torch.device, group: dist.ProcessGroup | None = None) -> str:
    """`gloo` or `nccl`: what carries collectives on tensors of `device` in `group` (None: the world)."""
    return backend_of(dist.get_backend_config(group), "cpu" if device.type == "meta" else device.type)


def abort_process_groups() -> None:
    """Abort NCCL in every group. Gloo's abort does not return while a peer is dead, so its groups end with the process.

    torch's `_abort_process_group` would abort every backend of a group, Gloo's too. Checked against torch 2.13.
    """
    found: list[Any] = []
    for group in list(dist.distributed_c10d._world.pg_map):
        with suppress(RuntimeError):  # no backend for CUDA tensors
            backend = group._get_backend(torch.device("cuda"))
            if "nccl" in backend.name().lower():
                found.append(backend)
    if not found:
        return
    found[0]._group_start()  # aborts of several communicators must not wait for one another (pytorch#119797)
    for backend in found:
        backend.abort()
    found[0]._group_end()
