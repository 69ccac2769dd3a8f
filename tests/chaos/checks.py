"""What must hold after a fault, and of a whole run: nothing left behind, no other bit, every row once."""

from __future__ import annotations

import tempfile
from typing import TYPE_CHECKING

import numpy as np
import psutil
import victim

from sparkring.conf.storage import open_storage
from sparkring.training.data.audit.check import Expected, check_run
from sparkring.training.data.audit.log import read_run
from sparkring.training.launch.job import JobSpec
from sparkring.training.launch.local import run_local
from sparkring.training.launch.messages import ChildEvent, Event

if TYPE_CHECKING:
    from inject import Run

Weights = dict[int, list[float]]  # step of a checkpoint -> parameters


def leftovers(run: Run) -> list[str]:
    """Ranks of earlier attempts, and ports held by anything but Spark, the newest attempt and its driver."""
    ranks = set(run.ranks.get(run.attempt, []))
    found = [f"rank {pid}" for pids in run.ranks.values() for pid in pids if pid not in ranks and alive(pid)]
    allowed = ranks | {parent.pid for rank in ranks if alive(rank) for parent in psutil.Process(rank).parents()[:2]}
    for node in range(1, run.cluster.workers + 1):
        for port, holders in run.cluster.listeners(node):
            if not holders & allowed and not any(is_spark(pid) for pid in holders):
                found.append(f"port {port} on node {node}, held by {holders or 'nobody we can see'}")
    assert run.driver is not None
    own = [port for port, pids in run.cluster.listeners(0) if run.driver.pid in pids and "127.0.0.1" not in port]
    if len(own) > 1:
        found.append(f"ports {own} of the driver: one is the channel's, the others belong to attempts that are over")
    return found


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def is_spark(pid: int) -> bool:
    """A JVM, or the one process in each that forks Spark's Python workers; an agent is such a fork."""
    try:
        process = psutil.Process(pid)
        parent = process.parent()
        return process.name() == "java" or (parent is not None and parent.name() == "java")
    except psutil.NoSuchProcess:
        return False


def compare_weights(run: Run, undisturbed: Weights) -> str:
    """Every checkpoint so far against the one of an undisturbed run; bit for bit where the world never changed."""
    worlds = {e["world"] for e in run.events if e["kind"] == "AttemptStarted"}
    worst = 0.0
    for event in run.events:
        if event.get("name") == "checkpoint":
            step, w = event["data"]["step"], event["data"]["w"]
            if step in undisturbed:  # one written because training was asked to stop is at a step of its own
                worst = max(worst, *(abs(a - b) for a, b in zip(w, undisturbed[step], strict=True)))
    allowed = 0.0 if worlds == {run.world} else 1e-12
    assert worst <= allowed, f"parameters differ by {worst} from an undisturbed run's (worlds {sorted(worlds)})"
    return "bit-equal" if worst == 0 else f"within {worst:.1e} (worlds {sorted(worlds)})"


def compare_rows(run: Run, at_least: int) -> int:
    """Rows consumed so far, each once, by the audit's own records; AssertionError where that is not so."""
    ids = np.arange(run.steps * victim.ROWS)
    done = max((e["data"]["step"] for e in run.events if e.get("name") == "checkpoint"), default=0)
    expected = Expected(done, run.steps, victim.ROWS, ids, lambda epoch: ids, {})
    report = check_run(read_run(open_storage(str(run.folder / "audit"))), expected)
    rows = sum(epoch.rows for epoch in report.epochs)
    assert not report.problems and rows >= at_least, f"{rows} rows, {at_least} at least; {report.problems}"
    return rows


def verdict(run: Run, undisturbed: Weights) -> str:
    """Of a run that has ended: all its rows, and its last bits."""
    rows = compare_rows(run, run.steps * victim.ROWS)
    assert rows == run.steps * victim.ROWS, f"{rows} rows instead of {run.steps * victim.ROWS}"
    assert any(e["kind"] == "result" and e["finished"] for e in run.events), run.tail()
    last = next(e["data"] for e in reversed(run.events) if e.get("name") == "checkpoint")
    assert last["step"] == run.steps, f"the last checkpoint is of step {last['step']}"
    left = [pid for pids in run.ranks.values() for pid in pids if alive(pid)]
    assert not left, f"ranks {left} have outlived the run"
    return f"{rows} rows once each, parameters {compare_weights(run, undisturbed)}"


def undisturbed_run(steps: int, world: int) -> Weights:
    """Parameters at every checkpoint of a victim nobody disturbs, on this machine without Spark."""
    found: Weights = {}

    def on_event(event: Event) -> None:
        if isinstance(event, ChildEvent) and event.name == "checkpoint":
            found[event.data["step"]] = event.data["w"]

    with tempfile.TemporaryDirectory() as folder:
        payload = {"folder": folder, "steps": steps, "sleep_s": 0.0}
        run_local(JobSpec(victim.train, payload, preload=victim.PRELOAD), world, on_event)
    return found
