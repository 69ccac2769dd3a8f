"""How well rows are mixed, and what planning costs: from the order alone, nothing is read.

    python benchmarks/data_shuffle.py --out benchmarks/results/data_shuffle_2core_202611.md

A dataset stored in its worst order (row i is i) of 2,000,000 rows in row groups of 16,384, global batch 4,096. Distinct
row groups per batch and the rank correlation (Spearman) between stored and served order, within the whole epoch and
inside batches (the mean distance of neighbours, as a share of the rows; a full permutation has 1/3), beside a full
permutation. Then the CPU time and memory of planning 1,000,000 files with 10,000,000,000 rows.
"""

from __future__ import annotations

import argparse
import sys
import time
import tracemalloc
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from machine import measured_with  # noqa: E402

from sparkring.conf.blocks.data import DataConfig  # noqa: E402
from sparkring.training.data.order import epoch_ids, lane_order, make_plan  # noqa: E402

ROWS, GROUP, BATCH = 2_000_000, 16_384, 4096


def quality(name: str, ids: np.ndarray) -> str:
    batches = ids[: len(ids) // BATCH * BATCH].reshape(-1, BATCH)
    groups = np.mean([len(np.unique(batch)) for batch in batches // GROUP])
    correlation = np.corrcoef(np.arange(len(ids)), ids)[0, 1]
    distance = np.abs(np.diff(batches, axis=1)).mean() / len(ids)
    return f"| {name} | {groups:.1f} | {correlation:+.4f} | {distance:.3f} |"


def served(lanes: int, window: int | None, shuffle: bool = True) -> np.ndarray:
    sizes = [min(GROUP, ROWS - at) for at in range(0, ROWS, GROUP)]
    how = DataConfig(lanes=lanes, window_row_groups=window, seed=1, tail="pad", shuffle=shuffle)
    return epoch_ids(make_plan(sizes, BATCH, how), 0)


def planning() -> tuple[float, float]:
    rows = np.full(1_000_000, 10_000)
    tracemalloc.start()
    began = time.process_time()
    plan = make_plan(rows, 65_536, DataConfig())
    orders = [lane_order(plan, 0, lane) for lane in range(plan.lanes)]
    spent, peak = time.process_time() - began, tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert sum(order.windows for order in orders) >= 1_000_000
    return spent, peak / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    lines = [
        quality("stored order", np.arange(ROWS)),
        quality("1 lane, window 8 (a shuffle buffer of 8 row groups)", served(1, 8)),
        quality("8 lanes, window 1", served(8, 1)),
        quality("64 lanes, window 1 (default)", served(64, None)),
        quality("64 lanes, window 4", served(64, 4)),
        quality("full permutation", np.random.default_rng(0).permutation(ROWS)),
    ]
    spent, peak = planning()
    Path(args.out).write_text(
        f"# Shuffle quality and planning: {ROWS:,} rows in row groups of {GROUP:,}, global batch {BATCH:,}\n\n"
        f"{measured_with('numpy')}\n\n"
        "| | distinct row groups per batch | rank correlation with the stored order | neighbours' distance / rows |\n"
        "|---|---|---|---|\n" + "\n".join(lines) + "\n\n"
        f"Planning 1,000,000 files with 10,000,000,000 rows, all 64 lanes of an epoch: {spent:.2f} s of CPU, "
        f"{peak:.0f} MB at the peak.\n"
    )


if __name__ == "__main__":
    main()
