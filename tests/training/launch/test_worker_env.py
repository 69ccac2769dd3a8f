"""Ranks over hosts: as torchrun and Horovod define them, for every shape of cluster."""

from __future__ import annotations

import asyncio
import inspect
import re
import socket
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from training.launch.agent import choose_interface
from training.launch.rank import run_rank
from training.launch.rendezvous import Store
from training.launch.worker_env import Seat, assign_ranks, choose_seats, rank_environment, visible_devices


def seat(index: int, host: str, gpus: tuple[str, ...] = ()) -> Seat:
    return Seat(f"a-{index}", index, host, f"10.0.0.{index}", "eth0", 4000 + index, 5000 + index, gpus)


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
def test_places_are_a_bijection_and_contiguous_by_host(hosts: list[str]) -> None:
    seats = choose_seats([seat(i, host) for i, host in enumerate(hosts)], len(hosts))
    places = assign_ranks([s.host for s in seats])
    assert [p.rank for p in places] == list(range(len(hosts)))
    by_host: dict[str, list[int]] = {}
    for s, p in zip(seats, places, strict=True):
        by_host.setdefault(s.host, []).append(p.rank)
        assert p.local_rank == p.rank - min(by_host[s.host])
        assert p.local_size == hosts.count(s.host)
    assert all(ranks == list(range(ranks[0], ranks[0] + len(ranks))) for ranks in by_host.values())
    for local in range(max(p.local_size for p in places)):
        column = [p for p in places if p.local_rank == local]
        assert [p.cross_rank for p in column] == list(range(column[0].cross_size))


def test_a_smaller_world_sits_on_as_few_hosts_as_it_can() -> None:
    seats = [seat(0, "x"), seat(1, "y"), seat(2, "y"), seat(3, "y")]
    assert [s.index for s in choose_seats(seats, 3)] == [1, 2, 3]
    with pytest.raises(ValueError, match="seats for 4 ranks only"):
        choose_seats(seats, 5)


def test_one_visible_device_per_rank_or_the_hosts_in_order_for_scripts() -> None:
    seats = [seat(0, "x", ("3",)), seat(1, "x", ("1",)), seat(2, "y", ("0",))]
    place = assign_ranks(["x", "x", "y"])[1]
    assert visible_devices(seats[1], seats, "own") == ("1",)
    assert visible_devices(seats[1], seats, "host") == ("3", "1")
    env = rank_environment(place, seats[1], seats[0], 2, 30.4, "run", ("1",))
    assert env["CUDA_VISIBLE_DEVICES"] == "1"
    assert (env["MASTER_ADDR"], env["MASTER_PORT"]) == ("10.0.0.0", "4000")
    assert (env["TORCHELASTIC_RESTART_COUNT"], env["HOROVOD_GLOO_TIMEOUT_SECONDS"]) == ("1", "30")
    assert (env["HOROVOD_CROSS_RANK"], env["HOROVOD_CROSS_SIZE"], env["GROUP_RANK"]) == ("0", "1", "0")
    assert all(isinstance(v, str) for v in env.values())


@pytest.mark.parametrize("each", [1, 2, 3])
@pytest.mark.parametrize("which", ["own", "host"])
def test_set_device_by_local_rank_is_right_whatever_is_visible(which: str, each: int) -> None:
    """The first of the GPUs that Spark has given to a rank is the one at index LOCAL_RANK of those it sees."""
    seats = [seat(i, "xxy"[i], tuple(f"{i}{k}" for k in range(each))) for i in range(3)]
    for mine, place in zip(seats, assign_ranks([s.host for s in seats]), strict=True):
        seen = visible_devices(mine, seats, which)
        env = rank_environment(place, mine, seats[0], 1, 30.0, "run", seen)
        assert env["CUDA_VISIBLE_DEVICES"].split(",")[int(env["LOCAL_RANK"])] == mine.gpus[0]
        assert env["HOROVOD_LOCAL_RANK"] == str(place.local_rank)


def test_every_variable_that_torchrun_sets_is_set() -> None:
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

    source = inspect.getsource(LocalElasticAgent._start_workers) + inspect.getsource(
        LocalElasticAgent._set_local_rank_env
    )
    wanted = set(re.findall(r'"([A-Z][A-Z_]+)"', source)) - {"OMP_NUM_THREADS"}  # it passes that on, as we do
    assert {"LOCAL_RANK", "TORCHELASTIC_MAX_RESTARTS", "ROLE_NAME"} <= wanted
    env = rank_environment(assign_ranks(["x"])[0], seat(0, "x"), seat(0, "x"), 1, 30.0, "run", ())
    by_rank = inspect.getsource(run_rank)  # what an administrator may have set otherwise
    assert not {name for name in wanted - env.keys() - {"CUDA_VISIBLE_DEVICES"} if f'"{name}"' not in by_rank}


def test_the_store_bounds_what_it_keeps() -> None:
    async def use() -> None:
        store = Store()
        store.put("/s/a", b"1")
        assert await store.handle("GET", "/s/a", b"") == b"1"
        await store.handle("DELETE", "/s/a", b"")
        assert await store.get("/s/a") is None
        with pytest.raises(ValueError, match="does not fit"):
            store.put("/s/b", bytes((1 << 20) + 1))
        early = asyncio.create_task(store.get("/s/c", 10.0))
        await asyncio.sleep(0)
        store.put("/s/c", b"2")
        assert await early == b"2"

    asyncio.run(use())


def test_the_interface_is_the_one_that_reaches_the_driver_or_the_one_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    def address(text: str) -> Any:
        return SimpleNamespace(family=socket.AF_INET, address=text)

    there = {"lo": [address("127.0.0.1")], "eth0": [address("10.0.0.7")], "eth1": [address("10.1.0.7")]}
    monkeypatch.setattr("psutil.net_if_addrs", lambda: there)
    assert choose_interface("10.0.0.7", None) == ("10.0.0.7", "eth0")
    assert choose_interface("10.0.0.7", "eth1") == ("10.1.0.7", "eth1")
    with pytest.raises(ValueError, match=r"launch\.interface = 'ib0': no such interface .*'eth1': '10\.1\.0\.7'"):
        choose_interface("10.0.0.7", "ib0")
    with pytest.raises(ValueError, match=r"no interface has the address 10\.9\.9\.9 that reached the driver"):
        choose_interface("10.9.9.9", None)
