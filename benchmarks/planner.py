"""Cross-validate the planner's seconds on published measurements, and predict tables on which nothing was fitted.

    .venv/bin/python benchmarks/planner.py > benchmarks/results/planner_202611.md

Each fold leaves out all rows of one hidden size (benchmarks/published/), fits on the others, and predicts it. No row of
an unseen table is in any fit.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np

from benchmarks.machine import ROOT
from sparkring.conf.clusters.catalog import load_cluster
from sparkring.conf.clusters.cluster import GIB, Cluster
from sparkring.conf.plain_text import count_of
from sparkring.training.planner.search import USABLE
from sparkring.training.planner.timing.calibrate import FitErrors, fit_errors, fitted, predicted
from tests.helpers.published_steps import (
    MemoryStep,
    counts_of,
    memory_bytes,
    pick_regret,
    read_measurements,
    read_sharded,
)

PUBLISHED = ROOT / "benchmarks/published"
MEGATRON = str(PUBLISHED / "megatron.yaml")
# file -> the cluster whose parameters the fit starts from
TABLES = {
    "vtrain_single": MEGATRON,
    "vtrain_multi": MEGATRON,
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
SHARDED = "ibm_fsdp_a100_400gbit"
# Mean errors before contention (`overlap: 0.49` and 0.005, at 5b1d476d), as shipped, by this script of then; those of
# SHARDED with gradients reduced in bf16, as there, and in fp32
BEFORE = {
    "vtrain_single": "24.2%",
    "vtrain_multi": "6.2%",
    "llmfoundry_a100_80gb": "4.2%",
    "llmfoundry_h100_80gb": "2.7%",
    "llmfoundry_a100_40gb": "5.1%",
    "megatron_2020": "7.3%",
    "megatron_2021": "6.5%",
    "megatron_2022": "2.8%",
    f"{SHARDED}, bf16": "10.0%",
    f"{SHARDED}, fp32": "30.4%",
}
# A framework exchanges after backward, or a fit says nothing of what it hides
FIXED = {MEGATRON: ("contention", "attention")}

HEAD = """# The planner's seconds against published measurements, November 2026

