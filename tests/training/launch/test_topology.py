"""Ranks over hosts: as torchrun and Horovod define them, for every shape of cluster."""

from __future__ import annotations

import inspect
import re
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkring.conf.rank_info import RankInfo
from sparkring.training.launch.host.rank import run_rank
from sparkring.training.launch.messages import MAX_PEERS
from sparkring.training.launch.topology import (
    AgentInfo,
    Rendezvous,
    assign_ranks,
    choose_agents,
    rank_environment,
    reach_plan,
    visible_devices,
)


def agent(index: int, host: str, gpus: tuple[str, ...] = ()) -> AgentInfo:
    return AgentInfo(f"a-{index}", index, host, f"10.0.0.{index}", "eth0", 4000 + index, 5000 + index, gpus)


def test_three_uneven_hosts() -> None:
    places = assign_ranks(["x", "x", "x", "y", "z", "z"])
    assert [p.rank for p in places] == [0, 1, 2, 3, 4, 5]
    assert [p.local_rank for p in places] == [0, 1, 2, 0, 0, 1]
    assert [p.local_size for p in places] == [3, 3, 3, 1, 2, 2]
    assert [p.node_rank for p in places] == [0, 0, 0, 1, 2, 2]
    assert [p.cross_rank for p in places] == [0, 0, 0, 1, 2, 1]  # of the hosts that have this local rank
    assert [p.cross_size for p in places] == [3, 2, 1, 3, 3, 2]
    assert {p.node_count for p in places} == {3}


@given(st.lists(st.sampled_from("abcdef"), min_size=1, max_size=40))
def test_ranks_are_a_bijection_and_contiguous_by_host(hosts: list[str]) -> None:
    agents = choose_agents([agent(i, host) for i, host in enumerate(hosts)], len(hosts))
    places = assign_ranks([s.host_key for s in agents])
    assert [p.rank for p in places] == list(range(len(hosts)))
    by_host: dict[str, list[int]] = {}
    for s, p in zip(agents, places, strict=True):
        by_host.setdefault(s.host_key, []).append(p.rank)
        assert p.local_rank == p.rank - min(by_host[s.host_key])
        assert p.local_size == hosts.count(s.host_key)
    assert all(ranks == list(range(ranks[0], ranks[0] + len(ranks))) for ranks in by_host.values())
    for local in range(max(p.local_size for p in places)):
        column = [p for p in places if p.local_rank == local]
        assert [p.cross_rank for p in column] == list(range(column[0].cross_size))


def test_a_smaller_world_uses_as_few_hosts_as_it_can() -> None:
    agents = [agent(0, "x"), agent(1, "y"), agent(2, "y"), agent(3, "y")]
    assert [s.index for s in choose_agents(agents, 3)] == [1, 2, 3]
    with pytest.raises(ValueError, match="the agents are for 4 ranks only"):
        choose_agents(agents, 5)


def test_one_visible_device_per_rank_or_the_hosts_in_order_for_scripts() -> None:
    agents = [agent(0, "x", ("3",)), agent(1, "x", ("1",)), agent(2, "y", ("0",))]
    place = assign_ranks(["x", "x", "y"])[1]
    assert visible_devices(agents[1], agents, "own") == ("1",)
    assert visible_devices(agents[1], agents, "host") == ("3", "1")
    env = rank_environment(place, agents[1], Rendezvous("run", 2, agents[0], 30.4), ("1",))
    assert env["CUDA_VISIBLE_DEVICES"] == "1"
    assert (env["MASTER_ADDR"], env["MASTER_PORT"]) == ("10.0.0.0", "4000")
    assert (env["TORCHELASTIC_RESTART_COUNT"], env["HOROVOD_GLOO_TIMEOUT_SECONDS"]) == ("1", "30")
    assert (env["HOROVOD_CROSS_RANK"], env["HOROVOD_CROSS_SIZE"], env["GROUP_RANK"]) == ("0", "1", "0")
    assert all(isinstance(v, str) for v in env.values())


@pytest.mark.parametrize("each", [1, 2, 3])
@pytest.mark.parametrize("which", ["own", "host"])
def test_set_device_by_local_rank_is_right_whatever_is_visible(which: str, each: int) -> None:
    """The first of the GPUs that Spark has given to a rank is the one at index LOCAL_RANK of those it sees."""
    agents = [agent(i, "xxy"[i], tuple(f"{i}{k}" for k in range(each))) for i in range(3)]
    for mine, place in zip(agents, assign_ranks([s.host_key for s in agents]), strict=True):
        seen = visible_devices(mine, agents, which)
        env = rank_environment(place, mine, Rendezvous("run", 1, agents[0], 30.0), seen)
        assert env["CUDA_VISIBLE_DEVICES"].split(",")[int(env["LOCAL_RANK"])] == mine.gpus[0]
        assert env["HOROVOD_LOCAL_RANK"] == str(place.local_rank)


def test_every_variable_that_torchrun_sets_is_set() -> None:
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

    source = inspect.getsource(LocalElasticAgent._start_workers) + inspect.getsource(
        LocalElasticAgent._set_local_rank_env
    )
    wanted = set(re.findall(r'"([A-Z][A-Z_]+)"', source)) - {"OMP_NUM_THREADS"}  # it passes that on, as we do
    assert {"LOCAL_RANK", "TORCHELASTIC_MAX_RESTARTS", "ROLE_NAME"} <= wanted
    env = rank_environment(RankInfo(), agent(0, "x"), Rendezvous("run", 1, agent(0, "x"), 30.0), ())
    by_rank = inspect.getsource(run_rank)  # what an administrator may have set otherwise
    devices = {"CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"}
    assert not {name for name in wanted - env.keys() - devices if f'"{name}"' not in by_rank}


@pytest.mark.parametrize("count", [1, 2, 3, 8, 9, 10, 11, 17, 64, 259, 1000])
def test_reach_is_sampled_evenly_and_the_sample_is_connected(count: int) -> None:
    """All pairs were tried: of more than 258 hosts each had more at its store's port than the kernel queues."""
    plan = reach_plan(count, MAX_PEERS)
    degree = min(MAX_PEERS, count - 1)
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
