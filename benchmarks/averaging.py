"""Averages of weights on a slow link: two ranks in network namespaces joined by a link that tbf limits.

usage (root, Linux): unshare --net python benchmarks/averaging.py [--link 200mbit] [--steps 60] [--longer 2]
[--rows 8] [--out benchmarks/results/averaging_2core_<yyyymm>.md]
The GPT of 4.1 M parameters of benchmarks/codecs.py on the bytes of the standard library's sources, AdamW, batches of
2 x --rows rows of 96 bytes: fewer rows are less computing for the same bytes on the link. Each kind trains a model of
its own from the same weights on the same batches, in turns of ten steps; those that average make --longer times the
ring's steps. The time is that of the steps alone, with the averages at the ends of windows; between turns the held-out
loss is read, of what each kind evaluates.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.codecs import CPU, EQUAL, RATES, ROWS, TIMEOUT, TURN, WORLD, rows_of, source_bytes
from benchmarks.machine import measured_with, publish
from benchmarks.strategies import Namespaces, as_table, environment
from sparkring.conf.blocks.optim import OptimConfig
from sparkring.conf.blocks.parallel import ParallelConfig
from sparkring.conf.rank_info import RankInfo
from sparkring.training.loop.optim.build import build_optimizer
from sparkring.training.models.gpt import GPT, LanguageModelTask
from sparkring.training.parallel.batching import slice_batch
from sparkring.training.parallel.compose import build_strategy

KINDS: dict[str, dict[str, Any]] = {
    "ring": {},
    "local_sgd, every 10": {"kind": "local_sgd", "every": 10},
    "diloco, every 50": {"kind": "diloco", "every": 50},
}


def curves(steps: int, longer: int, rows: int) -> dict[str, Any]:
    """Kind -> [seconds of all steps so far, held-out loss] after every turn. `rows`: of each rank in a step."""
    text, rank = source_bytes(), dist.get_rank()
    held_out, text = text[-200_000:], text[:-200_000]
    test, task = rows_of(held_out, 1, 64), LanguageModelTask()
    strategies, found = {}, {name: [] for name in KINDS}
    for name, averaging in KINDS.items():
        torch.manual_seed(0)
        config = ParallelConfig.model_validate({"engine": "torch", "averaging": averaging})
        strategy = build_strategy(config, RankInfo(rank, WORLD, 0, 1), CPU, clip_norm=1.0, timeout=TIMEOUT)
        model = GPT(vocab=256, width=256, layers=5, heads=4, hidden=704)
        strategy.prepare(model, task, lambda named: build_optimizer(named, OptimConfig(name="adamw")))
        strategies[name] = (strategy, [0.0])
    for turn in range(longer * steps // TURN):
        for name, (strategy, spent) in strategies.items():
            if name == "ring" and turn >= steps // TURN:
                continue
            batches = [rows_of(text, 100 + turn * TURN + step, rows * WORLD) for step in range(TURN)]
            dist.barrier()
            began = time.perf_counter()
            for number, batch in enumerate(batches):
                strategy.forward_backward(slice_batch(batch, rank * rows, (rank + 1) * rows))
                strategy.step(RATES["adamw"] * min(1.0, (turn * TURN + number + 1) / 20))
            dist.barrier()
            spent[0] += time.perf_counter() - began
            with strategy.averaged():
                outputs = strategy.evaluate(test)
            found[name].append([spent[0], float(task.loss(outputs, test.columns).mean())])
    return found


def as_rank(arguments: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=TIMEOUT)
    found = curves(arguments.steps, arguments.longer, arguments.rows)
    if dist.get_rank() == 0:
        Path(arguments.as_rank).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def on_link(arguments: argparse.Namespace) -> dict[str, Any]:
    """What rank 0 of two found."""
    spaces, out = Namespaces(WORLD, arguments.link), Path(tempfile.mkdtemp()) / "found.json"
    words = [sys.executable, __file__, "--as-rank", str(out)]
    words += ["--steps", str(arguments.steps), "--longer", str(arguments.longer), "--rows", str(arguments.rows)]
    ranks = [
        subprocess.Popen(spaces.command(rank, words), env={**os.environ, **environment(rank, WORLD, spaces.shared)})
        for rank in range(WORLD)
    ]
    try:
        for process in ranks:
            process.wait(timeout=1200)
        found: dict[str, Any] = json.loads(out.read_text())
        return found
    finally:
        for process in ranks:
            process.kill()
            process.wait()
        spaces.close()


def curve_table(found: dict[str, Any]) -> str:
    ring = found["ring"]
    wanted = ring[-1][1]
    lines = [
        ["kind", "steps", "s per step", "held-out loss", f"steps to within 1 % of {wanted:.3f}", "s", "ring / kind"]
    ]
    reached = {n: next((i for i, (_, loss) in enumerate(c) if loss <= EQUAL * wanted), None) for n, c in found.items()}
    first = ring[reached["ring"]][0]
    for name, curve in found.items():
        steps, turn = TURN * len(curve), reached[name]
        row = [name, f"{steps}", f"{curve[-1][0] / steps:.3f}", f"{curve[-1][1]:.4f}"]
        if turn is None:
            lines.append([*row, "not reached", "-", "-"])
        else:
            lines.append([*row, f"{TURN * (turn + 1)}", f"{curve[turn][0]:.1f}", f"{first / curve[turn][0]:.1f}"])
    return as_table(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--link", default="200mbit")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--longer", type=int, default=2)
    parser.add_argument("--rows", type=int, default=ROWS)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--note", default="", help="of the circumstances, put into the result")
    parser.add_argument("--as-rank", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.as_rank:
        as_rank(arguments)
        return
    head = f"# Averages of weights on a link of {arguments.link}, two ranks: training to the ring's loss"
    parts = [head, *([arguments.note] if arguments.note else []), curve_table(on_link(arguments))]
    publish("\n\n".join([*parts, measured_with("torch", "numpy")]) + "\n", arguments.out)


if __name__ == "__main__":
    main()
