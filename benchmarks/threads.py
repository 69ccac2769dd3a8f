"""Threads of one rank: steps per second of nets of one and of all cores' threads, alone and beside other work.

    python benchmarks/threads.py [--out FILE.md]

Each case runs in a process of its own, the cases in turn. `work` is what `training/worker/threads.py` decides by:
multiply-adds of a forward pass. On a machine that others use, `chrt -r 1` before the command gives its first column.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from pathlib import Path

from machine import measured_with, publish

STEP = """
import sys, time, torch
threads, width, rows = map(int, sys.argv[1:4])
torch.set_num_threads(threads)
torch.manual_seed(0)
def block():
    return torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.LayerNorm(width), torch.nn.ReLU())
net = torch.nn.Sequential(block(), block(), block(), torch.nn.Linear(width, 1))
x = torch.randn(rows, width)
optimizer = torch.optim.AdamW(net.parameters(), fused=True)
seconds = []
for step in range(400):
    began = time.perf_counter()
    optimizer.zero_grad()
    net(x).square().mean().backward()
    optimizer.step()
    seconds.append(time.perf_counter() - began)
    if step > 20 and sum(seconds) > 3:
        break
print(sorted(seconds)[len(seconds) // 2])
"""
SPIN = "while True: pass"
WIDTHS, ROWS = (32, 64, 128, 256, 512, 1024), (256, 2048)


def step_s(threads: int, width: int, rows: int) -> float:
    """Median seconds of a step."""
    command = [sys.executable, "-c", STEP, str(threads), str(width), str(rows)]
    environment = {**os.environ, "GOMP_SPINCOUNT": "10000"}  # as ranks have it
    return float(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout)


def gains(rounds: int) -> dict[tuple[int, int], float]:
    """(width, rows) -> seconds of one thread over those of all cores'."""
    cores, found = os.cpu_count() or 1, dict[tuple[int, int], float]()
    for width in WIDTHS:
        for rows in ROWS:
            times = [(step_s(1, width, rows), step_s(cores, width, rows)) for _ in range(rounds)]
            found[width, rows] = statistics.median(one / every for one, every in times)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--alone", action="store_true", help="not beside other work")
    given = parser.parse_args()
    alone, busy = gains(given.rounds), dict[tuple[int, int], float]()
    if not given.alone:
        others = [subprocess.Popen([sys.executable, "-c", SPIN]) for _ in range(os.cpu_count() or 1)]
        try:
            busy = gains(given.rounds)
        finally:
            for other in others:
                other.kill()
                other.wait()
    lines = ["| width | rows a pass | work | alone | beside a busy process a core |", "|---|---|---|---|---|"]
    for (width, rows), gain in alone.items():
        work = rows * (3 * width * width + width)
        beside = f"{busy[width, rows]:.2f}" if busy else ""
        lines.append(f"| {width} | {rows:,} | {work / 1e6:,.1f} million | {gain:.2f} | {beside} |")
    head = "# Threads of one rank\n\n" + measured_with("torch") + "\n\nRate of all cores' threads over one thread's.\n"
    publish("\n".join([head, *lines, ""]), given.out)


if __name__ == "__main__":
    main()
