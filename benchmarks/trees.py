"""Trees of `model.family: trees` beside XGBoost alone on the same rows: quality, and CPU seconds.

usage: python benchmarks/trees.py DATASET [--rounds 200] [--out FILE]

DATASET is the folder that `sparkring run flights` has built. Alone is what a person writes: pandas reads the Parquet
files, makes the same columns and categories, and `xgboost.train` evaluates the validation rows each round. Ours are
ranks in processes of their own, without Spark; their CPU seconds are from the entry to the result, all ranks together,
and hold the reading, its hashes, checkpoints and the scores of the test rows. All on one thread a process. First a
fixed number of rounds without samples of rows and columns, then the defaults with early stopping.
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

import numpy as np
from machine import measured_with, publish

from sparkring.conf.load import load_config
from sparkring.training.launch.job import JobSpec
from sparkring.training.launch.local import run_local
from sparkring.training.worker.payload import TrainPayload

CASES: dict[str, dict[str, Any]] = {
    "rounds fixed, no samples": {
        "early_stopping_rounds": None,
        "subsample": 1.0,
        "columns_per_tree": 1.0,
        "rows_per_leaf": 0.0,  # by default each round has a bound of its own, which the library alone has not
    },
    "defaults, early stopping": {},
}


def ours(dataset: str, world: int, trees: dict[str, Any]) -> dict[str, Any]:
    words = [f"trees={json.dumps(trees)}", "model.family=trees", "etl=null", f"dataset={dataset}"]
    words += ["train.threads_per_rank=1", "report.share_by=[]", "train.export=last"]
    config = load_config("flights", words)
    with tempfile.TemporaryDirectory() as run:
        payload = TrainPayload(config=config.as_dict(), dataset=dataset, run=run)
        spec = JobSpec(timed_rank, payload.to_json(), preload=("torch",))
        results = run_local(spec, world, lambda event: None).results
    (first, _), seconds = results[0], sum(cpu_s for _, cpu_s in results)
    test = first["test"]
    return {"rounds": first["exported_step"], "loss": test["loss"], "auc": test["auc"], "cpu_s": seconds}


def timed_rank(ctx: Any) -> tuple[dict[str, Any], float]:
    """Train as a job does; also the CPU seconds that it took, without the imports."""
    import time
    from dataclasses import asdict

    from sparkring.training.worker.train_trees import train

    began = time.process_time()
    result = train(ctx)
    return asdict(result), time.process_time() - began


def alone(dataset: str, trees: dict[str, Any]) -> dict[str, Any]:
    """In a process of its own, whose imports do not count."""
    words = [sys.executable, __file__, dataset, "--alone", json.dumps(trees)]
    done = subprocess.run(words, check=True, capture_output=True, text=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def train_alone(dataset: str, trees: dict[str, Any]) -> dict[str, Any]:
    import pandas as pd
    import xgboost
    from sklearn.metrics import log_loss, roc_auc_score

    manifest = json.loads(Path(dataset, "_manifest.json").read_text())
    label = next(column["name"] for column in manifest["columns"] if column["role"] == "label")
    began = time.process_time()

    def split(name: str) -> tuple[pd.DataFrame, np.ndarray]:
        files = [Path(dataset, file["path"]) for file in manifest["files"] if file["split"] == name]
        stored = pd.concat([pd.read_parquet(file) for file in files])
        made = {}
        for state in manifest["features"]["features"]:
            values = stored[state["column"]]
            if state["kind"] == "categorical":
                texts = values.astype("Int64").astype("string") if values.dtype.kind in "if" else values
                known = texts.where(texts.isin(state["values"]) | texts.isna(), "other")
                made[state["name"]] = pd.Categorical(known, categories=["other", *state["values"]])
            elif state["kind"] == "cyclic":
                turn = values.to_numpy(np.float64) * (2 * np.pi / state["period"])
                made |= {f"{state['name']}_sin": np.sin(turn), f"{state['name']}_cos": np.cos(turn)}
            else:
                made[state["name"]] = values.to_numpy(np.float32, na_value=np.nan)
        return pd.DataFrame(made), stored[label].to_numpy(np.float32)

    (train, of_train), (valid, of_valid), (test, of_test) = (split(name) for name in ("train", "valid", "test"))
    matrix = xgboost.QuantileDMatrix(train, of_train, enable_categorical=True, nthread=1)
    held = xgboost.QuantileDMatrix(valid, of_valid, enable_categorical=True, nthread=1, ref=matrix)
    params = {
        "objective": "binary:logistic", "eval_metric": "logloss", "nthread": 1, "seed": 0,
        "learning_rate": trees["learning_rate"], "max_depth": trees["max_depth"],
        "subsample": trees["subsample"], "colsample_bytree": trees["columns_per_tree"],
        "max_cat_threshold": trees["categories_per_split"],
    }  # fmt: skip
    if trees["rows_per_leaf"] is not None:
        params["min_child_weight"] = trees["rows_per_leaf"]
    booster = xgboost.train(
        params, matrix, trees["rounds"], [(held, "valid")], early_stopping_rounds=trees["early_stopping_rounds"],
        verbose_eval=False,
    )  # fmt: skip
    rounds = booster.best_iteration + 1 if trees["early_stopping_rounds"] else trees["rounds"]
    scores = booster.inplace_predict(test, iteration_range=(0, rounds))
    found = {"rounds": rounds, "loss": log_loss(of_test, scores), "auc": roc_auc_score(of_test, scores)}
    return found | {"cpu_s": time.process_time() - began}


def row(name: str, found: dict[str, Any], base_s: float) -> str:
    cells = [name, str(found["rounds"]), f"{found['loss']:.5f}", f"{found['auc']:.5f}", f"{found['cpu_s']:.1f}"]
    return f"| {' | '.join(cells)} | {found['cpu_s'] / base_s:.2f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset")
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--alone", type=json.loads, help=argparse.SUPPRESS)
    words = parser.parse_args()
    dataset = str(Path(words.dataset).resolve())
    if words.alone is not None:
        print(json.dumps(train_alone(dataset, words.alone)))
        return
    os.environ["OMP_NUM_THREADS"] = "1"  # a rank that has a host to itself would have a thread for each core
    lines = []
    for case, changed in CASES.items():
        fixed = {"rounds": words.rounds} if changed else {}
        trees = load_config("flights", [f"trees={json.dumps(changed | fixed)}"]).config.trees.model_dump()
        base = alone(dataset, trees)
        lines += [
            f"\n{case}:\n",
            "| | rounds | test log loss | test AUC | CPU s | of alone's |",
            "|---|---|---|---|---|---|",
        ]
        lines.append(row("XGBoost alone", base, base["cpu_s"]))
        for world in (1, 2):
            lines.append(row(f"{world} rank{'s' * (world > 1)}", ours(dataset, world, trees), base["cpu_s"]))
    head = (
        f"# Trees beside XGBoost alone, on the rows of flights\n\n{measured_with('xgboost-cpu', 'torch', 'pyarrow')}.\n"
    )
    publish("\n".join([head, *lines]) + "\n", words.out)


if __name__ == "__main__":
    main()
