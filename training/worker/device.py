"""Choose the device of all ranks together, before they form a process group.

NCCL needs a GPU of its own for each rank ("Duplicate GPU detected" ends the job otherwise), and a group whose ranks are
on different device types cannot be formed. So ranks tell each other what they see, through torch's store, and all draw
the same conclusion.
"""

from __future__ import annotations

import json
import logging
import os
import socket
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from sparkring.conf.rank_info import RankInfo
from sparkring.training.waiting import waits_for_ranks

log = logging.getLogger(__name__)
NO_GPU = "train.device = 'cuda': torch sees no GPU on this host; use 'auto' or 'cpu'"
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")  # the machine, whatever its containers are called


@dataclass(frozen=True)
class SeenGpu:
    """The GPU that one rank would take."""

    host: str  # its name, for messages
    machine: str
    gpu: str | None  # its address, which MIG slices of one GPU share, as NCCL sees it; None: torch sees none


def see_gpu(local_rank: int) -> SeenGpu:
    """Check the GPU that this rank would take."""
    machine = BOOT_ID.read_text().strip() if BOOT_ID.exists() else socket.gethostname()
    gpu = None
    if torch.cuda.is_available():
        gpu = gpu_address(torch.cuda.get_device_properties(gpu_index(local_rank)))
    return SeenGpu(socket.gethostname(), machine, gpu)


def gpu_address(properties: Any) -> str:
    """Read what identifies a GPU on its machine: its PCI address, or its UUID from a torch that does not tell that."""
    names = ("pci_domain_id", "pci_bus_id", "pci_device_id")
    numbers = [getattr(properties, name, None) for name in names]
    return str(properties.uuid) if None in numbers else ":".join(f"{number:02x}" for number in numbers)


def gpu_index(local_rank: int) -> int:
    """Return the index of a rank's GPU among the visible ones: all on the host, or only Spark's assigned one."""
    return local_rank % torch.cuda.device_count()


def choose_device_type(wanted: str, seen: Sequence[SeenGpu]) -> tuple[str, str | None]:
    """Choose (`cpu` or `cuda`, reason why `auto` ignores existing GPUs).

    Args:
        wanted: value of `train.device`.
        seen: visible GPUs of each rank.

    Raises:
        ValueError: `cuda`, and a rank has no GPU, or none of its own.
    """
    if wanted == "cpu":
        return "cpu", None
    problem = gpu_problem(seen)
    if problem is None:
        return "cuda", None
    if wanted == "cuda":
        remedy = "set train.device=cpu or auto" if len(seen) == 1 else "set train.device=cpu, or a smaller launch.world"
        raise ValueError(f"train.device = 'cuda': {problem}; {remedy}")
    return "cpu", problem if any(rank.gpu for rank in seen) else None


def gpu_problem(seen: Sequence[SeenGpu]) -> str | None:
    """Describe the first rank without a GPU, or the first two on one; None if each has its own."""
    holders: dict[tuple[str, str], int] = {}
    for rank, mine in enumerate(seen):
        if mine.gpu is None:
            return f"torch sees no GPU for rank {rank} on {mine.host}"
        other = holders.setdefault((mine.machine, mine.gpu), rank)
        if other != rank:
            return f"ranks {other} and {rank} on {mine.host} would share GPU {mine.gpu}, and NCCL needs one for each"
    return None


def gpu_advice(seen: Sequence[SeenGpu]) -> str:
    """Return how many ranks would train on GPUs, where every rank sees one."""
    if not all(rank.gpu for rank in seen):
        return ""
    return f"; with launch.world={len({(rank.machine, rank.gpu) for rank in seen})} they would be on GPUs"


def pick_device(wanted: str, info: RankInfo, timeout: timedelta, together: bool = True) -> torch.device:
    """Pick this rank's device. Collective where `together` and `wanted` is not `cpu`.

    Args:
        wanted: value of `train.device`.
        info: this process among all.
        timeout: timeout for the answers of the other ranks.
        together: False if ranks form no group, as with parameter servers: each rank checks only itself.

    Raises:
        ValueError: as of `choose_device_type`.
    """
    seen = [see_gpu(info.local_rank)] if wanted != "cpu" else []
    if seen and together and info.world_size > 1:
        seen = exchange(seen[0], info, timeout)
    device_type, why = choose_device_type(wanted, seen)
    if device_type == "cpu":
        if why and info.rank == 0:
            log.warning("train.device=auto: all ranks are on the CPU, since %s%s", why, gpu_advice(seen))
        return torch.device("cpu")
    device = torch.device("cuda", gpu_index(info.local_rank))
    torch.cuda.set_device(device)
    torch.backends.cudnn.allow_tf32 = False  # "fp32" would be TF32 in convolutions alone; matrix products have it off
    return device


@waits_for_ranks
def exchange(mine: SeenGpu, info: RankInfo, timeout: timedelta) -> list[SeenGpu]:
    """Gather what all ranks see, by rank, through the store of the launch, before there is a group. Collective."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.PrefixStore("sparkring-device", dist.TCPStore(address, port, is_master=False, timeout=timeout))
    store.set(str(info.rank), json.dumps(asdict(mine)))
    return [SeenGpu(**json.loads(store.get(str(rank)))) for rank in range(info.world_size)]


def expected_device_type(wanted: str, world: int, is_here: bool) -> str:
    """Return the device type that ranks will have, as far as this machine knows, before any is started.

    Args:
        wanted: value of `train.device`.
        world: number of ranks.
        is_here: whether all ranks will be on this machine; if not, `auto` means the CPU.
    """
    if wanted != "auto":
        return wanted
    return "cuda" if is_here and torch.cuda.is_available() and torch.cuda.device_count() >= world else "cpu"
