"""What preflight says before anything waits; the checks that need Spark run in every launch of test_barrier.py."""

from __future__ import annotations

import socket
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from sparkring.conf.code import code_digest
from sparkring.pipelines.launch import preflight
from sparkring.pipelines.launch.check_hosts import check_hosts, unreachable
from sparkring.pipelines.launch.preflight import SlotRequest, check_slots, fixed_allocation
from sparkring.training.launch.channel.connection import listen
from sparkring.training.launch.control import Control
from sparkring.training.launch.failure import Cancelled, LaunchError
from sparkring.training.launch.group import WorkerGroup
from sparkring.training.launch.host.info import (
    collect_host_info,
)
from sparkring.training.launch.job import JobSpec
from sparkring.training.launch.local import local_group
from sparkring.training.launch.messages import Event, PeerFailure


@pytest.fixture(autouse=True)
def running(monkeypatch: pytest.MonkeyPatch) -> None:
    """The applications of these tests have not ended; they have no JVM to ask."""
    monkeypatch.setattr(preflight, "has_ended", lambda _: False)


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
        check_slots(session, SlotRequest(2), asked_to(what))
    with WorkerGroup("127.0.0.1") as group, pytest.raises(Cancelled, match="2 of 2 agents had not come"):
        group.gather(2, 60, asked_to(what))


def test_fewer_slots_than_ranks_are_enough_to_begin_where_the_world_may_shrink(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(preflight, "slots", lambda *_: 2)
    session: Any = SimpleNamespace(
        sparkContext=SimpleNamespace(master="local[2]", getConf=lambda: SimpleNamespace(getAll=list))
    )
    check_slots(session, SlotRequest(4, 2))
    with pytest.raises(LaunchError, match=r"launch\.min_world = 3: local\[2\] has 2 task slots"):
        check_slots(session, SlotRequest(4, 3))
    with pytest.raises(LaunchError, match=r"launch\.world = 4: local\[2\] has 2 task slots"):
        check_slots(session, SlotRequest(4))


def test_a_cluster_without_executors_is_not_told_to_train_on_no_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "slots", lambda *_: 0)
    session: Any = SimpleNamespace(
        sparkContext=SimpleNamespace(master="spark://h:1", getConf=lambda: SimpleNamespace(getAll=list))
    )
    with pytest.raises(LaunchError, match=r"spark://h:1 has no task slot.*see whether its workers.*memory"):
        check_slots(session, SlotRequest(2, wait_s=0.0))


def test_slots_that_come_late_are_waited_for_and_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A cluster that grows by itself has none for minutes."""
    counts = [0, 0, 1, 2]
    monkeypatch.setattr(preflight, "slots", lambda *_: counts.pop(0))
    session: Any = SimpleNamespace(
        sparkContext=SimpleNamespace(master="spark://h:1", getConf=lambda: SimpleNamespace(getAll=list))
    )
    with caplog.at_level("INFO"):
        check_slots(session, SlotRequest(2, wait_s=300.0))
        assert not counts
        monkeypatch.setattr(preflight, "slots", lambda *_: 2)
        check_slots(session, SlotRequest(2))  # all are there
    words = "launch.world = 2: spark://h:1 has 0 task slots now; waiting launch.hosts_wait_s = 300 s for more"
    assert caplog.messages == [words]


def test_slots_that_never_come_are_an_error_with_the_wait_and_its_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "slots", lambda *_: 1)
    session: Any = SimpleNamespace(
        sparkContext=SimpleNamespace(master="spark://h:1", getConf=lambda: SimpleNamespace(getAll=list))
    )
    words = (
        r"^launch\.world = 2: spark://h:1 has 1 task slot after launch\.hosts_wait_s = 0 s, and each rank needs "
        r"one; set launch\.world to 1 or less, .* or raise launch\.hosts_wait_s where they come later$"
    )
    with pytest.raises(LaunchError, match=words):
        check_slots(session, SlotRequest(2, wait_s=0.0))
    monkeypatch.setattr(preflight, "has_ended", lambda _: True)
    with pytest.raises(LaunchError, match=r"^spark://h:1: Spark's application has ended"):
        check_slots(session, SlotRequest(2, wait_s=3600.0))
    monkeypatch.setattr(preflight, "slots", lambda *_: 0)
    with pytest.raises(
        LaunchError, match=r"no task slot after launch\.hosts_wait_s = 0 s, .*raise launch\.hosts_wait_s"
    ):
        check_slots(session, SlotRequest(2, wait_s=0.0))


def test_slots_are_counted_by_what_a_rank_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four cores are two ranks of two, whatever an ETL task has."""
    session: Any = SimpleNamespace(
        sparkContext=SimpleNamespace(master="local-cluster[2,2,1024]", getConf=lambda: SimpleNamespace(getAll=list))
    )
    profile: Any = SimpleNamespace(taskResources={"cpus": SimpleNamespace(amount=2.0)})
    monkeypatch.setattr(preflight, "slots", lambda _, asked: 2 if asked is profile else 4)
    check_slots(session, SlotRequest(4))
    check_slots(session, SlotRequest(2, profile=profile))
    with pytest.raises(LaunchError, match=r"launch\.world = 4: local-cluster.* has 2 task slots"):
        check_slots(session, SlotRequest(4, profile=profile))


