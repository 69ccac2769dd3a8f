"""Hosts that come by themselves: who is waited for, who is sent away, and what each is told. All on the loopback."""

from __future__ import annotations

import logging
import re
import signal
import socket
import ssl
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from uuid import uuid4

import pytest

from sparkring.training.launch.channel.control_client import Endpoint
from sparkring.training.launch.channel.tls import shared_certificate
from sparkring.training.launch.failure import LaunchError, PreflightError
from sparkring.training.launch.group import SharedPort, WorkerGroup
from sparkring.training.launch.host import info
from sparkring.training.launch.host.agent import DriverGone
from sparkring.training.launch.job import JobSpec
from sparkring.training.launch.join import hosts
from sparkring.training.launch.join.hosts import (
    REFUSED,
    HostAgents,
    JoinedHosts,
    JoinOptions,
    driver_addresses,
    join_driver,
    joined_hosts,
    share,
    visible_gpus,
)
from sparkring.training.launch.join.placement import ALONE, Placement
from tests.waits import wait_for

SECRET = "a secret of enough letters"
FIRST = JoinOptions(
    placement=Placement("variables", 0, 2, "127.0.0.1", 0, ("h0", "h1")),
    recipe="r" * 64,
    dataset="d" * 64,
    problem="",
    ranks=1,
    preload=(),
    secret=SECRET,
    wait_s=60.0,
)


def other(rank: int = 1, **changes: object) -> JoinOptions:
    """The options of another host."""
    place = replace(FIRST.placement, rank=rank)
    return replace(FIRST, placement=place, process=uuid4().hex, **changes)  # type: ignore[arg-type]


class Job:
    """Host 0, and whoever joins it."""

    def __init__(self, options: JoinOptions = FIRST):
        self.group = WorkerGroup("127.0.0.1", shared=SharedPort(0, SECRET))
        self.hosts = JoinedHosts(options, self.group, HostAgents(options, self.group.endpoint))

    def join(self, options: JoinOptions, secret: str = SECRET) -> HostAgents:
        _, certificate, proof = shared_certificate(secret)
        return HostAgents(options, Endpoint(("127.0.0.1",), self.group.server.port, proof, certificate))


@pytest.fixture
def start() -> Iterator[Callable[..., Job]]:
    with ExitStack() as stack:

        def started(options: JoinOptions = FIRST) -> Job:
            job = Job(options)
            stack.callback(job.hosts.close)
            return job

        yield started


def rank_of(ctx: object) -> int:
    return ctx.rank_info.rank  # type: ignore[attr-defined, no-any-return]


@pytest.mark.usefixtures("no_torch")
def test_ranks_run_on_hosts_that_have_come_and_all_end_with_the_drivers_code(start: Callable[..., Job]) -> None:
    job = start()
    second = job.join(other())
    job.hosts.gather(2)
    assert job.hosts.slots() == 2
    with job.hosts.open_group(2, ()) as group:
        assert group.run(JobSpec(rank_of, preload=()), 2).results == [0, 1]
    job.hosts.end(6, "not better")
    job.hosts.close()
    assert second.wait(60.0) and (second.result().code, second.result().why) == (6, "not better")


def test_a_host_that_comes_after_host_0_has_failed_hears_why(start: Callable[..., Job]) -> None:
    """It looked for a driver until launch.hosts_wait_s had passed, and was then told to open a port."""
    job = start()
    job.hosts.end(3, "dataset = 'd': not a dataset", stays=True)
    with ThreadPoolExecutor() as pool:
        closing = pool.submit(job.hosts.close)
        assert job.hosts._own.wait(60.0), "all of host 0 itself has ended"
        second = job.join(other())
        closing.result()
    assert second.wait(60.0) and (second.result().code, second.result().why) == (3, "dataset = 'd': not a dataset")


