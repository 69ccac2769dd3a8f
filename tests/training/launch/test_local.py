"""Ranks as processes of this machine: what they compute, and every way they can end."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from pipelines.launch.script import pack_folder
from training.launch.agent import Agent, AgentOptions
from training.launch.attempt import Limits
from training.launch.crew import Control
from training.launch.failure import Cancelled, WorkerFailed
from training.launch.job import JobSpec
from training.launch.link import Endpoint
from training.launch.local import local_crew, run_local
from training.launch.rank import FILES
from training.launch.tls import new_certificate

pytestmark = pytest.mark.ranks
BARE: tuple[str, ...] = ()  # nothing preloaded: a rank starts in no time


def quiet(event: dict[str, Any]) -> None:
    """Events are of no interest to a test about something else."""


def fails(entry: Any, world: int = 2, preload: tuple[str, ...] = BARE, **options: Any) -> WorkerFailed:
    with pytest.raises(WorkerFailed) as caught:
        run_local(JobSpec(entry, preload=preload), world, options.pop("on_event", quiet), **options)
    return caught.value


def horovod_sum(ctx: Any) -> list[float]:
    import horovod.torch as hvd
    import torch

    hvd.init()
    assert (hvd.rank(), hvd.size(), hvd.local_rank(), hvd.cross_size()) == (ctx.rank, ctx.world_size, ctx.local_rank, 1)
    summed = hvd.allreduce(torch.ones(3) * (ctx.rank + 1), op=hvd.Sum)
    ctx.metrics(1, {"sum": float(summed[0])})
    return summed.tolist()


def torch_sum(ctx: Any) -> float:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    x = torch.ones(1) * (ctx.rank + 1)
    dist.all_reduce(x)
    dist.destroy_process_group()
    return float(x)


@pytest.mark.horovod
def test_horovod_and_torch_rings_on_one_crew_the_second_launch_warm() -> None:
    events: list[dict[str, Any]] = []
    with local_crew(2, ("torch", "horovod.torch")) as crew:
        first = crew.run(JobSpec(horovod_sum), 2, events.append, attempt=1)
        second = crew.run(JobSpec(torch_sum), 2, events.append, attempt=2)
    assert first.results == [[3.0] * 3] * 2
    assert first.metrics == [{"step": 1, "values": {"sum": 3.0}}]
    assert second.results == [3.0, 3.0]
    assert second.start_s < first.start_s
    assert {e["rank"] for e in events if e["kind"] == "metrics"} == {0, 1}


def test_the_payload_the_place_and_the_environment_reach_every_rank() -> None:
    def entry(ctx: Any) -> dict[str, Any]:
        names = (
            "RANK",
            "WORLD_SIZE",
            "LOCAL_RANK",
            "LOCAL_WORLD_SIZE",
            "GROUP_RANK",
            "MASTER_ADDR",
            "HOROVOD_SIZE",
            "MINE",
        )
        return {"payload": ctx.payload, **{name: os.environ.get(name) for name in names}}

    result = run_local(JobSpec(entry, payload={"a": [1]}, env={"MINE": "x"}, preload=BARE), 2, quiet)
    expected = {"payload": {"a": [1]}, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0", "MINE": "x"}
    expected |= {"MASTER_ADDR": "127.0.0.1", "HOROVOD_SIZE": "2"}
    assert result.results == [{**expected, "RANK": str(r), "LOCAL_RANK": str(r)} for r in range(2)]


def test_arguments_go_and_tensors_come_back() -> None:
    import torch

    def entry(ctx: Any, x: Any, *, factor: float) -> dict[str, Any]:
        return {"rank": ctx.rank, "scaled": x * factor}

    job = JobSpec(entry, args=(torch.ones(2),), kwargs={"factor": 3.0}, preload=BARE)
    for rank, result in enumerate(run_local(job, 2, quiet).results):
        assert result["rank"] == rank and result["scaled"].tolist() == [3.0, 3.0]


@pytest.mark.parametrize("world", [0, -1, 1.5])
def test_a_world_that_is_no_number_of_ranks(world: Any) -> None:
    with pytest.raises(ValueError, match=f"world = {world}: a whole number of ranks, at least 1"):
        run_local(JobSpec(print, preload=BARE), world, quiet)


def test_an_entry_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "named_entry.py").write_text("def main(ctx):\n    return [ctx.rank, ctx.attempt]\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert run_local(JobSpec("named_entry:main", preload=BARE), 2, quiet, attempt=3).results == [[0, 3], [1, 3]]


TORCHRUN_SCRIPT = """
import os, sys
import torch, torch.distributed as dist
def main():
    dist.init_process_group("gloo")
    x = torch.tensor([float(dist.get_rank() + 1)])
    dist.all_reduce(x)
    print("argv", sys.argv[1:], "sum", x.item(), "local", os.environ["LOCAL_RANK"], flush=True)
    dist.destroy_process_group()
