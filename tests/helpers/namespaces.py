"""Hosts made of one machine: network namespaces on a bridge, each with an address of its own."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


class Hosts:
    """Namespaces <prefix>0 to n-1; what runs in one is on that host."""

    def __init__(self, prefix: str, count: int):
        self._prefix, self.count = f"{prefix}{os.getpid() % 100000}", count

    def namespace(self, host: int) -> str:
        return f"{self._prefix}-{host}"

    def address(self, host: int) -> str:
        return f"10.78.{os.getpid() % 250}.{host + 1}"

    def commands(self) -> Iterator[list[str]]:
        """What makes them, as arguments of `ip`."""
        bridge = f"{self._prefix}b"
        yield ["link", "add", bridge, "type", "bridge"]
        yield ["link", "set", bridge, "up"]
        for host in range(self.count):
            name, outside = self.namespace(host), f"{self._prefix}v{host}"
            yield ["netns", "add", name]
            yield ["link", "add", outside, "type", "veth", "peer", "name", "eth0", "netns", name]
            yield ["link", "set", outside, "master", bridge, "up"]
            yield ["-n", name, "addr", "add", f"{self.address(host)}/24", "dev", "eth0"]
            yield ["-n", name, "link", "set", "eth0", "up"]
            yield ["-n", name, "link", "set", "lo", "up"]

    def start(
        self, host: int, command: Sequence[str], variables: Mapping[str, str], log: Path
    ) -> subprocess.Popen[bytes]:
        """Start a program on a host, its output into `log`."""
        with open(log, "ab") as output:
            return subprocess.Popen(
                ["ip", "netns", "exec", self.namespace(host), *command],
                env={**os.environ, "PYTHONPATH": str(ROOT), **variables},
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )

    def kill(self, host: int) -> None:
        """SIGKILL everything that runs on a host."""
        found = subprocess.run(["ip", "netns", "pids", self.namespace(host)], capture_output=True, text=True)
        for pid in found.stdout.split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)

    def are_connected(self, one: int, other: int) -> bool:
        """Whether a TCP connection between two hosts is open."""
        shown = ["ip", "netns", "exec", self.namespace(one), "cat", "/proc/net/tcp"]
        found = subprocess.run(shown, capture_output=True, text=True).stdout
        address = socket.inet_aton(self.address(other))[::-1].hex().upper()  # as the kernel shows it, on x86
        return any(f" {address}:" in line and line.split()[3] == "01" for line in found.splitlines()[1:])

    def close(self) -> None:
        for host in range(self.count):
            self.kill(host)
            subprocess.run(["ip", "netns", "del", self.namespace(host)], capture_output=True)
        subprocess.run(["ip", "link", "del", f"{self._prefix}b"], capture_output=True)


@contextmanager
def hosts_of_one_machine(prefix: str, count: int) -> Iterator[Hosts]:
    """Make the hosts; skips the test where this machine does not let us."""
    hosts = Hosts(prefix, count)
    try:
        for command in hosts.commands():
            try:
                made = subprocess.run(["ip", *command], capture_output=True).returncode == 0
            except FileNotFoundError:
                made = False
            if not made:
                pytest.skip("no network namespaces here")
        yield hosts
    finally:
        hosts.close()
