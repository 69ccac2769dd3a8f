"""What hosts must have alike: the differences that are found, and the digest of our code."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from sparkring.training.launch.channel.frames import decode, encode
from sparkring.training.launch.host.info import (
    HostInfo,
    collect_host_info,
    problems,
    short_of_shared_memory,
    unfit_for_horovod,
)
from sparkring.training.launch.messages import AgentReady
from sparkring.training.launch.topology import AgentInfo

HERE = HostInfo(
    python="3.11",
    executable="/p",
    packages={"torch": "2.13.0", "horovod": "0.28.1", "petastorm": None},
    code="abc",
    disk_folder="/tmp",
    disk_bytes=1 << 40,
    shm_bytes=1 << 30,
    gpus=0,
    hostname="h",
    hostname_address="10.0.0.7",
    time_s=1000.0,
)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({}, None),
        ({"python": "3.12"}, "h: Python 3.12 (/p), the driver has 3.11; use the same everywhere"),
        ({"packages": {"torch": "2.9.0", "horovod": "0.28.1"}}, "h: torch 2.9.0, the driver has 2.13.0"),
        ({"packages": {"torch": "2.13.0"}}, "h: horovod is missing, the driver has 0.28.1"),
        ({"code": "def"}, "h: imports other code of ours than the driver (def against abc); install the same there"),
        ({"disk_bytes": 5 << 20}, "h: 5 MiB free in /tmp"),
    ],
)
def test_each_difference_is_one_line(changed: dict[str, Any], words: str | None) -> None:
    found = problems(HERE, {"h": replace(HERE, **changed)}, {"h": 0.2})
    assert len(found) == (words is not None)
    if words is not None:
        assert found[0].startswith(words)


def test_a_clock_that_differs_is_named() -> None:
    assert problems(HERE, {"h": HERE}, {"h": -50.0})[0].startswith("h: its clock is -50 s off the driver's")


@pytest.mark.parametrize(
    ("gpus", "ranks", "free_mib", "needed_mib"),
    [
        (0, {"h": 4}, 4, None),  # over Gloo
        (0, {"h": 4}, 3, 4),
        (0, {"h": 4}, None, None),  # no /dev/shm at all
        (1, {"h": 4}, 64, None),  # ranks that would share a GPU train on the CPU
        (1, {"h": 1}, 64, None),  # one rank connects to none
        (1, {"h": 1, "g": 1}, 64, 128),  # a pod as it comes
        (2, {"h": 2}, 64, 256),
        (8, {"h": 8}, 1024, None),  # NVIDIA's --shm-size=1g
    ],
)
def test_shared_memory_is_asked_for_by_the_backend_and_the_ranks_of_a_host(
    gpus: int, ranks: dict[str, int], free_mib: int | None, needed_mib: int | None
) -> None:
    host = replace(HERE, gpus=gpus, shm_bytes=None if free_mib is None else free_mib << 20)
    found = short_of_shared_memory({"h": host}, ranks)
    assert len(found) == (needed_mib is not None)
    if needed_mib is not None:
        assert found[0].startswith(f"h: {free_mib} MiB free in /dev/shm, {needed_mib} at least")
        assert ("over NCCL" in found[0]) == (gpus > 0)
        assert f"--shm-size={needed_mib}m" in found[0]
        assert f"emptyDir: {{medium: Memory, sizeLimit: {needed_mib}Mi}}" in found[0]


def test_code_is_compared_only_where_it_is_shipped() -> None:
    assert problems(replace(HERE, code=None), {"h": replace(HERE, code="def")}, {"h": 0.0}) == []


def test_a_host_whose_own_name_is_its_loopback_is_no_host_for_a_ring_of_horovods() -> None:
    good, loop, none = (
        replace(HERE, hostname="vm", hostname_address=address) for address in ("10.0.0.7", "127.0.1.1", None)
    )
    first, second = unfit_for_horovod({"a": good, "b": loop, "c": none})
    assert first.startswith("b: its own name 'vm' resolves to 127.0.1.1 there")
    assert "/etc/hosts" in first and "parallel.engine=torch" in first
    assert second.startswith("c: its own name 'vm' resolves to nothing")


@pytest.mark.parametrize("packages", [{}, {"torch": "2.13.0", "horovod": None}])
def test_a_hosts_own_name_leads_nowhere_and_nobody_minds_without_horovod(packages: dict[str, str | None]) -> None:
    assert not unfit_for_horovod({"h": replace(HERE, packages=packages, hostname_address="127.0.1.1")})


def test_what_a_host_reports_survives_the_channel() -> None:
    agent = AgentInfo("a", 0, "h", "10.0.0.1", "eth0", 1, 2)
    ready = AgentReady(agent, "h", collect_host_info())
    assert decode(encode(ready)[4:]) == (ready, 0)
    assert ready.host.packages["torch"]
