"""Rows per CPU second that a loaded model scores, on one thread, without Spark.

usage: python benchmarks/scoring.py [--rows 200000] [--rounds 7]

The rows and the model are those of benchmarks/predict.py: 27 raw columns, the recipe `flights`, random weights. In
turns, from Arrow columns, as `sparkring predict` has them, and from a pandas frame, as MLflow gives it. Prints one JSON
object: the median of the rounds, by name. benchmarks/before_after.py runs it on two commits.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import pyarrow.parquet as pq
import torch
from predict import features_of, write_model, write_rows

from sparkring.conf.load import load_config
from sparkring.conf.storage import open_storage
from sparkring.pipelines.serving import Predictor, make_predictor


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--rounds", type=int, default=7)
    words = parser.parse_args()
    torch.set_num_threads(1)
    config = load_config("flights").config
    features = features_of(config)
    with tempfile.TemporaryDirectory() as scratch:
        write_rows(Path(scratch) / "rows", features, words.rows)
        write_model(Path(scratch) / "model", config, features)
        predictor = make_predictor(open_storage(f"{scratch}/model"))
        table = pq.read_table(Path(scratch) / "rows")
    assert isinstance(predictor, Predictor)
    torch.manual_seed(0)
    for weight in predictor.model.parameters():  # initial weights of the last layers are zero
        torch.nn.init.normal_(weight, std=0.1)
    columns = {name: table.column(name).combine_chunks() for name in predictor.raw_columns}
    frame = table.select(predictor.raw_columns).to_pandas()
    rates: dict[str, list[float]] = {"from Arrow": [], "from pandas": []}
    for _ in range(words.rounds):
        began = time.process_time()
        from_arrow = predictor.scores(columns, len(table))
        between = time.process_time()
        from_pandas = predictor.predict(frame)["prediction"].to_numpy()
        rates["from Arrow"].append(words.rows / (between - began))
        rates["from pandas"].append(words.rows / (time.process_time() - between))
        assert from_arrow.tobytes() == from_pandas.tobytes()
    print(json.dumps({name: statistics.median(values) for name, values in rates.items()}))


if __name__ == "__main__":
    main()
