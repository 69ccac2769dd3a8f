"""Damaged inputs of every kind, each of which must be read or end in a documented error, in little time and memory.

    python -m tests.fuzz.run --count 100000 [--seed 0] [--kind NAME] [--out FILE]

Prints what ended otherwise, with the input, and exits with 1. An input follows from (seed, kind, number) alone.
"""

from __future__ import annotations

import argparse
import collections
import json
import math
import platform
import random
import resource
import signal
import sys
import tempfile
import time
import traceback
import warnings
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from sparkring.pipelines.tracking.tracker import git_commit
from tests.fuzz.kinds import Kind, kinds

MOST_S, MOST_BYTES, LATE_S = 1.0, 200 << 20, 10.0


@dataclass
class Tally:
    inputs: int = 0
    read: int = 0
    refused: int = 0
    slowest_s: float = 0.0  # of the processor: other processes do not count
    largest_bytes: int = 0
    wrong: dict[str, int] = field(default_factory=collections.Counter)
    examples: dict[str, str] = field(default_factory=dict)


def fuzz(name: str, kind: Kind, count: int, seed: int) -> Tally:
    """Read `count` damaged inputs; whatever ends in no documented error is in `wrong`."""
    tally = Tally()
    for number in range(count):
        rng = random.Random(f"{seed}/{name}/{number}")
        data = kind.damage(rng, rng.choice(kind.examples))
        wrong, before, began = "", _reset_peak(), time.process_time()
        try:
            signal.setitimer(signal.ITIMER_VIRTUAL, LATE_S)
            kind.read(data)
            tally.read += 1
        except kind.errors:
            tally.refused += 1
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            frame = traceback.extract_tb(error.__traceback__)[-1]
            wrong = f"{type(error).__name__} at {Path(frame.filename).name}:{frame.lineno}: {str(error)[:80]}"
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
        spent, used = time.process_time() - began, _peak() - before
        tally.inputs += 1
        tally.slowest_s, tally.largest_bytes = max(tally.slowest_s, spent), max(tally.largest_bytes, used)
        if not wrong and spent > MOST_S:
            wrong = f"took over {MOST_S} s"
        if not wrong and used > MOST_BYTES:
            wrong = f"took over {MOST_BYTES} bytes"
        if wrong:
            tally.wrong[wrong] += 1
            tally.examples.setdefault(wrong, f"number {number}: {data[:500]!r}")
    return tally


def _reset_peak() -> int:
    """Bytes in memory now, from which the peak is counted anew."""
    Path("/proc/self/clear_refs").write_text("5")
    return _peak()


def _peak() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) << 10


def _late(*_: Any) -> None:
    raise TimeoutError(f"still at it after {LATE_S} s")


def bound_memory() -> None:
    """What asks for gigabytes is to raise MemoryError, not to end the machine."""
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + (2 << 30), resource.getrlimit(resource.RLIMIT_AS)[1]))


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--count", type=int, default=100_000, help="inputs of all kinds together")
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--kind", action="append", help="this kind only; may be given more than once")
    options.add_argument("--out", type=Path, help="result file (JSON)")
    given = options.parse_args()
    warnings.simplefilter("error")
    began, signal_before = time.monotonic(), signal.signal(signal.SIGVTALRM, _late)
    memory = Path("/dev/shm")  # every input is a file that is flushed to the disk where it is on one
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        made = {name: kind for name, kind in kinds(Path(folder)).items() if name in (given.kind or [name])}
        bound_memory()
        shares = sum(kind.share for kind in made.values())
        tallies = {}
        for name, kind in made.items():
            tallies[name] = tally = fuzz(name, kind, math.ceil(given.count * kind.share / shares), given.seed)
            print(
                f"{name:14} {tally.inputs:7} inputs  {tally.read:6} read  {tally.refused:7} refused  "
                f"{sum(tally.wrong.values()):5} wrong  slowest {tally.slowest_s:.3f} s  "
                f"largest {tally.largest_bytes / 2**20:.0f} MiB",
                flush=True,
            )
            for wrong, times in tally.wrong.items():
                print(f"    {times} x {wrong}\n        {tally.examples[wrong][:400]}")
    signal.signal(signal.SIGVTALRM, signal_before)
    wrong_count = sum(sum(tally.wrong.values()) for tally in tallies.values())
    total = sum(tally.inputs for tally in tallies.values())
    print(f"{total} inputs, {wrong_count} in undocumented ends, {time.monotonic() - began:.0f} s")
    if given.out is not None:
        result = {
            "command": f"python -m tests.fuzz.run {' '.join(sys.argv[1:])}",
            "commit": git_commit(Path(__file__).parent),
            "python": platform.python_version(),
            "inputs": total,
            "wrong": wrong_count,
            "wall_s": round(time.monotonic() - began, 1),
            "kinds": {name: asdict(tally) for name, tally in tallies.items()},
        }
        given.out.write_text(json.dumps(result, indent=1) + "\n")
    return 1 if wrong_count else 0


if __name__ == "__main__":
    sys.exit(main())
