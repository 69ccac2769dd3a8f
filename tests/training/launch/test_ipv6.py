"""A host without IPv4 addresses, but for loopback: agents, their store, a ring and parameter servers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.ranks
ROOT = Path(__file__).parents[3]
NAMESPACE, ADDRESS = f"sparkring-v6-{os.getpid()}", "fd00:51::1"

SCRIPT = """
import json, os, sys
from sparkring.training.launch.job import JobSpec
from sparkring.training.launch.local import local_group

def ring(ctx):
    import torch, torch.distributed as dist
    dist.init_process_group("gloo")
    total = torch.ones(1) * (ctx.rank + 1)
    dist.all_reduce(total)
    dist.destroy_process_group()
    return [float(total), os.environ["MASTER_ADDR"], os.environ["GLOO_SOCKET_IFNAME"]]

toy = "tests.training.launch.toy_servers"
served = JobSpec(f"{toy}:work", {"steps": 5}, preload=(), servers_per_host=1, server_entry=f"{toy}:serve")
for written in sys.argv[1:]:
    with local_group(2, ("torch",), host=written) as group:
        found = [group.run(JobSpec(ring), 2).results, group.server.host]
        found.append(max(rank["totals"] for rank in group.run(served, 2, attempt=2).results))
    print("RESULT", json.dumps(found))
"""


@pytest.fixture
def host() -> Iterator[list[str]]:
    """How a command begins that runs on such a host; skips where the machine does not let us make one."""
    commands = [
        ["netns", "add", NAMESPACE],
        ["-n", NAMESPACE, "link", "set", "lo", "up"],
        ["-n", NAMESPACE, "link", "add", "v0", "type", "veth", "peer", "name", "v1"],
        ["-n", NAMESPACE, "link", "set", "v1", "up"],
        ["-n", NAMESPACE, "link", "set", "v0", "up"],
        ["-n", NAMESPACE, "addr", "add", f"{ADDRESS}/64", "dev", "v0", "nodad"],
    ]
    try:
        for command in commands:
            if subprocess.run(["ip", *command], capture_output=True).returncode:
                pytest.skip("no network namespaces here")
        yield ["ip", "netns", "exec", NAMESPACE]
    finally:
        subprocess.run(["ip", "netns", "del", NAMESPACE], capture_output=True)


def test_agents_ranks_and_servers_meet_on_ipv6_in_brackets_or_not(host: list[str]) -> None:
    command = [*host, sys.executable, "-c", SCRIPT, ADDRESS, f"[{ADDRESS}]"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    found = [json.loads(line.removeprefix("RESULT ")) for line in done.stdout.splitlines() if line.startswith("RESULT")]
    assert found == [[[[3.0, ADDRESS, "v0"]] * 2, ADDRESS, [10]]] * 2, done.stderr[-3000:]
