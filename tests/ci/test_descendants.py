"""The guard of the suite sees what a test starts."""

from __future__ import annotations

import os
import signal
import subprocess

from tests.descendants import Descendants


def test_children_and_theirs_are_seen_until_they_end() -> None:
    descendants = Descendants()
    before = descendants.pids()
    with subprocess.Popen(["sh", "-c", "sleep 600 & echo $!; wait"], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert descendants.pids() - before >= {parent.pid, child} and os.getpid() not in descendants.pids()
        os.kill(child, signal.SIGKILL)
    assert not {parent.pid, child} & descendants.pids()
