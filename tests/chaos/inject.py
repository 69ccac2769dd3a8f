"""Faults done to a running victim. After each it must go on from a good checkpoint, and nothing of what was there
before may be left: no process, no port, no row used twice, no other bit."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import victim
from checks import Weights, alive, compare_rows, compare_weights, leftovers
from cluster import Cluster


@dataclass
class Run:
    """One command line of the victim, given again where its driver is killed, and all it has said."""

    cluster: Cluster
    logs: Path
    steps: int
    world: int
    driver: subprocess.Popen[bytes] | None = None
    events: list[dict[str, Any]] = field(default_factory=list)
    ranks: dict[int, list[int]] = field(default_factory=dict)  # attempt -> process ids
    commands: int = 0
    variables: dict[str, str] = field(default_factory=dict)  # of the driver's environment
    _offset: int = 0

    @property
    def folder(self) -> Path:
        """Of checkpoints and audit, on the disk all hosts share."""
        return self.cluster.disk / self.logs.name

    @property
    def log(self) -> Path:
        return self.logs / "driver.log"

    def start(self) -> None:
        self.commands += 1
        args = [self.cluster.master_url, self.folder, self.steps, self.world, self.commands * 10_000]
        self.driver = self.cluster.driver(str(Path(victim.__file__)), *map(str, args), log=self.log, **self.variables)

    def read(self) -> None:
        """Take in what has been said since the last call."""
        with open(self.log, "rb") as file:
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._offset += len(line)
                if line.startswith(b'{"kind"'):
                    event = json.loads(line)
                    self.events.append(event)
                    if event.get("name") == "pid":
                        self.ranks.setdefault(event["attempt"], []).append(event["data"]["pid"])

    @property
    def step(self) -> int:
        return max((e["step"] for e in self.events if e["kind"] == "Heartbeat"), default=0)

    @property
    def attempt(self) -> int:
        return max(self.ranks, default=0)

    @property
    def is_forming(self) -> bool:
        """Whether no rank of the newest attempt is alive: agents of the next one may listen, and no rank names them."""
        return not any(map(alive, self.ranks.get(self.attempt, [])))

    def await_event(self, wanted: Callable[[dict[str, Any]], bool], timeout_s: float = 240.0) -> dict[str, Any]:
        """The first event said from now on that is `wanted`; TimeoutError and RuntimeError with the log's end."""
        deadline, seen = time.time() + timeout_s, len(self.events)
        while time.time() < deadline:
            ended = self.driver is not None and self.driver.poll() is not None
            self.read()
            for event in self.events[seen:]:
                if wanted(event):
                    return event
            seen = len(self.events)
            if ended:
                raise RuntimeError(f"the driver ended with {self.driver.returncode}:\n{self.tail()}")
            time.sleep(0.05)
        raise TimeoutError(f"not heard of within {timeout_s:g} s:\n{self.tail()}")

    def await_step(self, step: int, attempt: int = 0) -> float:
        """Time of the next heartbeat of `step` or later, in `attempt` or later."""
        reached = lambda e: e["kind"] == "Heartbeat" and e["step"] >= step and e["attempt"] >= attempt  # noqa: E731
        return float(self.await_event(reached)["at"])

    def tail(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines()
        return "\n".join(line for line in lines if '"heartbeat"' not in line)[-3000:]

    def end(self) -> None:
        """Wait until all steps are made; RuntimeError with the log's end where they are not."""
        assert self.driver is not None
        code = self.driver.wait(timeout=600)
        self.read()
        if code:
            raise RuntimeError(f"the driver ended with {code}:\n{self.tail()}")

    def kill(self) -> None:
        """SIGKILL the driver's Python and its JVM, whatever they are doing."""
        assert self.driver is not None
        if self.driver.poll() is None:
            root = psutil.Process(self.driver.pid)
            for process in [*root.children(recursive=True), root]:
                if process.is_running():
                    process.kill()
        self.driver.wait()
        self.read()


def kill_rank(run: Run, chance: random.Random) -> None:
    os.kill(chance.choice(run.ranks[run.attempt]), signal.SIGKILL)


def stop_rank(run: Run, chance: random.Random) -> None:
    os.kill(chance.choice(run.ranks[run.attempt]), signal.SIGSTOP)


def kill_fork_server(run: Run, chance: random.Random) -> None:
    psutil.Process(chance.choice(run.ranks[run.attempt])).parent().kill()


def kill_agent(run: Run, chance: random.Random) -> None:
    psutil.Process(chance.choice(run.ranks[run.attempt])).parent().parent().kill()


def busy_node(run: Run, chance: random.Random) -> int:
    """A worker that has a rank now: what happens to another one is no fault."""
    return chance.choice(
        [
            n
            for n in range(1, run.cluster.workers + 1)
            if run.cluster.find(n, "sparkring.training.launch.host.fork_server")
        ]
    )


def executor(run: Run, chance: random.Random) -> psutil.Process:
    return run.cluster.find(busy_node(run, chance), "CoarseGrainedExecutorBackend")[0]


def kill_executor(run: Run, chance: random.Random) -> None:
    executor(run, chance).kill()


def decommission(run: Run, chance: random.Random) -> None:
    """As a node's manager does it: the executor is told to leave, and goes when its tasks have ended."""
    executor(run, chance).send_signal(signal.SIGPWR)


def kill_spark_worker(run: Run, chance: random.Random) -> None:
    node = busy_node(run, chance)
    run.cluster.kill_worker(node)
    time.sleep(2)
    run.cluster.start_worker(node)


def cut_link(run: Run, chance: random.Random) -> None:
    node = busy_node(run, chance)
    run.cluster.link(node, up=False)
    time.sleep(12)
    run.cluster.link(node, up=True)


def slow_link(run: Run, chance: random.Random) -> None:
    node = busy_node(run, chance)
    run.cluster.slow(node, "1mbit")
    time.sleep(3)
    run.cluster.slow(node, None)


def fill_disk(run: Run, chance: random.Random) -> None:
    """Full until an attempt has ended by it, and the report says so."""
    run.cluster.fill_disk()
    try:
        run.await_event(lambda e: e["kind"] == "AttemptEnded" and e["cause"] == "disk", 60)
    finally:
        run.cluster.free_disk()


def kill_driver(run: Run, chance: random.Random) -> None:
    run.kill()
    run.start()


@dataclass(frozen=True)
class Fault:
    act: Callable[[Run, random.Random], None]
    share: int  # of a soak's faults; those with a short recovery come more often
    ends_attempt: bool = True


FAULTS: dict[str, Fault] = {
    "SIGKILL of a rank": Fault(kill_rank, 9),
    "SIGSTOP of a rank": Fault(stop_rank, 5),
    "SIGKILL of a helper": Fault(kill_fork_server, 7),
    "SIGKILL of an agent": Fault(kill_agent, 4),
    "SIGKILL of an executor": Fault(kill_executor, 1),
    "SIGKILL of a Spark worker": Fault(kill_spark_worker, 1),
    "link down for 12 s": Fault(cut_link, 1),
    "link at 1 Mbit/s for 3 s": Fault(slow_link, 6, ends_attempt=False),
    "full disk under checkpoints": Fault(fill_disk, 9),
    "decommissioning of an executor": Fault(decommission, 2),
    "SIGKILL of the driver, rerun": Fault(kill_driver, 1),
}


def strike(run: Run, name: str, chance: random.Random, undisturbed: Weights) -> float:
    """Inject one fault, wait until training is further than it was and has committed a checkpoint, and check what must
    hold by then. Returns the seconds from the fault to the first new step; AssertionError names what does not hold."""
    while True:
        run.await_step(0)
        step, attempt, began = run.step, run.attempt, time.time()
        try:
            FAULTS[name].act(run, chance)
            break
        except (IndexError, ProcessLookupError, psutil.NoSuchProcess):
            continue  # the attempt has just ended by itself, to go on with more ranks: nothing there to strike
    recovered = run.await_step(step + 1, attempt + FAULTS[name].ends_attempt)
    saved = run.await_event(lambda e: e.get("name") == "checkpoint" and e["data"]["step"] > step)
    compare_weights(run, undisturbed)
    compare_rows(run, at_least=saved["data"]["step"] * victim.ROWS)
    began_waiting = since_formed = time.time()
    while (left := leftovers(run)) and time.time() - since_formed < 10 and time.time() - began_waiting < 120:
        if run.is_forming:
            since_formed = time.time()
        time.sleep(0.1)
        run.read()
    assert not left, f"{name}: left behind: {left}"
    return recovered - began
