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

from sparkring.pipelines.launch.script import pack_folder
from sparkring.training.launch import attempt
from sparkring.training.launch.attempt import Limits
from sparkring.training.launch.control import Control
from sparkring.training.launch.failure import Cancelled, WorkerFailed
from sparkring.training.launch.group import WorkerGroup
from sparkring.training.launch.host.rank import FILES
from sparkring.training.launch.job import JobSpec
from sparkring.training.launch.local import local_group, run_local
from sparkring.training.launch.messages import ChildEvent, Event, Heartbeat, LogLines, RankMetrics

pytestmark = pytest.mark.ranks
BARE: tuple[str, ...] = ()  # nothing is imported before a rank needs it


def quiet(event: Event) -> None:
    """Events are of no interest to a test about something else."""


def fails(group: WorkerGroup, entry: Any, world: int = 2) -> WorkerFailed:
    with pytest.raises(WorkerFailed) as caught:
        group.run(JobSpec(entry), world, quiet)
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


def fork_server_of_rank(ctx: Any) -> int:
    return os.getppid()


@pytest.mark.horovod
def test_horovod_and_torch_rings_on_one_crew_the_second_launch_warm(group: WorkerGroup) -> None:
    events: list[Event] = []
    first = group.run(JobSpec(horovod_sum), 2, events.append, attempt=1)
    second = group.run(JobSpec(torch_sum), 2, events.append, attempt=2)
    parents = [group.run(JobSpec(fork_server_of_rank), 2, quiet, attempt=n).results for n in (3, 4)]
    assert parents[0] == parents[1], "what was imported once is not imported again"
    assert first.results == [[3.0] * 3] * 2
    assert first.metrics == [RankMetrics(0, 1, 1, {"sum": 3.0}, None)]
    assert second.results == [3.0, 3.0]
    assert {e.rank for e in events if isinstance(e, RankMetrics)} == {0, 1}


