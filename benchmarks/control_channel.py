"""The control channel of a thousand ranks: CPU of the driver, seconds to connect and to name a killed rank.

The driver's side is real: server, TLS, group, attempt and protocol, in this process. The agents are real clients, in
one other process and one event loop, with no rank behind them: each is ready, says that its rank runs, sends
heartbeats as a rank of so many steps a second would, and ends it when asked. After a while one rank is killed; all
others say within the same second that their ring broke, before the killed one's agent has said a word. The driver must
name the killed one.

    python benchmarks/control_channel.py [--ranks 1000] [--steps 5] [--seconds 20] [--write FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import pickle
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from machine import measured_with, publish  # noqa: E402

from sparkring.training.launch.attempt import CHECK_S, Attempt, Limits, RankState  # noqa: E402
from sparkring.training.launch.channel.control_client import HEARTBEAT_S, ControlClient, Endpoint  # noqa: E402
from sparkring.training.launch.control import Control  # noqa: E402
from sparkring.training.launch.failure import WorkerFailed  # noqa: E402
from sparkring.training.launch.group import WorkerGroup, allow_descriptors  # noqa: E402
from sparkring.training.launch.health import StragglerDetector  # noqa: E402
from sparkring.training.launch.host.info import HostInfo, collect_host_info, problems  # noqa: E402
from sparkring.training.launch.job import JobSpec  # noqa: E402
from sparkring.training.launch.messages import (  # noqa: E402
    MAX_PEERS,
    AgentReady,
    AttemptStarted,
    Bye,
    ChildEnded,
    ChildError,
    ChildFailed,
    Event,
    Heartbeat,
    KillChildren,
    RankMetrics,
    RankRunning,
    StartChild,
    ToAgent,
    WindowTiming,
)
from sparkring.training.launch.topology import AgentInfo, Child, assign_ranks, choose_agents, reach_plan  # noqa: E402

TARGETS = {"driver_cpu": 0.20, "connected_s": 10.0, "named_s": 2.0, "check_s": 0.05, "pure_s": 1.0}


def broken(rank: int, attempt: int) -> ChildError:
    message = "[gloo/pair.cc:1] Connection closed by peer"
    return ChildError(Child("rank", rank), attempt, "RuntimeError", message, "  ...\n" * 40, is_value_error=False)


class FakeRank:
    """An agent without a rank: a real client, and the messages a rank's life would make."""

    def __init__(self, endpoint: Endpoint, index: int, host: HostInfo, steps_per_s: float, killed: asyncio.Event):
        self._index, self._host, self._steps_per_s, self._killed = index, host, steps_per_s, killed
        self.client = ControlClient(endpoint, f"agent-{index}", self._on_message, 60.0)
        self._inbox: asyncio.Queue[ToAgent | None] = asyncio.Queue()

    def _on_message(self, message: ToAgent | None) -> None:
        self._inbox.put_nowait(message)

    async def live(self, door: asyncio.Semaphore) -> None:
        async with door:
            await self.client.open()
        i = self._index
        agent = AgentInfo(f"agent-{i}", i, f"host-{i // 8}", f"10.0.{i >> 8}.{i & 255}", "eth0", 4000, 5000)
        self.client.send(AgentReady(agent, f"h{i // 8}", self._host))
        while (message := await self._inbox.get()) is not None and not isinstance(message, Bye):
            if isinstance(message, StartChild):
                await self._run(message.child.index, message.attempt)
        await self.client.close()

    async def _run(self, rank: int, attempt: int) -> None:
        send = self.client.send
        send(RankRunning(rank, attempt))
        step, over = 0, asyncio.create_task(self._killed.wait())
        command = asyncio.create_task(self._inbox.get())
        while not over.done() and not command.done():
            step += 1
            send(Heartbeat(rank, attempt, step, "step"))
            if step % 50 == 0:
                timing = WindowTiming(0.2, 0.1, 0.0, 0.0, {}, {}, {})
                send(RankMetrics(rank, attempt, step, {"train/loss": 1.0}, timing))
            await asyncio.wait([over, command], timeout=1 / self._steps_per_s, return_when=asyncio.FIRST_COMPLETED)
        if over.done() and rank == KILLED:
            await asyncio.sleep(0.3)  # its victims are heard first
            command.cancel()
            return send(ChildEnded(Child("rank", rank), attempt, -9, "killed by SIGKILL"))
        if over.done():
            send(broken(rank, attempt))
        while not command.done() or not isinstance(command.result(), KillChildren):
            command = command if not command.done() else asyncio.create_task(self._inbox.get())
            await command
        return send(ChildEnded(Child("rank", rank), attempt, -9, "killed by SIGKILL", was_killed=True))


