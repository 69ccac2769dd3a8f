"""The driver's side of a launch: open files, agents that are ready, hosts that reach each other."""

from __future__ import annotations

import subprocess
import sys

from sparkring.training.launch.channel.control_server import MAX_UNAUTHENTICATED


def limited(soft: int, hard: int, agents: int) -> str:
    code = (
        "import resource; from sparkring.training.launch.group import allow_descriptors\n"
        f"resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))\n"
        f"allow_descriptors({agents})\n"
        "print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    return out.stdout + out.stderr


def test_the_limit_of_open_files_is_raised_or_named() -> None:
    assert int(limited(256, 4096, 1000)) >= 1000 + MAX_UNAUTHENTICATED
    assert int(limited(2048, 4096, 2)) == 2048, "what suffices is left alone"
    said = limited(256, 1000, 1000)
    assert "LaunchError: 1000 agents need about 1" in said and "its hard limit is 1000 (`ulimit -Hn`)" in said
