"""The fork server: it forks a rank, reports its pid and end, and leaves nothing behind."""

from __future__ import annotations

import os
import socket
import tempfile
from pathlib import Path
from typing import Any

import psutil
import pytest

from sparkring.conf.rank_info import RankInfo
from sparkring.training.launch.channel.frames import SocketChannel
from sparkring.training.launch.host.fork_server import ForkServer
from sparkring.training.launch.job import JobSpec
from sparkring.training.launch.local import run_local
from sparkring.training.launch.messages import (
    ChildExited,
    ChildForked,
    FromRankToAgent,
    RankResult,
    RankRunning,
    RankStart,
    StartChild,
)
from sparkring.training.launch.topology import Child

pytestmark = pytest.mark.ranks


def test_a_rank_is_forked_runs_and_ends_and_the_server_takes_the_next() -> None:
    entry = JobSpec(lambda ctx: [ctx.rank, ctx.payload["a"]], preload=()).describe_entry()
    server, rank = ForkServer((), {**os.environ, "MLFLOW_TRACKING_TOKEN": "secret"}), Child("rank", 1)
    try:
        for attempt in (1, 2):
            output, theirs_output = os.pipe()
            ours, theirs = socket.socketpair()
            store = socket.create_server(("127.0.0.1", 0))
            with tempfile.TemporaryFile() as stacks, store, ours, theirs:
                of_rank = RankStart(RankInfo(1, 2))
                start = StartChild(rank, attempt, entry, {"a": attempt}, dict(os.environ), of_rank)
                server.start(start, [theirs_output, theirs.fileno(), stacks.fileno(), store.fileno()])
                os.close(theirs_output)
                theirs.close()
                forked = server.receive()
                assert isinstance(forked, ChildForked) and forked.child == rank
                channel = SocketChannel(ours, FromRankToAgent)
                assert channel.receive() == RankRunning(1, attempt)
                assert channel.receive() == RankResult(1, attempt, "json", f"[1, {attempt}]")
                assert server.receive() == ChildExited(rank, 0)
                assert not psutil.pid_exists(forked.pid)
            os.close(output)
        assert server.alive
    finally:
        server.close()
    assert not server.alive
    with pytest.raises((EOFError, OSError)):
        server.receive()


@pytest.mark.usefixtures("no_torch")
def test_threads_wait_for_each_other_with_few_spins_unless_the_user_says_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """libgomp reads it when torch is imported, which the fork server does."""

    def spins(ctx: Any) -> str | None:
        variables = Path(f"/proc/{os.getppid()}/environ").read_text().split("\0")
        return next((each.partition("=")[2] for each in variables if each.startswith("GOMP_SPINCOUNT=")), None)

    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    assert run_local(JobSpec(spins, preload=()), 1).results == ["10000"]
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    assert run_local(JobSpec(spins, preload=()), 1).results == ["7"]
    monkeypatch.delenv("GOMP_SPINCOUNT")
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    assert run_local(JobSpec(spins, preload=()), 1).results == [None]