def test_the_payload_the_place_and_the_environment_reach_every_rank(group: WorkerGroup) -> None:
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

    result = group.run(JobSpec(entry, payload={"a": [1]}, env={"MINE": "x"}), 2, quiet)
    expected = {"payload": {"a": [1]}, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0", "MINE": "x"}
    expected |= {"MASTER_ADDR": "127.0.0.1", "HOROVOD_SIZE": "2"}
    assert result.results == [{**expected, "RANK": str(r), "LOCAL_RANK": str(r)} for r in range(2)]


def test_arguments_go_and_tensors_come_back(group: WorkerGroup) -> None:
    import torch

    def entry(ctx: Any, x: Any, *, factor: float) -> dict[str, Any]:
        return {"rank": ctx.rank, "scaled": x * factor}

    job = JobSpec(entry, args=(torch.ones(2),), kwargs={"factor": 3.0})
    for rank, result in enumerate(group.run(job, 2, quiet).results):
        assert result["rank"] == rank and result["scaled"].tolist() == [3.0, 3.0]


@pytest.mark.parametrize("world", [0, -1, 1.5])
def test_a_world_that_is_no_number_of_ranks(world: Any) -> None:
    with pytest.raises(ValueError, match=f"world = {world}: a whole number of ranks, at least 1"):
        run_local(JobSpec(print, preload=BARE), world, quiet)


@pytest.mark.usefixtures("no_torch")
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
    "source",
    [
        pytest.param(TORCHRUN_SCRIPT, id="torchrun"),
        pytest.param(HOROVODRUN_SCRIPT, id="horovodrun", marks=pytest.mark.horovod),
    ],
)
def test_a_script_for_another_launcher_runs_unmodified(group: WorkerGroup, tmp_path: Path, source: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(source)
    lines: list[str] = []
    result = group.run(
        JobSpec(str(script), args=("--lr", "1")),
        2,
        lambda e: lines.extend(f"{e.child.index}:{line}" for line in e.lines) if isinstance(e, LogLines) else None,
    )
    assert result.results == [None, None]
    assert sorted(lines) == [f"{r}:argv ['--lr', '1'] sum 3.0 local {r}" for r in range(2)]


def test_an_exception_is_told_with_rank_traceback_and_last_lines(group: WorkerGroup) -> None:
    def entry(ctx: Any) -> None:
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        print("about to fail")
        if ctx.rank == 1:
            raise ValueError("the offending key")
        dist.all_reduce(torch.ones(1))

    error = fails(group, entry)
    assert (error.child.index, error.failure.cause, error.failure.error_type) == (1, "exception", "ValueError")
    assert "the offending key" in str(error)
    assert 'raise ValueError("the offending key")' in error.failure.traceback
    assert error.failure.last_lines == ("about to fail",)
    assert str(error).count("Traceback (most recent call last)") == 1
    assert [o.child.index for o in error.others] in ([0], [])  # rank 0 saw its ring break


@pytest.mark.horovod
def test_a_rank_that_is_killed_is_the_first_failure_not_the_broken_ring(group: WorkerGroup) -> None:
    def entry(ctx: Any) -> None:
        import horovod.torch as hvd
        import torch

        hvd.init()
        for step in range(1000):
            if ctx.rank == 1 and step == 5:
                os.kill(os.getpid(), signal.SIGKILL)
            hvd.allreduce(torch.ones(3))

    error = fails(group, entry)
    assert (error.child.index, error.failure.words) == (1, "killed by SIGKILL")


@pytest.mark.parametrize(
    ("how", "words"),
    [
        (lambda: sys.exit(7), "exited with code 7"),
        (lambda: os._exit(3), "exited with code 3"),
        (lambda: os._exit(0), "exited with code 0 without returning from its entry"),
        (lambda: os.abort(), "killed by SIGABRT"),
    ],
)
def test_every_end_is_named_and_the_others_are_ended_within_seconds(
    group: WorkerGroup, how: Any, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempt, "SETTLE_S", 0.1)  # no other rank fails first

    def entry(ctx: Any) -> None:
        if ctx.rank == 1:
            how()
        time.sleep(600)

    error = fails(group, entry)
    assert (error.child.index, error.failure.words) == (1, words)


FOLDER_SCRIPT = """
import os, sys
from sparkring.training import progress
from helpers.mine import value
assert progress(1) is False
print(value, open("words.txt").read(), sys.argv[1:], os.path.exists("helpers/mine.py"), flush=True)
"""


@pytest.mark.parametrize("same", [True, False], ids=["the driver's folder", "a copy of it"])
def test_a_script_begins_in_the_drivers_folder_or_in_a_copy_of_it(
    group: WorkerGroup, tmp_path: Path, same: bool
) -> None:
    folder, place = tmp_path / "folder", tmp_path / "shipped"
    for path, text in {"train.py": FOLDER_SCRIPT, "helpers/mine.py": "value = 'mine'", "words.txt": "words"}.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    place.mkdir()
    archive = pack_folder(folder, str(folder / "train.py"), [], place)
    if not same:
        (folder / "helpers/mine.py").write_text("value = 'of another version'")
    lines: list[str] = []
    job = JobSpec(str(folder / "train.py"), args=("-x",), folder=str(folder), archive=archive.name)
    job = replace(job, env={FILES: str(place), "PYTHONDONTWRITEBYTECODE": "1"})
    steps = []
    group.run(
        job, 1, lambda e: lines.extend(e.lines) if isinstance(e, LogLines) else steps.append(getattr(e, "step", None))
    )
    assert lines[-1] == "mine words ['-x'] True"
    assert any("running in a copy" in line for line in lines) != same
    assert 1 in steps, "progress is a heartbeat"


def test_a_script_that_says_nothing_any_more_hangs_and_one_that_prints_does_not(
    group: WorkerGroup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sparkring.training.launch.health.DUMP_S", 0.3)  # a script's ranks show no stacks
    script = tmp_path / "quiet.py"
    script.write_text("import time\nfor _ in range(8): print('.', flush=True); time.sleep(0.2)\ntime.sleep(60)\n")
    lines: list[str] = []
    with pytest.raises(WorkerFailed) as caught:
        group.run(
            JobSpec(str(script)),
            2,
            lambda event: lines.extend(event.lines) if isinstance(event, LogLines) else None,
            limits=Limits(hang_s=2.0, by_output=True),
        )
    assert caught.value.failure.cause == "hang"
    assert len(lines) >= 16, "both have printed eight lines before"


def test_an_exception_that_cannot_be_pickled_or_printed(group: WorkerGroup) -> None:
    class Odd(Exception):
        def __init__(self, a: int, b: int):
            self.lock = threading.Lock()

        def __str__(self) -> str:
            raise RuntimeError("no words")

    def entry(ctx: Any) -> None:
        raise Odd(1, 2)

    assert "its __str__ raised RuntimeError" in str(fails(group, entry, world=1))


def test_a_result_that_is_not_json_names_the_function(group: WorkerGroup) -> None:
    def entry(ctx: Any) -> object:
        return {"model": object()}

    assert "entry returned a dict that cannot come back" in fails(group, entry, world=1).failure.message


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


def test_a_module_that_is_not_there_says_how_to_ship_it(group: WorkerGroup) -> None:
    said = fails(group, "nowhere.module:main", world=1).failure.message
    assert "install it there, or ship it with spark-submit's --py-files" in said


def test_a_payload_that_is_not_json() -> None:
    with pytest.raises(TypeError, match="payload of the job"):
        run_local(JobSpec(horovod_sum, payload={"a": object()}), 1, quiet)


def test_what_a_rank_forks_dies_with_it(group: WorkerGroup, tmp_path: Path) -> None:
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

    assert group.run(JobSpec(entry), 1, quiet).result == 1
    assert not [pid for pid in map(int, pids.read_text().split()) if _alive(pid)]


def test_hundreds_of_megabytes_of_prints_neither_slows_nor_fills_the_driver(group: WorkerGroup) -> None:
    def entry(ctx: Any) -> int:
        block = ("x" * 99 + "\n") * 10_000
        for _ in range(300):  # MB
            sys.stdout.write(block)
        print("the end")
        return 1

    received: list[str] = []
    before = psutil.Process().memory_info().rss
    result = group.run(JobSpec(entry), 1, lambda e: received.extend(e.lines) if isinstance(e, LogLines) else None)
    assert result.result == 1
    assert psutil.Process().memory_info().rss - before < 60 << 20
    assert len(received) < 1000 + 200 * result.run_s * 2 + 2000
    assert any("lines held back" in line for line in received)


def test_a_callback_that_fails_does_not_end_training(group: WorkerGroup) -> None:
    def broken(event: Event) -> None:
        raise OSError("the log is full")

    def entry(ctx: Any) -> int:
        print("hello")
        ctx.metrics(1, {"a": 1.0})
        return ctx.rank

    assert group.run(JobSpec(entry), 2, broken).results == [0, 1]


def test_requests_reach_every_rank_and_cancel_ends_them(group: WorkerGroup) -> None:
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

    def on_event(event: Event) -> None:
        if isinstance(event, Heartbeat) and event.rank == 0:
            control.checkpoint()
        if isinstance(event, ChildEvent) and event.name == "saved":
            saved.append(event.child.index)
            if len(saved) == 2:
                control.stop()

    assert group.run(JobSpec(entry), 2, on_event, control=control).results == [0, 1]

    def forever(ctx: Any) -> None:
        ctx.heartbeat(0, "wait")
        time.sleep(600)

    end = Control()
    with pytest.raises(Cancelled):
        group.run(
            JobSpec(forever),
            2,
            lambda e: end.cancel() if isinstance(e, Heartbeat) else None,
            control=end,
        )


def test_an_end_before_the_agents_have_come_leaves_none_behind_and_waits_for_none() -> None:
    """Agents that found nobody to answer waited for 20 s, and their helpers stayed for good."""
    control = Control()
    control.cancel()
    with pytest.raises(Cancelled, match="agents had not come"):
        run_local(JobSpec(print, preload=BARE), 2, control=control)


DRIVER = """
import sys, time
from sparkring.training.launch.job import JobSpec
from sparkring.training.launch.local import run_local
def entry(ctx):
    import os, subprocess
    child = subprocess.Popen(["sleep", "600"])
    print("PIDS", os.getpid(), child.pid)
    time.sleep(600)
def show(event):
    for line in getattr(event, "lines", ()):
        print(line, flush=True)
run_local(JobSpec(entry, preload=()), 2, show)
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_nothing_outlives_a_driver_that_is_ended(how: signal.Signals, no_torch: Path) -> None:
    import subprocess

    root = Path(__file__).parents[3]
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(no_torch)},
    )
    assert driver.stdout is not None
    pids = [int(pid) for _ in range(2) for pid in driver.stdout.readline().split()[1:]]
    assert len(pids) == 4 and all(psutil.pid_exists(pid) for pid in pids)
    driver.send_signal(how)
    driver.wait(timeout=300)
    deadline = time.monotonic() + 60
    while any(_alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    driver.stdout.close()
    assert not [pid for pid in pids if _alive(pid)]


def _alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def summing(ctx: Any) -> float:
    import horovod.torch as hvd
    import torch
    import torch.distributed as dist

    ctx.event("ports", {k: os.environ[k] for k in ("MASTER_PORT", "HOROVOD_GLOO_RENDEZVOUS_PORT")})
    hvd.init()
    dist.init_process_group("gloo")
    total = 0.0
    for step in range(40):
        ctx.heartbeat(step, "step")
        x = torch.ones(1, dtype=torch.float64)
        dist.all_reduce(x)
        total += float(hvd.allreduce(x, op=hvd.Sum))
        time.sleep(0.02)
    dist.destroy_process_group()
    return total


def bother(port: int, over: threading.Event) -> int:
    """Connect, flood, send garbage and half a greeting until told to stop; how many connections were made."""
    payloads = [b"", os.urandom(300), b"GET /global/0 HTTP/1.0\r\n\r\n", b"\x00\x00\x00\x20" + b"{" * 32, b"\xff" * 8]
    made, idle = 0, []
    while not over.is_set():
        try:
            sock = socket.create_connection(("127.0.0.1", port), timeout=1)
            sock.sendall(payloads[made % len(payloads)])
        except OSError:
            continue
        made += 1
        if made % 3:
            sock.close()
        else:
            idle.append(sock)
        time.sleep(0.005)
    for sock in idle:
        sock.close()
    return made


@pytest.mark.horovod
def test_a_running_job_does_not_notice_strangers_on_its_ports() -> None:
    over, threads, made = threading.Event(), [], []

    def attack(port: int) -> None:
        thread = threading.Thread(target=lambda: made.append(bother(port, over)))
        thread.start()
        threads.append(thread)

    def on_event(event: Event) -> None:
        if isinstance(event, Heartbeat) and event.step >= 5 and not threads:
            for port in ports:
                attack(port)
        if isinstance(event, ChildEvent):
            ports.add(int(event.data["HOROVOD_GLOO_RENDEZVOUS_PORT"]))

    with local_group(2, ("torch", "horovod.torch")) as group:
        ports = {group.endpoint.port}
        try:
            result = group.run(JobSpec(summing), 2, on_event)
        finally:
            over.set()
            for thread in threads:
                thread.join()
        refused = group.server.refused
    assert result.results == [160.0, 160.0]
    assert len(made) == 3 and all(count > 20 for count in made), made
    assert refused > 20


def test_the_secret_is_in_no_command_line_and_no_environment(group: WorkerGroup) -> None:
    def entry(ctx: Any) -> list[str]:
        import psutil

        family = [psutil.Process(), *psutil.Process().parents()[:2]]
        return [" ".join(p.cmdline()) + str(p.environ()) for p in family] + [str(ctx.payload)]

    texts = group.run(JobSpec(entry), 1, quiet).result
    assert len(texts) == 4
    assert not [text for text in texts if group.endpoint.secret in text]


def test_what_a_ring_opens_is_on_the_chosen_interface_alone() -> None:
    """torch's store and Gloo would listen on all of them if they were not told."""

    def entry(ctx: Any) -> list[str]:
        import psutil
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        dist.all_reduce(torch.ones(1))
        family = [psutil.Process(), *psutil.Process().parents()[:1]]  # the helper holds the store's port too
        listening = {c.laddr.ip for p in family for c in p.net_connections("tcp") if c.status == psutil.CONN_LISTEN}
        dist.destroy_process_group()
        return sorted(listening)

    with local_group(2, ("torch",)) as group:
        found = group.run(JobSpec(entry, preload=("torch",)), 2, lambda event: None).results
    assert found[0] == ["127.0.0.1"], "rank 0 serves the store"
    assert set(found[1]) <= {"127.0.0.1"}


@pytest.mark.ranks
def test_a_clock_that_jumps_neither_hangs_nor_ends_anything(
    group: WorkerGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    def entry(ctx: Any) -> int:
        for step in range(8):
            ctx.heartbeat(step, "step")
            time.sleep(0.15)
        return ctx.rank

    real, jump = time.time, [0.0]
    monkeypatch.setattr(time, "time", lambda: real() + jump[0])

    def on_event(event: Event) -> None:
        if isinstance(event, Heartbeat):
            jump[0] = 86400.0 if event.step % 2 else -86400.0

    result = group.run(JobSpec(entry), 2, on_event, limits=Limits(60, 5.0))
    assert result.results == [0, 1]


@pytest.mark.ranks
def test_a_dead_log_connection_does_not_stop_training() -> None:
    """The agents' connections are cut again and again while ranks work; nothing that matters is lost."""

    def entry(ctx: Any) -> int:
        for step in range(40):
            ctx.metrics(step, {"x": float(step)})
            print("line", step)
            time.sleep(0.02)
        return ctx.rank

    with local_group(2, ()) as group:

        def on_event(event: Event) -> None:
            if isinstance(event, RankMetrics) and event.step % 10 == 5:
                for known in list(group.server._agents.values()):
                    if connection := known.connection:
                        group.server._loop.call_soon_threadsafe(connection.abort)

        result = group.run(JobSpec(entry, preload=()), 2, on_event)
    assert result.results == [0, 1]
    assert [m.step for m in result.metrics] == list(range(40))


@pytest.mark.ranks
def test_a_slow_callback_holds_nobody_up(group: WorkerGroup, tmp_path: Path) -> None:
    reported = tmp_path / "reported"

    def entry(ctx: Any) -> None:
        for step in range(200):
            ctx.metrics(step, {"x": 0.0})
        reported.touch()

    seen: list[bool] = []

    def on_event(event: Event) -> None:
        if isinstance(event, RankMetrics) and not seen:  # the first one is held until all have been sent
            deadline = time.monotonic() + 120
            while not reported.exists() and time.monotonic() < deadline:
                time.sleep(0.01)
            seen.append(reported.exists())

    group.run(JobSpec(entry), 1, on_event)
    assert seen == [True]
