"""The control channel of a thousand ranks: CPU of the driver, seconds to connect and to name a killed rank.

The driver's side is real: hub, TLS, crew, attempt and protocol, in this process. The agents are real links to it, in
one other process and one event loop, with no rank behind them: each offers a seat, says that its rank runs, sends
heartbeats as a rank of so many steps a second would, and ends it when told. After a while one rank is killed; all
others say within the same second that their ring broke, before the killed one's agent has said a word. The driver must
name the killed one.

    python benchmarks/control_channel.py [--ranks 1000] [--beats 5] [--seconds 20] [--write FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import pickle
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from machine import measured_with, publish  # noqa: E402

from training.launch.attempt import LOOK_S, Attempt, Control, Limits  # noqa: E402
from training.launch.channel import Message  # noqa: E402
from training.launch.crew import Crew, allow_descriptors  # noqa: E402
from training.launch.facts import collect_facts, problems, reach_plan  # noqa: E402
from training.launch.failure import RankState, WorkerFailed  # noqa: E402
from training.launch.job import JobSpec  # noqa: E402
from training.launch.link import BEAT_S, Endpoint, Link  # noqa: E402
from training.launch.watch import StragglerWatch  # noqa: E402
from training.launch.worker_env import Seat, assign_ranks, choose_seats  # noqa: E402

BROKEN = {"type": "RuntimeError", "message": "[gloo/pair.cc:1] Connection closed by peer", "traceback": "  ...\n" * 40}
TARGETS = {"driver_cpu": 0.20, "connected_s": 10.0, "named_s": 2.0, "look_s": 0.05, "pure_s": 1.0}


class FakeRank:
    """An agent without a rank: a real link, and the messages a rank's life would make."""

    def __init__(self, endpoint: Endpoint, index: int, facts: dict[str, Any], beats: float, killed: asyncio.Event):
        self._index, self._facts, self._beats, self._killed = index, facts, beats, killed
        self.link = Link(endpoint, f"agent-{index}", self._hear, 60.0)
        self._inbox: asyncio.Queue[Message | None] = asyncio.Queue()

    def _hear(self, message: Message | None) -> None:
        self._inbox.put_nowait(message)

    async def live(self, door: asyncio.Semaphore) -> None:
        async with door:
            await self.link.open()
        i = self._index
        seat = Seat(f"agent-{i}", i, f"host-{i // 8}", f"10.0.{i >> 8}.{i & 255}", "eth0", 4000, 5000, pid=i)
        self.link.send({"kind": "seat", "seat": asdict(seat), "hostname": f"h{i // 8}", "facts": self._facts})
        while (message := await self._inbox.get()) is not None and message["kind"] != "bye":
            if message["kind"] == "start":
                await self._run(message["document"]["rank_info"]["rank"], message["attempt"])
        await self.link.close()

    async def _run(self, rank: int, attempt: int) -> None:
        tell = lambda kind, **fields: self.link.send({"kind": kind, "rank": rank, "attempt": attempt, **fields})  # noqa: E731
        tell("running", time=time.time())
        step, over = 0, asyncio.create_task(self._killed.wait())
        command = asyncio.create_task(self._inbox.get())
        while not over.done() and not command.done():
            step += 1
            tell("heartbeat", step=step, phase="step", time=time.time())
            if step % 50 == 0:
                tell("metrics", step=step, values={"perf/step_s": 0.2, "perf/wait_s": 0.1, "train/loss": 1.0})
            await asyncio.wait([over, command], timeout=1 / self._beats, return_when=asyncio.FIRST_COMPLETED)
        if over.done() and rank == KILLED:
            await asyncio.sleep(0.3)  # its victims are heard first
            command.cancel()
            return tell("ended", status=-9, words="killed by SIGKILL", was_killed=False, last_lines=[])
        if over.done():
            tell("error", **BROKEN)
        while not command.done() or command.result()["kind"] != "kill":
            command = command if not command.done() else asyncio.create_task(self._inbox.get())
            await command
        tell("ended", status=-9, words="killed by SIGKILL", was_killed=True, last_lines=[])


