"""Which host of a job this is, by the variables that torchrun, srun, mpirun, Kubeflow or a person has set.

`find_placement` is a pure function of them. It raises ValueError with the variable, its value and what to do.

| started by | number of this host | number of hosts | address of the first host | port |
|---|---|---|---|---|
| torchrun | GROUP_RANK | GROUP_WORLD_SIZE | MASTER_ADDR | MASTER_PORT + 1 |
| a person | NODE_RANK | NNODES | MASTER_ADDR | MASTER_PORT |
| Kubeflow TrainJob | PET_NODE_RANK | PET_NNODES | PET_MASTER_ADDR | PET_MASTER_PORT |
| Kubeflow PyTorchJob | RANK | WORLD_SIZE | MASTER_ADDR | MASTER_PORT |
| srun | SLURM_NODEID | SLURM_STEP_NUM_NODES | first of SLURM_STEP_NODELIST | by SLURM_JOB_ID |
| Open MPI | OMPI_COMM_WORLD_RANK | OMPI_COMM_WORLD_SIZE | MASTER_ADDR | MASTER_PORT |
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from sparkring.conf.plain_text import count_of

DEFAULT_PORT = 29500  # torch's
SLURM_PORTS = range(20000, 30000)  # below those that Linux gives to connections
Variables = Mapping[str, str]


@dataclass(frozen=True)
class Placement:
    """One host among those that the same command was started on."""

    started_by: str
    rank: int = 0  # of this host
    count: int = 1  # hosts
    address: str = "127.0.0.1"  # of the driver: of host 0
    port: int = 0  # that it listens on; 0: any free one
    names: tuple[str, ...] = ()  # of the hosts by rank, where the scheduler says them
    rank_key: str = "NODE_RANK"  # the variable that numbers hosts, for messages

    def name_of(self, rank: int) -> str:
        """Name a host for people."""
        return f"{self.rank_key}={rank}" + (f" ({self.names[rank]})" if rank < len(self.names) else "")


ALONE = Placement("nothing")


def find_placement(env: Variables) -> Placement:
    """Find this host's place among the hosts of the job; ALONE where no variable says that there are others."""
    if "TORCHELASTIC_RUN_ID" in env:
        return _checked(_of_torchrun(env), env)
    if key := next((key for key in ("NODE_RANK", "PET_NODE_RANK") if key in env), None):
        return _checked(_of_variables(env, key), env)
    if "SLURM_STEP_ID" in env and "SLURM_NODEID" in env:
        return _checked(_of_slurm(env), env)
    if "OMPI_COMM_WORLD_SIZE" in env:
        return _checked(_of_mpi(env), env)
    if {"RANK", "MASTER_ADDR"} <= env.keys():  # a Kubeflow PyTorchJob numbers its pods so
        return _checked(_of_variables(env, "RANK"), env)
    return ALONE


def overlooked_hosts(env: Variables) -> str:
    """Warn of a SLURM job's other hosts where srun has not started this command; '' where nothing is wrong."""
    nodes = env.get("SLURM_JOB_NUM_NODES") or env.get("SLURM_NNODES") or "1"
    if find_placement(env) is not ALONE or not nodes.isdecimal() or int(nodes) < 2:
        return ""
    return (
        f"SLURM has given this job {nodes} hosts, and this command runs on one of them; start it on all by "
        "`srun --ntasks-per-node=1`, or set launch.on=spark where a Spark cluster runs on them"
    )


def _of_torchrun(env: Variables) -> Placement:
    _once_per_host(env, "LOCAL_RANK", "torchrun --nproc-per-node=1")
    count = _number(env, "GROUP_WORLD_SIZE", 1)
    # torchrun's own store listens on MASTER_PORT for as long as it runs.
    return Placement(
        "torchrun", _number(env, "GROUP_RANK"), count, _master(env, count), _port(env) + 1, rank_key="GROUP_RANK"
    )


def _of_variables(env: Variables, key: str) -> Placement:
    counts = {"NODE_RANK": ("NNODES", "WORLD_SIZE"), "PET_NODE_RANK": ("PET_NNODES",), "RANK": ("WORLD_SIZE",)}[key]
    found = next((name for name in counts if name in env), None)
    if found is None:
        raise ValueError(f"{key} = {env[key]!r}: {counts[0]}, the number of hosts, is not set; set it on every host")
    count = _number(env, found)
    prefix = "PET_" if key.startswith("PET_") else ""
    return Placement(
        "variables", _number(env, key), count, _master(env, count, prefix), _port(env, prefix), rank_key=key
    )


