"""One process of a host imports for all fork servers of its agents."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from sparkring.training.launch.group import WorkerGroup
from sparkring.training.launch.host import shared_imports
from sparkring.training.launch.host.fork_server import ForkServer
from sparkring.training.launch.host.shared_imports import MOST_BYTES, SharedImports, rank_environment
from sparkring.training.launch.job import JobSpec
from sparkring.training.launch.local import local_group
from tests.waits import wait_for

PRELOAD = ("sqlite3",)


@pytest.mark.parametrize(
    ("changed", "is_served"),
    [
        ({}, True),
        ({"ANOTHER": "1"}, True),  # a rank's own environment is set before its work begins
        ({"OMP_NUM_THREADS": "3"}, False),
        ({"GOMP_SPINCOUNT": "1"}, False),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, False),
        ({"CUDA_VISIBLE_DEVICES": "1"}, False),
        ({"LD_PRELOAD": "x.so"}, False),
        # Of a driver that has imported torch's inductor, or scikit-learn: all its later ranks imported for themselves.
        ({"TORCHINDUCTOR_CACHE_DIR": "/tmp/torchinductor_root"}, True),
        ({"KMP_DUPLICATE_LIB_OK": "True", "KMP_INIT_AT_FORK": "FALSE"}, True),
    ],
)
def test_libraries_that_would_be_imported_in_another_way_are_not_shared(
    changed: dict[str, str], is_served: bool
) -> None:
    environment = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "0"}
    shared = SharedImports(environment)
    assert shared.serves(environment | changed) is is_served
    shared.close()


def test_secrets_are_not_in_its_environment() -> None:
    found = rank_environment(
        {"SPARKRING_SECRET": "s", "OPENLINEAGE_API_KEY": "k", "MLFLOW_TRACKING_TOKEN": "t", "A": "1"}
    )
    assert set(found) == {"A", "GOMP_SPINCOUNT"}


def places(ctx: Any) -> dict[str, Any]:
    server = psutil.Process(os.getppid())
    return {
        "server": server.pid,
        "imports": server.ppid(),
        "folder": os.readlink(f"/proc/{server.pid}/cwd"),
        "session": os.getsid(server.pid),
        "imported": "sqlite3" in sys.modules,
        "finds": importlib.util.find_spec("module_of_the_folder") is not None,
    }


def run(group: WorkerGroup, world: int, attempt: int = 1) -> list[dict[str, Any]]:
    return group.run(JobSpec(places), world, attempt=attempt).results


@pytest.mark.ranks
@pytest.mark.usefixtures("no_torch")
def test_fork_servers_of_a_host_are_forked_from_one_process_which_ends_with_the_last_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "5")  # the suite's is for another number
    monkeypatch.chdir(tmp_path)
    (tmp_path / "module_of_the_folder.py").touch()
    with local_group(2, PRELOAD) as first:
        ranks = run(first, 2)
        (tmp_path / "other").mkdir()
        monkeypatch.chdir(tmp_path / "other")
        with local_group(2, PRELOAD) as second:
            ranks += run(second, 2)
        (imports,) = {rank["imports"] for rank in ranks}
        assert imports != os.getpid() and psutil.Process(imports).ppid() == os.getpid()
        assert len({rank["server"] for rank in ranks}) == 4
        assert all(rank["session"] == rank["server"] and rank["imported"] for rank in ranks)
        assert [rank["folder"] for rank in ranks] == [f"{tmp_path}"] * 2 + [f"{tmp_path}/other"] * 2
        assert [rank["finds"] for rank in ranks] == [True] * 2 + [False] * 2
        wait_for(lambda: not any(psutil.pid_exists(rank["server"]) for rank in ranks[2:]))
        assert psutil.pid_exists(imports) and all(psutil.pid_exists(rank["server"]) for rank in ranks[:2])
    assert not psutil.pid_exists(imports)
    wait_for(lambda: not any(psutil.pid_exists(rank["server"]) for rank in ranks))


@pytest.mark.ranks
@pytest.mark.usefixtures("no_torch")
def test_where_it_was_killed_a_fork_server_imports_itself_and_those_it_had_forked_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    with local_group(2, PRELOAD) as group:
        before = run(group, 2)
        psutil.Process(before[0]["imports"]).kill()
        again = run(group, 2, attempt=2)
        assert [rank["server"] for rank in again] == [rank["server"] for rank in before]
        psutil.Process(before[1]["server"]).kill()
        wait_for(lambda: not psutil.pid_exists(before[1]["server"]))
        last = run(group, 2, attempt=3)
    assert last[0]["server"] == before[0]["server"]
    assert last[1]["imports"] == os.getpid() and last[1]["imported"]


@pytest.mark.ranks
def test_a_request_that_is_too_long_is_served_by_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    with shared_imports.shared_imports(os.environ):
        monkeypatch.setattr(sys, "path", [*sys.path, "/" + "x" * MOST_BYTES])
        server = ForkServer((), os.environ)
        assert server.alive and psutil.Process(server._process.pid).ppid() == os.getpid()  # type: ignore[union-attr]
        server.close()
        assert not server.alive


FORKS = """
import os, sys, time
from sparkring.training.launch.host.shared_imports import share_with_forks
share_with_forks()
for _ in range(2):
    if not os.fork():
        from sparkring.training.launch.local import local_group
        from tests.training.launch.host.test_shared_imports import PRELOAD, run
        with local_group(1, PRELOAD) as group:
            (rank,) = run(group, 1)
            print(rank["imports"], rank["server"], flush=True)
            time.sleep(600)
time.sleep(600)
"""


@pytest.mark.ranks
@pytest.mark.parametrize("how", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_processes_that_are_forked_later_share_it_and_nothing_outlives_them(
    how: signal.Signals, no_torch: Path
) -> None:
    """As the agents of Spark's Python workers do, which its daemon forks."""
    path = f"{no_torch}{os.pathsep}{Path(__file__).parents[4]}"
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([sys.executable, "-c", FORKS], stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    found = [[int(word) for word in process.stdout.readline().split()] for _ in range(2)]
    assert found[0][0] == found[1][0] and found[0][1] != found[1][1]
    imports = psutil.Process(found[0][0])
    assert imports.ppid() == process.pid and "fork_on_request" in " ".join(imports.cmdline())
    workers = psutil.Process(process.pid).children()
    workers.remove(imports)
    workers[0].send_signal(how)
    gone = [server for _, server in found]
    wait_for(lambda: sum(map(psutil.pid_exists, gone)) == 1)
    assert imports.is_running()
    for each in (workers[1], psutil.Process(process.pid)):
        each.send_signal(how)
    process.wait(timeout=60)
    process.stdout.close()
    wait_for(lambda: not any(map(psutil.pid_exists, [*gone, imports.pid])))
