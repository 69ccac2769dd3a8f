"""Where the time of `make test` goes: by file, set-up apart, the processor apart from waiting.

    python benchmarks/suite.py [--jobs 4] [--out results/suite_2core_202611.md] [tests/conf ...]

Runs the suite as `make test` does, with this file as a plugin, and ends with its exit code. The processor seconds of a
test are those of its worker and of all processes below it, the shared JVM too.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
ROOT = Path(__file__).resolve().parent.parent
WRITTEN = "SUITE_TIMES"  # environment variable: the file that the plugin writes to
# Read once: tests change the environment
TIMES, IS_WORKER = os.environ.get(WRITTEN, ""), "PYTEST_XDIST_WORKER" in os.environ


# --- the plugin


@cache
def descendants() -> Any:
    from tests.descendants import Descendants  # of the suite's folder, which the script's path lacks

    return Descendants()


def cpu_s() -> float:
    """User and system seconds of this process and all below it, and of those they have waited for."""
    return sum(map(process_cpu_s, descendants().pids()), sum(os.times()[:4]))


def process_cpu_s(pid: int) -> float:
    """The same of one process, 0 where it is gone: psutil takes milliseconds, and each test would be charged twice."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return 0.0
    return sum(map(int, stat.rpartition(b")")[2].split()[11:15])) / TICKS_PER_S


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    item.stash[BEGAN] = cpu_s()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    result = yield
    item.user_properties.append(("cpu_s", cpu_s() - item.stash[BEGAN]))
    return result


BEGAN = pytest.StashKey[float]()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Write a line for each phase of each test, in the process that `pytest` was started as."""
    if IS_WORKER:
        return
    line = {"test": report.nodeid, "phase": report.when, "s": report.duration, "outcome": report.outcome}
    with open(TIMES, "a") as file:
        file.write(json.dumps(line | dict(report.user_properties)) + "\n")


# --- the script


def by_file(lines: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Sum seconds of each file: `setup`, `call`, `teardown`, `cpu_s`, and the number of `tests`."""
    found: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for line in lines:
        of_file = found[line["test"].split("::")[0]]
        of_file[line["phase"]] += line["s"]
        if line["phase"] == "teardown":
            of_file["tests"] += 1
            of_file["cpu_s"] += line.get("cpu_s", 0.0)
    return found


def table(lines: list[dict[str, Any]], shown: int) -> str:
    """Format the files that take longest, then the tests that do, as Markdown."""
    files = by_file(lines)

    def wall(name: str) -> float:
        return sum(files[name][phase] for phase in ("setup", "call", "teardown"))

    rows = ["| file | tests | seconds | of which set-up | processor |", "|---|---|---|---|---|"]
    order = sorted(files, key=wall, reverse=True)
    for name in order[:shown]:
        one = files[name]
        rows.append(f"| {name} | {one['tests']:.0f} | {wall(name):.1f} | {one['setup']:.1f} | {one['cpu_s']:.1f} |")
    rest = order[shown:]
    total, cpu = sum(map(wall, order)), sum(one["cpu_s"] for one in files.values())
    setup = sum(one["setup"] for one in files.values())
    tests = sum(one["tests"] for one in files.values())
    rows.append(f"| {len(rest)} other files | | {sum(map(wall, rest)):.1f} | | |")
    rows.append(f"| all {len(order)} | {tests:.0f} | {total:.1f} | {setup:.1f} | {cpu:.1f} |")
    calls = sorted((line for line in lines if line["phase"] == "call"), key=lambda line: -line["s"])[:shown]
    rows += ["", "| test | seconds |", "|---|---|"] + [f"| {line['test']} | {line['s']:.1f} |" for line in calls]
    return "\n".join(rows) + "\n"


def main() -> int:
    from machine import measured_with, publish

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tests", nargs="*", default=[])
    parser.add_argument("--jobs", type=int, default=4)
    parser.add_argument("--shown", type=int, default=60, help="files, and tests")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder) / "times.jsonl"
        written.touch()
        paths = [str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", "")]
        environment = {**os.environ, WRITTEN: str(written), "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)  # as make does: each process would compile us anew
        command = [sys.executable, "-m", "pytest", "-q", "--tb=short", "-p", "suite", "-m", "not slow"]
        command += ["-n", str(arguments.jobs), "--dist", "loadfile", "--no-loadscope-reorder"]
        began = time.monotonic()
        code = subprocess.run([*command, *arguments.tests], cwd=ROOT, env=environment).returncode
        wall_s = time.monotonic() - began
        lines = [json.loads(line) for line in written.read_text().splitlines()]
    failed = sum(line["outcome"] == "failed" for line in lines)
    head = f"`python benchmarks/suite.py --jobs {arguments.jobs}`: {wall_s:.0f} s, {failed} failed.\n\n"
    body = head + table(lines, arguments.shown)
    publish(f"# Where the suite's time goes\n\n{measured_with('pytest', 'pytest-xdist')}\n\n{body}", arguments.out)
    return code


if __name__ == "__main__":
    sys.exit(main())