def _of_slurm(env: Variables) -> Placement:
    _once_per_host(env, "SLURM_LOCALID", "srun --ntasks-per-node=1")
    nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST") or ""
    names = tuple(expand_nodes(nodes)) if nodes else ()
    count = _number(env, next(filter(env.__contains__, ("SLURM_STEP_NUM_NODES", "SLURM_NNODES")), ""), len(names) or 1)
    address = env.get("MASTER_ADDR") or next(iter(names), "") or env.get("SLURM_LAUNCH_NODE_IPADDR", "")
    if not address and count > 1:
        raise ValueError(
            "SLURM_STEP_NODELIST, SLURM_JOB_NODELIST, SLURM_LAUNCH_NODE_IPADDR: none is set, so the first host is not "
            "known; start this by srun, or set MASTER_ADDR"
        )
    job = _number(env, "SLURM_JOB_ID", 0) + 7 * (_number(env, "SLURM_STEP_ID") % 1000)
    port = _port(env) if "MASTER_PORT" in env else SLURM_PORTS[job % len(SLURM_PORTS)]
    rank = _number(env, "SLURM_NODEID")
    return Placement("srun", rank, count, address or ALONE.address, port, names, "SLURM_NODEID")


def _of_mpi(env: Variables) -> Placement:
    _once_per_host(env, "OMPI_COMM_WORLD_LOCAL_RANK", "mpirun --map-by ppr:1:node")
    count, key = _number(env, "OMPI_COMM_WORLD_SIZE"), "OMPI_COMM_WORLD_RANK"
    return Placement("mpirun", _number(env, key), count, _master(env, count), _port(env), rank_key=key)


def _checked(found: Placement, env: Variables) -> Placement:
    if not 0 <= found.rank < found.count:
        raise ValueError(
            f"{found.rank_key} = {env.get(found.rank_key)!r}: the job is of {count_of(found.count, 'host')}, numbered "
            "from 0; give each a number of its own below that"
        )
    return found


def _once_per_host(env: Variables, key: str, command: str) -> None:
    if _number(env, key, 0) > 0:
        raise ValueError(
            f"{key} = {env[key]!r}: `sparkring train` is started once on each host, and starts the host's ranks "
            f"itself (launch.ranks_per_host); start it by `{command}`"
        )


def _master(env: Variables, count: int, prefix: str = "") -> str:
    key = f"{prefix}MASTER_ADDR"
    if not env.get(key) and count > 1:
        raise ValueError(
            f"{key} is not set: {count_of(count, 'host needs')} the address of the first one; set it on every host"
        )
    return env.get(key) or ALONE.address


def _port(env: Variables, prefix: str = "") -> int:
    port = _number(env, f"{prefix}MASTER_PORT", DEFAULT_PORT)
    if not 1 <= port < 65535:
        raise ValueError(f"{prefix}MASTER_PORT = {port}: a port from 1 to 65534")
    return port


def _number(env: Variables, key: str, default: int | None = None) -> int:
    text = env.get(key, "")
    if not text and default is not None:
        return default
    text = text.rpartition(":")[2]  # torchrun's 2:4, from 2 hosts to 4
    if not text.isdecimal():
        raise ValueError(f"{key} = {env.get(key)!r}: must be a whole number, 0 or more; set it on every host")
    return int(text)


def expand_nodes(text: str) -> list[str]:
    """List the hosts of SLURM's short form: `a[01-03,7],b` is a01, a02, a03, a7 and b."""
    found: list[str] = []
    for name in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", text):
        found += _expand(name)
    return found


def _expand(name: str) -> list[str]:
    before, bracket, rest = name.partition("[")
    if not bracket:
        return [name]
    inside, _, after = rest.partition("]")
    numbers: list[str] = []
    for part in inside.split(","):
        first, _, last = part.partition("-")
        numbers += [str(n).zfill(len(first)) for n in range(int(first), int(last or first) + 1)]
    return [f"{before}{number}{tail}" for number in numbers for tail in _expand(after)]
