"""A process is told from all others, however it is named and whatever becomes of its pid."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

from sparkring.pipelines.run.process_id import is_running, start_ticks, this_process


def test_this_process_runs_and_its_start_never_changes() -> None:
    me = this_process()
    assert me == this_process() and me.pid == os.getpid() and is_running(me, me) is True
    uptime_s = float(Path("/proc/uptime").read_text().split()[0])
    assert 0 < me.start_ticks / os.sysconf("SC_CLK_TCK") < uptime_s


def test_another_process_of_the_same_pid_is_another_and_one_elsewhere_cannot_be_seen() -> None:
    me = this_process()
    assert is_running(replace(me, start_ticks=me.start_ticks + 1), me) is False
    assert is_running(replace(me, host="elsewhere"), me) is None


def test_a_process_that_ended_does_not_run_even_where_nobody_waited_for_it() -> None:
    program = "import ctypes, sys; ctypes.CDLL(None).prctl(15, b'a) S 1 (b', 0, 0, 0); input()"  # PR_SET_NAME
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE) as child:
        born = start_ticks(child.pid)
        assert born is not None and child.stdin is not None
        child.stdin.write(b"end\n")
        child.stdin.flush()
        deadline = time.monotonic() + 30
        while start_ticks(child.pid) == born and time.monotonic() < deadline:
            time.sleep(0.01)
        assert start_ticks(child.pid) is None  # a zombie: it is waited for below
    assert start_ticks(child.pid) is None
