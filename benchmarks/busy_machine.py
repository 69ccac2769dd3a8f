"""Threads of a small model on a machine that others use too: rows/s by how a thread waits for the others.

    python benchmarks/busy_machine.py [--out FILE.md]

Each case runs in a process of its own, alone and beside one busy process a core, the cases in turn, two rounds.
libgomp reads its variables when torch is imported; by default its threads spin 300,000 times before they sleep.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from machine import measured_with, publish

STEP = """
import sys, time, torch
torch.set_num_threads(int(sys.argv[1]))
torch.manual_seed(0)
hidden = [layer for _ in range(2) for layer in (torch.nn.LazyLinear(64), torch.nn.ReLU())]
net = torch.nn.Sequential(*hidden, torch.nn.LazyLinear(1))
table = torch.nn.Embedding(1000, 40)
ids = torch.randint(0, 1000, (1024, 8))
net(table(ids).mean(1))
optimizer = torch.optim.AdamW([*net.parameters(), *table.parameters()], fused=True)
steps, began = -5, 0.0
while steps < 1 or time.perf_counter() - began < 4:
    if steps == 0:
        began = time.perf_counter()
    optimizer.zero_grad()
    net(table(ids).mean(1)).square().mean().backward()
    optimizer.step()
    steps += 1
print(steps * 1024 / (time.perf_counter() - began))
"""
CASES = {
    "1 thread": ("1", {}),
    "threads, 300,000 spins (libgomp's default)": ("all", {}),
    "threads, 10,000 spins (ranks)": ("all", {"GOMP_SPINCOUNT": "10000"}),
    "threads that sleep at once": ("all", {"OMP_WAIT_POLICY": "PASSIVE"}),
}


def rows_per_s(threads: str, variables: dict[str, str]) -> float:
    count = str(os.cpu_count()) if threads == "all" else threads
    environment = {**os.environ, **variables}
    done = subprocess.run(
        [sys.executable, "-c", STEP, count], env=environment, capture_output=True, text=True, check=True
    )
    return float(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    found: dict[tuple[str, str], list[float]] = {}
    for _ in range(2):
        for load in ("alone", "busy"):
            count = (os.cpu_count() or 1) if load == "busy" else 0
            others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
            time.sleep(1.0)
            try:
                for case, (threads, variables) in CASES.items():
                    found.setdefault((case, load), []).append(rows_per_s(threads, variables))
            finally:
                for other in others:
                    other.kill()
                    other.wait()
    rows = [
        f"| {case} | {statistics.median(found[case, 'alone']):,.0f} | {statistics.median(found[case, 'busy']):,.0f} |"
        for case in CASES
    ]
    text = "Rows/s, medians of two rounds."
    head = f"# A small model beside other work\n\n{measured_with('torch')}\n\n{text}\n"
    publish("\n".join([head, "| | alone | beside a busy process a core |", "|---|---|---|", *rows, ""]), arguments.out)


if __name__ == "__main__":
    main()