if __name__ == "__main__":
    main()
"""


HOROVODRUN_SCRIPT = """
import sys
import torch, horovod.torch as hvd
hvd.init()
x = hvd.allreduce(torch.tensor([hvd.rank() + 1.0]), op=hvd.Sum)
print("argv", sys.argv[1:], "sum", x.item(), "local", hvd.local_rank(), flush=True)
"""


@pytest.mark.parametrize(
    ("source", "preload"),
    [
        pytest.param(TORCHRUN_SCRIPT, ("torch",), id="torchrun"),
        pytest.param(HOROVODRUN_SCRIPT, ("torch", "horovod.torch"), id="horovodrun", marks=pytest.mark.horovod),
    ],
)
def test_a_script_for_another_launcher_runs_unmodified(tmp_path: Path, source: str, preload: tuple[str, ...]) -> None:
    script = tmp_path / "train.py"
    script.write_text(source)
    lines: list[str] = []
    result = run_local(
        JobSpec(str(script), args=("--lr", "1"), preload=preload),
        2,
        lambda e: lines.extend(f"{e['rank']}:{line}" for line in e["lines"]) if e["kind"] == "log" else None,
    )
    assert result.results == [None, None]
    assert sorted(lines) == [f"{r}:argv ['--lr', '1'] sum 3.0 local {r}" for r in range(2)]


def test_an_exception_is_told_with_rank_traceback_and_last_lines() -> None:
    def entry(ctx: Any) -> None:
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        print("about to fail")
        if ctx.rank == 1:
            raise ValueError("the offending key")
        dist.all_reduce(torch.ones(1))

    error = fails(entry, preload=("torch",))
    assert (error.rank, error.failure.cause, error.failure.error_type) == (1, "exception", "ValueError")
    assert "the offending key" in str(error)
    assert 'raise ValueError("the offending key")' in error.failure.traceback
    assert "about to fail" in error.failure.last_lines
    assert [o.rank for o in error.others] in ([0], [])  # rank 0 saw its ring break


@pytest.mark.horovod
def test_a_rank_that_is_killed_is_the_first_failure_not_the_broken_ring() -> None:
    def entry(ctx: Any) -> None:
        import horovod.torch as hvd
        import torch

        hvd.init()
        for step in range(1000):
            if ctx.rank == 1 and step == 5:
                os.kill(os.getpid(), signal.SIGKILL)
            hvd.allreduce(torch.ones(3))

    error = fails(entry, preload=("torch", "horovod.torch"))
    assert (error.rank, error.failure.words) == (1, "killed by SIGKILL")


@pytest.mark.parametrize(
    ("how", "words"),
    [
        (lambda: sys.exit(7), "exited with code 7"),
        (lambda: os._exit(3), "exited with code 3"),
        (lambda: os._exit(0), "exited with code 0 without returning from its entry"),
        (lambda: os.abort(), "killed by SIGABRT"),
    ],
)
def test_every_end_is_named_and_the_others_are_ended_within_seconds(how: Any, words: str) -> None:
    def entry(ctx: Any) -> None:
        if ctx.rank == 1:
            how()
        time.sleep(600)

    began = time.monotonic()
    error = fails(entry)
    assert (error.rank, error.failure.words) == (1, words)
    assert time.monotonic() - began < 20


FOLDER_SCRIPT = """
import os, sys
from training import progress
from helpers.mine import value
assert progress(1) is False
print(value, open("words.txt").read(), sys.argv[1:], os.path.exists("helpers/mine.py"), flush=True)
"""


@pytest.mark.parametrize("same", [True, False], ids=["the driver's folder", "a copy of it"])
def test_a_script_begins_in_the_drivers_folder_or_in_a_copy_of_it(tmp_path: Path, same: bool) -> None:
    folder, place = tmp_path / "folder", tmp_path / "shipped"
    for path, text in {"train.py": FOLDER_SCRIPT, "helpers/mine.py": "value = 'mine'", "words.txt": "words"}.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    place.mkdir()
    archive = pack_folder(folder, str(folder / "train.py"), [], place)
    if not same:
        (folder / "helpers/mine.py").write_text("value = 'of another version'")
    lines: list[str] = []
    job = JobSpec(str(folder / "train.py"), args=("-x",), folder=str(folder), archive=archive.name, preload=BARE)
    job = replace(job, env={FILES: str(place), "PYTHONDONTWRITEBYTECODE": "1"})
    steps = []
    run_local(job, 1, lambda e: lines.extend(e.get("lines", ())) if e["kind"] == "log" else steps.append(e.get("step")))
    assert lines[-1] == "mine words ['-x'] True"
    assert any("running in a copy" in line for line in lines) != same
    assert 1 in steps, "progress is a heartbeat"


def test_a_script_that_says_nothing_any_more_hangs_and_one_that_prints_does_not(tmp_path: Path) -> None:
    script = tmp_path / "quiet.py"
    script.write_text("import time\nfor _ in range(8): print('.', flush=True); time.sleep(0.5)\ntime.sleep(60)\n")
    began = time.monotonic()
    with pytest.raises(WorkerFailed) as caught:
        run_local(JobSpec(str(script), preload=BARE), 2, quiet, limits=Limits(hang_s=3.0, by_output=True))
    assert caught.value.failure.cause == "hang"
    assert time.monotonic() - began > 4.0 + 2.5


def test_an_exception_that_cannot_be_pickled_or_printed() -> None:
    class Odd(Exception):
        def __init__(self, a: int, b: int):
            self.lock = threading.Lock()

        def __str__(self) -> str:
            raise RuntimeError("no words")

    def entry(ctx: Any) -> None:
        raise Odd(1, 2)

    assert "its __str__ raised RuntimeError" in str(fails(entry, world=1))


def test_a_result_that_is_not_json_names_the_function() -> None:
    def entry(ctx: Any) -> object:
        return {"model": object()}

    assert "entry returned a dict that cannot come back" in fails(entry, world=1).failure.message


def test_an_unpicklable_function_names_what() -> None:
    lock = threading.Lock()

    def entry(ctx: Any) -> None:
        lock.acquire()

    with pytest.raises(TypeError, match=r"entry cannot be sent to the workers: 'lock' \(_thread.lock\)"):
        run_local(JobSpec(entry), 1, quiet)


@pytest.mark.parametrize(
    ("entry", "match"), [("no_such.py", "no such script"), ("just words", "neither 'module:function' nor")]
)
def test_an_entry_that_is_nothing(entry: str, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        run_local(JobSpec(entry), 1, quiet)


def test_a_module_that_is_not_there_says_how_to_ship_it() -> None:
    assert "ship it with --py-files" in fails("nowhere.module:main", world=1).failure.message


def test_a_payload_that_is_not_json() -> None:
    with pytest.raises(TypeError, match="payload of the job"):
        run_local(JobSpec(horovod_sum, payload={"a": object()}), 1, quiet)


def test_what_a_rank_forks_dies_with_it(tmp_path: Path) -> None:
    pids = tmp_path / "pids"

    def entry(ctx: Any) -> int:
        if os.fork() == 0:
            os.setsid()
            os.fork()  # a daemon in a session of its own, and its child
            with open(pids, "a") as file:
                file.write(f"{os.getpid()}\n")
            time.sleep(600)
        while not pids.exists() or len(pids.read_text().splitlines()) < 2:
            time.sleep(0.01)
        return 1

    assert run_local(JobSpec(entry, preload=BARE), 1, quiet).result == 1
    assert not [pid for pid in map(int, pids.read_text().split()) if psutil.pid_exists(pid)]


def test_a_gigabyte_of_prints_neither_slows_nor_fills_the_driver() -> None:
    def entry(ctx: Any) -> int:
        block = ("x" * 99 + "\n") * 10_000
        for _ in range(1000):  # 1 GB
            sys.stdout.write(block)
        print("the end")
        return 1

    received: list[str] = []
    before = psutil.Process().memory_info().rss
    result = run_local(
        JobSpec(entry, preload=BARE), 1, lambda e: received.extend(e["lines"]) if e["kind"] == "log" else None
    )
    assert result.result == 1
    assert psutil.Process().memory_info().rss - before < 200 << 20
    assert len(received) < 1000 + 200 * result.run_s * 2 + 2000
    assert any("lines held back" in line for line in received)


def test_a_callback_that_fails_does_not_end_training() -> None:
    def broken(event: dict[str, Any]) -> None:
        raise OSError("the log is full")

    def entry(ctx: Any) -> int:
        print("hello")
        ctx.metrics(1, {"a": 1.0})
        return ctx.rank

    assert run_local(JobSpec(entry, preload=BARE), 2, broken).results == [0, 1]


def test_requests_reach_every_rank_and_cancel_ends_them() -> None:
    def entry(ctx: Any) -> int:
        ctx.heartbeat(1, "step")
        while not ctx.should_checkpoint():
            time.sleep(0.01)
        ctx.event("saved", {"rank": ctx.rank})
        while not ctx.should_stop():
            time.sleep(0.01)
        assert not ctx.should_checkpoint()
        return ctx.rank

    control, saved = Control(), []

    def on_event(event: dict[str, Any]) -> None:
        if event["kind"] == "heartbeat" and event["rank"] == 0:
            control.checkpoint()
        if event["kind"] == "event" and event["event"] == "saved":
            saved.append(event["rank"])
            if len(saved) == 2:
                control.stop()

    assert run_local(JobSpec(entry, preload=BARE), 2, on_event, control=control).results == [0, 1]

    def forever(ctx: Any) -> None:
        ctx.heartbeat(0, "wait")
        time.sleep(600)

    end, began = Control(), time.monotonic()
    with pytest.raises(Cancelled):
        run_local(
            JobSpec(forever, preload=BARE),
            2,
            lambda e: end.cancel() if e["kind"] == "heartbeat" else None,
            control=end,
        )
    assert time.monotonic() - began < 20


def test_an_end_before_the_agents_have_come_leaves_none_behind_and_waits_for_none() -> None:
    """Agents that found nobody to answer waited for 20 s, and their helpers stayed for good."""
    control, began = Control(), time.monotonic()
    control.cancel()
    with pytest.raises(Cancelled, match="agents were waited for"):
        run_local(JobSpec(print, preload=BARE), 2, control=control)
    assert time.monotonic() - began < 15


def test_an_agent_without_a_driver_ends_its_helper() -> None:
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        port = nobody.getsockname()[1]
    before = set(psutil.Process().children())
    endpoint = Endpoint(("127.0.0.1",), port, "0" * 64, new_certificate()[1])
    with pytest.raises(ConnectionError):
        Agent(AgentOptions(endpoint, {**os.environ}, BARE, patience_s=0.3), 0, "a")
    assert set(psutil.Process().children()) == before


DRIVER = """
import sys, time
from training.launch.job import JobSpec
from training.launch.local import run_local
def entry(ctx):
    import os, subprocess
    child = subprocess.Popen(["sleep", "600"])
    print("PIDS", os.getpid(), child.pid)
    time.sleep(600)
def show(event):
    for line in event.get("lines", ()):
        print(line, flush=True)
run_local(JobSpec(entry, preload=()), 2, show)
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_nothing_outlives_a_driver_that_is_ended(how: signal.Signals) -> None:
    import subprocess

    root = Path(__file__).parents[3]
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=root
    )
    assert driver.stdout is not None
    pids = [int(pid) for _ in range(2) for pid in driver.stdout.readline().split()[1:]]
    assert len(pids) == 4 and all(psutil.pid_exists(pid) for pid in pids)
    driver.send_signal(how)
    driver.wait(timeout=20)
    deadline = time.monotonic() + 10
    while any(_alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    driver.stdout.close()
    assert not [pid for pid in pids if _alive(pid)]


def _alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
