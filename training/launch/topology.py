"""Ranks over hosts, and the environment of each rank. Pure functions of plain values."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, Literal, TypeAlias

from sparkring.conf.plain_text import count_of
from sparkring.conf.rank_info import RankInfo

Role: TypeAlias = Literal["rank", "server"]


@dataclass(frozen=True)
class Child:
    """A process that an agent runs: a rank, or a server next to the ranks."""

    role: Role
    index: int  # the rank, or the number of the server

    def __str__(self) -> str:
        return f"{self.role} {self.index}"


@dataclass(frozen=True)
class AgentInfo:
    """One agent, which can run one rank."""

    name: str
    index: int  # Spark's partition id, or 0..n-1 on one machine
    host_key: str  # opaque: agents with the same key share memory and loopback
    address: str  # by which the other hosts reach this one
    interface: str  # that has this address
    store_port: int  # of a listening socket for torch's store, in case rank 0 runs here
    proxy_port: int  # of Horovod's rendezvous on this host's loopback
    gpus: tuple[str, ...] = ()
    proxy_address: str = field(default="127.0.0.1", repr=False)  # of Horovod's rendezvous, with its token


@dataclass(frozen=True)
class Rendezvous:
    """What all ranks of one attempt share."""

    run_id: str
    attempt: int
    master: AgentInfo  # of rank 0, which serves torch's store
    timeout_s: float  # of a collective


def check_world(world: int, name: str = "world") -> None:
    """Raise ValueError where `world` is not a number of ranks."""
    if not isinstance(world, int) or world < 1:
        raise ValueError(f"{name} = {world}: a whole number of ranks, at least 1")


def choose_agents(agents: list[AgentInfo], world: int) -> list[AgentInfo]:
    """Choose `world` agents, in rank order. Fullest hosts first, so that the ring crosses the fewest cables."""
    if world > len(agents):
        raise ValueError(f"world = {world}: the agents are for {count_of(len(agents), 'rank')} only")
    by_host: dict[str, list[AgentInfo]] = {}
    for agent in sorted(agents, key=lambda agent: agent.index):
        by_host.setdefault(agent.host_key, []).append(agent)
    hosts = sorted(by_host.values(), key=lambda group: (-len(group), group[0].index))
    return [agent for group in hosts for agent in group][:world]


def assign_ranks(host_keys: list[str]) -> list[RankInfo]:
    """Assign rank numbers to agents; agents of one host follow each other in `host_keys`."""
    local_sizes = Counter(host_keys)  # in order of appearance
    nodes = {host: node for node, host in enumerate(local_sizes)}
    cross_sizes: Counter[int] = Counter()  # by local rank: hosts that have it
    started: Counter[str] = Counter()
    local_and_cross = []
    for host in host_keys:
        local = started[host]
        local_and_cross.append((local, cross_sizes[local]))
        cross_sizes[local] += 1
        started[host] += 1
    return [
        RankInfo(
            rank=rank,
            world_size=len(host_keys),
            local_rank=local,
            local_size=local_sizes[host],
            node_rank=nodes[host],
            node_count=len(nodes),
            cross_rank=cross,
            cross_size=cross_sizes[local],
        )
        for rank, (host, (local, cross)) in enumerate(zip(host_keys, local_and_cross, strict=True))
    ]


def reach_plan(count: int, most: int) -> list[list[int]]:
    """Plan which hosts each of `count` hosts tries to reach.

    All others, or `most` of them where there are more. They are spread evenly and the next host is among them, so every
    host is tried by as many, and the plan is connected.
    """
    few = min(most, count - 1)
    offsets = [1 + step * (count - 1) // few for step in range(few)]
    return [[(host + offset) % count for offset in offsets] for host in range(count)]


def rank_environment(
    rank_info: RankInfo, agent: AgentInfo, rendezvous: Rendezvous, devices: tuple[str, ...]
) -> dict[str, str]:
    """Make the standard variables: what runs under torchrun or horovodrun runs under these.

    `torch.cuda.set_device(LOCAL_RANK)` is right whatever is visible: where a rank sees its own GPUs only, LOCAL_RANK is
    0, as under `torchrun --virtual-local-rank`.
    """
    numbers: dict[str, Any] = {
        "RANK": rank_info.rank,
        "WORLD_SIZE": rank_info.world_size,
        "LOCAL_RANK": 0 if devices and devices == agent.gpus else rank_info.local_rank,
        "LOCAL_WORLD_SIZE": rank_info.local_size,
        "GROUP_RANK": rank_info.node_rank,
        "GROUP_WORLD_SIZE": rank_info.node_count,
        "ROLE_RANK": rank_info.rank,
        "ROLE_WORLD_SIZE": rank_info.world_size,
        "ROLE_NAME": "default",
        "MASTER_ADDR": rendezvous.master.address,
        "MASTER_PORT": rendezvous.master.store_port,
        # The store is opened by us on the chosen interface only; torch would open it on all of them.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RUN_ID": rendezvous.run_id,
        "TORCHELASTIC_RESTART_COUNT": rendezvous.attempt - 1,
        "TORCHELASTIC_MAX_RESTARTS": max(0, rendezvous.attempt - 1),  # recovery sets it in the job's env
        "GLOO_SOCKET_IFNAME": agent.interface,
        "NCCL_SOCKET_IFNAME": f"={agent.interface}",
        "TP_SOCKET_IFNAME": agent.interface,
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_RANK": rank_info.rank,
        "HOROVOD_SIZE": rank_info.world_size,
        "HOROVOD_LOCAL_RANK": rank_info.local_rank,
        "HOROVOD_LOCAL_SIZE": rank_info.local_size,
        "HOROVOD_CROSS_RANK": rank_info.cross_rank,
        "HOROVOD_CROSS_SIZE": rank_info.cross_size,
        "HOROVOD_HOSTNAME": agent.host_key,
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": agent.proxy_address,
        "HOROVOD_GLOO_RENDEZVOUS_PORT": agent.proxy_port,
        "HOROVOD_GLOO_IFACE": agent.interface,
        "HOROVOD_GLOO_TIMEOUT_SECONDS": max(1, round(rendezvous.timeout_s)),
    }
    environment = {name: str(value) for name, value in numbers.items()}
    if devices:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
    return environment


def visible_devices(agent: AgentInfo, neighbors: list[AgentInfo], which: str) -> tuple[str, ...]:
    """Choose the GPU addresses a rank may see: its own, or those of all ranks of its host.

    Of all ranks' GPUs the first of each comes first, in local-rank order, then what further ones they have.
    """
    if which == "own":
        return agent.gpus
    beside = [other.gpus for other in neighbors if other.host_key == agent.host_key]
    return tuple(gpu for each in zip_longest(*beside) for gpu in each if gpu is not None)
