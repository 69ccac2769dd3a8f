"""Ranks on a Ray cluster, without Spark (launch.on: ray): agents as actors of one placement group, a bundle each.

Ray gives the bundles, all at once or not at all, and takes them back. An actor is its rank's agent until the driver
says bye, as a task of a barrier stage is. When Ray loses a node, an actor is lost with it, and the next attempt has a
new placement group on the nodes that are left. The secret travels in the actor's arguments, Ray's own channel (encrypt
it by RAY_USE_TLS).
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import time
import uuid
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from sparkring.conf.blocks.launch import LaunchConfig
from sparkring.conf.code import code_digest
from sparkring.conf.errors import first_line
from sparkring.conf.plain_text import count_of
from sparkring.pipelines.launch.check_hosts import check_hosts
from sparkring.pipelines.launch.recover import Platform
from sparkring.training.launch.failure import LaunchError
from sparkring.training.launch.group import WorkerGroup
from sparkring.training.launch.host.agent import Agent, AgentOptions, DriverGone
from sparkring.training.launch.topology import check_world

log = logging.getLogger(__name__)
POLL_S, CONNECT_S = 0.2, 5.0
END_S = 10.0  # for actors to return after bye


class RayCluster:
    """A running Ray cluster as a place for ranks."""

    def __init__(self, launch: LaunchConfig):
        self._launch = launch
        self._asks = asks_of(launch)
        self._held = 0  # bundles of the group that is open
        self._given_up: frozenset[str] = frozenset()  # nodes of hosts that fell silent, until Ray notices too

    @property
    def platform(self) -> Platform:
        return Platform(slots=self.slots, open_group=self.open_group, give_up=self._give_up)

    def slots(self) -> int:
        """Count the ranks that fit, including those running now."""
        return room(self._nodes(), ray.available_resources(), self._held, self._asks)

    def _nodes(self) -> list[Mapping[str, Any]]:
        return [node for node in ray.nodes() if node["Alive"] and node["NodeID"] not in self._given_up]

    def _give_up(self, hosts: frozenset[str]) -> None:
        lost = [n for n in ray.nodes() if not hosts.isdisjoint({n["NodeManagerAddress"], n["NodeManagerHostname"]})]
        self._given_up |= {node["NodeID"] for node in lost}

    def wait_for_room(self) -> None:
        """Wait launch.hosts_wait_s for room, as for an autoscaler's new nodes.

        LaunchError where there is less than for launch.min_world then.
        """
        launch = self._launch
        if (found := self.slots()) >= launch.world:
            return
        log.info(
            "Ray has room for %s of %s each, and %d are wanted: waiting launch.hosts_wait_s = %g s for more",
            *(count_of(found, "rank"), amounts(self._asks), launch.world, launch.hosts_wait_s),
        )
        deadline = time.monotonic() + launch.hosts_wait_s
        while (found := self.slots()) < launch.world and time.monotonic() < deadline:
            time.sleep(POLL_S)
        if found < (launch.min_world or launch.world):
            raise LaunchError(too_little_room(launch, self._asks, found, self._nodes()))

    @contextmanager
    def open_group(self, world: int, preload: tuple[str, ...]) -> Iterator[WorkerGroup]:
        """Make a group of `world` actors, for as many attempts as all of them live."""
        check_world(world)
        launch, address = self._launch, ray.util.get_node_ip_address()
        actors = AgentActors()
        check = partial(check_hosts, code=code_digest()[:12], horovod="horovod.torch" in preload)
        run_id = ray.get_runtime_context().get_job_id()
        with WorkerGroup(
            address, run_id=run_id, silence_timeout_s=launch.silence_timeout_s, trouble=actors.trouble, check=check
        ) as group:
            options = AgentOptions(group.endpoint, {}, preload, launch.interface, lines_per_s=launch.log_lines_per_s)
            actors.start(options, self._asks, world)
            self._held = world
            try:
                yield group
            finally:
                group.close()
                actors.end(0.0 if group.lost_hosts else END_S)
                self._held = 0


class AgentActors:
    """The actors of one placement group."""

    def __init__(self) -> None:
        self._group: Any = None
        self._actors: list[Any] = []
        self._runs: list[Any] = []  # one object reference for each actor, there when it has ended

    def start(self, options: AgentOptions, asks: Mapping[str, float], world: int) -> None:
        """Ask for the bundles and the actors in them; they start once Ray has room for all."""
        name = f"sparkring-{uuid.uuid4().hex[:8]}"
        self._group = placement_group([dict(asks)] * world, strategy="PACK", name=name)
        for index in range(world):
            placed = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=index)
            actor = (
                ray.remote(RayAgent)
                .options(num_cpus=asks["CPU"], num_gpus=asks.get("GPU", 0), scheduling_strategy=placed)
                .remote()
            )
            self._actors.append(actor)
            self._runs.append(actor.run.remote(options, index, f"{name}-{index}"))

    def trouble(self) -> str | None:
        """Explain why an actor has ended; None while all run."""
        try:
            ended, _ = ray.wait(self._runs, timeout=0) if self._runs else ([], [])
            if not ended:
                return None
            ray.get(ended)
        except Exception as error:
            return ray_reason(error)
        return "an agent has ended"

    def end(self, patience_s: float) -> None:
        """Wait for the actors to return, which they do on bye; end those that do not, and give the bundles back."""
        with contextlib.suppress(Exception):  # the cluster may be gone
            ray.wait(self._runs, num_returns=len(self._runs), timeout=patience_s)
            for actor in self._actors:
                ray.kill(actor)
            remove_placement_group(self._group)


class RayAgent:
    """The actor of one rank; its environment is that of Ray's worker."""

    def run(self, options: AgentOptions, index: int, name: str) -> None:
        """Run as an agent until the driver says bye."""
        gpus = tuple(str(gpu) for gpu in ray.get_gpu_ids())
        with contextlib.suppress(DriverGone):  # Ray reports it, or the driver is gone too
            Agent(replace(options, environment={**os.environ}), index, name, gpus).run()