@pytest.mark.parametrize(
    ("stays", "have_begun", "comes", "awaited"),
    [
        (True, False, "", True),
        (False, False, "", False),  # stopped by a signal, or well
        (True, True, "", False),
        (True, False, SECRET, False),
        (True, False, "another secret of enough letters", False),  # it has ended, with a word of its own
    ],
)
def test_host_0_waits_to_tell_those_alone_that_do_not_know(
    stays: bool, have_begun: bool, comes: str, awaited: bool, start: Callable[..., Job]
) -> None:
    job = start()
    if comes:
        second = job.join(other(), comes)
        wait_for(lambda: job.group.look() or job.hosts._strangers() or len(job.group.agents) == 2)
        assert comes == SECRET or second.wait(60.0)
    wait_for(lambda: job.group.look() or job.group.agents)
    if have_begun:
        job.hosts._accepted.add(job.group.agents[0].name)
    job.hosts.end(3, "why", stays)
    assert job.hosts._is_awaited() == awaited
    job.hosts.end(3)


def test_a_host_whose_driver_is_gone_says_where_to_look(start: Callable[..., Job]) -> None:
    agents = start().hosts._own
    for error, said in ((DriverGone("gone"), "gone; look at the log of host 0"), (ValueError("no such"), "no such")):
        agents.error = error
        with pytest.raises(LaunchError) as found:
            agents.result()
        assert str(found.value) == said
    agents.error = None


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"recipe": "x" * 64}, "has another recipe, other overrides or other modules of yours than host 0"),
        ({"dataset": "x" * 64}, "has another dataset than host 0; give every host the same dataset=URI"),
        ({"problem": "dataset = '/data': no such folder"}, "dataset = '/data': no such folder"),
        ({"rank": 0}, "NODE_RANK = 0: given to "),
    ],
)
def test_a_host_that_was_started_with_something_else_ends_the_job_before_it_begins(
    changes: dict[str, object], said: str, start: Callable[..., Job]
) -> None:
    job = start()
    second = job.join(other(**changes))  # type: ignore[arg-type]
    with pytest.raises(
        PreflightError, match=r"do not fit together:\n  - .*\nWhere one is another job's, give"
    ) as error:
        job.hosts.gather(2)
    assert said in str(error.value)
    job.hosts.end(REFUSED, str(error.value))
    job.hosts.close()
    assert second.wait(60.0) and said in second.result().why


