"""Who sits where: ranks over hosts, and the environment each rank is given. Pure functions of plain values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate, zip_longest
from typing import Any

from conf.rank_info import RankInfo


@dataclass(frozen=True)
class Seat:
    """One agent's offer of a place to run a rank."""

    agent: str
    index: int  # Spark's partition id, or 0..n-1 on one machine
    host: str  # opaque key of the host: agents with the same key share memory and loopback
    address: str  # by which the other hosts reach this one
    interface: str  # that carries this address
    store_port: int  # a listening socket held open for torch's store, should rank 0 sit here
    shim_port: int  # Horovod's rendezvous on this host's loopback
    gpus: tuple[str, ...] = ()
    pid: int = 0
    shim_address: str = field(default="127.0.0.1", repr=False)  # the shim's address, with its token

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Seat:
        return cls(**{**values, "gpus": tuple(values["gpus"])})


def check_world(world: int, name: str = "world") -> None:
    if not isinstance(world, int) or world < 1:
        raise ValueError(f"{name} = {world}: a whole number of ranks, at least 1")


def assign_ranks(hosts: list[str]) -> list[RankInfo]:
    """Positions in the order of `hosts` (one entry per agent). Ranks are contiguous on a host, hosts in order of
    appearance."""
    sizes = Counter(hosts)  # in order of appearance
    nodes = {host: node for node, host in enumerate(sizes)}
    first = dict(zip(sizes, accumulate(sizes.values(), initial=0), strict=False))
    holders: Counter[int] = Counter()  # local rank -> hosts that have it
    cross: dict[tuple[str, int], int] = {}  # (host, local rank) -> how many of those hosts come before
    for host, size in sizes.items():
        for local in range(size):
            cross[host, local] = holders[local]
            holders[local] += 1
    taken: Counter[str] = Counter()
    infos = []
    for host in hosts:
        local = taken[host]
        taken[host] += 1
        infos.append(
            RankInfo(
                rank=first[host] + local,
                world_size=len(hosts),
                local_rank=local,
                local_size=sizes[host],
                node_rank=nodes[host],
                node_count=len(sizes),
                cross_rank=cross[host, local],
                cross_size=holders[local],
            )
        )
    return infos


def choose_seats(seats: list[Seat], world: int) -> list[Seat]:
    """`world` of the seats in rank order. Fullest hosts first, so that the ring crosses as few cables as it can."""
    if world > len(seats):
        raise ValueError(f"world = {world}: there are seats for {len(seats)} ranks only")
    by_host: dict[str, list[Seat]] = {}
    for seat in sorted(seats, key=lambda s: s.index):
        by_host.setdefault(seat.host, []).append(seat)
    hosts = sorted(by_host.values(), key=lambda group: (-len(group), group[0].index))
    return [seat for group in hosts for seat in group][:world]


def rank_environment(
    rank_info: RankInfo,
    seat: Seat,
    master: Seat,
    attempt: int,
    timeout_s: float,
    run_id: str,
    devices: tuple[str, ...],
) -> dict[str, str]:
    """The standard variables: anything that runs under torchrun or horovodrun runs under these.

    `torch.cuda.set_device(LOCAL_RANK)` is right whatever is visible: where a rank sees its own GPUs only, LOCAL_RANK is
    0, as under `torchrun --virtual-local-rank`.
    """
    numbers: dict[str, Any] = {
        "RANK": rank_info.rank,
        "WORLD_SIZE": rank_info.world_size,
        "LOCAL_RANK": 0 if devices and devices == seat.gpus else rank_info.local_rank,
        "LOCAL_WORLD_SIZE": rank_info.local_size,
        "GROUP_RANK": rank_info.node_rank,
        "GROUP_WORLD_SIZE": rank_info.node_count,
        "ROLE_RANK": rank_info.rank,
        "ROLE_WORLD_SIZE": rank_info.world_size,
        "ROLE_NAME": "default",
        "MASTER_ADDR": master.address,
        "MASTER_PORT": master.store_port,
        # The store is opened by us on the chosen interface only; torch would open it on all of them.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RUN_ID": run_id,
        "TORCHELASTIC_RESTART_COUNT": attempt - 1,
        "TORCHELASTIC_MAX_RESTARTS": max(0, attempt - 1),  # whoever plans more attempts says so in the job's env
        "GLOO_SOCKET_IFNAME": seat.interface,
        "NCCL_SOCKET_IFNAME": f"={seat.interface}",
        "TP_SOCKET_IFNAME": seat.interface,
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_RANK": rank_info.rank,
        "HOROVOD_SIZE": rank_info.world_size,
        "HOROVOD_LOCAL_RANK": rank_info.local_rank,
        "HOROVOD_LOCAL_SIZE": rank_info.local_size,
        "HOROVOD_CROSS_RANK": rank_info.cross_rank,
        "HOROVOD_CROSS_SIZE": rank_info.cross_size,
        "HOROVOD_HOSTNAME": seat.host,
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": seat.shim_address,
        "HOROVOD_GLOO_RENDEZVOUS_PORT": seat.shim_port,
        "HOROVOD_GLOO_IFACE": seat.interface,
        "HOROVOD_GLOO_TIMEOUT_SECONDS": max(1, round(timeout_s)),
    }
    environment = {name: str(value) for name, value in numbers.items()}
    if devices:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
    return environment


def visible_devices(seat: Seat, neighbours: list[Seat], which: str) -> tuple[str, ...]:
    """GPU addresses a rank may see: its own, or all of its host's ranks': the first of each in local-rank order, then
    what further ones they have."""
    if which == "own":
        return seat.gpus
    beside = [other.gpus for other in neighbours if other.host == seat.host]
    return tuple(gpu for each in zip_longest(*beside) for gpu in each if gpu is not None)
