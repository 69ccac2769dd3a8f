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
    hostname="h",
    hostname_address="10.0.0.7",
    time_s=1000.0,
)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({}, None),
        ({"python": "3.12"}, "h: Python 3.12 (/p), the driver has 3.11; set PYSPARK_PYTHON"),
        ({"packages": {"torch": "2.9.0", "horovod": "0.28.1"}}, "h: torch 2.9.0, the driver has 2.13.0"),
        ({"packages": {"torch": "2.13.0"}}, "h: horovod is missing, the driver has 0.28.1"),
        ({"code": "def"}, "h: imports other code of ours than the driver (def against abc)"),
        ({"disk_bytes": 5 << 20}, "h: 5 MiB free in /tmp"),
        ({"shm_bytes": 0}, "h: 0 MiB free in /dev/shm"),
        ({"shm_bytes": None}, None),
    ],
)
def test_each_difference_is_one_line(changed: dict[str, Any], words: str | None) -> None:
    found = problems(HERE, {"h": replace(HERE, **changed)}, {"h": 0.2})
    assert len(found) == (words is not None)
    if words is not None:
        assert found[0].startswith(words)


def test_a_clock_that_differs_is_named() -> None:
    assert problems(HERE, {"h": HERE}, {"h": -50.0})[0].startswith("h: its clock is -50 s off the driver's")


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


def test_what_a_host_reports_survives_the_channel() -> None:
    agent = AgentInfo("a", 0, "h", "10.0.0.1", "eth0", 1, 2)
    ready = AgentReady(agent, "h", collect_host_info())
    assert decode(encode(ready)[4:]) == (ready, 0)
    assert ready.host.packages["torch"]
