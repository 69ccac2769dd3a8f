"""Facts that must be equal on all hosts: agents collect them, the driver compares."""

from __future__ import annotations

import glob
import ipaddress
import json
import os
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib import metadata

from sparkring.conf.code import code_digest

PACKAGES = ("torch", "horovod", "numpy", "pyarrow", "pandas", "petastorm", "pydantic", "cloudpickle")
MIN_DISK_BYTES = 1 << 30
# Four ranks in a /dev/shm of 1 MiB: Gloo took nothing of it, Horovod over Gloo 80 KiB.
SHM_BYTES_PER_RANK = 1 << 20
# NCCL shares at least 32 MiB per communicator (`ncclProxyOpsPool`) and 9 MiB per connection to a rank of the same host.
# NVIDIA starts containers with 1 GiB, eight ranks' share:
# https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting/runtime_and_mpi_issues.html#shared-memory
NCCL_SHM_BYTES_PER_RANK = 128 << 20
MAX_SKEW_S = 30.0


@dataclass(frozen=True)
class HostInfo:
    """One process's Python, packages and code, and the room on its host."""

    python: str  # major.minor
    executable: str
    packages: dict[str, str | None]  # version by name; None: not installed
    code: str | None  # digest of our source files; None: not compared
    disk_folder: str
    disk_bytes: int  # free there
    shm_bytes: int | None  # free in /dev/shm, where there is one
    gpus: int  # NVIDIA devices that its processes can open
    hostname: str
    hostname_address: str | None  # what the host's name resolves to on the host itself
    time_s: float  # its clock, since the epoch


def collect_host_info() -> HostInfo:
    return HostInfo(
        python=f"{sys.version_info[0]}.{sys.version_info[1]}",
        executable=sys.executable,
        packages={name: version_of(name) for name in PACKAGES},
        code=code_digest()[:12],
        disk_folder=tempfile.gettempdir(),
        disk_bytes=shutil.disk_usage(tempfile.gettempdir()).free,
        shm_bytes=shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else None,
        gpus=len(glob.glob("/dev/nvidia[0-9]*")),
        hostname=socket.gethostname(),
        hostname_address=address_of_own_name(),
        time_s=time.time(),
    )


def host_info_json(_: object = None) -> str:
    """Report this process's HostInfo as JSON, from a task of Spark's. Needs the standard library alone."""
    return json.dumps(asdict(collect_host_info()))


def address_of_own_name() -> str | None:
    """Resolve this host's own name; None where it does not resolve."""
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return None


def version_of(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def problems(driver: HostInfo, agents: Mapping[str, HostInfo], skews_s: Mapping[str, float]) -> list[str]:
    """List differences and shortages that would fail later, one line each.

    Args:
        driver: what every host is compared with.
        agents: by host name.
        skews_s: how far each host's clock is ahead of the driver's, by host name.
    """
    found: list[str] = []
    for name, host in agents.items():
        if host.python != driver.python:
            found.append(
                f"{name}: Python {host.python} ({host.executable}), the driver has {driver.python}; "
                "use the same everywhere (on Spark by PYSPARK_PYTHON)"
            )
        found += [
            f"{name}: {package} {host.packages.get(package) or 'is missing'}, the driver has {version}; "
            "install the same version there"
            for package, version in driver.packages.items()
            if version is not None and host.packages.get(package) != version
        ]
        if driver.code not in (None, host.code):
            found.append(
                f"{name}: imports other code of ours than the driver ({host.code} against {driver.code}); "
                "install the same there (spark-submit ships it by --py-files), or remove an old one from its path"
            )
        if host.disk_bytes < MIN_DISK_BYTES:
            free = host.disk_bytes >> 20
            found.append(f"{name}: {free} MiB free in {host.disk_folder}, 1024 at least; clear it or set TMPDIR")
        if abs(skews_s[name]) > MAX_SKEW_S:
            found.append(f"{name}: its clock is {skews_s[name]:+.0f} s off the driver's; run NTP on both")
    return found


def short_of_shared_memory(hosts: Mapping[str, HostInfo], ranks: Mapping[str, int]) -> list[str]:
    """List hosts whose /dev/shm is too small for the ranks on them. Both by host name."""
    found = []
    for name, host in hosts.items():
        # Ranks that would share a GPU train on the CPU, over Gloo, as does a host without GPUs.
        nccl = host.gpus >= ranks[name] and sum(ranks.values()) > 1
        each = NCCL_SHM_BYTES_PER_RANK if nccl else SHM_BYTES_PER_RANK
        if host.shm_bytes is not None and host.shm_bytes < ranks[name] * each:
            need = ranks[name] * each >> 20
            found.append(
                f"{name}: {host.shm_bytes >> 20} MiB free in /dev/shm, {need} at least ({each >> 20} for each rank"
                f"{' over NCCL' if nccl else ''}); start a container with --shm-size={need}m, mount a volume "
                f"`emptyDir: {{medium: Memory, sizeLimit: {need}Mi}}` at /dev/shm in a pod, or remove old files there"
            )
    return found


def unfit_for_horovod(agents: Mapping[str, HostInfo]) -> list[str]:
    """List hosts with Horovod whose own name leads the other hosts nowhere.

    Horovod 0.28.1 binds the sockets of a process set to what the host's own name resolves to, whatever interface it is
    given (`InitializeForProcessSet` in its gloo_context.cc).
    """
    found = []
    for name, host in agents.items():
        if host.packages.get("horovod") is None:
            continue  # its ring is torch's
        address = host.hostname_address
        if address is None or ipaddress.ip_address(address).is_loopback:
            found.append(
                f"{name}: its own name {host.hostname!r} resolves to {address or 'nothing'} there, and Horovod would "
                f"have the other hosts connect to that; give {host.hostname!r} the host's address in its /etc/hosts, "
                "or set parallel.engine=torch"
            )
    return found
