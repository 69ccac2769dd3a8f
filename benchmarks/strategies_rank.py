"""One rank of the strategy benchmark: our strategy and bare torch or Horovod code for the same thing, taking turns in
the same processes. Environment: RANK, WORLD_SIZE, MASTER_*, HOROVOD_*. usage: CASES.json OUT.json SECONDS_PER_CASE
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.strategies_bare import BARE, Step
from sparkring.conf.blocks.optim import OptimConfig
from sparkring.conf.blocks.parallel import ParallelConfig
from sparkring.conf.rank_info import RankInfo
from sparkring.training.data.batch import Batch
from sparkring.training.loop.optim.build import build_optimizer
from sparkring.training.models.gpt import GPT, LanguageModelTask
from sparkring.training.parallel.batching import part_bounds, slice_batch
from sparkring.training.parallel.compose import build_strategy
from sparkring.training.parallel.data_parallel.horovod_ring import start_horovod
from sparkring.training.planner import Workload, make_plan

ROWS_PER_RANK, TOKENS, WARM_UP = 8, 64, 3
BLOCK_S, FEWEST_PAIRS, MOST_PAIRS = 0.4, 6, 60
CPU = torch.device("cpu")
SIZE = {"vocab": 1024, "width": 192, "layers": 4, "heads": 4, "hidden": 512}


def model() -> GPT:
    torch.manual_seed(0)
    return GPT(**SIZE)


def sent_bytes() -> int:
    """By every interface of this network namespace."""
    lines = [line.partition(":")[2].split() for line in Path("/proc/net/dev").read_text().splitlines()[2:]]
    return sum(int(fields[8]) for fields in lines)


def blocks_of_steps(ours: Step, bare: Step, seconds: float) -> list[dict[str, list[float]]]:
    """Wall and CPU seconds per step of both, block by block, in the order ours bare bare ours: what drifts hits both.

    A block is as many steps as last BLOCK_S, from one barrier to another; its CPU seconds are those of all ranks.
    """
    both = {"ours": ours, "bare": bare}
    slowest = max(block(step, 1)[0] for step in both.values())
    steps = int(agreed(max(1.0, BLOCK_S / slowest)))
    pairs = int(agreed(min(MOST_PAIRS, max(FEWEST_PAIRS, seconds / (len(both) * steps * slowest)))))
    found = []
    for pair in range(pairs):
        order = list(reversed(both)) if pair % 2 else list(both)
        found.append({name: block(both[name], steps) for name in order})
    return found


def block(step: Step, steps: int) -> list[float]:
    """Wall and CPU seconds per step."""
    dist.barrier()
    began, busy = time.perf_counter(), time.process_time()
    for _ in range(steps):
        step()
    dist.barrier()
    spent = torch.tensor([time.perf_counter() - began, time.process_time() - busy], dtype=torch.float64)
    cpu = spent[1].clone()
    dist.all_reduce(cpu)
    return [round(float(spent[0]) / steps, 5), round(float(cpu) / steps, 5)]


def agreed(value: float) -> float:
    """Rank 0's."""
    tensor = torch.tensor(value, dtype=torch.float64)
    dist.broadcast(tensor, src=0)
    return float(tensor)


def mean_loss(loss: torch.Tensor | None) -> float:
    """Over the ranks that see one."""
    total = torch.zeros(2, dtype=torch.float64) if loss is None else torch.tensor([float(loss), 1.0]).double()
    dist.all_reduce(total)
    return float(total[0] / total[1])


def sent_by(step: Step) -> float:
    """Bytes one step sends, over this network namespace's interfaces; nothing else uses them."""
    counts = []
    for steps in (0, 2):
        for _ in range(steps):
            step()
        dist.barrier()
        time.sleep(0.2)
        counts.append(sent_bytes())
        dist.barrier()
    return (counts[1] - counts[0]) / 2


