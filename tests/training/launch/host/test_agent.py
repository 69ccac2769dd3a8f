"""The agent: the interface it chooses, and its end without a driver."""

from __future__ import annotations

import os
import socket
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from sparkring.training.launch.channel.control_client import Endpoint
from sparkring.training.launch.channel.tls import new_certificate
from sparkring.training.launch.host.agent import Agent, AgentOptions, choose_interface


def test_the_interface_is_the_one_that_reaches_the_driver_or_the_one_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    def address(text: str) -> Any:
        return SimpleNamespace(family=socket.AF_INET, address=text)

    there = {"lo": [address("127.0.0.1")], "eth0": [address("10.0.0.7")], "eth1": [address("10.1.0.7")]}
    monkeypatch.setattr("psutil.net_if_addrs", lambda: there)
    assert choose_interface("10.0.0.7", None) == ("10.0.0.7", "eth0")
    assert choose_interface("10.0.0.7", "eth1") == ("10.1.0.7", "eth1")
    with pytest.raises(ValueError, match=r"launch\.interface = 'ib0': no such interface .*'eth1', '10\.1\.0\.7'"):
        choose_interface("10.0.0.7", "ib0")
    with pytest.raises(ValueError, match=r"no interface has the address 10\.9\.9\.9 that reached the driver"):
        choose_interface("10.9.9.9", None)


def test_an_interface_of_both_families_is_used_by_the_one_that_reaches_the_driver(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def address(text: str) -> Any:
        return SimpleNamespace(family=socket.AF_INET6 if ":" in text else socket.AF_INET, address=text)

    both = [address("fe80::1%eth0"), address("10.0.0.7"), address("fd00::7")]
    there = {"lo": [address("127.0.0.1"), address("::1")], "eth0": both, "eth1": [address("fd01::7")]}
    monkeypatch.setattr("psutil.net_if_addrs", lambda: there)
    assert choose_interface("fd00::7", None) == ("fd00::7", "eth0")
    assert choose_interface("10.0.0.7", "eth0") == ("10.0.0.7", "eth0")
    assert choose_interface("fd01::7", "eth0") == ("fd00::7", "eth0")
    assert choose_interface("10.0.0.7", "eth1") == ("fd01::7", "eth1")


@pytest.mark.ranks
def test_an_agent_without_a_driver_ends_its_fork_server() -> None:
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        port = nobody.getsockname()[1]
    before = set(psutil.Process().children())
    endpoint = Endpoint(("127.0.0.1",), port, "0" * 64, new_certificate()[1])
    with pytest.raises(ConnectionError):
        Agent(AgentOptions(endpoint, {**os.environ}, (), patience_s=0.3), 0, "a")
    assert set(psutil.Process().children()) == before