KILLED = 3


async def all_agents(endpoint: Endpoint, ranks: int, steps_per_s: float, at_once: int) -> None:
    """Every agent, until the driver says bye. A line on standard input kills a rank."""
    killed, host = asyncio.Event(), collect_host_info()
    asyncio.get_running_loop().add_reader(0, lambda: killed.set() if sys.stdin.readline() else None)
    door = asyncio.Semaphore(at_once)
    await asyncio.gather(*(FakeRank(endpoint, i, host, steps_per_s, killed).live(door) for i in range(ranks)))


def simulate(ranks: int, steps_per_s: float, seconds: float, at_once: int = 10_000) -> dict[str, float]:
    """Figures of one launch; AssertionError where the wrong rank is named."""
    found: dict[str, float] = {}
    allow_descriptors(ranks)
    before_kib = rss_kib()
    with WorkerGroup("127.0.0.1") as group:
        command = [
            sys.executable,
            __file__,
            "--agents",
            str(ranks),
            "--steps",
            str(steps_per_s),
            "--at-once",
            str(at_once),
        ]
        agents = subprocess.Popen(command, stdin=subprocess.PIPE, text=True)
        assert agents.stdin is not None
        agents.stdin.write(pickle.dumps(group.endpoint).hex() + "\n")
        agents.stdin.flush()
        while not group.server._agents:  # it imports
            time.sleep(0.01)
        began, cpu = time.monotonic(), time.process_time()
        group.gather(ranks, 300)
        found["connected_s"], found["connect_cpu_s"] = time.monotonic() - began, time.process_time() - cpu
        found["refused"], found["rss_per_rank_kib"] = group.server.refused, (rss_kib() - before_kib) / ranks
        marks: dict[str, float] = {}
        heartbeats = 0

        def on_event(event: Event) -> None:
            nonlocal heartbeats
            now = time.monotonic()
            heartbeats += isinstance(event, Heartbeat)
            if isinstance(event, AttemptStarted):
                marks["from"], marks["cpu"], marks["heartbeats"] = now + 2, -1.0, 0
            elif "from" in marks and marks["cpu"] < 0 and now > marks["from"]:
                marks["from"], marks["cpu"], marks["heartbeats"] = now, time.process_time(), heartbeats
            elif "killed" not in marks and marks.get("cpu", -1.0) >= 0 and now > marks["from"] + seconds:
                found["driver_cpu"] = (time.process_time() - marks["cpu"]) / (now - marks["from"])
                found["heartbeats_per_s"] = (heartbeats - marks["heartbeats"]) / (now - marks["from"])
                marks["killed"] = now
                agents.stdin.write("kill\n")
                agents.stdin.flush()
            elif isinstance(event, ChildFailed):
                found["named_s"] = now - marks["killed"]

        try:
            group.run(JobSpec("os:getpid", preload=()), ranks, on_event, limits=Limits(300, 60))
        except WorkerFailed as error:
            assert (error.child.index, error.failure.words) == (KILLED, "killed by SIGKILL"), str(error)[:500]
            assert len(error.others) == ranks - 1
        else:
            raise AssertionError("no rank was killed")
    agents.wait(60)
    return found


