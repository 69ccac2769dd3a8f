"""What preflight says before anything waits; the checks that need Spark run in every launch of test_barrier.py."""

from __future__ import annotations

import socket
import zipfile
from collections import Counter
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import training.launch.facts
from pipelines.launch import preflight
from pipelines.launch.preflight import check_hosts
from pipelines.package import write_archive
from training.launch.attempt import Control
from training.launch.crew import Crew
from training.launch.facts import (
    REACH_PEERS,
    code_digest,
    collect_facts,
    problems,
    reach_plan,
    unfit_for_horovod,
    unreachable,
)
from training.launch.failure import Cancelled, LaunchError
from training.launch.job import JobSpec
from training.launch.local import local_crew

HERE = {
    "python": "3.11",
    "executable": "/p",
    "packages": {"torch": "2.13.0", "horovod": "0.28.1", "petastorm": None},
    "code": "abc",
    "disk_folder": "/tmp",
    "disk_bytes": 1 << 40,
    "shm_bytes": 1 << 30,
    "time": 1000.0,
    "received": 1000.2,
}


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
        ({"time": 950.0}, "h: its clock is -50 s off the driver's"),
    ],
)
def test_each_difference_is_one_line(changed: dict[str, Any], words: str | None) -> None:
    found = problems(HERE, {"h": {**HERE, **changed}})
    assert len(found) == (words is not None)
    if words is not None:
        assert found[0].startswith(words)


def asked_to(what: str) -> Control:
    control = Control()
    getattr(control, what)()
    return control


