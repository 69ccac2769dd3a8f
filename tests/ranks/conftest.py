"""`launch`: run a function of a module beside the tests in several processes, and return every rank's result."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from sparkring.training.parallel.data_parallel.horovod_ring import available
from tests.ranks.problem import RANKS_ON

HERE = Path(__file__).resolve().parent
Launch = Callable[..., list[Any]]


class RanksFailed(AssertionError):
    """Has the log of the launch and every rank's error."""


class RankForkServer:
    """A process that has torch imported and forks the ranks of launches."""

    def __init__(self) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
        command = [sys.executable, str(HERE / "fork_server.py")]
        self.process = subprocess.Popen(
            command, bufsize=0, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self.process.stdin is not None and self.process.stdout is not None
        self.requests, self.answers = self.process.stdin, self.process.stdout

    def run(self, request: dict[str, Any], timeout_s: float) -> int | None:
        """The exit code; None when it was killed after `timeout_s`."""
        self.requests.write(json.dumps(request).encode() + b"\n")
        group = int(self.answers.readline())
        ended = bool(select.select([self.answers], [], [], timeout_s)[0])
        if not ended:
            os.killpg(group, signal.SIGKILL)
        code = int(self.answers.readline())
        return code if ended else None

    def close(self) -> None:
        self.requests.close()
        self.process.wait()
        self.answers.close()


@pytest.fixture(scope="session")
def fork_server() -> Iterator[RankForkServer]:
    with closing(RankForkServer()) as process:
        yield process


@pytest.fixture
def network() -> str | None:
    """Commands that set up a network namespace for the ranks of `launch`; None: they are on the machine's network."""
    return None


@pytest.fixture
def launch(tmp_path: Path, fork_server: RankForkServer, network: str | None) -> Launch:
    """A launch with Horovod where it is not installed skips the test and says so."""
    runs = iter(range(1000))

    def run(
        world: int,
        function: str,
        payload: dict[str, Any] | None = None,
        engine: str = "torch",
        timeout_s: float = 400,
    ) -> list[Any]:
        if engine == "horovod" and (why := available(RANKS_ON)):
            pytest.skip(f"{why}: nothing was checked on Horovod")
        out = tmp_path / f"run{next(runs)}"
        out.mkdir()
        request = {"world": world, "function": f"tests.ranks.{function}", "engine": engine, "out": str(out)}
        request |= {"network": network} if network else {}
        request["payload"] = {"tmp": str(tmp_path), **(payload or {})}
        code = fork_server.run(request, timeout_s)
        if code != 0:
            errors = "\n".join(f"--- {path.name}\n{path.read_text()[-3000:]}" for path in sorted(out.glob("*.error")))
            ending = f"no end after {timeout_s} s" if code is None else f"exit code {code}"
            raise RanksFailed(f"{ending}\n{(out / 'log').read_text()[-3000:]}\n{errors}")
        return [torch.load(out / f"{rank}.pt", map_location="cpu", weights_only=False) for rank in range(world)]

    return run