KILLED = 3


async def all_agents(endpoint: Endpoint, ranks: int, beats: float, at_once: int) -> None:
    """Every agent, until the driver says bye. A line on standard input kills a rank."""
    killed, facts = asyncio.Event(), collect_facts()
    asyncio.get_running_loop().add_reader(0, lambda: killed.set() if sys.stdin.readline() else None)
    door = asyncio.Semaphore(at_once)
    await asyncio.gather(*(FakeRank(endpoint, i, facts, beats, killed).live(door) for i in range(ranks)))


def simulate(ranks: int, beats: float, seconds: float, at_once: int = 10_000) -> dict[str, float]:
    """Figures of one launch; AssertionError where the wrong rank is named."""
    found: dict[str, float] = {}
    allow_descriptors(ranks)
    before_kib = rss_kib()
    with Crew("127.0.0.1") as crew:
        command = [sys.executable, __file__, "--agents", str(ranks), "--beats", str(beats), "--at-once", str(at_once)]
        agents = subprocess.Popen(command, stdin=subprocess.PIPE, text=True)
        assert agents.stdin is not None
        agents.stdin.write(pickle.dumps(crew.endpoint).hex() + "\n")
        agents.stdin.flush()
        while not crew._hub._agents:  # it imports
            time.sleep(0.01)
        began, cpu = time.monotonic(), time.process_time()
        crew.gather(ranks, 300)
        found["connected_s"], found["connect_cpu_s"] = time.monotonic() - began, time.process_time() - cpu
        found["refused"], found["rss_per_rank_kib"] = crew.refused, (rss_kib() - before_kib) / ranks
        marks: dict[str, float] = {}
        beaten = 0

        def on_event(event: dict[str, Any]) -> None:
            nonlocal beaten
            now = time.monotonic()
            beaten += event["kind"] == "heartbeat"
            if event["kind"] == "started":
                marks["from"], marks["cpu"], marks["beats"] = now + 2, -1.0, 0
            elif "from" in marks and marks["cpu"] < 0 and now > marks["from"]:
                marks["from"], marks["cpu"], marks["beats"] = now, time.process_time(), beaten
            elif "killed" not in marks and marks.get("cpu", -1.0) >= 0 and now > marks["from"] + seconds:
                found["driver_cpu"] = (time.process_time() - marks["cpu"]) / (now - marks["from"])
                found["beats_per_s"] = (beaten - marks["beats"]) / (now - marks["from"])
                marks["killed"] = now
                agents.stdin.write("kill\n")
                agents.stdin.flush()
            elif event["kind"] == "failure":
                found["named_s"] = now - marks["killed"]

        try:
            crew.run(JobSpec("os:getpid", preload=()), ranks, on_event, limits=Limits(300, 60))
        except WorkerFailed as error:
            assert (error.rank, error.failure.words) == (KILLED, "killed by SIGKILL"), str(error)[:500]
            assert len(error.others) == ranks - 1
        else:
            raise AssertionError("no rank was killed")
    agents.wait(60)
    return found


