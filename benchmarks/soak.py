"""Faults injected at random into training on a real standalone cluster of three workers, for as long as asked.

    python benchmarks/soak.py --minutes 30 [--seed 0] [--steps 2000] [--only "SIGKILL of a rank" ...] [--write FILE]

Needs root (network namespaces). After each fault: training got further than it was, and no rank of an earlier attempt
is left. At each run's end: every row counted once, and the parameters of an undisturbed run (bit for bit where the
world never changed, else within 1e-12).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "chaos")]


def main() -> None:
    import cluster as clusters
    import inject

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=2000, help="of one run; a new one starts when it has ended")
    parser.add_argument("--only", nargs="+", choices=sorted(inject.FAULTS), default=sorted(inject.FAULTS))
    parser.add_argument("--write", type=Path, help="result file")
    args = parser.parse_args()
    chance, until = random.Random(args.seed), time.time() + args.minutes * 60
    times: dict[str, list[float]] = {}
    problems: list[str] = []
    runs: list[str] = []
    began = time.time()
    with tempfile.TemporaryDirectory() as folder, clusters.running(Path(folder)) as cluster:
        wanted = inject.expected(args.steps, 3)
        while time.time() < until and len(problems) < 5:
            place = Path(folder) / f"run{len(runs)}"
            place.mkdir()
            run = inject.Run(cluster, place, args.steps, 3)
            run.start()
            try:
                soak(run, args, chance, until, times)
                runs.append(verdict(run, wanted))
            except (AssertionError, RuntimeError, TimeoutError) as error:
                problems.append(str(error))
                print(error, flush=True)
                runs.append("failed")
            finally:
                if run.driver is not None and run.driver.poll() is None:
                    inject.kill_group(run.driver)
    text = report(args, times, runs, problems, time.time() - began)
    print(text)
    if args.write:
        args.write.write_text(text)
    sys.exit(bool(problems))


def soak(
    run: Any, args: argparse.Namespace, chance: random.Random, until: float, times: dict[str, list[float]]
) -> None:
    """Faults until the run is near its end or the time is over, then to the end undisturbed."""
    import inject

    run.await_step(5, 180)
    while run.step < args.steps - 150 and time.time() < until:
        name = chance.choice(args.only)
        seconds = inject.strike(run, name, chance)
        times.setdefault(name, []).append(seconds)
        print(f"{sum(map(len, times.values())):4d}  {name}: {seconds:.1f} s  (step {run.step})", flush=True)
        run.await_step(run.step + 1, 180)
    assert run.driver is not None
    code = run.driver.wait(timeout=600)
    run.read()
    assert code == 0, f"the driver ended with {code}:\n{run.tail()}"


def verdict(run: Any, wanted: dict[str, Any]) -> str:
    """Compare with an undisturbed run; AssertionError with both where they differ."""
    result = next(e for e in reversed(run.events) if e["kind"] == "result")
    assert result["rows"] == wanted["rows"], f"rows: {result['rows']} instead of {wanted['rows']}"
    worlds = {e["world"] for e in run.events if e["kind"] in ("started", "result")}
    if worlds == {3}:
        assert result["digest"] == wanted["digest"], f"bits differ: {result['w']} instead of {wanted['w']}"
        return "bit-equal"
    worst = max(abs(a - b) for a, b in zip(result["w"], wanted["w"], strict=True))
    assert worst < 1e-12, f"parameters differ by {worst}"
    return f"within {worst:.1e} (worlds {sorted(worlds)})"


def report(
    args: argparse.Namespace, times: dict[str, list[float]], runs: list[str], problems: list[str], s: float
) -> str:
    count = sum(map(len, times.values()))
    rows = "\n".join(
        f"| {name} | {len(v)} | {statistics.median(v):.1f} | {max(v):.1f} |" for name, v in sorted(times.items())
    )
    verdicts = "\n".join(f"- run {i}: {words}" for i, words in enumerate(runs))
    found = "\n".join(f"- {p[:500]}" for p in problems) or "none"
    return (
        f"# Soak: {count} injected faults on a standalone cluster of three workers\n\n"
        f"`python benchmarks/soak.py --minutes {args.minutes:g} --seed {args.seed} --steps {args.steps}`, "
        f"{time.strftime('%Y-%m-%d')}, {os.cpu_count()} cores shared with other work, load average "
        f"{os.getloadavg()[0]:.0f} at the end, {s / 60:.0f} minutes in all. Seconds from the fault to the first step "
        f"further than before it.\n\n| fault | times | median s | worst s |\n|---|---|---|---|\n{rows}\n\n"
        f"Every run's rows and parameters against an undisturbed one:\n\n{verdicts}\n\nProblems:\n\n{found}\n\n"
        f"```json\n{json.dumps(times)}\n```\n"
    )


if __name__ == "__main__":
    main()
