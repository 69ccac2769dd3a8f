"""One rank of the strategy benchmark: our strategy and bare torch or Horovod code for the same thing, taking turns in
the same processes. Environment: RANK, WORLD_SIZE, MASTER_*, HOROVOD_*. usage: CASES.json OUT.json PAIRS
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.strategies_bare import BARE
from training.data.batch import Batch
from training.models.gpt import GPT, LanguageModelTask
from training.optim import build_optimizer
from training.parallel import ParallelSettings, Place, build_strategy
from training.parallel.batching import part_bounds, slice_batch
from training.parallel.ring_horovod import start_horovod
from training.planner import make_plan

ROWS_PER_RANK, TOKENS, WARM_UP = 8, 64, 3
CPU = torch.device("cpu")
SIZE = {"vocab": 1024, "width": 192, "layers": 4, "heads": 4, "hidden": 512}


def model() -> GPT:
    torch.manual_seed(0)
    return GPT(**SIZE)


def sent_bytes() -> int:
    """By every interface of this network namespace."""
    lines = [line.partition(":")[2].split() for line in Path("/proc/net/dev").read_text().splitlines()[2:]]
    return sum(int(fields[8]) for fields in lines)


def ratio(ours: list[float], bare: list[float]) -> list[float]:
    """First quartile, median and third quartile of ours over bare, step by step in turns."""
    return statistics.quantiles([a / b for a, b in zip(ours, bare, strict=True)], n=4)


def timed(step: Callable[[], Any], steps: int) -> list[float]:
    """Seconds of each step; ranks start together."""
    dist.barrier()
    seconds = []
    for _ in range(steps):
        began = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - began)
    return seconds


def run_case(name: str, settings: dict[str, Any], rank: int, world: int, pairs: int) -> dict[str, Any]:
    task = LanguageModelTask()
    torch.manual_seed(1)
    rows = ROWS_PER_RANK * world
    tokens = torch.randint(0, SIZE["vocab"], (rows, TOKENS + 1))
    whole = Batch({"tokens": tokens}, rows, rows, rows)
    strategy = build_strategy(ParallelSettings(**settings), Place(rank, world, 0, 1), CPU, clip_norm=1.0)
    plan = make_plan(
        model(), strategy.settings, strategy.mesh, strategy.engine, inputs=(tokens[:1, :-1],), global_batch=rows
    )
    strategy.prepare(model(), task, lambda named: build_optimizer(named))
    part = slice_batch(whole, *part_bounds(rows, strategy.data_size)[strategy.data_rank])

    def ours() -> None:
        strategy.forward_backward(part)
        strategy.step(1e-3)

    bare = BARE[name](model(), task, part, rank, world) if name in BARE else None
    times: dict[Any, list[float]] = {ours: [], bare: []}
    cpu: dict[Any, list[float]] = {ours: [], bare: []}
    sent = []
    for turn in range(WARM_UP + pairs):
        for step in (ours, bare) if turn % 2 else (bare, ours):
            if step is None:
                continue
            before, busy = sent_bytes(), time.process_time()
            seconds = timed(step, 1)[0]
            if turn >= WARM_UP:
                times[step].append(seconds)
                cpu[step].append(time.process_time() - busy)
            dist.barrier()
            if turn >= WARM_UP and step is ours:
                sent.append(sent_bytes() - before)
    measured = strategy.measure()
    result = {
        "case": name,
        "engine": strategy.engine,
        "step_s": statistics.median(times[ours]),
        "bare_s": statistics.median(times[bare]) if bare else None,
        "ratio": ratio(times[ours], times[bare]) if bare else None,
        "cpu_ratio": ratio(cpu[ours], cpu[bare]) if bare else None,
        "sent_bytes": statistics.median(sent),
        "planned_bytes": sum(plan.sent_bytes.values()),
        "memory_bytes": sum(
            v for k, v in measured.items() if k in ("weights_bytes", "gradients_bytes", "optimizer_bytes")
        ),
        "bubble": [measured.get("bubble_share"), plan.bubble],
    }
    if strategy.data_size > 1 and not strategy.settings.zero:
        result |= hidden_share(part, task, times[ours])
    strategy.axis.close(failed=True)
    return result


def hidden_share(part: Batch, task: Any, our_seconds: list[float]) -> dict[str, Any]:
    """Share of communication behind compute: (alone compute + alone reduction - step) / alone reduction."""
    alone = build_strategy(ParallelSettings(dp=1), Place(), CPU, clip_norm=1.0)
    alone.prepare(model(), task, lambda named: build_optimizer(named))

    def compute() -> None:
        alone.forward_backward(part)
        alone.step(1e-3)

    flat = torch.zeros(sum(p.numel() for p in alone.module.parameters()))
    compute_s = statistics.median(timed(compute, 4)[1:])
    reduce_s = statistics.median(timed(lambda: dist.all_reduce(flat), 4)[1:])
    step_s = statistics.median(our_seconds)
    share = min(1.0, max(0.0, (compute_s + reduce_s - step_s) / reduce_s))
    return {"compute_s": compute_s, "reduce_s": reduce_s, "hidden_share": share}


def main() -> None:
    torch.set_num_threads(1)
    cases, out, pairs = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]), int(sys.argv[3])
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    start_horovod(rank, world)
    results = []
    for name, settings in cases.items():
        found = run_case(name, settings, rank, world, pairs)
        everyone: list[Any] = [None] * world
        dist.all_gather_object(everyone, found["sent_bytes"])
        # on loopback all ranks share one interface, between namespaces each has its own
        shared = os.environ["BENCHMARK_SHARED_INTERFACE"] == "1"
        found["sent_bytes"] = found["sent_bytes"] / world if shared else sum(everyone) / world
        results.append(found)
        if rank == 0:
            out.write_text(json.dumps(results, indent=1))
            print(name, f"{found['step_s']:.3f} s", found["ratio"], flush=True)
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