def rss_kib() -> int:
    return int(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmRSS")))


class Quiet:
    """The crew of an attempt whose ranks all work and say nothing more."""

    why_over = staticmethod(lambda: None)
    beats = staticmethod(dict)
    beat_of = staticmethod(lambda agent: None)
    is_lost = staticmethod(lambda agent, limit_s: False)
    is_connected = staticmethod(lambda agent: True)
    left_at = staticmethod(lambda agent: float("inf"))
    tell = staticmethod(lambda agent, kind: None)


def pure_parts(ranks: int) -> dict[str, float]:
    """Seconds of what is done for all ranks at a time."""
    seats = [Seat(f"a{i}", i, f"h{i // 8}", f"10.{i}", "eth0", 1, 2) for i in range(ranks)]
    seconds: dict[str, float] = {}

    def clock(name: str, call: Callable[[], Any]) -> Any:
        began = time.process_time()
        result = call()
        seconds[name] = time.process_time() - began
        return result

    chosen = clock("choose_seats", lambda: choose_seats(seats, ranks))
    clock("assign_ranks", lambda: assign_ranks([seat.host for seat in chosen]))
    clock("assign_ranks, a host each", lambda: assign_ranks([seat.agent for seat in chosen]))
    clock("reach_plan", lambda: reach_plan(ranks))
    facts = {**collect_facts(), "received": time.time()}
    clock("problems", lambda: problems(facts, {f"h{i}": facts for i in range(ranks)}))
    states = [RankState(i, f"a{i}", f"h{i // 8}") for i in range(ranks)]
    attempt = Attempt(Quiet(), states, 1, lambda event: None, Control(), time.monotonic(), Limits(300, 60))  # type: ignore[arg-type]
    clock("running", lambda: [attempt._take(s.agent, {"kind": "running", "attempt": 1}) for s in states])
    clock("look", attempt._look)
    watch = StragglerWatch(ranks)
    values = {"perf/step_s": 1.0, "perf/wait_s": 0.5}
    clock("a window of timings", lambda: [watch.add(i, 1, values) for i in range(ranks)])
    error = {"kind": "error", "attempt": 1, **BROKEN}
    clock("all fail: errors", lambda: [attempt._take(s.agent, dict(error)) for s in states])
    clock("all fail: look", attempt._look)
    ended = {
        "kind": "ended",
        "attempt": 1,
        "status": 1,
        "words": "exited with code 1",
        "was_killed": False,
        "last_lines": [],
    }
    clock("all fail: ends", lambda: [attempt._take(s.agent, dict(ended)) for s in states])
    return seconds


def report(ranks: int, found: dict[str, float], pure_ranks: int, pure: dict[str, float]) -> str:
    looks_s = max(pure["look"], pure["all fail: look"])
    rows = [
        ("refused connections", f"{found['refused']:.0f}", "0"),
        ("all connected, s", f"{found['connected_s']:.1f}", f"{TARGETS['connected_s']:g}"),
        ("CPU of the driver until then, ms a rank", f"{found['connect_cpu_s'] / ranks * 1e3:.2f}", ""),
        ("CPU of the driver, % of a core", f"{found['driver_cpu'] * 100:.1f}", f"{TARGETS['driver_cpu'] * 100:g}"),
        ("the same, µs a rank and second", f"{found['driver_cpu'] / ranks * 1e6:.0f}", ""),
        ("heartbeats looked at, a second", f"{found['beats_per_s']:.0f}", ""),
        ("memory of the driver, KiB a rank", f"{found['rss_per_rank_kib']:.0f}", ""),
        ("killed rank named, s", f"{found['named_s']:.2f}", f"{TARGETS['named_s']:g}"),
        (f"a look at {pure_ranks:,} ranks, ms", f"{looks_s * 1e3:.1f}", f"{TARGETS['look_s'] * 1e3:g}"),
        (f"all pure parts for {pure_ranks:,} ranks, s", f"{sum(pure.values()):.2f}", f"{TARGETS['pure_s']:g}"),
    ]
    lines = [f"| {name} | {value} | {target} |" for name, value, target in rows]
    parts = [f"| {name} | {value * 1e3:.1f} |" for name, value in pure.items()]
    return "\n".join(
        [
            f"# Control channel: {ranks:,} ranks on one machine",
            "",
            f"{measured_with()}. The driver in one process, all agents in another; heartbeats "
            f" are merged at the agent to one in {BEAT_S:g} s, and the driver looks every {LOOK_S:g} s.",
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
    parser.add_argument("--beats", type=float, default=5.0, help="steps a second of each rank")
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
        return asyncio.run(all_agents(endpoint, args.agents, args.beats, args.at_once))
    pure = pure_parts(args.pure_ranks)
    text = report(args.ranks, simulate(args.ranks, args.beats, args.seconds, args.at_once), args.pure_ranks, pure)
    publish(text, args.write)
    return None


if __name__ == "__main__":
    main()
