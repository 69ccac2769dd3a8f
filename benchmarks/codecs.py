"""Gradient codecs on slow links: two ranks in network namespaces joined by links that tbf limits.

usage (root, Linux): unshare --net python benchmarks/codecs.py [--links 200mbit 1gbit | loopback] [--rounds 8]
[--steps 80] [--optimizer adamw] [--trained none int8 ...] [--out benchmarks/results/codecs_2core_<yyyymm>.md]
Exchanges: 16 MiB of fp32 gradients, in four buckets as training would send them. The codecs take turns, a round each.
Training (--steps, on the first link only; 0: none): a GPT of 4.1 M parameters on the bytes of the standard library's
sources, each codec with a model of its own from the same weights on the same batches, in turns of ten steps. The time
is that of the steps alone; the held-out loss is read between turns.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.machine import measured_with, publish
from benchmarks.strategies import Namespaces, as_table, environment
from sparkring.conf.blocks.optim import OptimConfig
from sparkring.conf.blocks.parallel import CompressConfig, ParallelConfig
from sparkring.conf.rank_info import RankInfo
from sparkring.training.data.batch import Batch
from sparkring.training.loop.optim.build import build_optimizer
from sparkring.training.models.gpt import GPT, LanguageModelTask
from sparkring.training.parallel.batching import slice_batch
from sparkring.training.parallel.compose import build_strategy
from sparkring.training.parallel.data_parallel.codecs import sent_bytes
from sparkring.training.parallel.data_parallel.coding_cost import coding_cost
from sparkring.training.parallel.data_parallel.compress import compressed
from sparkring.training.parallel.data_parallel.ddp import GroupTransport
from sparkring.training.parallel.data_parallel.reduce import GradientReducer

CPU, WORLD, TIMEOUT = torch.device("cpu"), 2, timedelta(seconds=120)
SHAPES = [(1024, 1024)] * 4  # 16 MiB in fp32
CODECS: dict[str, dict[str, Any]] = {
    "none": {},
    **{name: {"codec": name} for name in ("fp16", "bf16", "int8", "int4", "onebit")},
    "topk 1 %": {"codec": "topk", "share": 0.01},
    "powersgd r4": {"codec": "powersgd", "rank": 4},
    "powersgd r16": {"codec": "powersgd", "rank": 16},
}
TRAINED = ("none", "bf16", "int8", "onebit", "topk 1 %", "powersgd r4")
RATES = {"adamw": 1e-3, "sgd": 0.1}  # after 20 steps of warm-up
ROWS, TOKENS, TURN = 8, 96, 10
EQUAL = 1.01  # a loss within 1 % is the same


def exchanges(rounds: int) -> dict[str, Any]:
    """Codec -> seconds of each exchange, the slower rank's, and what the coding alone takes on this machine."""
    reducers, found = {}, {}
    for name, settings in CODECS.items():
        parameters = [nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
        transport = compressed(CompressConfig(**settings), GroupTransport(None))
        reducer = GradientReducer(parameters, transport, bucket_bytes=25 * 2**20)
        transport.plan(reducer.buckets, {p: str(number) for number, p in enumerate(parameters)})
        reducers[name] = (parameters, reducer, transport)
        found[name] = {"seconds": [], "coding": coding_cost(CompressConfig(**settings), WORLD, CPU)[0]}
    gradients = [torch.randn(shape) for shape in SHAPES]
    for number in range(1 + rounds):
        for name, (parameters, reducer, transport) in reducers.items():
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient.clone()
            dist.barrier()
            began = time.perf_counter()
            reducer.finish()
            transport.commit()
            spent = torch.tensor(time.perf_counter() - began)
            dist.all_reduce(spent, op=dist.ReduceOp.MAX)
            if number:
                found[name]["seconds"].append(float(spent))
    return found


def source_bytes() -> torch.Tensor:
    """The standard library's sources, one after the other, as byte values."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return torch.tensor(list(b"".join(path.read_bytes() for path in files)), dtype=torch.int64)


def rows_of(text: torch.Tensor, seed: int, rows: int) -> Batch:
    places = torch.randint(len(text) - TOKENS - 1, (rows,), generator=torch.Generator().manual_seed(seed))
    return Batch({"tokens": torch.stack([text[p : p + TOKENS + 1] for p in places.tolist()])}, rows, rows, rows)


def curves(steps: int, trained: list[str], optimizer: Any) -> dict[str, Any]:
    """Codec -> [seconds of all steps so far, held-out loss] after every turn."""
    text, rank = source_bytes(), dist.get_rank()
    held_out, text = text[-200_000:], text[:-200_000]
    test, task = rows_of(held_out, 1, 64), LanguageModelTask()
    strategies, found = {}, {name: [] for name in trained}
    for name in trained:
        torch.manual_seed(0)
        config = ParallelConfig(engine="torch", compress=CompressConfig(**CODECS[name]))
        strategy = build_strategy(config, RankInfo(rank, WORLD, 0, 1), CPU, clip_norm=1.0, timeout=TIMEOUT)
        model = GPT(vocab=256, width=256, layers=5, heads=4, hidden=704)
        strategy.prepare(model, task, lambda named: build_optimizer(named, OptimConfig(name=optimizer)))
        strategies[name] = (strategy, [0.0])
    for turn in range(steps // TURN):
        for name, (strategy, spent) in strategies.items():
            batches = [rows_of(text, 100 + turn * TURN + step, ROWS * WORLD) for step in range(TURN)]
            dist.barrier()
            began = time.perf_counter()
            for number, batch in enumerate(batches):
                strategy.forward_backward(slice_batch(batch, rank * ROWS, (rank + 1) * ROWS))
                strategy.step(RATES[optimizer] * min(1.0, (turn * TURN + number + 1) / 20))
            dist.barrier()
            spent[0] += time.perf_counter() - began
            outputs = strategy.evaluate(test)
            found[name].append([spent[0], float(task.loss(outputs, test.columns).mean())])
    return found


def as_rank(arguments: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=TIMEOUT)
    found = {"exchanges": exchanges(arguments.rounds)}
    found["curves"] = curves(arguments.steps, arguments.trained, arguments.optimizer) if arguments.steps else {}
    if dist.get_rank() == 0:
        Path(arguments.as_rank).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def on_link(link: str, arguments: argparse.Namespace, steps: int) -> dict[str, Any]:
    """What rank 0 of two found."""
    spaces, out = Namespaces(WORLD, link), Path(tempfile.mkdtemp()) / "found.json"
    words = [sys.executable, __file__, "--as-rank", str(out), "--rounds", str(arguments.rounds), "--steps", str(steps)]
    words += ["--optimizer", arguments.optimizer, "--trained", *arguments.trained]
    ranks = [
        subprocess.Popen(spaces.command(rank, words), env={**os.environ, **environment(rank, WORLD, spaces.shared)})
        for rank in range(WORLD)
    ]
    try:
        for process in ranks:
            process.wait(timeout=600)
        found: dict[str, Any] = json.loads(out.read_text())
        return found
    finally:
        for process in ranks:
            process.kill()
            process.wait()
        spaces.close()


def exchange_table(found: dict[str, Any]) -> str:
    dense = statistics.median(found["none"]["seconds"])
    lines = [["codec", "MB sent per rank", "ms", "quartiles", "dense / codec", "ms of coding alone"]]
    for name, each in found.items():
        config = CompressConfig(**CODECS[name])
        sent = sum(sent_bytes(config, [shape], WORLD, 4) for shape in SHAPES)
        low, middle, high = statistics.quantiles(each["seconds"], n=4)
        row = [name, f"{sent / 1e6:.2f}", f"{middle * 1e3:.0f}", f"{low * 1e3:.0f}-{high * 1e3:.0f}"]
        lines.append([*row, f"{dense / middle:.1f}", f"{each['coding'] * 1e3:.0f}" if name != "none" else "-"])
    return as_table(lines)


def curve_table(found: dict[str, Any]) -> str:
    wanted, steps = found["none"][-1][1], TURN * len(found["none"])
    head = ["codec", "s per step", f"held-out loss after {steps} steps", "s until within 1 % of the dense ring's last"]
    lines = [[*head, "dense / codec"]]
    reached = {name: [spent for spent, loss in curve if loss <= EQUAL * wanted] for name, curve in found.items()}
    for name, curve in found.items():
        spent, loss = curve[-1]
        row = [name, f"{spent / steps:.3f}", f"{loss:.4f} ({loss / wanted - 1:+.2%})"]
        times = reached[name]
        row += [f"{times[0]:.1f}", f"{reached['none'][0] / times[0]:.1f}"] if times else ["not reached", "-"]
        lines.append(row)
    return as_table(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--links", nargs="+", default=["200mbit", "1gbit"])
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--optimizer", choices=list(RATES), default="adamw")
    parser.add_argument("--trained", nargs="+", choices=list(CODECS), default=list(TRAINED))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--as-rank", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.as_rank:
        as_rank(arguments)
        return
    parts = ["# Gradient codecs on slow links"]
    for number, link in enumerate(arguments.links):
        found = on_link(link, arguments, 0 if number else arguments.steps)
        parts += [f"## {link}, two ranks: an exchange of 16 MiB of gradients", exchange_table(found["exchanges"])]
        if found["curves"]:
            head = f"## {link}, two ranks: training with {arguments.optimizer} to the dense ring's loss"
            parts += [head, curve_table(found["curves"])]
    publish("\n\n".join([*parts, measured_with("torch", "numpy")]) + "\n", arguments.out)


if __name__ == "__main__":
    main()
