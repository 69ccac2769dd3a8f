"""Ray as a place for ranks: how many have room, and what is said where they have none."""

from __future__ import annotations

from typing import Any

import pytest
import ray

from sparkring.conf.blocks.launch import LaunchConfig
from sparkring.pipelines.launch.ray_agents import asks_of, ray_cluster, ray_reason, room, too_little_room
from sparkring.training.launch.failure import LaunchError


def node(**resources: float) -> dict[str, Any]:
    return {"Resources": resources}


@pytest.mark.parametrize(
    ("nodes", "free", "held", "asks", "found"),
    [
        ([node(CPU=4.0), node(CPU=2.0)], {"CPU": 6.0}, 0, {"CPU": 1.0}, 6),
        ([node(CPU=4.0), node(CPU=2.0)], {"CPU": 3.0}, 0, {"CPU": 1.0}, 3),  # another job holds 3
        ([node(CPU=4.0), node(CPU=2.0)], {}, 6, {"CPU": 1.0}, 6),  # we hold all
        ([node(CPU=3.0), node(CPU=3.0)], {"CPU": 6.0}, 0, {"CPU": 2.0}, 2),  # a node's odd core is no use
        ([node(CPU=8.0, GPU=2.0), node(CPU=8.0)], {"CPU": 16.0, "GPU": 2.0}, 0, {"CPU": 1.0, "GPU": 1.0}, 2),
        ([node(CPU=8.0)], {"CPU": 8.0}, 0, {"CPU": 1.0, "GPU": 1.0}, 0),
        ([node(CPU=2.0)], {}, 2, {"CPU": 1.0}, 2),  # the other node of ours is lost
        ([], {}, 0, {"CPU": 1.0}, 0),
    ],
)
def test_room_is_what_is_free_or_ours_on_nodes_that_fit_a_rank(
    nodes: list[dict[str, Any]], free: dict[str, float], held: int, asks: dict[str, float], found: int
) -> None:
    assert room(nodes, free, held, asks) == found


def test_a_rank_asks_for_the_cores_and_gpus_of_the_recipe() -> None:
    assert asks_of(LaunchConfig()) == {"CPU": 1}
    assert asks_of(LaunchConfig(cpus_per_rank=3, gpus_per_rank=2)) == {"CPU": 3, "GPU": 2}


def test_too_little_room_says_what_is_there_and_what_to_set() -> None:
    launch = LaunchConfig(on="ray", world=4, gpus_per_rank=1)
    said = too_little_room(launch, asks_of(launch), 1, [node(CPU=8.0, GPU=1.0)])
    assert "room for 1 rank of 1 CPU, 1 GPU each, and launch.world = 4 must fit" in said
    assert "on its 1 node there are 8 CPU, 1 GPU" in said
    launch = LaunchConfig(on="ray", world=4, min_world=2)
    assert "launch.min_world = 2 must fit" in too_little_room(launch, asks_of(launch), 1, [])


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("ray://head:10001", "RAY_ADDRESS = 'ray://head:10001': through Ray's client the ranks could not reach"),
        ("127.0.0.1:1", "no Ray cluster answers at '127.0.0.1:1'"),
        ("127.0.0.1:none", "no Ray cluster answers at '127.0.0.1:none'"),
    ],
)
def test_a_cluster_that_is_not_there_is_named(address: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(LaunchError) as error, ray_cluster(LaunchConfig(on="ray")):
        pass
    assert said in str(error.value)


def test_the_autoscaler_keeps_room_for_all_ranks_until_the_job_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lost node is replaced by it only while it is asked to."""
    asked: list[Any] = []

    def request_resources(bundles: list[Any]) -> None:
        asked.append(bundles)
        if not bundles:
            raise ConnectionError("the cluster is gone")

    monkeypatch.setenv("RAY_ADDRESS", "auto")
    monkeypatch.setattr(ray, "init", lambda *_, **__: None)
    monkeypatch.setattr(ray, "shutdown", lambda: asked.append("shutdown"))
    monkeypatch.setattr("ray.autoscaler.sdk.request_resources", request_resources)
    with ray_cluster(LaunchConfig(on="ray", world=2, gpus_per_rank=1)):
        assert asked == [[{"CPU": 1.0, "GPU": 1.0}] * 2]
    assert asked[1:] == [[], "shutdown"]


@pytest.mark.parametrize(
    ("error", "said"),
    [
        ("The actor died because its node has died.\nNode Id: 12", "The actor died because its node has died."),
        (
            "System error\ntraceback:\n  ModuleNotFoundError: No module named 'sparkring'\n",
            "ModuleNotFoundError: No module named 'sparkring', in the Python of a Ray node; install the same packages "
            "on every node",
        ),
        (
            "ray::RayAgent.run()\n  File x\nValueError: launch.interface = 'eth9'",
            "ValueError: launch.interface = 'eth9'",
        ),
    ],
)
def test_the_line_of_a_ray_error_that_says_why_is_found(error: str, said: str) -> None:
    assert ray_reason(RuntimeError(error)) == said
