"""What the trained model is worth on the held-out split, beside the baselines; everything the report draws from."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import SparkSession

from conf.manifest import DatasetManifest
from conf.schema import RunConfig
from conf.storage import Storage
from conf.stored import StoredError
from pipelines import serving
from pipelines.baseline import fit_baselines
from pipelines.etl_step import Dataset
from pipelines.metrics import binary_scores, is_better
from pipelines.split_rows import SplitRows, split_rows
from pipelines.train_step import Trained
from training.models.gpt import perplexity
from training.weights import read_weights
from training.worker import pick_columns

log = logging.getLogger(__name__)
EVALUATE = "evaluate"
MODEL = "this model"


@dataclass(frozen=True)
class Evaluation:
    """`scores`: name -> metric -> value, the model first. `labels`, `predictions`: one entry per test row, in the
    dataset's order; empty where the task has none. `groups`: column -> value of each test row, as text. `missing`:
    baseline that could not be computed -> why."""

    scores: dict[str, dict[str, float]]
    labels: np.ndarray = field(default_factory=lambda: np.zeros(0))
    predictions: np.ndarray = field(default_factory=lambda: np.zeros(0))
    groups: dict[str, np.ndarray] = field(default_factory=dict)
    sample: str = ""
    missing: dict[str, str] = field(default_factory=dict)

    def flat(self) -> dict[str, float]:
        """`test/auc` for the model, `test/<baseline>/auc` beside it."""
        flat: dict[str, float] = {}
        for name, scores in self.scores.items():
            prefix = "test" if name == MODEL else f"test/{name.split(' (')[0].replace(' ', '_')}"
            flat |= {f"{prefix}/{metric}": value for metric, value in scores.items()}
        return flat


def evaluate(spark: SparkSession, config: RunConfig, dataset: Dataset, run: Storage, trained: Trained) -> Evaluation:
    """Exact metrics over all test rows, gathered from the ranks' prediction files, and the baselines'."""
    scores: dict[str, dict[str, float]] = {MODEL: dict(trained.summary.get("test", {}))}
    split = config.train.test_split
    if split is None:
        return Evaluation({MODEL: dict(trained.summary["valid"])})
    if config.model.task == "language_model":
        return evaluate_text(config, dataset, run, trained, split)
    if not trained.predictions:
        return Evaluation(scores)
    test = tested_rows(config, dataset, trained.summary)
    labels, predictions = read_predictions(run, trained.predictions, test)
    missing: dict[str, str] = {}
    if config.model.task == "binary":
        scores[MODEL] |= binary_scores(labels, predictions)
        if config.report.baselines:
            train = split_rows(dataset, "train", config.data, trained.summary["train_left_out"])
            picked = pick_columns(dataset.manifest, config.model.inputs, config.model.label)
            assert picked.label is not None, "a binary task has a label"
            read = [dataset.manifest.column(name) for name in picked.read]
            baselines = fit_baselines(spark, train, test, read, dataset.manifest.column(picked.label))
            scores, missing = scores | baselines.scores, baselines.missing
    return Evaluation(scores, labels, predictions, share_groups(config, dataset, test), missing=missing)


def tested_rows(config: RunConfig, dataset: Dataset, summary: dict[str, Any]) -> SplitRows:
    """The rows of the test split that the ranks have scored."""
    assert config.train.test_split is not None
    return split_rows(dataset, config.train.test_split, config.data, summary.get("test_left_out", []))


def lost_to(
    scores: dict[str, dict[str, float]], metrics: Iterable[str], missing: Mapping[str, str] | None = None
) -> list[str]:
    """A line for each baseline that the model does not beat in one of `metrics`; a baseline without it is passed over.

    `scores`, `missing`: as Evaluation's. A metric the model has not, or one that is not a number, beats nothing; nor is
    a baseline beaten that could not be computed.
    """
    metrics = list(metrics)
    lost = [f"{name} could not be computed ({why})" for name, why in (missing or {}).items() if metrics]
    for metric in metrics:
        ours = scores[MODEL].get(metric, math.nan)
        for name, theirs in ((name, s[metric]) for name, s in scores.items() if name != MODEL and metric in s):
            if not is_better(metric, ours, theirs):
                lost.append(f"{metric} {ours:.4f} does not beat {theirs:.4f} of {name}")
    return lost


def evaluate_text(config: RunConfig, dataset: Dataset, run: Storage, trained: Trained, split: str) -> Evaluation:
    """Loss and perplexity per token beside a model that knows only how often tokens occur, and a sample of text."""
    loss = trained.summary["test"]["loss"]
    scores = {MODEL: trained.summary["test"] | {"perplexity": perplexity(loss)}}
    if config.report.baselines:
        entropy = dataset.manifest.text["splits"][split]["unigram_entropy_nats"]
        scores["unigram frequencies"] = {"loss": entropy, "perplexity": perplexity(entropy)}
    writer = serving.Writer(config, dataset.manifest, read_weights(run.at(trained.summary["weights"])))
    row = {"prompt": config.report.sample_prompt, "tokens": config.report.sample_tokens}
    (written,) = writer.predict([row])["text"]
    return Evaluation(scores, sample=config.report.sample_prompt + written)


def share_groups(config: RunConfig, dataset: Dataset, test: SplitRows) -> dict[str, np.ndarray]:
    """Column -> text value of every test row, for the columns of `report.share_by`."""
    return {name: group_values(test.column(name), dataset.manifest, name) for name in config.report.share_by}


def read_predictions(run: Storage, files: list[str], test: SplitRows) -> tuple[np.ndarray, np.ndarray]:
    """(labels, predictions) in the dataset's order. StoredError for files that are damaged; RuntimeError unless every
    test row was scored exactly once."""
    try:
        tables = [pq.read_table(run.path(f), filesystem=run.fs, columns=["id", "prediction", "label"]) for f in files]
        table = pa.concat_tables(tables)
    except (pa.ArrowException, OSError) as error:
        raise StoredError(f"{run.uri}: its predictions {files} cannot be read ({error}); train again") from error
    ids, rows = table["id"].to_numpy(), test.row_numbers()
    if not np.array_equal(np.sort(ids), rows):
        raise RuntimeError(f"{run.uri}: {len(ids)} predictions ({len(np.unique(ids))} rows) for {len(rows)} test rows")
    order = np.argsort(ids)
    predictions: Any = table["prediction"].combine_chunks()
    values = (
        np.stack(predictions.to_numpy(zero_copy_only=False))
        if pa.types.is_fixed_size_list(predictions.type)
        else predictions.to_numpy(zero_copy_only=False)
    )
    return table["label"].to_numpy()[order].astype(np.float64), values[order]


def group_values(stored: pa.ChunkedArray, manifest: DatasetManifest, column: str) -> np.ndarray:
    """The column's values as text, dictionary codes turned back into what they stand for."""
    values = stored.to_numpy()
    vocabulary = next(
        (s["values"] for s in manifest.features.get("features", []) if s["name"] == column and "values" in s), None
    )
    if vocabulary is None:
        return values.astype(str)
    names = np.array(["null", "unseen", *vocabulary])
    return names[values]
