"""Cross-validate the planner's seconds on published measurements, and predict tables on which nothing was fitted.

    .venv/bin/python benchmarks/planner.py > benchmarks/results/planner_202611.md

Each fold leaves out all rows of one hidden size (benchmarks/published/), fits on the others, and predicts it. No row of
an unseen table is in any fit.
"""

from __future__ import annotations

import time

import numpy as np

from sparkring.conf.clusters.catalog import load_cluster
from sparkring.training.planner.search import LayoutCosts
from sparkring.training.planner.timing.calibrate import FitErrors, fit_errors, fitted, pick_regret, predicted
from sparkring.training.planner.timing.measurements import counts_of, read_measurements, traced_step

# file -> the cluster whose parameters the fit starts from
TABLES = {
    "vtrain_single": "a100-80gb-infiniband",
    "vtrain_multi": "a100-80gb-infiniband",
    "llmfoundry_a100_80gb": "a100-80gb-roce",
    "llmfoundry_h100_80gb": "h100-80gb-roce",
}
# Of other machines than those of the fits, predicted with the shipped parameters
UNSEEN = {
    "llmfoundry_a100_40gb": "a100-40gb-roce",
    "megatron_2020": "a100-80gb-infiniband-1600",
    "megatron_2021": "a100-80gb-infiniband-1600",
    "megatron_2022": "a100-80gb-infiniband-1600",
}

HEAD = """# The planner's seconds against published measurements, November 2026

`.venv/bin/python benchmarks/planner.py`; the tables are in `benchmarks/published/`, with where they are from. Error is
|predicted / measured - 1|; rank is Spearman's correlation of tokens per device and second; pick regret is how much
slower the layout predicted to be fastest was than the measured best, the mean over models with the same batch and
devices.
"""


def line(table: str, fold: str, errors: FitErrors, regret: str = "") -> str:
    found = f"{errors.mean:.1%} | {errors.worst:.0%} | {errors.rank:.3f} | {regret}"
    return f"| {table} | {fold} | {errors.rows} | {found} |"


def cross_validate(name: str, cluster_name: str) -> list[str]:
    """Lines of the table for one file: each fold, all folds, and the fit on all rows."""
    steps = read_measurements(f"benchmarks/published/{name}.csv")
    counts, cluster = [counts_of(step) for step in steps], load_cluster(cluster_name)
    widths = np.array([step.width for step in steps])
    seconds, lines = np.zeros(len(steps)), []
    for width in sorted(set(widths)):
        left_out, rest = np.flatnonzero(widths == width), np.flatnonzero(widths != width)
        fold = fitted(cluster, [counts[i] for i in rest], [steps[i] for i in rest], name)
        seconds[left_out] = predicted([counts[i] for i in left_out], fold)
        errors = fit_errors(seconds[left_out], [steps[i] for i in left_out])
        lines.append(line(name, f"width {width} left out", errors))
    for label, values in (
        ("all folds, each predicted without its width", seconds),
        ("fitted on all rows", predicted(counts, fitted(cluster, counts, steps, name))),
        (f"as shipped, {cluster_name}", predicted(counts, cluster)),
    ):
        errors = fit_errors(values, steps)
        regret = f"{pick_regret(values, steps):.1%}" if name.startswith("vtrain") else ""
        lines.append(line(name, f"**{label}**", errors, regret))
    return lines


def unseen(name: str, cluster_name: str) -> str:
    """The line of a table that no fit has seen."""
    steps = read_measurements(f"benchmarks/published/{name}.csv")
    errors = fit_errors(predicted([counts_of(step) for step in steps], load_cluster(cluster_name)), steps)
    return line(name, f"**unseen, as shipped, {cluster_name}**", errors)


def fitting(name: str, cluster_name: str) -> str:
    """How many steps that have run are predicted to fit."""
    cluster = load_cluster(cluster_name)
    steps = read_measurements(f"benchmarks/published/{name}.csv")
    fit = 0
    for step in steps:
        traced = traced_step(step)
        costs = LayoutCosts(traced, cluster)
        fit += costs.fits(costs.layout(traced.workload.config, traced.workload.mesh))
    return f"| {name} | {len(steps)} | {fit} |"


def main() -> None:
    started = time.time()
    print(HEAD)
    print("| table | fold | rows | mean error | worst | rank | pick regret |\n|---|---|---|---|---|---|---|")
    for name, cluster in TABLES.items():
        print("\n".join(cross_validate(name, cluster)), flush=True)
    print("\n".join(unseen(name, cluster) for name, cluster in UNSEEN.items()))
    print("\n| table | steps that ran | predicted to fit |\n|---|---|---|")
    print("\n".join(fitting(name, cluster) for name, cluster in (TABLES | UNSEEN).items()))
    print(f"\nMade in {time.time() - started:.0f} s on two cores.")


if __name__ == "__main__":
    main()
