"""What must be alike on every host before ranks start, and what each must have: agents collect, the driver compares."""

from __future__ import annotations

import hashlib
import ipaddress
import os
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from importlib import metadata, resources
from importlib.resources.abc import Traversable
from typing import Any

PACKAGES = ("torch", "horovod", "numpy", "pyarrow", "pandas", "petastorm", "pydantic", "cloudpickle")
OURS = ("conf", "etl", "training", "pipelines")
MIN_DISK_BYTES = 1 << 30
MIN_SHM_BYTES = 32 << 20
MAX_SKEW_S = 30.0
REACH_PEERS = 8  # hosts that each host tries to reach


def collect_facts() -> dict[str, Any]:
    """This process's Python, packages, code and room, as JSON."""
    return {
        "python": f"{sys.version_info[0]}.{sys.version_info[1]}",
        "executable": sys.executable,
        "packages": {name: version_of(name) for name in PACKAGES},
        "code": code_digest(),
        "disk_folder": tempfile.gettempdir(),
        "disk_bytes": shutil.disk_usage(tempfile.gettempdir()).free,
        "shm_bytes": shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else None,
        "own_name": [socket.gethostname(), address_of_own_name()],
        "time": time.time(),
    }


def address_of_own_name() -> str | None:
    """What this host's name resolves to here; None where it does not."""
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return None


def version_of(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def code_digest() -> str:
    """Digest of the source files of our packages as this process would import them, from a folder or an archive."""
    total = hashlib.sha256()
    for package in OURS:
        try:
            root = resources.files(package)
        except ModuleNotFoundError:
            continue
        for name, file in sorted(_sources(root, package)):
            total.update(f"{name}\n".encode() + hashlib.sha256(file.read_bytes()).digest())
    return total.hexdigest()[:12]


def _sources(folder: Traversable, name: str) -> list[tuple[str, Traversable]]:
    found: list[tuple[str, Traversable]] = []
    for entry in folder.iterdir():
        if entry.name.endswith(".py"):
            found.append((f"{name}/{entry.name}", entry))
        elif entry.is_dir() and entry.name != "__pycache__":
            found += _sources(entry, f"{name}/{entry.name}")
    return found


def problems(driver: Mapping[str, Any], agents: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """One line per difference or shortage that would fail later; `agents` by host name. Pure."""
    found: list[str] = []
    for host, facts in agents.items():
        if facts["python"] != driver["python"]:
            found.append(
                f"{host}: Python {facts['python']} ({facts['executable']}), the driver has {driver['python']}; "
                "set PYSPARK_PYTHON to the same interpreter everywhere"
            )
        found += [
            f"{host}: {name} {facts['packages'].get(name) or 'is missing'}, the driver has {version}; "
            "install the same version there"
            for name, version in driver["packages"].items()
            if version is not None and facts["packages"].get(name) != version
        ]
        if driver["code"] not in (None, facts["code"]):
            found.append(
                f"{host}: imports other code of ours than the driver ({facts['code']} against {driver['code']}); "
                "remove an installed sparkring or an old archive from its path, or ship this by --py-files"
            )
        found += shortages(host, facts)
        skew_s = facts["time"] - facts["received"]
        if abs(skew_s) > MAX_SKEW_S:
            found.append(f"{host}: its clock is {skew_s:+.0f} s off the driver's; run NTP on both")
    return found


def shortages(host: str, facts: Mapping[str, Any]) -> list[str]:
    """What a host has too little of."""
    found = []
    if facts["disk_bytes"] < MIN_DISK_BYTES:
        free = facts["disk_bytes"] >> 20
        found.append(f"{host}: {free} MiB free in {facts['disk_folder']}, 1024 at least; clear it or set TMPDIR")
    shm = facts["shm_bytes"]
    if shm is not None and shm < MIN_SHM_BYTES:
        found.append(f"{host}: {shm >> 20} MiB free in /dev/shm, 32 at least; give the container more (--shm-size)")
    return found


def reach_plan(count: int) -> list[list[int]]:
    """Which hosts each of `count` is to reach: all others where they are few, else REACH_PEERS of them, spread evenly
    and the next one among them. So every host is tried by as many, and the plan is connected. Pure."""
    few = min(REACH_PEERS, count - 1)
    offsets = [1 + step * (count - 1) // few for step in range(few)]
    return [[(host + offset) % count for offset in offsets] for host in range(count)]


def unreachable(names: Mapping[str, str], failed: Mapping[str, Sequence[Sequence[Any]]]) -> list[str]:
    """Lines for what agents could not connect to: `failed` is agent -> [[address, port, why], ...]."""
    return [
        f"{names[agent]}: cannot reach {address}:{port} ({why}); open the ports between hosts or set launch.interface"
        for agent, targets in failed.items()
        for address, port, why in targets
    ]


def unfit_for_horovod(agents: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Hosts of several whose name leads the others nowhere: Horovod 0.28.1 binds the sockets of a process set to what
    the host's own name resolves to, whatever interface it is given (`InitializeForProcessSet` in its gloo_context.cc).
    """
    found = []
    for host, facts in agents.items():
        name, address = facts["own_name"]
        if address is None or ipaddress.ip_address(address).is_loopback:
            found.append(
                f"{host}: its own name {name!r} resolves to {address or 'nothing'} there, and Horovod would have the "
                f"other hosts connect to that; give {name!r} the host's address in its /etc/hosts, or set "
                "parallel.engine=torch"
            )
    return found