`.venv/bin/python benchmarks/planner.py`; the tables are in `benchmarks/published/`, with where they are from. Error is
|predicted / measured - 1|; rank is Spearman's correlation of tokens per device and second; pick regret is how much
slower the layout predicted to be fastest was than the measured best, the mean over models with the same batch and
devices.
"""


def line(table: str, fold: str, errors: FitErrors, regret: str = "") -> str:
    found = f"{errors.mean:.1%} | {errors.worst:.0%} | {errors.rank:.3f} | {regret}"
    return f"| {table} | {fold} | {errors.rows} | {found} |"


def table_path(name: str) -> str:
    return str(PUBLISHED / f"{name}.csv")


def cluster_of(name: str, cluster_name: str) -> Cluster:
    """The cluster, with what Megatron-LM reaches of it where that took the steps."""
    cluster = load_cluster(cluster_name)
    if name.startswith("megatron"):
        return cluster.model_copy(update={"reached": load_cluster(MEGATRON).reached})
    return cluster


def shown(cluster_name: str) -> str:
    return Path(cluster_name).name


def cross_validate(name: str, cluster_name: str) -> list[str]:
    """Lines of the table for one file: each fold, all folds, and the fit on all rows."""
    steps = read_measurements(table_path(name))
    counts, cluster = [counts_of(step) for step in steps], load_cluster(cluster_name)
    fixed = FIXED.get(cluster_name, ())
    widths = np.array([step.width for step in steps])
    seconds, lines = np.zeros(len(steps)), []
    for width in sorted(set(widths)):
        left_out, rest = np.flatnonzero(widths == width), np.flatnonzero(widths != width)
        fold = fitted(cluster, [counts[i] for i in rest], [steps[i] for i in rest], name, fixed)
        seconds[left_out] = predicted([counts[i] for i in left_out], fold)
        errors = fit_errors(seconds[left_out], [steps[i] for i in left_out])
        lines.append(line(name, f"width {width} left out", errors))
    for label, values in (
        ("all folds, each predicted without its width", seconds),
        ("fitted on all rows", predicted(counts, fitted(cluster, counts, steps, name, fixed))),
        (f"as shipped, {shown(cluster_name)}", predicted(counts, cluster)),
    ):
        errors = fit_errors(values, steps)
        regret = f"{pick_regret(values, steps):.1%}" if name.startswith("vtrain") else ""
        lines.append(line(name, f"**{label}**", errors, regret))
    return lines


def shipped_errors(name: str, cluster_name: str) -> FitErrors:
    steps = read_measurements(table_path(name))
    return fit_errors(predicted([counts_of(step) for step in steps], cluster_of(name, cluster_name)), steps)


def unseen(name: str, cluster_name: str) -> str:
    """The line of a table that no fit has seen."""
    return line(name, f"**unseen, as shipped, {cluster_name}**", shipped_errors(name, cluster_name))


def sharded_lines() -> list[str]:
    """The rows of FSDP on slower networks, by what gradients are reduced in."""
    both = [read_sharded(PUBLISHED / f"{SHARDED}.csv", size) for size in (2, 4)]
    errors = [[step.error() for step in steps] for steps in both]
    lines = [
        f"| {step.name} | {step.step_s:.2f} s | {half:+.1%} | {whole:+.1%} |"
        for step, half, whole in zip(both[0], *errors, strict=True)
    ]
    means = [float(np.mean(np.abs(each))) for each in errors]
    return [*lines, f"| **mean of absolute errors** | | {means[0]:.1%} | {means[1]:.1%} |"]


def before_and_after() -> list[str]:
    every = TABLES | UNSEEN
    after = {name: f"{shipped_errors(name, cluster).mean:.1%}" for name, cluster in every.items()}
    means = [
        np.mean([abs(step.error()) for step in read_sharded(PUBLISHED / f"{SHARDED}.csv", size)]) for size in (2, 4)
    ]
    after |= {f"{SHARDED}, bf16": f"{means[0]:.1%}", f"{SHARDED}, fp32": f"{means[1]:.1%}"}
    return [f"| {name} | {BEFORE[name]} | {value} |" for name, value in after.items()]


def fitting(name: str, cluster_name: str) -> str:
    """How many steps that have run are predicted to fit."""
    cluster = load_cluster(cluster_name)
    steps = read_measurements(table_path(name))
    fit = sum(memory_bytes(step, cluster) <= cluster.device.memory_bytes * USABLE for step in steps)
    return f"| {name} | {len(steps)} | {fit} | | |"


def memory_lines() -> list[str]:
    """Steps beside each other that ran, and that ran out of memory."""
    cluster = load_cluster("a100-80gb-infiniband")
    rows = read_measurements(table_path("bigscience_memory"), MemoryStep)
    fit = {id(row): memory_bytes(row, cluster) / (row.device_gib * GIB * USABLE) for row in rows}
    ran, out = ([row for row in rows if (row.step_s is None) == is_out] for is_out in (False, True))
    counted = (
        f"{len(ran)} | {sum(fit[id(row)] <= 1 for row in ran)} | {len(out)} | {sum(fit[id(row)] > 1 for row in out)}"
    )
    lines = [
        f"| bigscience_memory | {counted} |",
        "\n| ran out of memory | of what a device has for it, predicted |\n|---|---|",
    ]
    for row in out:
        cut = f"dp={row.dp}, tp={row.tp}, pp={row.pp}, {count_of(row.micro_batch, 'row')} a pass"
        lines.append(f"| {row.width} x {row.layers}, {row.device_gib:.0f} GiB, {cut} | {fit[id(row)]:.0%} |")
    return lines


def main() -> None:
    started = time.time()
    print(HEAD)
    print("| table | fold | rows | mean error | worst | rank | pick regret |\n|---|---|---|---|---|---|---|")
    for name, cluster in TABLES.items():
        print("\n".join(cross_validate(name, cluster)), flush=True)
    print("\n".join(unseen(name, cluster) for name, cluster in UNSEEN.items()))
    print("\n## FSDP on slower networks, on which nothing was fitted\n")
    print(
        "| step | measured | predicted, gradients in bf16 (as there) | in fp32 (as this product) |\n|---|---|---|---|"
    )
    print("\n".join(sharded_lines()))
    print("\n## Before and after\n\nMean errors as shipped: a constant share `overlap`, and `contention`.\n")
    print("| table | before | after |\n|---|---|---|")
    print("\n".join(before_and_after()))
    print("\n## Memory\n\nIn the true bytes of a weight.\n")
    print("| table | ran | predicted to fit | ran out of memory | predicted not to fit |\n|---|---|---|---|---|")
    print("\n".join(fitting(name, cluster) for name, cluster in (TABLES | UNSEEN).items()))
    print("\n".join(memory_lines()))
    print(f"\nMade in {time.time() - started:.0f} s on two cores.")


if __name__ == "__main__":
    main()