def rss_kib() -> int:
    return int(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmRSS")))


class Quiet:
    """The group, and server, of an attempt whose ranks all work and send nothing more."""

    trouble = staticmethod(lambda: None)
    heartbeats = staticmethod(dict)
    heartbeat_of = staticmethod(lambda agent: None)
    is_lost = staticmethod(lambda agent, limit_s: False)
    is_connected = staticmethod(lambda agent: True)
    left_at = staticmethod(lambda agent: float("inf"))
    send = staticmethod(lambda agent, message: None)

    def __init__(self) -> None:
        self.server = self


def pure_parts(ranks: int) -> dict[str, float]:
    """Seconds of what is done for all ranks at a time."""
    agents = [AgentInfo(f"a{i}", i, f"h{i // 8}", f"10.{i}", "eth0", 1, 2) for i in range(ranks)]
    seconds: dict[str, float] = {}

    def clock(name: str, call: Callable[[], Any]) -> Any:
        began = time.process_time()
        result = call()
        seconds[name] = time.process_time() - began
        return result

    chosen = clock("choose_agents", lambda: choose_agents(agents, ranks))
    clock("assign_ranks", lambda: assign_ranks([agent.host_key for agent in chosen]))
    clock("assign_ranks, a host each", lambda: assign_ranks([agent.name for agent in chosen]))
    clock("reach_plan", lambda: reach_plan(ranks, MAX_PEERS))
    host, names = collect_host_info(), [f"h{i}" for i in range(ranks)]
    clock("problems", lambda: problems(host, dict.fromkeys(names, host), dict.fromkeys(names, 0.0)))
    states = [RankState(Child("rank", i), f"a{i}", f"h{i // 8}") for i in range(ranks)]
    attempt = Attempt(Quiet(), states, 1, lambda event: None, Control(), Limits(300, 60))  # type: ignore[arg-type]
    clock("running", lambda: [attempt._take(s.agent, RankRunning(s.rank, 1)) for s in states])
    clock("check", attempt._check)
    watch = StragglerDetector(ranks)
    timing = WindowTiming(1.0, 0.5, 0.0, 0.0, {}, {}, {})
    clock("a window of timings", lambda: [watch.add(i, 1, timing) for i in range(ranks)])
    clock("all fail: errors", lambda: [attempt._take(s.agent, broken(s.rank, 1)) for s in states])
    clock("all fail: check", attempt._check)
    clock(
        "all fail: ends",
        lambda: [attempt._take(s.agent, ChildEnded(s.child, 1, 1, "exited with code 1")) for s in states],
    )
    return seconds


def report(ranks: int, found: dict[str, float], pure_ranks: int, pure: dict[str, float]) -> str:
    check_s = max(pure["check"], pure["all fail: check"])
    rows = [
        ("refused connections", f"{found['refused']:.0f}", "0"),
        ("all connected, s", f"{found['connected_s']:.1f}", f"{TARGETS['connected_s']:g}"),
        ("CPU of the driver until then, ms a rank", f"{found['connect_cpu_s'] / ranks * 1e3:.2f}", ""),
        ("CPU of the driver, % of a core", f"{found['driver_cpu'] * 100:.1f}", f"{TARGETS['driver_cpu'] * 100:g}"),
        ("the same, µs a rank and second", f"{found['driver_cpu'] / ranks * 1e6:.0f}", ""),
        ("heartbeats read, a second", f"{found['heartbeats_per_s']:.0f}", ""),
        ("memory of the driver, KiB a rank", f"{found['rss_per_rank_kib']:.0f}", ""),
        ("killed rank named, s", f"{found['named_s']:.2f}", f"{TARGETS['named_s']:g}"),
        (f"a check of {pure_ranks:,} ranks, ms", f"{check_s * 1e3:.1f}", f"{TARGETS['check_s'] * 1e3:g}"),
        (f"all pure parts for {pure_ranks:,} ranks, s", f"{sum(pure.values()):.2f}", f"{TARGETS['pure_s']:g}"),
    ]
    lines = [f"| {name} | {value} | {target} |" for name, value, target in rows]
    parts = [f"| {name} | {value * 1e3:.1f} |" for name, value in pure.items()]
    return "\n".join(
        [
            f"# Control channel: {ranks:,} ranks on one machine",
            "",
            f"{measured_with()}. The driver in one process, all agents in another; heartbeats "
            f" are merged at the agent to one in {HEARTBEAT_S:g} s, and the driver checks every {CHECK_S:g} s.",
            "",
            "| | measured | at most |",
            "|---|---|---|",
            *lines,
            "",
            f"CPU of the pure parts at {pure_ranks:,} ranks:",
            "",
            "| part | ms |",
            "|---|---|",
            *parts,
            "",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1000)
    parser.add_argument("--steps", type=float, default=5.0, help="steps a second of each rank")
    parser.add_argument("--seconds", type=float, default=20.0, help="of measuring, before a rank is killed")
    parser.add_argument("--pure-ranks", type=int, default=10_000)
    parser.add_argument(
        "--at-once",
        type=int,
        default=10_000,
        help="connections made at a time: fewer where the agents' process starves",
    )
    parser.add_argument("--write", type=Path, help="result file")
    parser.add_argument("--agents", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.agents:
        allow_descriptors(args.agents)
        endpoint = pickle.loads(bytes.fromhex(sys.stdin.readline()))
        return asyncio.run(all_agents(endpoint, args.agents, args.steps, args.at_once))
    pure = pure_parts(args.pure_ranks)
    text = report(args.ranks, simulate(args.ranks, args.steps, args.seconds, args.at_once), args.pure_ranks, pure)
    publish(text, args.write)
    return None


if __name__ == "__main__":
    main()