@pytest.mark.parametrize("what", ["stop", "cancel"])
def test_an_end_is_heard_while_slots_or_agents_are_waited_for(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """They may never come, and the terminal must not be deaf until then."""
    monkeypatch.setattr(preflight, "slots", lambda *_: 0)
    session: Any = SimpleNamespace(
        sparkContext=SimpleNamespace(master="spark://h:1", getConf=lambda: SimpleNamespace(getAll=list))
    )
    with pytest.raises(Cancelled, match="slots were waited for"):
        preflight.check_slots(session, 2, control=asked_to(what))
    with Crew("127.0.0.1") as crew, pytest.raises(Cancelled, match="2 of 2 agents were waited for"):
        crew.gather(2, 60, asked_to(what))


def test_fewer_slots_than_ranks_are_enough_to_begin_where_the_world_may_shrink(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(preflight, "slots", lambda *_: 2)
    session: Any = SimpleNamespace(
        sparkContext=SimpleNamespace(master="local[2]", getConf=lambda: SimpleNamespace(getAll=list))
    )
    preflight.check_slots(session, 4, 2)
    with pytest.raises(LaunchError, match=r"launch\.min_world = 3: local\[2\] has 2 task slots"):
        preflight.check_slots(session, 4, 3)
    with pytest.raises(LaunchError, match=r"launch\.world = 4: local\[2\] has 2 task slots"):
        preflight.check_slots(session, 4)


def test_slots_are_counted_by_what_a_rank_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four cores are two ranks of two, whatever an ETL task has."""
    session: Any = SimpleNamespace(
        sparkContext=SimpleNamespace(master="local-cluster[2,2,1024]", getConf=lambda: SimpleNamespace(getAll=list))
    )
    profile: Any = SimpleNamespace(taskResources={"cpus": SimpleNamespace(amount=2.0)})
    monkeypatch.setattr(preflight, "slots", lambda _, asked: 2 if asked is profile else 4)
    preflight.check_slots(session, 4)
    preflight.check_slots(session, 2, profile=profile)
    with pytest.raises(LaunchError, match=r"launch\.world = 4: local-cluster.* has 2 task slots"):
        preflight.check_slots(session, 4, profile=profile)


def test_code_is_compared_only_where_it_is_shipped() -> None:
    assert problems({**HERE, "code": None}, {"h": {**HERE, "code": "def"}}) == []


def test_unreachable_hosts_are_named() -> None:
    (line,) = unreachable({"a": "host-a"}, {"a": [["10.0.0.2", 4000, "timed out"]], "b": []})
    assert line.startswith("host-a: cannot reach 10.0.0.2:4000 (timed out)")


def test_a_host_whose_own_name_is_its_loopback_is_no_host_for_a_ring_of_horovods() -> None:
    good, loop, none = ({"own_name": ["vm", address]} for address in ("10.0.0.7", "127.0.1.1", None))
    first, second = unfit_for_horovod({"a": good, "b": loop, "c": none})
    assert first.startswith("b: its own name 'vm' resolves to 127.0.1.1 there")
    assert "/etc/hosts" in first and "parallel.engine=torch" in first
    assert second.startswith("c: its own name 'vm' resolves to nothing")


def test_the_digest_is_the_same_from_a_folder_and_from_an_archive(tmp_path: Path) -> None:
    import subprocess
    import sys

    path = write_archive(tmp_path / "sparkring.zip")
    code = (
        f"import sys; sys.path.insert(0, {str(path)!r})\n"
        "import training.launch.facts as f; print(f.__file__, f.code_digest())"
    )
    command = [sys.executable, "-P", "-c", code]
    where, digest = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=True).stdout.split()
    assert str(path) in where and digest == code_digest()
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("training/extra.py", "x = 1\n")
    other = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=True).stdout.split()[1]
    assert other != digest


def quiet(event: dict[str, Any]) -> None:
    """Nothing is asked of the events."""


@pytest.mark.ranks
def test_a_crew_of_unlike_hosts_is_refused_with_every_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "training.launch.agent.collect_facts", lambda: {**collect_facts(), "python": "2.7", "shm_bytes": 1}
    )
    with local_crew(2, ()) as crew:
        crew.check = partial(check_hosts, code=code_digest())
        with pytest.raises(LaunchError, match=r"preflight: 2 problems\n  - .*Python 2\.7[^\n]*\n  - .*/dev/shm"):
            crew.run(JobSpec("os:getpid", preload=()), 2, quiet)


@pytest.mark.ranks
def test_agents_reach_each_other_or_say_what_they_cannot_reach() -> None:
    with local_crew(2, ()) as crew:
        crew.gather(2, 30)
        seats = crew.seats
        assert crew.reach(seats) == {seat.agent: [] for seat in seats}
        with socket.create_server(("127.0.0.1", 0)) as closed:
            port = closed.getsockname()[1]
        from dataclasses import replace

        failed = crew.reach([seats[0], replace(seats[1], store_port=port)])
        assert failed[seats[1].agent] == []
        assert failed[seats[0].agent][0][:2] == ["127.0.0.1", port]


@pytest.mark.parametrize("count", [1, 2, 3, 8, 9, 10, 11, 17, 64, 259, 1000])
def test_reach_is_sampled_evenly_and_the_sample_is_connected(count: int) -> None:
    """All pairs were tried: of more than 258 hosts each had more at its store's port than the kernel queues."""
    plan = reach_plan(count)
    degree = min(REACH_PEERS, count - 1)
    for host, peers in enumerate(plan):
        assert len(set(peers)) == len(peers) == degree and host not in peers
    tried = Counter(peer for peers in plan for peer in peers)
    assert all(tried[host] == degree for host in range(count))
    reached, todo = {0}, [0]
    while todo:
        fresh = set(plan[todo.pop()]) - reached
        reached |= fresh
        todo += fresh
    assert reached == set(range(count))


@pytest.mark.ranks
def test_who_has_knocked_at_the_stores_port_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody accepts there before rank 0 does: check after check filled the kernel's queue."""
    create = socket.create_server
    monkeypatch.setattr(
        "training.launch.agent.socket.create_server", lambda address, backlog: create(address, backlog=2)
    )
    with local_crew(2, ()) as crew:
        crew.gather(2, 30)
        for _ in range(5):
            assert crew.reach(crew.seats) == {seat.agent: [] for seat in crew.seats}


def test_facts_are_json() -> None:
    import json

    facts = training.launch.facts.collect_facts()
    assert json.loads(json.dumps(facts)) == facts
    assert facts["packages"]["torch"]