def elastic_session(master: str) -> Any:
    settings = [("spark.dynamicAllocation.enabled", "true"), ("spark.executor.cores", "4")]
    return SimpleNamespace(
        sparkContext=SimpleNamespace(master=master, getConf=lambda: SimpleNamespace(getAll=lambda: settings))
    )


def test_dynamic_allocation_is_refused_with_the_settings_and_the_two_commands() -> None:
    words = (
        r"--conf spark\.dynamicAllocation\.enabled=false --conf spark\.executor\.instances=3 .*`spark\.conf`.*"
        r"`sparkring etl`.*`sparkring train`"
    )
    with pytest.raises(LaunchError, match=words):
        check_slots(elastic_session("yarn"), SlotRequest(9))


def test_dynamic_allocation_changes_nothing_where_tasks_run_in_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spark does not look at it there, and a machine's spark-defaults.conf may have it."""
    monkeypatch.setattr(preflight, "slots", lambda *_: 2)
    check_slots(elastic_session("local[2]"), SlotRequest(2))
    with pytest.raises(LaunchError, match=r"spark\.dynamicAllocation"):
        check_slots(elastic_session("local-cluster[2,1,1024]"), SlotRequest(2))


@pytest.mark.parametrize(
    ("master", "conf", "cpus_per_rank", "instances"),
    [
        ("yarn", {}, None, "9"),
        ("yarn", {"spark.executor.cores": "4", "spark.task.cpus": "2"}, None, "5"),
        ("k8s://https://h:443", {"spark.executor.cores": "4"}, 4, "9"),
        ("spark://h:7077", {"spark.executor.cores": "4"}, None, None),
    ],
)
def test_as_many_executors_are_asked_for_as_all_ranks_need(
    master: str, conf: dict[str, str], cpus_per_rank: int | None, instances: str | None
) -> None:
    profile: Any = cpus_per_rank and SimpleNamespace(taskResources={"cpus": SimpleNamespace(amount=cpus_per_rank)})
    settings = fixed_allocation(master, conf, SlotRequest(9, profile=profile))
    assert settings.pop("spark.dynamicAllocation.enabled") == "false"
    assert settings == ({"spark.executor.instances": instances} if instances else {})


def test_a_profile_is_refused_where_spark_takes_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "takes_profiles", lambda: False)
    session: Any = SimpleNamespace(
        sparkContext=SimpleNamespace(master="local-cluster[2,2,1024]", getConf=lambda: SimpleNamespace(getAll=list))
    )
    with pytest.raises(LaunchError, match=r"launch\.cpus_per_rank.*leave them at their defaults.*spark\.task\.cpus"):
        check_slots(session, SlotRequest(2, profile=SimpleNamespace()))  # type: ignore[arg-type]


def test_unreachable_hosts_are_named() -> None:
    (line,) = unreachable({"a": "host-a"}, {"a": [PeerFailure("10.0.0.2", 4000, "timed out")], "b": []})
    assert line.startswith("host-a: cannot reach 10.0.0.2:4000 (timed out)")


def quiet(event: Event) -> None:
    """Nothing is asked of the events."""


@pytest.mark.ranks
def test_a_crew_of_unlike_hosts_is_refused_with_every_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "sparkring.training.launch.host.agent.collect_host_info",
        lambda: replace(collect_host_info(), python="2.7", shm_bytes=1),
    )
    with local_group(2, ()) as group:
        group._check = partial(check_hosts, code=code_digest()[:12])
        with pytest.raises(LaunchError, match=r"preflight: 2 problems\n  - .*Python 2\.7[^\n]*\n  - .*/dev/shm"):
            group.run(JobSpec("os:getpid", preload=()), 2, quiet)


@pytest.mark.ranks
def test_agents_reach_each_other_or_say_what_they_cannot_reach() -> None:
    with local_group(2, ()) as group:
        group.gather(2, 30)
        agents = group.agents
        assert group.reach(agents) == {agent.name: () for agent in agents}
        with socket.create_server(("127.0.0.1", 0)) as closed:
            port = closed.getsockname()[1]
        failed = group.reach([agents[0], replace(agents[1], store_port=port)])
        assert failed[agents[1].name] == ()
        (peer,) = failed[agents[0].name]
        assert (peer.address, peer.port) == ("127.0.0.1", port)


@pytest.mark.ranks
def test_who_has_knocked_at_the_stores_port_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody accepts there before rank 0 does: check after check filled the kernel's queue."""
    monkeypatch.setattr("sparkring.training.launch.host.agent.listen", lambda address, backlog: listen(address, 2))
    with local_group(2, ()) as group:
        group.gather(2, 30)
        for _ in range(5):
            assert group.reach(group.agents) == {agent.name: () for agent in group.agents}
