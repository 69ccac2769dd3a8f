"""Faults injected at random into training on a real standalone cluster of three workers, for as long as asked.

    python benchmarks/soak.py --minutes 60 [--seed 0] [--steps 1500] [--only "SIGKILL of a rank" ...] [--write FILE]

Needs root (network namespaces). After each fault: training got further than it was; its next checkpoint holds the
parameters of an undisturbed run (bit for bit where the world never changed, else within 1e-12); every row until there
was consumed once, by the audit; no rank of an earlier attempt is left, and no port is held that it opened. At each
run's end the same of the whole run.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from machine import measured_with, publish

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "chaos")]


def main() -> None:
    import checks
    import cluster as clusters
    import inject

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=1500, help="of one run; a new one starts when it has ended")
    parser.add_argument("--only", nargs="+", choices=sorted(inject.FAULTS), default=list(inject.FAULTS))
    parser.add_argument("--write", type=Path, help="result file")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the cluster is taken down then, too
    chance, began = random.Random(args.seed), time.time()
    until = began + args.minutes * 60
    times: dict[str, list[float]] = {}
    problems: list[str] = []
    runs: list[str] = []
    with tempfile.TemporaryDirectory() as folder, clusters.running(Path(folder)) as cluster:
        undisturbed = checks.undisturbed_run(args.steps, 3)
        faults = deal(args.only, chance)
        while time.time() < until and len(problems) < 5:
            logs = Path(folder) / f"run{len(runs)}"
            logs.mkdir()
            run = inject.Run(cluster, logs, args.steps, 3)
            run.start()
            try:
                soak(run, faults, chance, undisturbed, until, times)
                runs.append(checks.verdict(run, undisturbed))
            except (AssertionError, RuntimeError, TimeoutError) as error:
                problems.append(f"run {len(runs)}: {type(error).__name__}: {error}")
                print(problems[-1], flush=True)
                runs.append("failed")
            finally:
                run.kill()
                shutil.rmtree(run.folder, ignore_errors=True)
    text = report(times, runs, problems, time.time() - began)
    publish(text, args.write)
    sys.exit(bool(problems))


def deal(names: list[str], chance: random.Random) -> Iterator[str]:
    """Faults without end, from one shuffled deck after another, in which each has its share."""
    import inject

    while True:
        deck = [name for name in names for _ in range(inject.FAULTS[name].share)]
        chance.shuffle(deck)
        yield from deck


def soak(
    run: Any,
    faults: Iterator[str],
    chance: random.Random,
    undisturbed: dict[int, list[float]],
    until: float,
    times: dict[str, list[float]],
) -> None:
    """Faults until the run is near its end or the time is over, then to the end undisturbed."""
    import inject

    run.await_step(5)
    while run.step < run.steps - 100 and time.time() < until:
        name = next(faults)
        seconds = inject.strike(run, name, chance, undisturbed)
        times.setdefault(name, []).append(seconds)
        print(f"{sum(map(len, times.values())):4d}  {name}: {seconds:.1f} s  (step {run.step})", flush=True)
    run.end()


def report(times: dict[str, list[float]], runs: list[str], problems: list[str], seconds: float) -> str:
    count = sum(map(len, times.values()))
    rows = "\n".join(
        f"| {name} | {len(v)} | {statistics.median(v):.1f} | {max(v):.1f} |" for name, v in sorted(times.items())
    )
    verdicts = "\n".join(f"- run {i}: {words}" for i, words in enumerate(runs))
    found = "\n".join(f"- {p[:500]}" for p in problems) or "none"
    return (
        f"# Soak: {count} injected faults on a standalone cluster of three workers\n\n"
        f"{measured_with('pyspark', 'torch')}; {seconds / 60:.0f} minutes in all.\n\n"
        "Seconds from the fault to the first step further than before it. Before the next fault: a new checkpoint "
        "with an undisturbed run's parameters, every row once, no process and no port left.\n\n"
        f"| fault | times | median s | worst s |\n|---|---|---|---|\n{rows}\n\n"
        f"Every run whole, against an undisturbed one:\n\n{verdicts}\n\nProblems:\n\n{found}\n\n"
        f"```json\n{json.dumps({name: [round(x, 2) for x in v] for name, v in times.items()})}\n```\n"
    )


if __name__ == "__main__":
    main()
