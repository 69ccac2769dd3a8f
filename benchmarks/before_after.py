"""Two commits side by side: launch, reader, scoring, steps, the loop and checkpoint stall, in turns on one machine.

usage (root, Linux): unshare --net python benchmarks/before_after.py COMMIT [COMMIT] [--turns 2] [--only NAME ...]
       [--write FILE]

Each commit (the second: HEAD) is checked out in a folder of its own and measured by its own benchmarks, in the order
A B B A, repeated. What a benchmark compares with inside one run (bare code, the plain copy, the decoder) is measured
again for each commit, so a ratio that changes while that one does not is the code's.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
from machine import ROOT, measured_with, publish
from strategies import middle_mean

Numbers = dict[str, float]


def run(tree: Path, *words: str) -> str:
    names = os.environ | {"PYTHONPATH": str(tree), "PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1"}
    done = subprocess.run([sys.executable, *words], cwd=tree, env=names, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{tree}: {words}: exit code {done.returncode}\n{done.stderr[-3000:]}")
    return done.stdout


def launch(tree: Path) -> Numbers:
    """Seconds to a formed ring of two ranks, beside Spark's and Horovod's launchers in the same session."""
    out = run(tree, "benchmarks/launch.py", "--one", "local[2]", "--rounds", "2")
    seconds = json.loads(next(x for x in out.splitlines() if x.startswith("RESULT ")).removeprefix("RESULT "))
    return {f"launch s: {name}": statistics.median(values) for name, values in seconds.items()}


def reader(tree: Path) -> Numbers:
    """Million rows per CPU second of the table reader, beside decoding alone."""
    folder = tree / "build/rows"
    target = tree / "build/reader.md"
    cases = ["decode alone", "sparkring", "sparkring 8 lanes"]
    words = ["--theme", "table", "--rows", "1000000", "--rounds", "1", "--cases", ",".join(cases)]
    run(tree, "benchmarks/data_readers.py", *words, "--folder", str(folder), "--out", str(target))
    rows = [line.split("|") for line in target.read_text().splitlines() if line.startswith("|")]
    found: dict[str, float] = {}
    for row in rows:
        if row[1].strip() in cases:  # the first table has the rates, those below it say where the time went
            found.setdefault(row[1].strip(), float(row[2].split()[0].replace(",", "")))
    return {f"reader, M rows per CPU s: {name}": found[name] / 1e6 for name in cases}


def steps(tree: Path) -> Numbers:
    """Seconds of a step of ours over bare code's, in pairs of neighbouring blocks (benchmarks/strategies.py)."""
    for old in (tree / "benchmarks/results").glob("strategies_2core_*.json"):
        old.unlink()
    cases = ("ddp", "horovod", "zero3", "1f1b")
    run(tree, "benchmarks/strategies.py", "--ranks", "2", "--links", "loopback", "--seconds", "10", "--cases", *cases)
    (found,) = (tree / "benchmarks/results").glob("strategies_2core_*.json")
    (part,) = json.loads(found.read_text()).values()
    ratios = {r["case"]: np.array([b["ours"][0] / b["bare"][0] for b in r["blocks"]]) for r in part["results"]}
    return {f"step, ours / bare: {name}": float(middle_mean(ratios[name])) for name in cases}


def stall(tree: Path) -> Numbers:
    """How long a checkpoint of 400 MB holds training up, beside one copy of it."""
    found = json.loads(run(tree, "benchmarks/checkpoint_stall.py"))
    return {f"checkpoint: {name}": found[name] for name in ("plain_copy_s", "stall_s", "stall_over_copy")}


def scoring(tree: Path) -> Numbers:
    """Million rows per CPU second that a loaded model scores, by this commit's benchmark."""
    shutil.copyfile(ROOT / "benchmarks/scoring.py", tree / "benchmarks/scoring.py")  # the older one may lack it
    found = json.loads(run(tree, "benchmarks/scoring.py").splitlines()[-1])
    return {f"scoring, M rows per CPU s: {name}": rate / 1e6 for name, rate in found.items()}


def loop(tree: Path) -> Numbers:
    """Milliseconds of a step of the whole loop with a tiny model (benchmarks/loop_overhead.py)."""
    shutil.copyfile(ROOT / "benchmarks/loop_overhead.py", tree / "benchmarks/loop_overhead.py")  # the older may lack it
    found = map(json.loads, run(tree, "benchmarks/loop_overhead.py", "--steps", "1000").splitlines())
    return {f"loop, ms per step: {one['layout']}": one["step_ms"] for one in found}


MEASURES: list[Callable[[Path], Numbers]] = [stall, reader, scoring, steps, launch, loop]


def table(commits: list[str], found: list[dict[str, list[float]]]) -> str:
    """One line per number: its median for each commit, the spread, and the ratio of the medians."""
    lines = [f"| | {commits[0]} | {commits[1]} | second / first |", "|---|---|---|---|"]
    for name in found[0]:
        columns = [turns[name] for turns in found]
        middles = [statistics.median(values) for values in columns]
        shown = [f"{m:.3f} ({min(v):.3f}-{max(v):.3f})" for m, v in zip(middles, columns, strict=True)]
        lines.append(f"| {name} | {shown[0]} | {shown[1]} | {middles[1] / middles[0]:.3f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commits", nargs="+", help="one or two; the second is HEAD where it is not given")
    parser.add_argument("--turns", type=int, default=2, help="each is A B B A: two measurements per commit")
    names = [measure.__name__ for measure in MEASURES]
    parser.add_argument("--only", nargs="+", choices=names, default=names, help="what to measure")
    parser.add_argument("--write", type=Path, help="result file")
    arguments = parser.parse_args()
    git = ["git", "-C", str(ROOT)]
    commits = [
        subprocess.run([*git, "rev-parse", "--short", name], capture_output=True, text=True, check=True).stdout.strip()
        for name in [*arguments.commits, "HEAD"][:2]
    ]
    found: list[dict[str, list[float]]] = [{}, {}]
    with tempfile.TemporaryDirectory() as scratch:
        trees = [Path(scratch, commit) for commit in commits]
        for tree, commit in zip(trees, commits, strict=True):
            subprocess.run([*git, "worktree", "add", "--quiet", "--detach", str(tree), commit], check=True)
            (tree / "build").mkdir()
        try:
            wanted = [measure for measure in MEASURES if measure.__name__ in arguments.only]
            for measure, which in itertools.product(wanted, (0, 1, 1, 0) * arguments.turns):
                print(measure.__name__, commits[which], file=sys.stderr, flush=True)
                for name, value in measure(trees[which]).items():
                    found[which].setdefault(name, []).append(value)
        finally:
            for tree in trees:
                subprocess.run([*git, "worktree", "remove", "--force", str(tree)], check=True)
    head = f"# Two commits side by side\n\n{measured_with('pyspark', 'horovod', 'torch')}"
    spread = f"Median of {2 * arguments.turns} (smallest - largest)."
    publish(f"{head}\n\n{spread}\n\n{table(commits, found)}\n", arguments.write)


if __name__ == "__main__":
    main()