@contextmanager
def ray_cluster(launch: LaunchConfig) -> Iterator[RayCluster]:
    """Connect to the running cluster of RAY_ADDRESS, or of this host. LaunchError where none answers."""
    address = os.environ.get("RAY_ADDRESS", "auto")
    if address.startswith("ray://"):
        raise LaunchError(
            f"RAY_ADDRESS = {address!r}: through Ray's client the ranks could not reach this driver; start it on the "
            "cluster: ray job submit -- sparkring train ... launch.on=ray"
        )
    try:
        if ":" in address:  # Ray itself tries for minutes
            host, _, port = address.rpartition(":")
            socket.create_connection((host, int(port)), timeout=CONNECT_S).close()
        ray.init(address, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, ValueError, RuntimeError) as error:
        raise LaunchError(
            f"launch.on = 'ray': no Ray cluster answers at {address!r} ({first_line(error)}); start one with `ray "
            "start --head`, or set RAY_ADDRESS"
        ) from error
    try:
        with asked_of_autoscaler([asks_of(launch)] * launch.world):
            yield RayCluster(launch)
    finally:
        ray.shutdown()


@contextmanager
def asked_of_autoscaler(bundles: Sequence[Mapping[str, float]]) -> Iterator[None]:
    """Make Ray's autoscaler, where there is one, keep room for `bundles` meanwhile, in place of lost nodes too."""
    from ray.autoscaler.sdk import request_resources  # of a cluster that scales

    request_resources(bundles=[dict(each) for each in bundles])
    try:
        yield
    finally:
        with contextlib.suppress(Exception):  # the cluster may be gone
            request_resources(bundles=[])


def asks_of(launch: LaunchConfig) -> dict[str, float]:
    """Return the Ray resources of a rank."""
    gpus = {"GPU": float(launch.gpus_per_rank)} if launch.gpus_per_rank else {}
    return {"CPU": float(launch.cpus_per_rank or 1), **gpus}


def room(nodes: Sequence[Mapping[str, Any]], free: Mapping[str, float], held: int, asks: Mapping[str, float]) -> int:
    """Count the bundles that the nodes have room for, by what is free in the cluster and `held` by us already.

    What is free is known of the cluster only, so bundles that no single node has room for may be counted.
    """
    whole = sum(min(int(node["Resources"].get(name, 0) // each) for name, each in asks.items()) for node in nodes)
    return min(whole, *(int((free.get(name, 0) + held * each) // each) for name, each in asks.items()))


def too_little_room(
    launch: LaunchConfig, asks: Mapping[str, float], found: int, nodes: Collection[Mapping[str, Any]]
) -> str:
    """Describe what Ray has, and what is requested."""
    least, key = (launch.min_world, "launch.min_world") if launch.min_world else (launch.world, "launch.world")
    have = {name: sum(node["Resources"].get(name, 0) for node in nodes) for name in asks}
    return (
        f"Ray has room for {count_of(found, 'rank')} of {amounts(asks)} each, and {key} = {least} must fit: on its "
        f"{count_of(len(nodes), 'node')} there are {amounts(have)}, with what other jobs hold; add nodes, end other "
        "jobs, or set launch.world, launch.cpus_per_rank or launch.gpus_per_rank to less"
    )


def amounts(resources: Mapping[str, float]) -> str:
    """Format resources for people."""
    return ", ".join(f"{amount:g} {name}" for name, amount in resources.items())


def ray_reason(error: BaseException) -> str:
    """Find the line of a Ray error that says why."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    missing = next((line for line in lines if line.startswith(("ModuleNotFoundError", "ImportError"))), None)
    if missing:
        return f"{missing}, in the Python of a Ray node; install the same packages on every node"
    reason = next((line for line in lines if "died" in line or "Error:" in line), first_line(error))
    return reason[:1000]