def test_a_host_short_of_temporary_space_is_named_first_and_then_what_to_do(
    start: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(info, "MIN_DISK_BYTES", 1 << 60)
    with pytest.raises(PreflightError) as error:
        start().hosts.gather(1)
    short = re.escape(tempfile.gettempdir()) + ", 1024 at least; clear it or set TMPDIR"
    assert re.match(rf"the hosts do not fit together:\n  - .*: \d+ MiB free in {short}\n", str(error.value))


def test_a_host_that_never_comes_is_named(start: Callable[..., Job]) -> None:
    job = start(replace(FIRST, wait_s=0.5))
    with pytest.raises(LaunchError, match=r"NODE_RANK=1 \(h1\): not here within launch.hosts_wait_s = 0.5 s"):
        job.hosts.gather(2)


def test_a_first_host_that_is_not_at_the_address_of_the_first_host_says_so() -> None:
    options = replace(FIRST, placement=replace(FIRST.placement, address="127.0.0.2"), wait_s=0.5)
    group = WorkerGroup("127.0.0.1", shared=SharedPort(0, SECRET))
    hosts = JoinedHosts(options, group, HostAgents(options, replace(group.endpoint, addresses=("127.0.0.2",))))
    with pytest.raises(
        LaunchError, match=r"NODE_RANK=0 .*; host 0 does not reach itself at 127.0.0.2: set MASTER_ADDR"
    ):
        hosts.gather(2)
    hosts.close()


def test_training_begins_without_a_host_that_does_not_come_where_the_rest_is_enough(start: Callable[..., Job]) -> None:
    job = start(replace(FIRST, wait_s=3.0))
    job.hosts.gather(1)
    assert job.hosts.missing() == [1] and job.hosts.slots() == 1


def test_a_host_with_another_secret_ends_alone_and_is_named_on_either_side(start: Callable[..., Job]) -> None:
    job = start(replace(FIRST, wait_s=3.0))
    stranger = job.join(other(), secret="another secret of enough letters")
    with pytest.raises(LaunchError, match=r"NODE_RANK=1 \(h1\) at 127.0.0.1: another SPARKRING_SECRET than host 0"):
        job.hosts.gather(2)
    assert stranger.wait(60.0)
    with pytest.raises(LaunchError, match="a driver with another SPARKRING_SECRET listens there"):
        stranger.result()


def test_a_job_waits_on_for_the_host_whose_number_one_with_another_secret_has_used(
    start: Callable[..., Job], caplog: pytest.LogCaptureFixture
) -> None:
    """Anyone who reaches the port can say that, of every number. Its log says at once, and once, who has called."""
    job = start(replace(FIRST, wait_s=3600.0))
    with caplog.at_level(logging.WARNING), ThreadPoolExecutor() as pool:
        gathering = pool.submit(job.hosts.gather, 2)
        for _ in range(2):  # started again as it was
            stranger = job.join(other(), secret="another secret of enough letters")
            wait_for(lambda: "tried to join" in caplog.text)
            assert stranger.wait(60.0)
        job.join(other())
        gathering.result()
    assert job.hosts.slots() == 2
    named = [record.getMessage() for record in caplog.records if "tried to join" in record.getMessage()]
    assert len(named) == 1 and named[0].startswith(
        "a host with another secret, NODE_RANK=1 (h1), tried to join from 127.0.0.1, and has ended: set "
        "SPARKRING_SECRET"
    )


def test_a_client_that_is_no_host_ends_no_wait(start: Callable[..., Job]) -> None:
    """As the health check of a load balancer: it speaks TLS, and does not trust the driver's certificate either."""
    job = start(replace(FIRST, wait_s=3600.0))
    for name in ("balancer.example.org", "host1-0-0", "host7-0-0.other-secret"):  # of this job there is no host 7
        with pytest.raises(ssl.SSLError), socket.create_connection(("127.0.0.1", job.group.server.port)) as plain:
            ssl.create_default_context().wrap_socket(plain, server_hostname=name)
    wait_for(lambda: job.group.server.refused == 3)
    job.join(other())
    job.hosts.gather(2)


def test_a_host_that_comes_late_takes_a_lost_ones_place_unless_it_has_another_recipe(
    start: Callable[..., Job],
) -> None:
    job = start()
    second = job.join(other())
    job.hosts.gather(2)
    second.leave()
    wait_for(lambda: job.hosts.slots() == 1)
    assert len(job.hosts.leaving) == 1
    with job.hosts.open_group(1, ()):
        assert second.wait(60.0) and second.result().code == 0 and not job.hosts.leaving
    stranger = job.join(other(recipe="x" * 64))
    wait_for(lambda: job.hosts.slots() == 1 and stranger.wait(0.1))
    assert stranger.result().code == REFUSED and "another recipe" in stranger.result().why
    third = job.join(other(dataset=FIRST.dataset))
    wait_for(lambda: job.hosts.slots() == 2)
    job.hosts.close()
    assert third.wait(60.0)


@pytest.mark.parametrize(
    ("changes", "alive_s", "while_training", "said"),
    [
        ({"recipe": "x" * 64}, 0.0, True, "another recipe"),
        ({"rank": 1}, 60.0, True, "NODE_RANK = 1: given to "),
        ({"rank": 1}, 0.0, False, "NODE_RANK = 1: given to "),  # the first may be lost, and not yet known to be
    ],
)
def test_a_host_that_is_one_too_many_is_sent_away_while_others_train_or_at_the_end(
    changes: dict[str, object],
    alive_s: float,
    while_training: bool,
    said: str,
    start: Callable[..., Job],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The world is whole, so nobody asks for slots: such a host waited for the job's end, and ended with its code."""
    monkeypatch.setattr(hosts, "ALIVE_S", alive_s)
    job = start()
    second = job.join(other())
    job.hosts.gather(2)
    third = job.join(other(**changes))  # type: ignore[arg-type]
    with job.hosts.open_group(2, ()) as group:
        assert group.wait(lambda: third.wait(0) if while_training else len(group.ready) == 3, 60.0)
    assert third.wait(0) == while_training
    job.hosts.end(0)
    job.hosts.close()
    assert third.wait(60.0) and third.result().code == REFUSED and said in third.result().why
    assert second.wait(60.0) and second.result().code == 0


def test_a_number_that_is_given_twice_is_refused_while_the_first_hosts_are_checked(
    start: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one was taken for accepted: it trained nothing, and ended with the job's code and no word."""
    monkeypatch.setattr(hosts, "ALIVE_S", 60.0)
    job = start()
    second, third = job.join(other()), list[HostAgents]()

    def check(group: WorkerGroup, agents: object) -> None:
        third.append(job.join(other()))
        assert group.wait(lambda: third[0].wait(0), 60.0)

    job.group._check = check
    job.hosts.gather(2)
    assert third[0].result().code == REFUSED and "NODE_RANK = 1: given to " in third[0].result().why
    assert "another job's, give each job its own MASTER_PORT" in third[0].result().why
    job.hosts.end(0)
    job.hosts.close()
    assert second.wait(60.0) and second.result().code == 0


def test_a_signal_does_not_make_running_agents_look_as_if_they_had_ended(start: Callable[..., Job]) -> None:
    """Else the host would end at once, without the checkpoint that the driver asks the ranks for."""
    job = start()
    second = job.join(other())
    job.hosts.gather(2)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(KeyboardInterrupt):
            second.wait(60.0)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert not second.wait(0.1) and job.hosts.slots() == 2


def test_two_jobs_on_one_port_are_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        options = replace(FIRST, placement=replace(ALONE, port=port), secret=None)
        with (
            pytest.raises(LaunchError, match=f"port {port} of .*: another process listens there"),
            joined_hosts(options, lambda group, agents: None),
        ):
            pass


def test_an_address_that_leads_a_host_to_itself_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(LaunchError, match=r"MASTER_ADDR = '127.0.0.1': leads host 1 to itself"):
        join_driver(other())
    monkeypatch.setattr(socket, "gethostname", lambda: "localhost")
    with pytest.raises(LaunchError, match=r"MASTER_ADDR = '127.0.0.1': leads other hosts nowhere"):
        driver_addresses(FIRST.placement)


def test_the_driver_listens_on_its_own_address_or_on_all_behind_a_service(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sparkring.training.launch.join.hosts.own_addresses", lambda: {"127.0.0.1", "10.0.0.1"})
    assert driver_addresses(ALONE) == ("127.0.0.1", "127.0.0.1")
    assert driver_addresses(replace(FIRST.placement, address="10.0.0.1")) == ("10.0.0.1", "10.0.0.1")
    assert driver_addresses(replace(FIRST.placement, address="10.0.0.7")) == ("0.0.0.0", "10.0.0.7")


def test_a_hosts_gpus_are_shared_out_among_its_ranks() -> None:
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "3, 5,GPU-a,7"}) == ("3", "5", "GPU-a", "7")
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": ""}) == ()
    assert [share(("3", "5", "6"), 2, slot) for slot in (0, 1)] == [("3",), ("5",)]
    assert share(("0",), 2, 0) == () and share(("0", "1", "2", "3"), 2, 1) == ("2", "3")


def test_the_secret_is_not_shown() -> None:
    assert SECRET not in repr(FIRST) + repr(SharedPort(1, SECRET))  # which an error could quote
