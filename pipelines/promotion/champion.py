"""The champion: the model an alias names, and what it predicts for the test rows of another dataset.

Shards hold values, so the reader that serves the ranks makes tensors of them by the champion's own feature state:
its vocabularies and scales, not those of the new dataset.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from sparkring.conf.config import RunConfig
from sparkring.conf.manifest import with_features
from sparkring.conf.plain_text import count_of
from sparkring.conf.storage import Storage
from sparkring.conf.stored import StoredError
from sparkring.pipelines import serving
from sparkring.pipelines.context.etl_step import Dataset
from sparkring.pipelines.evaluation.split_rows import SplitRows
from sparkring.pipelines.tracking.alias import Version
from sparkring.training.data.build import make_reader
from sparkring.training.data.request import ReadRequest
from sparkring.training.model.folder import CONFIG, TrainedModel, read_model_folder
from sparkring.training.model.predictions import Predictions
from sparkring.training.model.recipe_model import pick_columns, recipe_task
from sparkring.training.trees.columns import seen_by

log = logging.getLogger(__name__)
Array = NDArray[Any]


class NotComparable(ValueError):
    """The champion cannot be read, or cannot score the rows; the message says why."""


@dataclass(frozen=True)
class Champion:
    """A registered version with what its model folder says."""

    version: Version
    folder: Storage  # a copy, valid as long as the caller keeps it
    model: TrainedModel


def read_champion(version: Version, folder: Storage, config: RunConfig) -> Champion:
    """Read a version's model folder. NotComparable where it is damaged, or names code that is not the recipe's."""
    try:
        model = read_model_folder(folder)
        if model.config.model_code != config.model_code:
            serving.check_trusted(model.config, f"{folder.uri}/{CONFIG}")
    except (StoredError, OSError) as error:
        raise NotComparable(f"version {version.version} of {version.name!r} cannot be read: {error}") from error
    return Champion(version, folder, model)


def predict_test_rows(champion: Champion, config: RunConfig, dataset: Dataset, rows: SplitRows) -> Array:
    """Predict the test rows by the champion, (N,) or (N, classes), in the dataset's order.

    Raises NotComparable if its features cannot be made from this dataset's columns, or its task differs.

    Args:
        champion: champion with its model and features.
        config: configuration of this run: how to read rows, and which are the test rows.
        dataset: dataset of this run.
        rows: rows that the ranks have scored.

    Raises NotComparable where its features cannot be made of this dataset's columns, or its task is another.
    """
    try:
        return _predict(champion, config, dataset, rows)
    except (StoredError, OSError, ValueError, KeyError, TypeError, RuntimeError) as error:  # RuntimeError: torch's
        why = " ".join(str(error).split())
        raise NotComparable(
            f"version {champion.version.version} of {champion.version.name!r} cannot score the test rows: {why}"
        ) from error


def _predict(champion: Champion, config: RunConfig, dataset: Dataset, rows: SplitRows) -> Array:
    trained = champion.model
    if trained.config.model.task != config.model.task:
        raise ValueError(f"its task is {trained.config.model.task!r}, this recipe's is {config.model.task!r}")
    for of in ("classes", "label_names"):
        if (theirs := getattr(trained.manifest, of)) != (ours := getattr(dataset.manifest, of)):
            raise ValueError(f"its {of.replace('_', ' ')} are {theirs}, this dataset's {ours}")
    wanted = rows.row_numbers()
    parts = [_predict_part(champion.folder, part, config, dataset, wanted) for part in trained.parts]
    scores = parts[0] if trained.blend is None else trained.blend.of(config.model.kind, *parts)
    return scores if trained.calibration is None else trained.calibration.of(scores)


def _predict_part(folder: Storage, trained: TrainedModel, config: RunConfig, dataset: Dataset, wanted: Array) -> Array:
    """Predict by a champion of one family, or by one model of a blend.

    Args:
        folder: folder with its weights.
        trained: configuration of the trained model.
        config: configuration of this run.
        dataset: dataset of this run.
        wanted: numbers of the test rows, in the dataset's order.
    """
    split = config.train.test_split
    assert split is not None, "there are test rows"
    features = {key: state for key, state in trained.manifest.features.items() if key != "weight"}  # of its own rows
    manifest = seen_by(trained.config.model, with_features(dataset.manifest, features))
    model_block = trained.config.model.model_copy(update={"label": config.model.label})
    columns = pick_columns(manifest, model_block)
    model = serving.read_model(folder, trained)
    task: Any = recipe_task(model_block, columns)
    at_a_time = config.evaluation_batch(manifest.splits[split].rows)
    request = ReadRequest(dataset.folder, manifest, split, columns.read, at_a_time)
    data = config.data.model_copy(update={"decoders": trained.config.data.decoders})
    reader = make_reader(data, request, evaluation=True)
    found = Predictions(task)
    try:
        with torch.inference_mode():
            for batch in reader.batches():
                found.add(batch, model(*task.inputs(batch.columns)))
    finally:
        reader.close()
    ids, scores = (np.concatenate([part[i] for part in found.parts]) for i in (0, 1))
    order = np.argsort(ids)
    if not np.array_equal(ids[order], wanted):
        raise ValueError(f"{len(ids)} of {count_of(len(wanted), 'test row was')} read")
    return np.asarray(scores[order])