def run_case(name: str, settings: dict[str, Any], rank: int, world: int, seconds: float) -> dict[str, Any]:
    task = LanguageModelTask()
    torch.manual_seed(1)
    rows = ROWS_PER_RANK * world
    tokens = torch.randint(0, SIZE["vocab"], (rows, TOKENS + 1))
    whole = Batch({"tokens": tokens}, rows, rows, rows)
    strategy = build_strategy(ParallelConfig(**settings), RankInfo(rank, world, 0, 1), CPU, clip_norm=1.0)
    plan = make_plan(
        Workload(model(), strategy.local.config, strategy.local.mesh, strategy.engine, (tokens[:1, :-1],), rows)
    )
    strategy.prepare(model(), task, lambda named: build_optimizer(named, OptimConfig()))
    part = slice_batch(whole, *part_bounds(rows, strategy.data_size)[strategy.data_rank])

    def ours() -> torch.Tensor:
        loss = strategy.forward_backward(part)
        strategy.step(1e-3)
        return loss

    passes, bf16 = settings.get("accumulate", 1), settings.get("precision") == "bf16"
    bare = BARE[name.partition(",")[0]](model(), part.columns["tokens"], rank, world, passes, bf16)
    for _ in range(WARM_UP):
        our_loss, bare_loss = ours(), bare()
    losses = [float(strategy.meeting.sum_over_data(our_loss.reshape(1)).sum()) / rows, mean_loss(bare_loss)]
    off = 1e-2 if bf16 else 1e-3
    assert abs(losses[0] - losses[1]) < off, f"{name}: ours and bare code do not train the same: {losses}"
    gc.collect()
    gc.freeze()
    blocks = blocks_of_steps(ours, bare, seconds)
    measured = strategy.measure()
    result = {
        "case": name,
        "engine": strategy.engine,
        "blocks": blocks,
        "losses": losses,
        "sent_bytes": sent_by(ours),
        "bare_sent_bytes": sent_by(bare),
        "planned_bytes": sum(plan.sent_bytes.values()),
        "memory_bytes": sum(
            v for k, v in measured.items() if k in ("weights_bytes", "gradients_bytes", "optimizer_bytes")
        ),
        "bubble": [measured.get("bubble_share"), plan.bubble],
    }
    if strategy.data_size > 1 and not strategy.local.config.zero:
        result |= hidden_share(part, task, [each["ours"][0] for each in blocks])
    strategy.local.data_parallel.close(failed=True)
    gc.unfreeze()
    return result


def hidden_share(part: Batch, task: Any, our_seconds: list[float]) -> dict[str, Any]:
    """Share of communication behind compute: (alone compute + alone reduction - step) / alone reduction."""
    alone = build_strategy(ParallelConfig(dp=1), RankInfo(), CPU, clip_norm=1.0)
    alone.prepare(model(), task, lambda named: build_optimizer(named, OptimConfig()))

    def compute() -> None:
        alone.forward_backward(part)
        alone.step(1e-3)

    flat = torch.zeros(sum(p.numel() for p in model().parameters()))
    compute_s = statistics.median(block(compute, 1)[0] for _ in range(8))
    reduce_s = statistics.median(block(lambda: dist.all_reduce(flat), 1)[0] for _ in range(8))
    step_s = statistics.median(our_seconds)
    share = min(1.0, max(0.0, (compute_s + reduce_s - step_s) / reduce_s))
    return {"compute_s": compute_s, "reduce_s": reduce_s, "hidden_share": share}


def main() -> None:
    torch.set_num_threads(1)
    cases, out, seconds = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]), float(sys.argv[3])
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    os.sched_setaffinity(0, {rank % (os.cpu_count() or 1)})  # of a rank and its helpers, which are born later
    start_horovod(rank, world)
    results = []
    for name, settings in cases.items():
        found = run_case(name, settings, rank, world, seconds)
        everyone: list[Any] = [None] * world
        # on loopback all ranks share one interface, between namespaces each has its own
        shared = os.environ["BENCHMARK_SHARED_INTERFACE"] == "1"
        for key in ("sent_bytes", "bare_sent_bytes"):
            dist.all_gather_object(everyone, found[key])
            found[key] = found[key] / world if shared else sum(everyone) / world
        results.append(found)
        if rank == 0:
            out.write_text(json.dumps(results))
            print(name, len(found["blocks"]), "blocks, first", found["blocks"][0], flush=True)
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
