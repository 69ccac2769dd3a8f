"""Faults done to a running victim; after each it must go on, and nothing of an earlier attempt may be left."""

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
from cluster import Cluster

VICTIM = Path(__file__).with_name("victim.py")


@dataclass
class Run:
    """One command line of the victim, restarted where its driver is killed, and all it has said."""

    cluster: Cluster
    folder: Path
    steps: int
    world: int
    driver: subprocess.Popen[bytes] | None = None
    events: list[dict[str, Any]] = field(default_factory=list)
    pids: dict[tuple[int, int], list[int]] = field(default_factory=dict)  # (command, attempt) -> pids of ranks
    commands: int = 0
    _offset: int = 0

    def start(self) -> None:
        self.commands += 1
        log = self.folder / "driver.log"
        self.driver = self.cluster.driver(
            str(VICTIM), self.cluster.master_url, str(self.folder), str(self.steps), str(self.world), log=log
        )

    def read(self) -> list[dict[str, Any]]:
        """Events since the last call."""
        fresh = []
        with open(self.folder / "driver.log", "rb") as file:
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._offset += len(line)
                if line.startswith(b'{"kind"'):
                    event = json.loads(line)
                    fresh.append(event)
                    if event["kind"] == "event" and event["event"] == "pid":
                        self.pids.setdefault((self.commands, event["attempt"]), []).append(event["data"]["pid"])
        self.events += fresh
        return fresh

    @property
    def step(self) -> int:
        return max((e["step"] for e in self.events if e["kind"] == "heartbeat"), default=0)

    def await_step(self, step: int, timeout_s: float, after: float = 0.0) -> float:
        """Time of a heartbeat of `step` or later, said after `after`; TimeoutError with the log's end."""
        deadline = time.time() + timeout_s
        seen = 0
        while time.time() < deadline:
            self.read()
            for event in self.events[seen:]:
                if event["kind"] == "heartbeat" and event["step"] >= step and event["at"] > after:
                    return float(event["at"])
            seen = len(self.events)
            if self.driver is not None and self.driver.poll() is not None:
                raise RuntimeError(f"the driver ended with {self.driver.returncode}:\n{self.tail()}")
            time.sleep(0.05)
        raise TimeoutError(f"no step {step} within {timeout_s:g} s:\n{self.tail()}")

    def tail(self) -> str:
        lines = (self.folder / "driver.log").read_text(errors="replace").splitlines()
        return "\n".join(line for line in lines if '"heartbeat"' not in line)[-3000:]

    def orphans(self) -> list[int]:
        """Ranks of all but the newest attempt that are still there."""
        newest = max(self.pids, default=(0, 0))
        return [pid for key, pids in self.pids.items() if key != newest for pid in pids if alive(pid)]


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def kill_rank(run: Run, chance: random.Random) -> None:
    os.kill(chance.choice(run.pids[max(run.pids)]), signal.SIGKILL)


def stop_rank(run: Run, chance: random.Random) -> None:
    os.kill(chance.choice(run.pids[max(run.pids)]), signal.SIGSTOP)


def kill_helper(run: Run, chance: random.Random) -> None:
    psutil.Process(chance.choice(run.pids[max(run.pids)])).parent().kill()


def kill_agent(run: Run, chance: random.Random) -> None:
    psutil.Process(chance.choice(run.pids[max(run.pids)])).parent().parent().kill()


def kill_executor(run: Run, chance: random.Random) -> None:
    nodes = [n for n in range(1, run.cluster.workers + 1) if run.cluster.find(n, "CoarseGrainedExecutorBackend")]
    run.cluster.find(chance.choice(nodes), "CoarseGrainedExecutorBackend")[0].kill()


def busy_node(run: Run, chance: random.Random) -> int:
    """A worker that has a rank now: what happens to another one is no fault."""
    return chance.choice([n for n in range(1, run.cluster.workers + 1) if run.cluster.find(n, "training.zygote")])


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


def decommission(run: Run, chance: random.Random) -> None:
    """As a node's manager does it: the executor is told to leave, and goes when its tasks have ended."""
    executor = run.cluster.find(busy_node(run, chance), "CoarseGrainedExecutorBackend")[0]
    executor.send_signal(signal.SIGPWR)


def slow_link(run: Run, chance: random.Random) -> None:
    node = busy_node(run, chance)
    run.cluster.slow(node, "1mbit")
    time.sleep(3)
    run.cluster.slow(node, None)


def kill_driver(run: Run, chance: random.Random) -> None:
    assert run.driver is not None
    kill_group(run.driver)
    run.start()


def kill_group(driver: subprocess.Popen[bytes]) -> None:
    """The driver's Python and its JVM."""
    root = psutil.Process(driver.pid)
    for process in [*root.children(recursive=True), root]:
        if process.is_running():
            process.kill()
    driver.wait()


FAULTS: dict[str, Callable[[Run, random.Random], None]] = {
    "SIGKILL of a rank": kill_rank,
    "SIGSTOP of a rank": stop_rank,
    "SIGKILL of a helper": kill_helper,
    "SIGKILL of an agent": kill_agent,
    "SIGKILL of an executor": kill_executor,
    "SIGKILL of a Spark worker": kill_spark_worker,
    "link down for 12 s": cut_link,
    "link at 1 Mbit/s for 3 s": slow_link,
    "decommissioning of an executor": decommission,
    "SIGKILL of the driver, rerun": kill_driver,
}


def strike(run: Run, name: str, chance: random.Random, timeout_s: float = 240.0) -> float:
    """Inject one fault; seconds until training is further than it was, with a little time for orphans to be ended."""
    run.read()
    step, began = run.step, time.time()
    FAULTS[name](run, chance)
    recovered = run.await_step(step + 1, timeout_s, after=began + (0.3 if name != "link at 1 Mbit/s for 3 s" else 0))
    deadline = time.time() + 10
    while run.orphans() and time.time() < deadline:
        time.sleep(0.05)
    if left := run.orphans():
        raise AssertionError(f"{name}: ranks of earlier attempts are left: {left}")
    return recovered - began


def expected(steps: int, world: int) -> dict[str, Any]:
    """What an undisturbed run of the victim returns."""
    import tempfile

    from victim import train

    from training.job import JobSpec
    from training.launch import run_local

    with tempfile.TemporaryDirectory() as folder:
        job = JobSpec(train, {"folder": folder, "steps": steps, "sleep_s": 0.0}, preload=("torch",))
        result: dict[str, Any] = run_local(job, world, lambda event: None).result
    return result
