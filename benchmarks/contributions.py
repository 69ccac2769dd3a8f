"""Rows per CPU second of the contributions of `predict.contributions`, and how exact those of networks are.

usage: python benchmarks/contributions.py DATASET MODEL [MODEL ...] [--rows 26000] [--out FILE]

DATASET is the folder that `sparkring run flights` has built, each MODEL the `model` folder of a run on it, of either
family. The rows are those of the test split, as raw columns, in one process of one thread, without Spark: what a Python
worker of `sparkring predict` does with them, but for the reading and writing. Beside trees, XGBoost alone: its matrix
is made beforehand. Beside networks, the same estimate from 64 orders.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from machine import measured_with, publish

from sparkring.conf.manifest import read_manifest
from sparkring.conf.storage import open_storage
from sparkring.pipelines.predict.model import load
from sparkring.pipelines.serving import Predictor
from sparkring.training.model import contributions as network_contributions

TARGET = 20_000  # rows of trees per CPU second
FEW, EXACT_ROWS, EXACT_PAIRS = 2000, 500, 32


def held_out_rows(dataset: str, columns: list[str], most: int) -> pa.Table:
    manifest = read_manifest(open_storage(dataset))
    files = [Path(dataset, file.path) for file in manifest.files_of("test")]
    return pa.concat_tables(pq.read_table(file, columns=columns) for file in files).slice(0, most).combine_chunks()


def raw_of(table: pa.Table) -> dict[str, Any]:
    return {name: table[name].combine_chunks() for name in table.column_names}


def cpu_s(act: Callable[[], Any]) -> float:
    began = time.process_time()
    act()
    return time.process_time() - began


def by_xgboost(predictor: Predictor, table: pa.Table) -> float:
    """Rows per CPU second of the library alone, in one thread."""
    import xgboost

    trees: Any = predictor.model
    (tensors,) = predictor._batches(raw_of(table), len(table))
    data = xgboost.DMatrix(
        trees.columns.matrix(tensors), feature_names=trees.columns.names, feature_types=trees.columns.types,
        enable_categorical=True,
    )  # fmt: skip
    trees.booster.set_param({"nthread": 1})
    return len(table) / cpu_s(lambda: trees.booster.predict(data, pred_contribs=True))


def error_of_estimate(folder: Path, table: pa.Table) -> float:
    """The mean distance of contributions from those of many orders, as a share of their mean size."""
    found = load(folder).contributions(raw_of(table), len(table)).values
    pairs = network_contributions.PAIRS
    network_contributions.PAIRS = EXACT_PAIRS
    exact = load(folder).contributions(raw_of(table), len(table)).values
    network_contributions.PAIRS = pairs
    return float(np.abs(found - exact).mean() / np.abs(exact).mean())


def measure(dataset: str, folder: Path, most: int) -> list[str]:
    """The cells of a model's line."""
    predictor = load(folder)
    config, is_trees = predictor.config, predictor.config.model.is_trees
    table = held_out_rows(dataset, predictor.raw_columns, most)
    rows, count = raw_of(table), len(table)
    first = raw_of(table.slice(0, 1))
    setup_s = cpu_s(lambda: predictor.contributions(first, 1))
    score_s = min(cpu_s(lambda: predictor.scores(rows, count)) for _ in range(3))
    explain_s = min(cpu_s(lambda: predictor.contributions(rows, count)) for _ in range(3))
    found = predictor.contributions(rows, count)
    model: Any = predictor.model
    size = f"{model.booster.num_boosted_rounds()} rounds, depth {config.trees.max_depth}" if is_trees else (
        ", ".join(f"{key} {value}" for key, value in config.model.args.items() if isinstance(value, int | float))
    )  # fmt: skip
    return [
        config.model.family,
        size,
        str(len(predictor.raw_columns)),
        f"{count / score_s:,.0f}",
        f"{setup_s:.1f}",
        f"{count / explain_s:,.0f}",
        f"{by_xgboost(predictor, table.slice(0, FEW)):,.0f}" if is_trees else "",
        "exact" if is_trees else f"{error_of_estimate(folder, table.slice(0, EXACT_ROWS)):.1%}",
        f"{np.abs(found.base + found.values.sum(axis=1) - found.raw).max():.1g}",
        str(int(found.misses().sum())),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset")
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument("--rows", type=int, default=26_000)
    parser.add_argument("--out", type=Path)
    words = parser.parse_args()
    torch.set_num_threads(1)
    lines = [measure(words.dataset, folder, words.rows) for folder in words.models]
    columns = [
        "family", "size", "columns", "scored, rows per CPU s", "tables, CPU s", "explained, rows per CPU s",
        "XGBoost alone", "estimate's error", "largest miss of the sum", "rows that miss",
    ]  # fmt: skip
    table = [columns, ["---"] * len(columns), *lines]
    text = f"""# Contributions of rows of flights

{measured_with("xgboost-cpu", "torch", "numpy", "pyarrow")}.

{chr(10).join(f"| {' | '.join(cells)} |" for cells in table)}

Target: {TARGET:,} rows of trees per CPU second. `tables`: what a worker does once, before its first row. The estimate's
error is the mean distance from contributions of {2 * EXACT_PAIRS} orders, as a share of their mean size, on
{EXACT_ROWS} rows.
"""
    publish(text, words.out)


if __name__ == "__main__":
    main()
