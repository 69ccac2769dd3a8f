"""The sample in a registered model: raw rows of the held-out split, and what the model predicts for them.

    data/sample_rows.parquet         raw columns, as the rows view had them
         sample_predictions.parquet  the columns that `predict` must give for them

Predictions are made of the dataset's stored columns, as training's evaluation makes them. A process that loads the
model makes them of the raw rows, so a comparison shows whether both see the same.
"""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from sparkring.conf.blocks.train import TrainConfig
from sparkring.conf.config import RunConfig
from sparkring.conf.features import State
from sparkring.conf.manifest import DatasetManifest
from sparkring.conf.storage import Storage
from sparkring.pipelines.serving import TablePredictor, Writer
from sparkring.training.model.folder import SAMPLE

ROWS, PREDICTIONS = SAMPLE
SAMPLE_TOKENS = 20  # of text: enough to tell one model from another


def write_sample(folder: Path, rows: pa.Table, predictions: pa.Table) -> None:
    pq.write_table(rows, folder / ROWS)
    pq.write_table(predictions, folder / PREDICTIONS)


def sample_of(
    config: RunConfig, manifest: DatasetManifest, dataset: Storage, predictor: TablePredictor | Writer
) -> tuple[pa.Table, pa.Table]:
    """Return raw rows and their predictions: `tracking.sample_rows` rows, or one language model prompt."""
    if isinstance(predictor, Writer):
        row = {"prompt": config.report.sample_prompt, "tokens": SAMPLE_TOKENS, "temperature": 0.0}
        return pa.Table.from_pylist([row]), pa.Table.from_pandas(predictor.predict([row]), preserve_index=False)
    stored = first_rows(config.train, manifest, dataset, predictor.stored_columns, config.tracking.sample_rows)
    predictions = predictor.predictions(predictor.scores_of_stored(stored))
    return raw_rows(stored, manifest.features.get("features", []), predictor.raw_columns), pa.table(predictions)


def first_rows(
    train: TrainConfig, manifest: DatasetManifest, dataset: Storage, columns: list[str], count: int
) -> pa.Table:
    """Read the first rows of the test split, or of the validation split where that has none.

    Args:
        train: names of the splits.
        manifest: manifest of the dataset.
        dataset: folder of the dataset.
        columns: stored columns to read.
        count: most rows to read.
    """
    folder, splits = manifest.files_folder(dataset), [train.test_split, train.valid_split]
    found: list[pa.RecordBatch] = []
    files = [file for split in splits if split in manifest.splits for file in manifest.files_of(split) if file.rows]
    for file in files:
        with folder.fs.open_input_file(folder.path(file.path)) as source:
            batch = next(pq.ParquetFile(source).iter_batches(batch_size=count, columns=columns))
        found.append(batch.slice(0, count - sum(map(len, found))))
        if sum(map(len, found)) == count:
            break
    return pa.Table.from_batches(found)


def raw_rows(stored: pa.Table, states: list[State], raw_columns: list[str]) -> pa.Table:
    """Return the raw columns behind stored ones; passthrough columns are stored by feature name."""
    passed = {state["column"]: state["name"] for state in states if state["kind"] == "passthrough"}
    names = [name if name in stored.column_names else passed[name] for name in raw_columns]
    return stored.select(names).rename_columns(raw_columns)
